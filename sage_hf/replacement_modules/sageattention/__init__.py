"""Replacement for SageAttention's package: its documented functions, computed by sage-hf.

`sage_hf.drop_in()` puts this module where `import sageattention` finds it. All functions take masks, any head_dim and
tensors that require gradients. Masks and gradients follow the rules of `sage_hf.sage_attention`. Keywords that choose
how the original package quantises (`ORIGINAL_NUMERICS`) have no effect, because a recipe of sage-hf has its own
numerics.
"""

from __future__ import annotations

import torch

from sage_hf.attention import attend_observed, chosen_fallback
from sage_kernels.packed import attend_packed
from sage_kernels.spec.derivatives import wants_gradient
from sage_kernels.spec.layout import Lengths
from sage_kernels.spec.options import Options

__version__ = "2.2.0"

ORIGINAL_NUMERICS = frozenset({"smooth_k", "smooth_v", "qk_quant_gran", "pv_accum_dtype", "quantization_backend"})
LAYOUTS = ("HND", "NHD")

Output = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def sageattn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    **kwargs: object,
) -> Output:
    """Compute attention by `sage2` or `sage1`, whichever is better on this device; with gradients by `sage_bwd`.

    Args:
        q: (batch, q_heads, q_len, head_dim) in the layout "HND", (batch, q_len, q_heads, head_dim) in "NHD"; dtypes as
            for `sage_hf.sage_attention`.
        k, v: in the same layout, with kv_heads and kv_len; q_heads is a multiple of kv_heads; v may have another
            head_dim.
        tensor_layout: "HND" or "NHD".
        is_causal: query i attends to keys 0…i, aligned upper left where lengths differ.
        sm_scale: factor of the scores; None: head_dim ** -0.5.
        return_lse: also return the log-sum-exp of each row's scores.
        attn_mask: bool (True: may attend) or additive, broadcastable to (batch, q_heads, q_len, kv_len); with
            `is_causal`, a query attends to the keys that both allow.
        kwargs: keywords of the original package's other functions (`ORIGINAL_NUMERICS`), without effect; and keywords
            of PyTorch's attention: `scale`, `enable_gqa`, `dropout_p`.

    Returns:
        The output, in q's layout and dtype; with return_lse also lse (batch, q_heads, q_len) float32. lse carries no
        gradient.

    Raises:
        ValueError: the layout is unknown, both sm_scale and scale are given, or `sage_hf.sage_attention` refuses.
        TypeError: a keyword is unknown.
    """
    return _attend(q, k, v, "sage2", tensor_layout, is_causal, sm_scale, return_lse, attn_mask, kwargs)


def sageattn_qk_int8_pv_fp16_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    quantization_backend: str = "triton",
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    return_lse: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    **kwargs: object,
) -> Output:
    """Compute attention by the recipe `sage1`; otherwise as `sageattn`."""
    return _attend(q, k, v, "sage1", tensor_layout, is_causal, sm_scale, return_lse, attn_mask, kwargs)


def sageattn_qk_int8_pv_fp16_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    **kwargs: object,
) -> Output:
    """Compute attention by the recipe `sage1`; otherwise as `sageattn`."""
    return _attend(q, k, v, "sage1", tensor_layout, is_causal, sm_scale, return_lse, attn_mask, kwargs)


def sageattn_qk_int8_pv_fp8_cuda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp16",
    smooth_k: bool = True,
    smooth_v: bool = False,
    return_lse: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    **kwargs: object,
) -> Output:
    """Compute attention by the recipe `sage2`; otherwise as `sageattn`."""
    return _attend(q, k, v, "sage2", tensor_layout, is_causal, sm_scale, return_lse, attn_mask, kwargs)


def sageattn_qk_int8_pv_fp8_cuda_sm90(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    qk_quant_gran: str = "per_thread",
    sm_scale: float | None = None,
    pv_accum_dtype: str = "fp32+fp32",
    smooth_k: bool = True,
    return_lse: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    **kwargs: object,
) -> Output:
    """Compute attention by the recipe `sage2`; otherwise as `sageattn`."""
    return _attend(q, k, v, "sage2", tensor_layout, is_causal, sm_scale, return_lse, attn_mask, kwargs)


def sageattn_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    **kwargs: object,
) -> torch.Tensor:
    """Compute attention within each packed sequence; otherwise as `sageattn`.

    Args:
        q: (total queries, q_heads, head_dim).
        k, v: (total keys, kv_heads, head_dim).
        cu_seqlens_q, cu_seqlens_k: int32 or int64 (sequences + 1,), from 0 to the total: sequence i has the tokens
            cu_seqlens[i] to cu_seqlens[i + 1] - 1.
        max_seqlen_q, max_seqlen_k: upper bound on the length of a sequence.
        is_causal, sm_scale: as in `sageattn`, for each sequence.
        smooth_k: without effect, as `ORIGINAL_NUMERICS`.
        kwargs: as in `sageattn`; and `tensor_layout="NHD"`, which is the only layout of packed sequences.

    Returns:
        (total queries, q_heads, head_dim) in q's dtype, or under autocast in autocast's.

    Raises:
        ValueError, TypeError: see `sageattn`; also if lengths do not fit.
    """
    if (layout := kwargs.pop("tensor_layout", "NHD")) != "NHD":
        raise ValueError(f"tensor_layout={layout!r} is not supported: packed sequences are (tokens, heads, head_dim)")
    output, _ = attend_packed(
        q,
        k,
        v,
        Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        _options("sage2", (q, k, v), is_causal, sm_scale, kwargs),
    )
    return output


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    recipe: str,
    tensor_layout: str,
    is_causal: bool,
    sm_scale: float | None,
    return_lse: bool,
    attn_mask: torch.Tensor | None,
    kwargs: dict[str, object],
) -> Output:
    if tensor_layout not in LAYOUTS:
        raise ValueError(
            f"tensor_layout must be one of {LAYOUTS}; got {tensor_layout!r:.40}: pass a mask by name, attn_mask=mask"
        )
    options = _options(recipe, (q, k, v), is_causal, sm_scale, kwargs)
    options = options.replace(tokens_first=tensor_layout == "NHD", return_lse=return_lse)
    output, lse = attend_observed(q, k, v, attn_mask, None, options)
    return output if lse is None or not return_lse else (output, lse)


def _options(
    recipe: str,
    tensors: tuple[torch.Tensor, ...],
    is_causal: bool,
    sm_scale: float | None,
    kwargs: dict[str, object],
) -> Options:
    """Return the options of a call; if gradients are wanted, with a recipe that has gradients.

    Raises:
        TypeError: a keyword is unknown.
        ValueError: both sm_scale and scale are given.
    """
    options = {name: value for name, value in kwargs.items() if name not in ORIGINAL_NUMERICS}
    scale, dropout_p = options.pop("scale", None), options.pop("dropout_p", 0.0)
    options.pop("enable_gqa", None)
    if options:
        raise TypeError(f"sage-hf's replacement for sageattention does not know the keyword {next(iter(options))!r}")
    if sm_scale is not None and scale is not None:
        raise ValueError(f"give sm_scale={sm_scale} or scale={scale}, not both")
    return Options(
        is_causal=is_causal,
        scale=scale if sm_scale is None else sm_scale,  # type: ignore[arg-type]  # `attend_observed` checks it
        dropout_p=dropout_p,  # type: ignore[arg-type]
        recipe="sage_bwd" if wants_gradient(*tensors) else recipe,
        fallback=chosen_fallback(None),
    )
