"""What each kernel can do, and which one serves a request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from .exact import key_mask
from .recipe import get_recipe
from .saved import Saved

Fallback = Literal["native", "emulate", "error"]
FALLBACKS: tuple[Fallback, ...] = ("native", "emulate", "error")

# Recipes tried in this order where the one asked for has no native kernel: the next cheaper hardware's.
SUBSTITUTES: dict[str, tuple[str, ...]] = {
    "sage3": ("sage2", "sage1"),
    "sage3_paper": ("sage2", "sage1"),
    "sage2": ("sage1",),
}

# Below these a call is bound by its launch, not its arithmetic: fewer query rows than one matrix instruction takes
# (decoding), fewer keys than one tile. A call with gradients is low-bit at any length: training must not change its
# numerics from one batch to the next.
MIN_QUERY_LEN = 16
MIN_KV_LEN = 64

# Fewer keys, and a GPU gains nothing from low bits beside a mask of scores: exact attention reads such a mask once,
# a low-bit kernel twice, and its first call waits for a compiler.
MIN_MASKED_KV_LEN = 1024

# Recipes are defined and tested for these; outside them attention is exact.
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256

SUPPORTED_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class KernelUnavailableError(RuntimeError):
    """No native kernel serves the request and the caller asked for `fallback="error"`."""


MaskKind = Literal["none", "keys", "bool", "additive"]


def mask_kind(mask: torch.Tensor | None, kv_len: int) -> MaskKind:
    """What a kernel must know of a 4-D mask; "keys": it is bool, and only says which keys exist."""
    if mask is None:
        return "none"
    if mask.dtype != torch.bool:
        return "additive"
    return "bool" if key_mask(mask, kv_len) is None else "keys"


@dataclass(frozen=True)
class Request:
    """One call's facts.

    `grad`: gradients are wanted, so `run_training` and `run_backward` of a kernel. `packed`: sequences lie one after
    the other, so `run_packed`; batch is their number, q_len and kv_len are the longest ones'.
    """

    recipe: str
    device_type: str
    capability: tuple[int, int] | None
    dtype: torch.dtype
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    mask: MaskKind
    is_causal: bool
    return_lse: bool
    grad: bool = False
    packed: bool = False

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
        is_causal: bool = False,
        recipe: str = "sage3",
        return_lse: bool = False,
        grad: bool = False,
    ) -> Request:
        """The facts of a call with these tensors; shapes as in `ops.attention`."""
        batch, q_heads, q_len, head_dim = query.shape
        device = query.device
        return cls(
            recipe=recipe,
            device_type=device.type,
            capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            dtype=query.dtype,
            batch=batch,
            q_heads=q_heads,
            kv_heads=key.shape[1],
            q_len=q_len,
            kv_len=key.shape[2],
            head_dim=head_dim,
            v_head_dim=value.shape[3],
            mask=mask_kind(mask, key.shape[2]),
            is_causal=is_causal,
            return_lse=return_lse,
            grad=grad,
        )


@dataclass(frozen=True)
class Kernel:
    """An implementation of some recipes.

    Attributes:
        name: as `explain` shows it.
        recipes: names of the recipes it computes.
        native: it runs on the hardware its recipes were made for; otherwise it reproduces their numerics.
        unsupported: reason why it cannot serve a request, "" when it can. A reason names limits, not the request's
            sizes, so that equal reasons compare equal.
        run: (query, key, value, *, mask, is_causal, causal_offset, scale, recipe, return_lse) -> (output, lse), as
            `ops.attention` documents; recipe is the Recipe, and lse may be anything when return_lse is false.
        run_packed: the same for sequences packed one after the other: (query, key, value, cu_seqlens_q, cu_seqlens_k,
            max_seqlen_q, max_seqlen_k, seqused_k, *, is_causal, causal_offset, scale, recipe, return_lse), tensors
            (1, heads, total tokens, channels); None: `run` serves one sequence at a time.
        run_training: the forward pass of a recipe with gradients, (query, key, value, *, lengths, valid, is_causal,
            causal_offset, scale, recipe) -> (output, Saved), as `saved` documents; None: no gradients.
        run_backward: its gradients, (output_gradient, value, output, Saved, *, head_dim, lengths, valid, is_causal,
            causal_offset, scale, recipe) -> (query_gradient, key_gradient, value_gradient).
    """

    name: str
    recipes: frozenset[str]
    native: bool
    unsupported: Callable[[Request], str]
    run: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    run_packed: Callable[..., tuple[torch.Tensor, torch.Tensor | None]] | None = None
    run_training: Callable[..., tuple[torch.Tensor, Saved]] | None = None
    run_backward: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None


@dataclass(frozen=True)
class Outcome:
    """A plan without its call's sizes: few differ, so they can be counted without end. Fields as in `Plan`."""

    asked: str
    recipe: str
    kernel: str
    numerics: str
    reason: str


