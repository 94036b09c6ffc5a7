"""Random calls with gradients, in groups that share what a kernel is compiled for.

Those of a form share layouts and heads. What failed as "GROUPS[3], key_mask, 17, 2" is rerun by
`run(GROUPS[3], "key_mask", 17, 2, device)`.
"""

import random
from dataclasses import replace
from functools import cache

import torch

from tests.helpers.judge_training import Draw, GradientErrors, judge_training
from tests.helpers.layouts import lay_out
from tests.helpers.random_calls import HEADS, LENGTHS, Group, draw_layouts, spread

Form = tuple[tuple[int, int, int], tuple[str, ...]]

KINDS = ("plain", "causal", "key_mask", "key_mask, causal", "packed", "packed, causal")
GROUPS = [
    Group("sage_bwd", 64, 64, torch.bfloat16),
    Group("sage_bwd", 128, 128, torch.float16),
    Group("sage_bwd", 40, 24, torch.bfloat16),
    Group("sage_bwd_int8", 64, 64, torch.float16),
    Group("sage_bwd_int8", 128, 80, torch.bfloat16),
]


@cache
def draw_forms(group: Group, kind: str, count: int) -> list[Form]:
    """Draw batch, q_heads and kv_heads, and the layouts of Q, K, V and dO, of so many forms."""
    choose = random.Random(f"{group} {kind} {count}")
    return list(zip(spread(choose, HEADS, count), draw_layouts(choose, 4, count), strict=True))


def run(group: Group, kind: str, index: int, forms: int, device: torch.device, backward: str = "") -> GradientErrors:
    """Judge one call, with gradients by the kernels that serve it or by the backward kernel of that name."""
    choose, draw = random.Random(f"{group} {kind} {index}"), Draw(device, index, group.dtype)

    def length() -> int:
        return choose.choice((choose.choice(LENGTHS), choose.randint(1, 600)))

    (batch, q_heads, kv_heads), layouts = draw_forms(group, kind, forms)[index % forms]
    q_len, kv_len = length(), length()
    options = {
        "is_causal": kind.endswith("causal"),
        "causal_offset": choose.choice((0, 0, kv_len - q_len, choose.randint(-600, 600))),
        "scale": choose.choice((None, None, 0.3, -0.2)),
    }
    if kind.startswith("key_mask"):
        options["key_mask"] = draw.uniform(choose.choice((1, batch)), kv_len) < choose.choice((0.02, 0.5, 0.95))
    if kind.startswith("packed"):
        count = choose.randint(1, 4)
        q_lengths, k_lengths = ([choose.choice((0, length(), length())) for _ in range(count)] for _ in range(2))
        used = [choose.randint(0, stored) for stored in k_lengths] if choose.random() < 0.5 else None
        batch, q_len, kv_len = 1, sum(q_lengths), sum(k_lengths)
        options["lengths"] = draw.lengths(q_lengths, k_lengths, used)
    call = draw.call(group.recipe, batch, q_heads, kv_heads, q_len, kv_len, group.head_dim, group.v_head_dim, **options)
    names = ("query", "key", "value", "output_gradient")
    tensors = {name: lay_out(getattr(call, name), layout) for name, layout in zip(names, layouts, strict=True)}
    try:
        return judge_training(replace(call, **tensors), backward)
    except AssertionError as error:
        sizes = f"{batch}×{q_heads}/{kv_heads}×{q_len}/{kv_len}, {options}, {layouts}"
        raise AssertionError(f"GROUPS[{GROUPS.index(group)}], {kind}, {index}, {forms}: {sizes}") from error
