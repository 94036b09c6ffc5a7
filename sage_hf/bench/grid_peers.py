"""The providers that are compared on the grid: PyTorch's backends, FlashAttention 3 and ours, which take any mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_hf import record
from sage_hf.attention import attend as attend_with_offset
from sage_hf.attention import sage_attention
from sage_hf.bench.grid import Arguments, Point
from sage_kernels.dispatch.cost_model import DECODED_QUERIES
from sage_kernels.exact import sdpa
from sage_kernels.spec.options import Options

Attend = Callable[[Arguments], Callable[[], Tensor]]
"""Arguments -> a call that computes the output, (batch, q_heads, q_len, head_dim). Either raises if it is refused."""

MOST_MATH_SCORES = 2**25
"""Number of scores from which PyTorch's own arithmetic is hopeless."""
LARGE = 1e11
"""Operations from which the kernels that are never the fastest are not tried where a faster one takes the call."""


@dataclass(frozen=True)
class GridProvider:
    """Provider of attention on the grid.

    Attributes:
        name: name in the JSON.
        attend: makes the call.
        context: made anew for each point; the call runs inside, and its cost is no part of the call's.
        suits: whether it is tried at a point.
        ours: whether it is one of ours.
    """

    name: str
    attend: Attend
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    suits: Callable[[Point], bool] = lambda point: True
    ours: bool = False


def _pytorch(arguments: Arguments) -> Callable[[], Tensor]:
    query, key, value, mask = arguments.query, arguments.key, arguments.value, arguments.mask
    options: dict[str, Any] = {"is_causal": arguments.is_causal, "enable_gqa": arguments.grouped}
    return lambda: sdpa.pytorch_sdpa(query, key, value, attn_mask=mask, **options)


def _flash(arguments: Arguments) -> Callable[[], Tensor]:
    if arguments.point.mask != "lower_right":
        return _pytorch(arguments)
    query, key, value, mask = arguments.query, arguments.key, arguments.value, arguments.lower_right
    options = {"enable_gqa": True} if arguments.grouped else {}
    return lambda: sdpa.pytorch_sdpa(query, key, value, attn_mask=mask, **options)


def _fa3(arguments: Arguments) -> Callable[[], Tensor]:
    import_module("fa3_fwd._C")
    point = arguments.point
    query, key, value = arguments.query, arguments.key, arguments.value
    # 0 splits: its own choice, which matters for few queries.
    options: dict[str, Any] = {"softmax_scale": point.head_dim**-0.5, "num_splits": 0 if point.q_len <= 64 else 1}
    match point.mask:
        case "causal" | "lower_right":  # The last query is at the last key.
            options["is_causal"] = True
        case "lengths":
            options["seqused_k"] = arguments.lengths
        case "none":
            pass
        case other:
            raise RuntimeError(f"fa3_fwd takes no mask such as {other}")

    def call() -> Tensor:
        # It takes tokens before heads: views, which are part of its call because all providers get the same tensors.
        tensors = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        output: Tensor = torch.ops.fa3_fwd.fwd(*tensors, **options)[0]
        return output.transpose(1, 2)

    return call


def _ours(recipe: str) -> Attend:
    def attend(arguments: Arguments) -> Callable[[], Tensor]:
        query, key, value, mask = arguments.query, arguments.key, arguments.value, arguments.mask
        is_causal, grouped = arguments.is_causal, arguments.grouped
        if arguments.point.mask == "lower_right":  # as for transformers, whose masks say so
            offset = arguments.point.kv_len - arguments.point.q_len
            options = Options(True, causal_offset=offset, enable_gqa=grouped, recipe=recipe)
            return lambda: attend_with_offset(query, key, value, None, options)[0]
        return lambda: sage_attention(
            query, key, value, mask, is_causal=is_causal, enable_gqa=grouped, recipe=recipe, fallback="native"
        )

    return attend


@contextmanager
def watch(found: list[dict[str, str]]) -> Iterator[None]:
    """Append what ran, {"recipe", "kernel", "quantizer", "backward", "reason"}, for each of our calls in the block."""

    def keep(call: record.AttentionCall) -> None:
        outcome = call.plan.outcome
        names = ("recipe", "kernel", "quantizer", "backward", "reason")
        found.append({name: getattr(outcome, name) for name in names})

    with record.observe(keep):
        yield


def _backend(backend: SDPBackend) -> Callable[[], AbstractContextManager[object]]:
    return lambda: sdpa_kernel(backend)


def _is_small(point: Point) -> bool:
    return point.scores <= MOST_MATH_SCORES


def _is_open(point: Point) -> bool:
    """Return whether any kernel may be the fastest: where FlashAttention takes no such mask, and for small calls."""
    return point.mask not in ("none", "causal", "lower_right") or point.operations < LARGE


def _has_plans(point: Point) -> bool:
    """Return whether cuDNN is tried, which makes a plan for each length: steps of decoding have a new one each."""
    return point.training or point.q_len >= DECODED_QUERIES or point.mask in ("lengths", "keys")


# The fastest ones first: others are compared to them before they are measured in full.
PYTORCH_PROVIDERS: tuple[GridProvider, ...] = (
    GridProvider("cudnn", _pytorch, _backend(SDPBackend.CUDNN_ATTENTION), _has_plans),
    GridProvider("sdpa_fa2", _flash, _backend(SDPBackend.FLASH_ATTENTION)),
    GridProvider("sdpa_efficient", _pytorch, _backend(SDPBackend.EFFICIENT_ATTENTION), _is_open),
    GridProvider("sdpa_math", _pytorch, _backend(SDPBackend.MATH), _is_small),
)
GRID_PROVIDERS: tuple[GridProvider, ...] = (
    GridProvider("sage_hf:sage2", _ours("sage2"), ours=True),
    GridProvider("fa3", _fa3),
    *PYTORCH_PROVIDERS,
)
TRAINING_GRID_PROVIDERS: tuple[GridProvider, ...] = (
    GridProvider("sage_hf:sage_bwd", _ours("sage_bwd"), ours=True),
    *PYTORCH_PROVIDERS,
)
