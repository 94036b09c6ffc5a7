"""Exact attention: PyTorch's scaled_dot_product_attention, and a plain implementation in any precision as the truth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_efficient_attention, can_use_flash_attention
from torch.nn.attention import SDPBackend

from ..runtime import dynamo, torch_private
from ..spec.autocast import autocast_dtype
from ..spec.derivatives import wants_gradient
from ..spec.masks import ROW_ELEMENTS, additive, mask_in_dtype, unexpanded
from .gradient_layout import with_gradient_like_output

ELEMENTS_PER_CHUNK = 2**22
LOAD_BYTES = 16  # bytes that PyTorch's memory-efficient kernel reads at once
LARGEST_BIAS = 2.0**127  # its product with log2 e, as PyTorch's GPU kernels compute it, is finite in float32

pytorch_sdpa = torch_private.scaled_dot_product_attention
_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION.value, SDPBackend.EFFICIENT_ATTENTION.value, SDPBackend.MATH.value]
"""Backends other than cuDNN's, in PyTorch's own order; PyTorch decides at the first call where cuDNN comes."""


def rows_per_chunk(batch_heads: int, columns: int, multiple: int = 1) -> int:
    """Return the rows of scores that fit in a chunk of bounded size, so that memory stays linear in sequence length."""
    rows = ELEMENTS_PER_CHUNK // max(1, batch_heads * columns)
    return max(multiple, rows // multiple * multiple)


def apply_mask(
    scores: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    first_row: int,
    first_column: int,
    causal_offset: int = 0,
) -> torch.Tensor:
    """Add the mask to a tile of scores.

    Args:
        scores: (batch, q_heads, rows, columns), the tile that begins at (first_row, first_column).
        mask: (batch, q_heads, q_len, kv_len), bool (True: may attend) or additive; strides may be 0.
        is_causal: row i attends to columns 0…i + causal_offset (0: upper-left alignment, as in PyTorch).

    Returns:
        The masked scores, -inf where attention is not allowed.
    """
    rows, columns = scores.shape[-2:]
    if mask is not None:
        tile = mask[..., first_row : first_row + rows, first_column : first_column + columns]
        if tile.dtype == torch.bool:
            scores = scores.masked_fill(~tile, -torch.inf)
        else:
            scores = scores + mask_in_dtype(tile, scores.dtype)
    first_row += causal_offset
    if is_causal and first_column + columns > first_row + 1:
        row = torch.arange(first_row, first_row + rows, device=scores.device).unsqueeze(-1)
        column = torch.arange(first_column, first_column + columns, device=scores.device)
        scores = scores.masked_fill(column > row, -torch.inf)
    return scores


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    causal_offset: int = 0,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute softmax(scale·Q·Kᵀ + mask)·V in `dtype`, a few rows at a time.

    Args:
        query: (batch, q_heads, q_len, head_dim).
        key, value: (batch, kv_heads, kv_len, head_dim), (batch, kv_heads, kv_len, v_head_dim); q_heads a multiple of
            kv_heads.
        mask: bool (True: may attend) or additive, broadcastable to (batch, q_heads, q_len, kv_len).
        is_causal: row i attends to keys 0…i + causal_offset.
        scale: default head_dim ** -0.5.

    Returns:
        (output, lse) in `dtype`: (batch, q_heads, q_len, v_head_dim) and (batch, q_heads, q_len). A row that may attend
        to nothing gives output 0 and lse -inf.
    """
    output = query.new_zeros(*query.shape[:3], value.shape[-1], dtype=dtype)
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=dtype)
    value = value.to(dtype).repeat_interleave(query.shape[1] // max(1, value.shape[1]), 1)
    for rows, scores in _score_chunks(query, key, mask, is_causal, causal_offset, scale, dtype):
        lse[:, :, rows] = scores.logsumexp(-1)
        weights = torch.exp(scores - lse[:, :, rows].nan_to_num(nan=torch.nan, neginf=0.0).unsqueeze(-1))
        output[:, :, rows] = weights @ value
    return output, lse


def log_sum_exp(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    causal_offset: int = 0,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute the lse of `attention`, float32 (batch, q_heads, q_len), without the output."""
    lse = query.new_full(query.shape[:3], -torch.inf, dtype=torch.float32)
    for rows, scores in _score_chunks(query, key, mask, is_causal, causal_offset, scale, torch.float32):
        lse[:, :, rows] = scores.logsumexp(-1)
    return lse


def mean_weights(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    causal_offset: int = 0,
    scale: float | None = None,
) -> torch.Tensor:
    """Return each key's weight, averaged over the rows that may attend to anything; arguments as in `attention`.

    Returns:
        float32 (batch, q_heads, kv_len); it sums to 1 over keys, or is 0 where no row may attend to anything.
    """
    batch, q_heads = query.shape[:2]
    total = query.new_zeros(batch, q_heads, key.shape[2], dtype=torch.float32)
    rows_attending = query.new_zeros(batch, q_heads, 1, dtype=torch.float32)
    for _, scores in _score_chunks(query, key, mask, is_causal, causal_offset, scale, torch.float32):
        attending = (scores != -torch.inf).any(-1, keepdim=True)
        total += torch.where(attending, scores.softmax(-1), 0.0).sum(-2)
        rows_attending += attending.sum(-2)
    return total / rows_attending.clamp_min(1.0)


def _score_chunks(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    causal_offset: int,
    scale: float | None,
    dtype: torch.dtype,
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield masked scores (batch, q_heads, rows, kv_len) in `dtype` with their rows, in chunks; none without keys."""
    batch, q_heads, q_len, head_dim = query.shape
    kv_heads, kv_len = key.shape[1:3]
    if 0 in (batch, q_heads, q_len, kv_len):
        return
    scale = max(1, head_dim) ** -0.5 if scale is None else scale
    if mask is not None:
        mask = mask.expand(batch, q_heads, q_len, kv_len)
    transposed_key = key.to(dtype).repeat_interleave(q_heads // kv_heads, 1).transpose(-1, -2)
    rows = rows_per_chunk(batch * q_heads, kv_len)
    for start in range(0, q_len, rows):
        chunk = slice(start, start + rows)
        scores = query[:, :, chunk].to(dtype) @ transposed_key * scale
        yield chunk, apply_mask(scores, mask, is_causal, start, 0, causal_offset)


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    lower_right: bool = False,
    backend: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """Call PyTorch's scaled_dot_product_attention with tensors that its kernels read correctly, in linear memory.

    With grouped queries and a mask, keys and values are repeated first, as transformers does: on most devices,
    PyTorch's kernels of linear memory take either grouped queries or a mask. On a GPU `_aligned` copies tensors that
    these kernels would misread; elsewhere tensors are passed on unchanged.

    Args:
        query, key, value, is_causal, scale: as in `attention`; is_causal not with a mask.
        mask: bool or additive of any floating dtype, broadcastable to (batch, q_heads, q_len, kv_len). In query's dtype
            it is used unchanged: PyTorch's GPU kernels treat finite numbers beyond ±2¹²⁷ as infinite.
        enable_gqa: q_heads may be a multiple of kv_heads.
        dropout_p: dropout probability of the attention weights.
        lower_right: causal, with the last query at the last key; only without a mask, and if `has_lower_right`.
        backend: a function with the same arguments that attends in place of PyTorch's, such as `without_cudnn`.

    Returns:
        (batch, q_heads, q_len, v_head_dim) in query's dtype.
    """
    if query.shape[1] == key.shape[1]:  # a branch, because PyTorch's function takes no SymBool
        enable_gqa = False
    if enable_gqa and mask is not None:
        group = query.shape[1] // max(1, key.shape[1])
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        enable_gqa = False
    v_head_dim = value.shape[-1]
    if mask is not None:
        mask = _mask_for_sdpa(mask, query, key.shape[-2])
    if scale is not None and scale <= 0:
        # PyTorch's kernels mask scores, or take a row's maximum, before they scale them.
        query, scale = (-query, -scale) if scale < 0 else (query * 0.0, 1.0)
    if 0 in (*query.shape[:3], key.shape[-2]):  # on a CPU, PyTorch 2.8 divides by these sizes and crashes
        return nothing_attended(query, key, value)
    if _on_gpu(query):
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        query, key, value = (_aligned(x, LOAD_BYTES // x.element_size()) for x in (query, key, value))
        if _misleads_cudnn(query, value):
            query = query.clone(memory_format=torch.contiguous_format)
        if mask is not None and mask.dtype != torch.bool and not _is_read_in_place(query, key, value, mask, dropout_p):
            mask = _with_aligned_rows(mask)
    if lower_right:
        output = _flash(query, key, value, True, scale)
    else:
        options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        output = (backend or pytorch_sdpa)(query, key, value, attn_mask=mask, **options)
    if _may_be_cudnn(query, key, value, mask):
        output = with_gradient_like_output(output)
    return output if output.shape[-1] == v_head_dim else output.narrow(-1, 0, v_head_dim)


def replay_function(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    is_causal: bool,
    scale: float,
    backend: Callable[..., torch.Tensor] | None = None,
) -> Callable[..., torch.Tensor] | None:
    """Return a function of (query, key, value) in these layouts that computes `sdpa` without mask and gradients.

    It is PyTorch's function, or `backend`, with options bound; None if `sdpa` would pass on other tensors than its
    arguments. The arguments are as in `sdpa`.
    """
    if scale <= 0 or 0 in (*query.shape[:3], key.shape[-2]):
        return None
    if _on_gpu(query):
        elements = LOAD_BYTES // query.element_size()
        aligned = all(x.shape[-1] % elements == 0 and _is_aligned(x) for x in (query, key, value))
        if not aligned or _misleads_cudnn(query, value):
            return None
    enable_gqa = query.shape[1] != key.shape[1]
    return partial(backend or pytorch_sdpa, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


def without_cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Call the operator that PyTorch's function would choose without cuDNN, and change no switch of PyTorch.

    PyTorch's function runs instead off the GPU, with dropout or gradients, if the caller has set another order of
    backends, and if the backends that the caller allows do not serve the call. Arguments are as in PyTorch's function,
    with 16-bit rows aligned as `sdpa` aligns them.
    """
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (query, key, value, attn_mask))
    order = [x for x in torch_private.sdp_priority_order() if x in _WITHOUT_CUDNN]
    if not _on_gpu(query) or dropout_p or grad or order != _WITHOUT_CUDNN:
        return pytorch_sdpa(query, key, value, attn_mask=attn_mask, **options)
    params = SDPAParams(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    if attn_mask is None and can_use_flash_attention(params):
        return _flash(query, key, value, is_causal, scale)
    if can_use_efficient_attention(params):
        bias = attn_mask
        if bias is not None:
            bias = _with_aligned_rows(additive(bias, query.dtype))
            bias = bias.expand(*query.shape[:3], key.shape[2])
        output: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, False, dropout_p, is_causal, scale=scale
        )[0]
        return output
    return pytorch_sdpa(query, key, value, attn_mask=attn_mask, **options)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """Call PyTorch's flash kernel, whose causality is aligned lower right."""
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, is_causal, scale=scale
    )[0]
    return output


def has_lower_right(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, enable_gqa: bool) -> bool:
    """Return whether PyTorch's flash kernel serves causality that is aligned lower right."""
    if not _on_gpu(query) or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    return can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, enable_gqa))


def nothing_attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return the output of a call with a size of 0, which is differentiable: empty, or zeros if there are no keys.

    Args:
        query, key, value: as in `attention`.
    """
    group = query.shape[1] // max(1, key.shape[1])
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    return query @ key.transpose(-1, -2) @ value


def _on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda


@dynamo.allow_in_graph  # the compiler cannot follow code that reads a storage's offset; autograd can
def _mask_for_sdpa(mask: torch.Tensor, query: torch.Tensor, kv_len: int) -> torch.Tensor:
    """Return the mask in a dtype that PyTorch takes with query; on a GPU, in the layout that its kernels read.

    On a GPU it has four dimensions. Broadcast dimensions have size 1 (PyTorch turns a bool mask into an additive mask
    of the size that it is given), except the last dimension, which is contiguous.
    """
    if not _on_gpu(query):
        kept = mask.dtype == torch.float32 and query.dtype != torch.float64 and autocast_dtype(query) is None
        return mask if kept else mask_in_dtype(mask, query.dtype)
    while mask.dim() < 4:
        mask = mask.unsqueeze(0)
    mask = mask_in_dtype(stored_part(mask), query.dtype, LARGEST_BIAS)
    if mask.shape[-1] != kv_len:
        mask = mask.expand(*mask.shape[:-1], kv_len)
    if mask.dtype == torch.bool and mask.stride(-1) != 1:
        return mask.clone(memory_format=torch.contiguous_format)
    return mask


def _is_read_in_place(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, dropout_p: float
) -> bool:
    """Return whether an additive mask is read unchanged: it is aligned, or cuDNN's kernel takes rows at any address.

    PyTorch's choice of kernel is not queried under a compiler or a transform, or for gradients.
    """
    if type(mask) is not torch.Tensor or torch.compiler.is_compiling() or torch_private.transforms_are_active():
        return False
    if _is_aligned(mask):
        return True
    wants_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value, mask))
    if wants_gradient or mask.stride(-1) != 1 or mask.data_ptr() % LOAD_BYTES:
        return False
    return torch_private.fused_sdp_choice(query, key, value, mask, dropout_p, False) == SDPBackend.CUDNN_ATTENTION.value


@dynamo.allow_in_graph
def _with_aligned_rows(mask: torch.Tensor) -> torch.Tensor:
    """Return an additive mask as the memory-efficient kernel reads it; see `_aligned`."""
    return mask if _is_aligned(mask) else _aligned(mask, ROW_ELEMENTS).narrow(-1, 0, mask.shape[-1])


def stored_part(x: torch.Tensor) -> torch.Tensor:
    """Return `unexpanded`, or x unchanged if each repetition has a separate gradient."""
    differentiated = x.requires_grad and torch.is_grad_enabled()
    return x if differentiated or torch_private.transforms_are_active() else unexpanded(x)


@dynamo.allow_in_graph
def _aligned(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Return x as PyTorch's GPU kernels read it, copied only if it must be: see `_is_aligned`.

    Args:
        x: (…, elements).
        multiple: zeros are appended until the number of elements is a multiple of it.

    Returns:
        (…, elements or more); dimensions of stride 0, except the last, keep it.
    """
    padding = -x.shape[-1] % multiple
    if not padding and _is_aligned(x):
        return x
    stored = stored_part(x)
    stored = stored.expand(*stored.shape[:-1], x.shape[-1])
    if padding:
        stored = F.pad(stored, (0, padding))
    if not _is_aligned(stored):
        stored = stored.clone(memory_format=torch.contiguous_format)
    return stored.expand(*x.shape[:-1], -1)


def _may_be_cudnn(*tensors: torch.Tensor | None) -> bool:
    """Return whether PyTorch's cuDNN attention may compute gradients of a call, outside of compiled graphs."""
    query = tensors[0]
    if query is None or not _on_gpu(query) or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if torch.compiler.is_compiling() or not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    return wants_gradient(*tensors) or torch_private.transforms_are_active()


def _misleads_cudnn(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether PyTorch would derive a wrong layout for cuDNN's output from the query's strides.

    With repeated heads or batch elements (stride 0) and another number of channels in V, the layout's last stride is
    not 1: cuDNN refuses the call or ends the process (PyTorch 2.11).
    """
    return query.shape[-1] != value.shape[-1] and 0 in query.stride()[:-1]


def _is_aligned(x: torch.Tensor) -> bool:
    """Return whether all rows of x are contiguous and begin at multiples of 16 bytes.

    The memory-efficient kernel reads 16 bytes at once and checks neither pointers nor the strides of dimensions of size
    1. A storage begins where its allocator aligned it; the pointer itself is not known while tracing.
    """
    *strides, last = x.stride()
    elements = LOAD_BYTES // x.element_size()
    if last != 1:
        return False
    for stride in strides:
        if stride % elements != 0:
            return False
    plain = type(x) is torch.Tensor or type(x) is torch.nn.Parameter
    if not plain or torch_private.transforms_are_active() or torch.compiler.is_compiling():
        return x.storage_offset() % elements == 0
    return x.data_ptr() % LOAD_BYTES == 0
