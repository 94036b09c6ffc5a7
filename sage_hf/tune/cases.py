"""Attention calls of chosen sizes on a GPU: their tensors, and the first run of each, which compiles its kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_hf.bench.cases import DOCUMENT, WINDOW
from sage_hf.bench.prewarm import call_in_processes
from sage_kernels import ops, training
from sage_kernels.dispatch import cost_model, run
from sage_kernels.dispatch.curves import Sizes
from sage_kernels.dispatch.plan import KernelUnavailableError
from sage_kernels.dispatch.registry import get_exact
from sage_kernels.exact import masked_rows
from sage_kernels.spec.call import Call, Mask, MaskKind
from sage_kernels.spec.recipe import get_recipe

Kind = Literal["none", "causal", "keys", "holes", "causal_keys", "bool", "window", "documents", "additive"]
"""Masks: of keys as padding at the end, and as holes in the middle too; bool as drawn, a band, and blocks; a bias."""
MASKS: dict[Kind, MaskKind] = {
    "causal": "none",
    "causal_keys": "keys",
    "holes": "keys",
    "window": "bool",
    "documents": "bool",
}
"""Kinds of masks that `sage_kernels` calls otherwise."""
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
assert tuple(BACKENDS) == cost_model.BACKENDS


@dataclass(frozen=True)
class Point:
    """Call to measure: bfloat16, laid out as (batch, tokens, heads, head_dim) in memory, as models make it.

    Attributes:
        sizes, kind: of the call.
        grad: whether its gradients are computed too.
    """

    sizes: Sizes
    kind: Kind = "none"
    grad: bool = False

    @property
    def mask(self) -> MaskKind:
        """Return the kind of mask, as `call.Mask` has it."""
        return MASKS.get(self.kind, cast(MaskKind, self.kind))

    @property
    def causal(self) -> bool:
        """Return whether the call is causal."""
        return self.kind in ("causal", "causal_keys")

    @property
    def causal_offset(self) -> int:
        """Return the offset of causality, which is aligned lower right."""
        return self.sizes.kv_len - self.sizes.q_len if self.causal else 0


def draw(device: torch.device, point: Point) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return query, key, value and mask of a point, the same ones at every call."""
    sizes = point.sizes
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int, tokens: int) -> Tensor:
        shape = (sizes.batch, tokens, heads, sizes.head_dim)
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16).transpose(1, 2)

    query = normal(sizes.q_heads, sizes.q_len)
    key, value = normal(sizes.kv_heads, sizes.kv_len), normal(sizes.kv_heads, sizes.kv_len)
    return query, key, value, _mask(device, point, generator)


def prepare(device: torch.device, point: Point) -> Callable[[str], Callable[[], object]]:
    """Draw a point's tensors; return what makes a call of them by a recipe's name or an exact backend's."""
    query, key, value, mask = draw(device, point)
    call = Call(
        query,
        key,
        value,
        get_recipe("exact"),
        Mask.of(mask, point.sizes.kv_len),
        is_causal=point.causal,
        causal_offset=point.causal_offset,
        scale=point.sizes.head_dim**-0.5,
    )

    def exactly(backend: SDPBackend) -> None:
        with sdpa_kernel(backend):
            run.attend(call, "native")

    def of(name: str) -> Callable[[], object]:
        if name in BACKENDS:
            return lambda: exactly(BACKENDS[name])
        if (own := get_exact(name)) is not None:
            if reason := own.unsupported(run.request_of(call)):
                raise ValueError(f"{name}: {reason}")
            return lambda: own.attend(call)
        causality: dict[str, Any] = {"is_causal": point.causal, "causal_offset": point.causal_offset}
        return lambda: ops.attention(query, key, value, mask=mask, **causality, recipe=name, fallback="error")

    return of


def prepare_training(
    device: torch.device, point: Point, backward: bool = True
) -> Callable[[str], Callable[[], object]]:
    """Do as `prepare` for calls with gradients: each is a forward and a backward pass, or else the forward alone."""
    query, key, value, mask = draw(device, point)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    gradient = torch.randn_like(query)

    def both(attend: Callable[[], Tensor]) -> None:
        with torch.enable_grad():
            output = attend()
            if backward:
                torch.autograd.grad(output, inputs, gradient)

    def attend() -> Tensor:
        grouped = point.sizes.kv_heads != point.sizes.q_heads
        return masked_rows.attend(query, key, value, mask=mask, is_causal=point.causal, enable_gqa=grouped)

    def exactly(backend: SDPBackend) -> None:
        with sdpa_kernel(backend):
            both(attend)

    def of(name: str) -> Callable[[], object]:
        if name in BACKENDS:
            return lambda: exactly(BACKENDS[name])
        valid = None if mask is None else mask[:, 0, 0]
        options: dict[str, Any] = {"valid": valid, "is_causal": point.causal, "recipe": name, "fallback": "error"}
        return lambda: both(lambda: training.attention(query, key, value, **options)[0])

    return of


def _mask(device: torch.device, point: Point, generator: torch.Generator) -> Tensor | None:
    """Draw a mask of the point's kind, as models make them."""
    sizes = point.sizes
    keys = torch.arange(sizes.kv_len, device=device)
    queries = torch.arange(sizes.q_len, device=device)[:, None] + (sizes.kv_len - sizes.q_len)
    match point.kind:
        case "keys" | "causal_keys" | "holes":
            shares = 0.25 + 0.75 * torch.rand(sizes.batch, 1, generator=generator, device=device)
            lengths = (shares * sizes.kv_len).long().clamp_min(1)
            first = (lengths + 1) // 2 if point.kind == "holes" else lengths
            return ((keys < first) | (keys >= sizes.kv_len - (lengths - first)))[:, None, None]
        case "bool":
            shape = (1, 1, sizes.q_len, sizes.kv_len)
            return torch.rand(shape, generator=generator, device=device) < 0.9
        case "window":
            return ((keys - queries).abs() <= WINDOW)[None, None]
        case "documents":
            return (keys // DOCUMENT == queries // DOCUMENT)[None, None]
        case "additive":
            shape = (1, sizes.q_heads, sizes.q_len, sizes.kv_len)
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    return None


def compile_kernels(device: torch.device, calls: Iterable[tuple[str, Point]], seconds: float | None = None) -> int:
    """Run each (recipe, point) once in one of several processes, so that later ones find its kernels in the caches.

    Args:
        device: a CUDA device.
        calls: a recipe with gradients also runs its backward pass, where it has one for such calls. Batch and heads
            are cut to a few.
        seconds: how long to go on beginning calls; default until all have run.

    Returns:
        The number of calls that ran.
    """
    small = dict.fromkeys((recipe, replace(point, sizes=_small(point.sizes))) for recipe, point in calls)
    return sum(call_in_processes(partial(_run_once, device), small, seconds))


def _small(sizes: Sizes) -> Sizes:
    """Return sizes whose calls need the same kernels, but less work."""
    kv_heads = min(2, sizes.kv_heads)
    q_heads = kv_heads * (sizes.q_heads // sizes.kv_heads)
    return replace(sizes, batch=min(2, sizes.batch), q_heads=q_heads, kv_heads=kv_heads)


def _run_once(device: torch.device, call: tuple[str, Point]) -> bool:
    """Run a call, (recipe or exact kernel, point); return whether it is native for the point."""
    name, point = call
    trains = get_exact(name) is None and get_recipe(name).backward is not None and point.mask in ("none", "keys")
    try:
        (prepare_training if trains else prepare)(device, point)(name)()
    except (KernelUnavailableError, ValueError):
        return False
    torch.cuda.synchronize(device)
    return True