@dataclass(frozen=True)
class Plan:
    """The kernel chosen for a request, and why the others were not.

    Attributes:
        request: what was asked.
        kernel: the kernel's name; "sdpa" is PyTorch's exact attention.
        recipe: the recipe that runs.
        numerics: "native", "emulated" or "exact".
        passed_over: (recipe or "recipe by kernel", reason) of each that did not serve, in the order tried.
    """

    request: Request
    kernel: str
    recipe: str
    numerics: Literal["native", "emulated", "exact"]
    passed_over: tuple[tuple[str, str], ...] = ()

    @property
    def is_fallback(self) -> bool:
        """Whether another recipe runs than the one asked for."""
        return self.recipe != self.request.recipe

    @property
    def reason(self) -> str:
        """Why the recipe asked for does not run, in one line; "" when it does."""
        if not self.is_fallback:
            return ""
        names: dict[str, list[str]] = {}
        for name, reason in self.passed_over:
            names.setdefault(reason, []).append(name)
        return "; ".join(f"{', '.join(who)}: {reason}" if any(who) else reason for reason, who in names.items())

    @property
    def outcome(self) -> Outcome:
        """What ran in place of what, without the call's sizes."""
        return Outcome(self.request.recipe, self.recipe, self.kernel, self.numerics, self.reason)


_kernels: dict[str, Kernel] = {}


def register(kernel: Kernel) -> None:
    """Make a kernel available; those registered first are preferred.

    Raises:
        ValueError: a kernel of that name exists.
    """
    if kernel.name in _kernels:
        raise ValueError(f"kernel {kernel.name!r} is registered already")
    _kernels[kernel.name] = kernel
    select.cache_clear()


def get_kernel(name: str) -> Kernel:
    """The registered kernel of that name (KeyError when there is none)."""
    return _kernels[name]


def exact_plan(request: Request, *passed_over: tuple[str, str]) -> Plan:
    """The plan that runs PyTorch's exact attention."""
    return Plan(request, "sdpa", "exact", "exact", passed_over)


def _why_too_short(request: Request) -> str:
    """Return why low bits would not pay for a call without gradients; "" where they may, or gradients are wanted."""
    if request.grad:
        return ""
    if request.q_len < MIN_QUERY_LEN or request.kv_len < MIN_KV_LEN:
        return f"fewer than {MIN_QUERY_LEN} queries or {MIN_KV_LEN} keys: too short to gain from low-bit attention"
    # A CPU shows what the recipe does, at any length.
    if request.device_type == "cuda" and request.mask in ("bool", "additive") and request.kv_len < MIN_MASKED_KV_LEN:
        return f"fewer than {MIN_MASKED_KV_LEN} keys beside a mask of scores: too short to gain from low-bit attention"
    return ""


@lru_cache(maxsize=4096)
def select(request: Request, fallback: Fallback = "native") -> Plan:
    """Choose the kernel for a request.

    Args:
        request: the call's facts.
        fallback: "native": the recipe natively, else the best recipe this device runs natively, else exact attention;
            on a CPU the recipe's emulation; very short calls without gradients are exact. "emulate": the recipe's own
            numerics, natively or emulated, else exact attention. "error": natively or not at all. A head_dim outside
            MIN_HEAD_DIM…MAX_HEAD_DIM has exact attention only.

    Raises:
        ValueError: unknown recipe or fallback.
        KernelUnavailableError: with "error", nothing serves natively.
    """
    get_recipe(request.recipe)
    if fallback not in FALLBACKS:
        raise ValueError(f"unknown fallback {fallback!r}; choose from: {', '.join(FALLBACKS)}")
    if request.recipe == "exact":
        return exact_plan(request)
    too_short = _why_too_short(request) if fallback == "native" else ""
    if too_short:
        return exact_plan(request, ("", too_short))
    emulation = fallback == "emulate" or (fallback == "native" and request.device_type == "cpu")
    recipes = (request.recipe, *(SUBSTITUTES.get(request.recipe, ()) if fallback == "native" else ()))
    passed_over: list[tuple[str, str]] = []
    if request.grad and get_recipe(request.recipe).backward is None:
        recipes = ()
        passed_over.append(("", f"{request.recipe} is forward only and gradients are wanted"))
    if not all(MIN_HEAD_DIM <= size <= MAX_HEAD_DIM for size in (request.head_dim, request.v_head_dim)):
        recipes = ()
        passed_over.append(("", f"head_dim outside {MIN_HEAD_DIM}…{MAX_HEAD_DIM}"))
    for recipe in recipes:
        candidate = replace(request, recipe=recipe)
        for kernel in sorted(_kernels.values(), key=lambda kernel: not kernel.native):
            if recipe not in kernel.recipes:
                continue
            reason = kernel.unsupported(candidate)
            if request.grad and kernel.run_backward is None:
                reason = "forward only"
            if not reason and (kernel.native or emulation):
                return Plan(request, kernel.name, recipe, "native" if kernel.native else "emulated", tuple(passed_over))
            if kernel.native or reason:
                passed_over.append((f"{recipe} by {kernel.name}", reason))
            else:
                passed_over.append((recipe, 'not native here; fallback="emulate" gives its numerics'))
    plan = exact_plan(request, *passed_over)
    if fallback == "error":
        raise KernelUnavailableError(
            f"no native kernel for recipe {request.recipe!r} on this {request.device_type} device ({plan.reason}); "
            'use fallback="native" for the best this device has, or fallback="emulate" for the recipe\'s numerics'
        )
    return plan
