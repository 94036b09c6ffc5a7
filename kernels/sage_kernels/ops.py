"""The torch.library operators: the only door through which anything above calls a kernel."""

from __future__ import annotations

from collections.abc import Callable

import torch

from . import exact, reference
from .recipe import RECIPES, Recipe, get_recipe
from .registry import SUPPORTED_DTYPES, Fallback, Kernel, Plan, Request, get_kernel, register, select

plan_listeners: list[Callable[[Plan], None]] = []
"""Called with the plan of every call of `attention`, at run time also when the call is inside a compiled graph."""

_library = torch.library.Library("sage_kernels", "DEF")
_library.define(
    "log_sum_exp(Tensor query, Tensor key, Tensor? mask, bool is_causal, float? scale) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, float? scale, str recipe, "
    "str fallback, bool return_lse) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    recipe: str = "sage3",
    fallback: Fallback = "native",
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Low-bit attention by the best kernel for the call, chosen when it runs. Forward only.

    Args:
        query: (batch, q_heads, q_len, head_dim) float16, bfloat16 or float32, any strides.
        key, value: (batch, kv_heads, kv_len, head_dim), (batch, kv_heads, kv_len, v_head_dim), dtype and device of
            query; q_heads a multiple of kv_heads.
        mask: 4-D, bool (True: may attend) or additive, broadcastable to (batch, q_heads, q_len, kv_len).
        is_causal: row i attends to keys 0…i.
        scale: default head_dim ** -0.5.
        recipe: a name in `recipe.RECIPES`.
        fallback: see `registry.select`.
        return_lse: compute the log-sum-exp of each row's scores.

    Returns:
        (output, lse): (batch, q_heads, q_len, v_head_dim) in query's dtype, laid out as (batch, q_len, q_heads,
        v_head_dim); (batch, q_heads, q_len) float32, or (0,) without return_lse. A row that may attend to nothing gives
        output 0 and lse -inf.

    Raises:
        ValueError, KernelUnavailableError: see `registry.select`.
        NotImplementedError: on backward.
    """
    return torch.ops.sage_kernels.attention(query, key, value, mask, is_causal, scale, recipe, fallback, return_lse)


def log_sum_exp(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """The exact log-sum-exp of each row's scores, float32 (batch, q_heads, q_len); arguments as in `attention`."""
    return torch.ops.sage_kernels.log_sum_exp(query, key, mask, is_causal, scale)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    recipe: str,
    fallback: Fallback,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    plan = select(Request.of(query, key, value, mask, is_causal, recipe, return_lse), fallback)
    for listener in plan_listeners:
        listener(plan)
    run = _run_sdpa if plan.kernel == "sdpa" else get_kernel(plan.kernel).run
    # Autocast would round the float32 products of scales and means.
    with torch.autocast(query.device.type, enabled=False):
        output, lse = run(
            query,
            key,
            value,
            mask=mask,
            is_causal=is_causal,
            scale=scale,
            recipe=get_recipe(plan.recipe),
            return_lse=return_lse,
        )
    output = output.transpose(1, 2).contiguous().transpose(1, 2)
    return output, lse if return_lse and lse is not None else query.new_empty(0, dtype=torch.float32)


def _log_sum_exp(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float | None
) -> torch.Tensor:
    with torch.autocast(query.device.type, enabled=False):
        return exact.log_sum_exp(query, key, mask=mask, is_causal=is_causal, scale=scale)


def _fake_log_sum_exp(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, scale: float | None
) -> torch.Tensor:
    return query.new_empty(query.shape[:3], dtype=torch.float32)


def _fake_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    recipe: str,
    fallback: Fallback,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, q_heads, q_len, _ = query.shape
    output = query.new_empty(batch, q_len, q_heads, value.shape[-1]).transpose(1, 2)
    return output, query.new_empty((batch, q_heads, q_len) if return_lse else 0, dtype=torch.float32)


def _no_backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> None:
    raise NotImplementedError(
        "the operators of sage_kernels are forward only: call sage_hf.sage_attention, which uses exact attention when "
        "gradients are wanted, or run under torch.no_grad()"
    )


for _name, _run, _fake in (
    ("attention", _attention, _fake_attention),
    ("log_sum_exp", _log_sum_exp, _fake_log_sum_exp),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sage_kernels::{_name}", _fake, lib=_library)
    torch.library.register_autograd(f"sage_kernels::{_name}", _no_backward, lib=_library)


def _run_sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    recipe: Recipe,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    output = exact.sdpa(
        query, key, value, mask=mask, is_causal=is_causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    if mask is not None:
        output = torch.where(exact.attended_rows(mask), output, 0.0)
    lse = exact.log_sum_exp(query, key, mask=mask, is_causal=is_causal, scale=scale) if return_lse else None
    return output, lse


def _run_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    recipe: Recipe,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return reference.attention(query, key, value, recipe, mask=mask, is_causal=is_causal, scale=scale)


def _unsupported_by_reference(request: Request) -> str:
    if request.dtype not in SUPPORTED_DTYPES:
        return f"dtype must be one of {', '.join(str(dtype).removeprefix('torch.') for dtype in SUPPORTED_DTYPES)}"
    return ""


register(
    Kernel(
        "reference",
        recipes=frozenset(name for name, recipe in RECIPES.items() if recipe.qk != "exact"),
        native=False,
        unsupported=_unsupported_by_reference,
        run=_run_reference,
    )
)
