"""More than two thousand random requests, each judged by its recipe's reference and by exact attention.

Drawn in groups that share what a kernel is compiled for, and in forms that share layouts, heads and the mask's shape.
What failed as "GROUPS[3], 17, 5" is rerun by `run(GROUPS[3], 17, 5, device)`.
"""

import random
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from tests.helpers.judge import Error, judge
from tests.helpers.layouts import lay_out
from tests.helpers.random_calls import HEADS, LENGTHS, Group, draw_layouts, spread

REQUESTS_PER_GROUP = 160
FORMS = 5
MASKS = ("none", "causal", "bool", "additive", "padding", "some rows", "expanded")


GROUPS = [
    Group("sage2", 64, 64, torch.bfloat16),
    Group("sage2", 128, 128, torch.bfloat16),
    Group("sage2", 40, 24, torch.float16),
    Group("sage2", 80, 128, torch.float32),
    Group("sage2", 256, 16, torch.bfloat16),
    Group("sage1", 64, 64, torch.float16),
    Group("sage1", 128, 80, torch.bfloat16),
    Group("sage1", 16, 96, torch.float32),
    Group("sage_bwd_int8", 64, 64, torch.bfloat16),
    Group("sage_bwd_int8", 128, 80, torch.float16),
    Group("sage3", 64, 64, torch.bfloat16),
    Group("sage3", 128, 128, torch.bfloat16),
    Group("sage3", 40, 24, torch.float16),
    Group("sage3", 256, 192, torch.float32),
    Group("sage3_paper", 128, 64, torch.bfloat16),
]


@dataclass(frozen=True)
class Form:
    """Layouts of Q, K and V; batch, q_heads and kv_heads; the mask, and along which axes it is shared."""

    layouts: tuple[str, ...]
    heads: tuple[int, int, int]
    mask: str
    shared: tuple[bool, ...]


@dataclass(frozen=True)
class Request:
    """One call: batch, q_heads and kv_heads; lengths; layouts of Q, K and V; the mask."""

    heads: tuple[int, int, int]
    q_len: int
    kv_len: int
    layouts: tuple[str, ...]
    mask: str
    mask_shape: tuple[int, int, int, int]
    allowed: float
    scale: float | None
    seed: int


@cache
def draw_forms(group: Group, count: int) -> list[Form]:
    choose = random.Random(f"{group} {count}")
    shared = zip(*(spread(choose, (False, True), count) for _ in range(4)), strict=True)
    return list(
        map(Form, draw_layouts(choose, 3, count), spread(choose, HEADS, count), spread(choose, MASKS, count), shared)
    )


def draw_request(group: Group, index: int, forms: int) -> Request:
    choose, form = random.Random(f"{group} {index}"), draw_forms(group, forms)[index % forms]
    q_len, kv_len = (choose.choice((choose.choice(LENGTHS), choose.randint(1, 600))) for _ in range(2))
    return Request(
        form.heads,
        q_len,
        kv_len,
        form.layouts,
        form.mask,
        tuple(1 if one else size for one, size in zip(form.shared, (*form.heads[:2], q_len, kv_len), strict=True)),
        choose.choice((0.02, 0.3, 0.9)),
        choose.choice((None, None, 0.3, -0.2)),
        index,
    )


def draw_mask(request: Request, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor | None:
    batch, q_heads, _ = request.heads
    device, full = generator.device, (batch, q_heads, request.q_len, request.kv_len)

    def draw(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=device, generator=generator)

    if request.mask == "bool":
        return draw(*request.mask_shape) < request.allowed
    if request.mask == "additive":
        bias = 4 * draw(*request.mask_shape) - 2
        return bias.masked_fill(draw(*request.mask_shape) > request.allowed, -torch.inf).to(dtype)
    if request.mask == "padding":
        return draw(batch, 1, 1, request.kv_len) < request.allowed
    if request.mask == "some rows":
        return (draw(1, 1, request.q_len, 1) < request.allowed).expand(1, 1, request.q_len, request.kv_len)
    if request.mask == "expanded":
        return (draw(1, 1, request.kv_len, request.q_len) < request.allowed).mT.expand(full)
    return None


def run(group: Group, index: int, forms: int, device: torch.device) -> Error:
    request = draw_request(group, index, forms)
    generator = torch.Generator(device).manual_seed(request.seed)
    batch, q_heads, kv_heads = request.heads
    shapes = (
        (batch, q_heads, request.q_len, group.head_dim),
        (batch, kv_heads, request.kv_len, group.head_dim),
        (batch, kv_heads, request.kv_len, group.v_head_dim),
    )
    inputs = []
    for shape, layout in zip(shapes, request.layouts, strict=True):
        bias = torch.randn(shape[-1], device=device, generator=generator)
        x = torch.randn(shape, device=device, generator=generator) + bias
        inputs.append(lay_out(x.to(group.dtype), layout))
    mask = draw_mask(request, group.dtype, generator)
    try:
        return judge(*inputs, group.recipe, mask=mask, is_causal=request.mask == "causal", scale=request.scale)
    except AssertionError as error:
        raise AssertionError(f"GROUPS[{GROUPS.index(group)}], {index}, {forms}: {request}") from error


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("group", GROUPS, ids=lambda g: f"{g.recipe}-{g.head_dim}-{g.v_head_dim}")
@pytest.mark.parametrize("forms", [FORMS, pytest.param(REQUESTS_PER_GROUP, marks=pytest.mark.audit)])
def test_random_requests(group, forms, device):
    error = Error()
    for index in range(REQUESTS_PER_GROUP):
        error += run(group, index, forms, device)
    error.assert_as_small_as_the_references()
