"""The torch.library operators without gradients; with `training`, the only door through which a kernel is called."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import forward_ad

from . import exact, reference, reference_backward
from .cuda import registration as cuda_kernels
from .recipe import RECIPES, Recipe, get_recipe
from .registry import SUPPORTED_DTYPES, Fallback, Kernel, Plan, Request, get_kernel, register, select
from .triton import registration as triton_kernels

DTYPES = (*SUPPORTED_DTYPES, torch.float64)

plan_listeners: list[Callable[[Plan], None]] = []
"""Called with the plan of every call of `attention`, at run time also when the call is inside a compiled graph."""

_library = torch.library.Library("sage_kernels", "DEF")
_library.define(
    "log_sum_exp(Tensor query, Tensor key, Tensor? mask, bool is_causal, int causal_offset, float? scale) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "attention(Tensor query, Tensor key, Tensor value, Tensor? mask, bool is_causal, int causal_offset, float? scale, "
    "str recipe, str fallback, bool return_lse) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "packed_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "int max_seqlen_q, int max_seqlen_k, Tensor? seqused_k, bool is_causal, int causal_offset, float? scale, "
    "str recipe, str fallback, bool return_lse) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    causal_offset: int = 0,
    scale: float | None = None,
    recipe: str = "sage3",
    fallback: Fallback = "native",
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Low-bit attention by the best kernel for the call, chosen when it runs. Forward only.

    Args:
        query: (batch, q_heads, q_len, head_dim) float16, bfloat16, float32, or float64 (runs exactly); any strides.
        key, value: (batch, kv_heads, kv_len, head_dim), (batch, kv_heads, kv_len, v_head_dim), dtype and device of
            query; q_heads a multiple of kv_heads.
        mask: 4-D, bool (True: may attend) or additive, broadcastable to (batch, q_heads, q_len, kv_len).
        is_causal: row i attends to keys 0…i + causal_offset. 0 aligns upper left as PyTorch's SDPA does, kv_len - q_len
            lower right as decoding does.
        scale: finite factor of the scores; default head_dim ** -0.5.
        recipe: a name in `recipe.RECIPES`.
        fallback: see `registry.select`.
        return_lse: compute the log-sum-exp of each row's scores.

    Returns:
        (output, lse): (batch, q_heads, q_len, v_head_dim) in query's dtype, laid out as (batch, q_len, q_heads,
        v_head_dim); (batch, q_heads, q_len) float32, or (0,) without return_lse. A row that may attend to nothing gives
        output 0 and lse -inf.

    Raises:
        TypeError: a tensor that is not dense or has another dtype; a scale that is no number.
        ValueError: shapes, dtypes or devices do not fit, or the scale is not finite; see also `registry.select`.
        KernelUnavailableError: see `registry.select`.
        NotImplementedError: on backward, or in forward mode.
    """
    check_kinds(query, key, value, mask, scale)
    refuse_tangents(query, key, value, mask)
    return torch.ops.sage_kernels.attention(
        query, key, value, mask, is_causal, causal_offset, scale, recipe, fallback, return_lse
    )


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: torch.Tensor | None = None,
    is_causal: bool = False,
    causal_offset: int = 0,
    scale: float | None = None,
    recipe: str = "sage3",
    fallback: Fallback = "native",
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention` of sequences of any lengths that lie one after the other, without padding. Forward only.

    Args:
        query: (total queries, q_heads, head_dim).
        key, value: (total keys, kv_heads, head_dim), (total keys, kv_heads, v_head_dim).
        cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1,), from 0 to the total: sequence i is tokens cu_seqlens[i] to
            cu_seqlens[i + 1] - 1.
        max_seqlen_q, max_seqlen_k: the longest sequence's length, or more.
        seqused_k: int32 (sequences,): only that many keys of each sequence count. With equal steps in cu_seqlens_k
            this is padding by length of an ordinary batch.
        is_causal, causal_offset, scale, recipe, fallback, return_lse: as in `attention`, for each sequence.

    Returns:
        (output, lse): (total queries, q_heads, v_head_dim) in query's dtype; (q_heads, total queries) float32, or (0,)
        without return_lse.

    Raises:
        TypeError: as `attention`.
        ValueError: as `attention`, or lengths that do not fit, as far as the host can tell: on a CPU.
        KernelUnavailableError: see `registry.select`.
        NotImplementedError: on backward, or in forward mode.
    """
    check_kinds(query, key, value, None, scale)
    refuse_tangents(query, key, value)
    return torch.ops.sage_kernels.packed_attention(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        seqused_k,
        is_causal,
        causal_offset,
        scale,
        recipe,
        fallback,
        return_lse,
    )


def log_sum_exp(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    causal_offset: int = 0,
    scale: float | None = None,
) -> torch.Tensor:
    """The exact log-sum-exp of each row's scores, float32 (batch, q_heads, q_len); arguments as in `attention`."""
    return torch.ops.sage_kernels.log_sum_exp(query, key, mask, is_causal, causal_offset, scale)


def has_tangent(*tensors: torch.Tensor | None) -> bool:
    """Whether forward-mode differentiation goes through one of the tensors; not known inside torch.compile."""
    if torch.compiler.is_compiling() or forward_ad._current_level < 0:
        return False
    return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def refuse_tangents(*tensors: torch.Tensor | None) -> None:
    """Raise NotImplementedError where an operator would cut a forward-mode gradient."""
    if has_tangent(*tensors):
        raise NotImplementedError(
            "the operators of sage_kernels have no forward-mode derivative: use exact attention, as "
            "sage_hf.sage_attention does"
        )


def check_kinds(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    mask_name: str = "mask",
) -> None:
    """Refuse what no operator takes: other things than tensors and numbers, other layouts and dtypes."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"query, key and value must be tensors; got {type(tensor).__name__} as {name}")
        if not _is_dense(tensor) or tensor.dtype not in DTYPES:
            raise TypeError(
                f"{name} is a {_layout(tensor)} tensor of {tensor.dtype}; expected a dense one of float16, bfloat16 or "
                "float32 (float64 runs exactly): pass the unquantised tensor, quantising is done inside; pad nested "
                "ones, or pack them for sage_kernels.ops.packed_attention"
            )
    if mask is not None:
        if not isinstance(mask, torch.Tensor):
            raise TypeError(f"{mask_name} must be a tensor or None; got {type(mask).__name__}")
        if not _is_dense(mask) or mask.dtype not in (torch.bool, *DTYPES):
            raise TypeError(
                f"{mask_name} is a {_layout(mask)} tensor of {mask.dtype}; expected a dense one, bool (True: may "
                "attend) or floating: use mask.bool()"
            )
    if scale is None:
        return
    if isinstance(scale, bool) or not isinstance(scale, int | float):
        raise TypeError(f"scale must be a number or None; got {type(scale).__name__}: use float(scale)")
    if not torch.compiler.is_compiling() and not math.isfinite(scale):
        raise ValueError(f"scale must be finite; got {scale}")


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested


def _layout(tensor: torch.Tensor) -> str:
    return "nested" if tensor.is_nested else str(tensor.layout)


def check_tensors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> None:
    """Refuse what kernels would read out of bounds: they take sizes from one tensor for all."""
    sizes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not (query.dim() == key.dim() == value.dim() == 4):
        raise ValueError(f"query, key and value need 4 dimensions (3 when packed); got {sizes}")
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[3] != key.shape[3]:
        raise ValueError(f"batch, kv_heads, kv_len and head_dim must agree; got {sizes}")
    q_heads, kv_heads = query.shape[1], key.shape[1]
    if (q_heads % kv_heads if kv_heads else q_heads) or 0 in (query.shape[3], value.shape[3]):
        raise ValueError(f"q_heads must be a multiple of kv_heads, and no head_dim 0; got {sizes}")
    for name, other in (("key", key), ("value", value), ("mask", mask)):
        if other is not None and other.device != query.device:
            raise ValueError(f"{name} is on {other.device}, query on {query.device}")
        if other is not None and name != "mask" and other.dtype != query.dtype:
            raise ValueError(f"{name} is {other.dtype}, query {query.dtype}")
    if mask is not None:
        shape = (*query.shape[:3], key.shape[2])
        if mask.dim() != 4 or any(size not in (1, full) for size, full in zip(mask.shape, shape, strict=True)):
            raise ValueError(f"mask {tuple(mask.shape)} must be 4-D and broadcastable to {tuple(shape)}")


def check_lengths(
    query: torch.Tensor,
    key: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: torch.Tensor | None,
) -> None:
    """Refuse packed sequences whose lengths a kernel would read out of bounds.

    The values of lengths on a GPU are not checked: the host would wait for them.
    """
    if cu_seqlens_q is None and cu_seqlens_k is None and seqused_k is None:
        return
    if cu_seqlens_q is None or cu_seqlens_k is None:
        raise ValueError("packed sequences need both cu_seqlens_q and cu_seqlens_k")
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.shape[0] == 0:
        raise ValueError(
            "cu_seqlens_q and cu_seqlens_k must both be (sequences + 1,); "
            f"got {tuple(cu_seqlens_q.shape)} and {tuple(cu_seqlens_k.shape)}"
        )
    sequences = cu_seqlens_q.shape[0] - 1
    if seqused_k is not None and seqused_k.shape != (sequences,):
        raise ValueError(f"seqused_k must be ({sequences},), one for each sequence; got {tuple(seqused_k.shape)}")
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k), ("seqused_k", seqused_k)):
        if x is not None and (x.dtype not in (torch.int32, torch.int64) or x.device != query.device):
            raise ValueError(f"{name} must hold integers on {query.device}; got {x.dtype} on {x.device}")
    if query.device.type != "cpu":
        return
    for name, starts, tokens, longest in (
        ("q", cu_seqlens_q.tolist(), query.shape[2], max_seqlen_q),
        ("k", cu_seqlens_k.tolist(), key.shape[2], max_seqlen_k),
    ):
        lengths = [stop - start for start, stop in itertools.pairwise(starts)]
        if starts[0] != 0 or starts[-1] > tokens or any(length < 0 for length in lengths):
            raise ValueError(
                f"cu_seqlens_{name} must begin at 0, never decrease, and end at the number of tokens, {tokens}; got "
                f"{starts}"
            )
        if max(lengths, default=0) > longest:
            raise ValueError(f"a sequence of cu_seqlens_{name} is longer than max_seqlen_{name}, {longest}")
    if seqused_k is not None and bool((seqused_k < 0).any()):
        raise ValueError(f"seqused_k must not be negative; got {seqused_k.tolist()}")


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    causal_offset: int,
    scale: float | None,
    recipe: str,
    fallback: Fallback,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    check_tensors(query, key, value, mask)
    if mask is not None and mask.dtype == torch.float64 and query.dtype != torch.float64:
        mask = exact.mask_in_dtype(mask, torch.float32)  # in which kernels add it
    plan = select(Request.of(query, key, value, mask, is_causal, recipe, return_lse), fallback)
    for listener in plan_listeners:
        listener(plan)
    if 0 in (*query.shape, key.shape[2]):
        nothing, infinite = reference.nothing_attended(query, value.shape[3], query.dtype)
        return nothing, infinite if return_lse else infinite.new_empty(0)
    run = _run_sdpa if plan.kernel == "sdpa" else get_kernel(plan.kernel).run
    # Autocast would round the float32 products of scales and means.
    with torch.autocast(query.device.type, enabled=False):
        output, lse = run(
            query,
            key,
            value,
            mask=mask,
            is_causal=is_causal,
            causal_offset=causal_offset,
            scale=scale,
            recipe=get_recipe(plan.recipe),
            return_lse=return_lse,
        )
    output = output.transpose(1, 2).contiguous().transpose(1, 2)
    return output, lse if return_lse and lse is not None else query.new_empty(0, dtype=torch.float32)


def _packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: torch.Tensor | None,
    is_causal: bool,
    causal_offset: int,
    scale: float | None,
    recipe: str,
    fallback: Fallback,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    # Sequences are the batch: (1, heads, tokens, channels).
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    check_tensors(query, key, value, None)
    check_lengths(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    request = Request.of(query, key, value, None, is_causal, recipe, return_lse)
    sequences = cu_seqlens_q.shape[0] - 1
    request = replace(request, batch=sequences, q_len=max_seqlen_q, kv_len=max_seqlen_k, packed=True)
    plan = select(request, fallback)
    for listener in plan_listeners:
        listener(plan)
    kernel = None if plan.kernel == "sdpa" else get_kernel(plan.kernel)
    options = {
        "is_causal": is_causal,
        "causal_offset": causal_offset,
        "scale": scale,
        "recipe": get_recipe(plan.recipe),
        "return_lse": return_lse,
    }
    with torch.autocast(query.device.type, enabled=False):
        if kernel is not None and kernel.run_packed is not None:
            lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
            output, lse = kernel.run_packed(query, key, value, *lengths, **options)
        else:
            run = _run_sdpa if kernel is None else kernel.run
            output, lse = _one_by_one(run, query, key, value, cu_seqlens_q, cu_seqlens_k, seqused_k, **options)
    output = output[0].transpose(0, 1).contiguous()
    return output, lse[0] if return_lse and lse is not None else query.new_empty(0, dtype=torch.float32)


def _one_by_one(
    run: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    seqused_k: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a kernel that knows no packed sequences once for each of them; reads the lengths back to the host."""
    output = query.new_zeros(*query.shape[:3], value.shape[3])
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
    q_starts, k_starts = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    stored = cu_seqlens_k.diff()
    k_lengths = (stored if seqused_k is None else torch.minimum(stored, seqused_k)).tolist()
    for start, stop, k_start, k_length in zip(q_starts, q_starts[1:], k_starts, k_lengths, strict=False):
        queries, keys = slice(start, stop), slice(k_start, k_start + k_length)
        if stop == start or k_length == 0:
            continue
        output[:, :, queries], some = run(
            query[:, :, queries], key[:, :, keys], value[:, :, keys], mask=None, **options
        )
        if some is not None:
            lse[:, :, queries] = some
    return output, lse


def _log_sum_exp(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    causal_offset: int,
    scale: float | None,
) -> torch.Tensor:
    with torch.autocast(query.device.type, enabled=False):
        return exact.log_sum_exp(query, key, mask=mask, is_causal=is_causal, causal_offset=causal_offset, scale=scale)


def _fake_log_sum_exp(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    causal_offset: int,
    scale: float | None,
) -> torch.Tensor:
    return query.new_empty(query.shape[:3], dtype=torch.float32)


def _fake_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    causal_offset: int,
    scale: float | None,
    recipe: str,
    fallback: Fallback,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, q_heads, q_len, _ = query.shape
    output = query.new_empty(batch, q_len, q_heads, value.shape[-1]).transpose(1, 2)
    return output, query.new_empty((batch, q_heads, q_len) if return_lse else 0, dtype=torch.float32)


def _fake_packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: torch.Tensor | None,
    is_causal: bool,
    causal_offset: int,
    scale: float | None,
    recipe: str,
    fallback: Fallback,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    tokens, q_heads, _ = query.shape
    output = query.new_empty(tokens, q_heads, value.shape[-1])
    return output, query.new_empty((q_heads, tokens) if return_lse else 0, dtype=torch.float32)


def _no_backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> None:
    raise NotImplementedError(
        "this operator of sage_kernels is forward only: call sage_hf.sage_attention, which honours gradients for every "
        "recipe, or sage_kernels.training, or run under torch.no_grad()"
    )


for _name, _run, _fake in (
    ("attention", _attention, _fake_attention),
    ("packed_attention", _packed_attention, _fake_packed_attention),
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
    causal_offset: int,
    scale: float | None,
    recipe: Recipe,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if is_causal and (causal_offset != 0 or mask is not None):
        # PyTorch's kernels know one alignment, and no mask beside it.
        mask = exact.with_causality(mask, query, key, causal_offset)
        is_causal = False
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
    causal_offset: int,
    scale: float | None,
    recipe: Recipe,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return reference.attention(
        query, key, value, recipe, mask=mask, is_causal=is_causal, causal_offset=causal_offset, scale=scale
    )


def _unsupported_by_reference(request: Request) -> str:
    if request.dtype not in SUPPORTED_DTYPES:
        return f"dtype must be one of {', '.join(str(dtype).removeprefix('torch.') for dtype in SUPPORTED_DTYPES)}"
    return ""


cuda_kernels.register_all()
triton_kernels.register_all()
register(
    Kernel(
        "reference",
        recipes=frozenset(name for name, recipe in RECIPES.items() if recipe.qk != "exact"),
        native=False,
        unsupported=_unsupported_by_reference,
        run=_run_reference,
        run_training=reference_backward.forward,
        run_backward=reference_backward.backward,
    )
)
