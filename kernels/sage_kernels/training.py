"""The torch.library operators with gradients: attention with low-bit forward and backward passes (SageBwd)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .dispatch import run
from .spec import checks, transforms
from .spec.block_list import BlockList, check_blocks
from .spec.call import BackwardCall, Call, Mask, softmax_scale
from .spec.derivatives import refuse_tangents
from .spec.layout import KEY_BLOCK, Lengths, padded_channels, padded_rows
from .spec.operands import Saved
from .spec.options import Fallback
from .spec.recipe import get_recipe

# The fields of `Lengths`; for sequences that are not packed, its tensors are None and its numbers 0.
_LENGTHS = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, int max_seqlen_q, int max_seqlen_k, Tensor? seqused_k"
# The fields of `BlockList`; without a list, its tensors are None and its numbers 0.
_BLOCKS = "Tensor? counts, Tensor? tiles, int block_m, int block_n"
_OPTIONS = "bool is_causal, int causal_offset, float? scale, str recipe, str fallback"
_SAVED = "Tensor saved_query, Tensor query_scale, Tensor saved_key, Tensor key_scale, Tensor equalizer, Tensor lse"

_library = torch.library.Library("sage_kernels", "FRAGMENT")
for _schema in (
    f"training_attention(Tensor query, Tensor key, Tensor value, Tensor? valid, {_BLOCKS}, {_LENGTHS}, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    f"training_attention_backward(Tensor output_gradient, Tensor value, Tensor output, {_SAVED}, Tensor? valid, "
    f"{_BLOCKS}, {_LENGTHS}, int head_dim, str kernel, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    "training_lse(Tensor query, Tensor key, Tensor lse, Tensor? valid, float? scale, str recipe) -> Tensor",
):
    _library.define(_schema, tags=torch.Tag.pt2_compliant_tag)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    valid: torch.Tensor | None = None,
    blocks: BlockList | None = None,
    is_causal: bool = False,
    causal_offset: int = 0,
    scale: float | None = None,
    recipe: str = "sage_bwd",
    fallback: Fallback = "native",
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute low-bit attention with low-bit gradients (arXiv 2505.11594, section 4), by the best kernel for the call.

    The kernels of both passes are chosen by one plan. Exact attention, whose gradients PyTorch computes, is not run
    here: ask `exact_choice.why_exact_gradients` first.

    Args:
        query: (batch, q_heads, q_len, head_dim) float16, bfloat16 or float32, any strides.
        key, value: (batch, kv_heads, kv_len, head_dim), (batch, kv_heads, kv_len, v_head_dim), dtype and device of
            query; q_heads a multiple of kv_heads.
        valid: bool (batch or 1, kv_len), False where a key does not exist; None: all do.
        blocks: the tiles of keys that each block of rows attends to; None: all. Gradients skip what it does not list.
        is_causal: row i attends to those of the keys 0…i + causal_offset that exist and are listed.
        causal_offset: see `ops.attention`.
        scale: finite factor of the scores; default head_dim ** -0.5.
        recipe: name of a recipe with gradients.
        fallback: see `select.select`.
        return_lse: compute the log-sum-exp of each row's scores.

    Returns:
        (output, lse): output (batch, q_heads, q_len, v_head_dim) in query's dtype, laid out in memory as (batch, q_len,
        q_heads, v_head_dim); lse (batch, q_heads, q_len) float32 without a gradient, or (0,) without return_lse. A row
        that may attend to nothing has output 0 and lse -inf, and contributes no gradient. Gradients have query's dtype
        and the layout of the output.

    Raises:
        TypeError: see `ops.attention`.
        ValueError: shapes, dtypes or devices do not fit, or the scale is not finite; see also `select.select` and
            `blocks.check_blocks`.
        KernelUnavailableError: no kernel with gradients serves the call.
        NotImplementedError: on a second derivative, or in forward-mode differentiation.
    """
    checks.check_causal(is_causal)
    checks.check_kinds(query, key, value, None, scale)
    refuse_tangents(query, key, value)
    output, *saved = torch.ops.sage_kernels.training_attention(
        *(query, key, value, valid, *_fields(blocks), None, None, 0, 0, None),
        *(is_causal, causal_offset, scale, recipe, fallback),
    )
    if not return_lse:
        return output, query.new_empty(0, dtype=torch.float32)
    with torch.no_grad():
        return output, torch.ops.sage_kernels.training_lse(query, key, saved[-1], valid, scale, recipe)


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
    recipe: str = "sage_bwd",
    fallback: Fallback = "native",
    blocks: BlockList | None = None,
) -> torch.Tensor:
    """Compute `attention` of sequences of any lengths that are packed one after another without padding.

    Args:
        query: (total queries, q_heads, head_dim).
        key, value: (total keys, kv_heads, head_dim), (total keys, kv_heads, v_head_dim).
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k: as in `ops.packed_attention`. Keys beyond
            seqused_k have gradient 0.
        is_causal, causal_offset, scale, recipe, fallback: as in `attention`, for each sequence.
        blocks: as in `ops.packed_attention`, with sequences as its batch.

    Returns:
        (total queries, q_heads, v_head_dim) in query's dtype.

    Raises:
        TypeError, KernelUnavailableError, NotImplementedError: see `attention`.
        ValueError: see `attention` and `ops.packed_attention`.
    """
    checks.check_causal(is_causal)
    checks.check_kinds(query, key, value, None, scale)
    refuse_tangents(query, key, value)
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    output, *_ = torch.ops.sage_kernels.training_attention(
        query, key, value, None, *_fields(blocks), *lengths, is_causal, causal_offset, scale, recipe, fallback
    )
    return output.squeeze(0).transpose(0, 1)


def _mask(valid: torch.Tensor | None, blocks: BlockList | None) -> Mask:
    """Return the mask of existing keys and of a block list, each None where there is none."""
    keys = Mask.of_keys(valid)
    return keys if blocks is None else replace(keys, kind="blocks" if valid is None else "block_keys", blocks=blocks)


def _blocks(counts: torch.Tensor | None, tiles: torch.Tensor | None, block_m: int, block_n: int) -> BlockList | None:
    return None if counts is None or tiles is None else BlockList(counts, tiles, block_m, block_n)


def _fields(blocks: BlockList | None) -> tuple[torch.Tensor | None, torch.Tensor | None, int, int]:
    """Return a list as the operators take it."""
    return (None, None, 0, 0) if blocks is None else (blocks.counts, blocks.tiles, blocks.block_m, blocks.block_n)


def _lengths(
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: torch.Tensor | None,
) -> Lengths | None:
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return None
    return Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)


def _with_tokens_first(x: torch.Tensor) -> torch.Tensor:
    """Return (batch, heads, tokens, channels) laid out in memory as (batch, tokens, heads, channels).

    Merging heads and channels then needs no copy.
    """
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _training_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor | None,
    counts: torch.Tensor | None,
    tiles: torch.Tensor | None,
    block_m: int,
    block_n: int,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: torch.Tensor | None,
    is_causal: bool,
    causal_offset: int,
    scale: float | None,
    recipe: str,
    fallback: Fallback,
) -> tuple[torch.Tensor, ...]:
    checks.check_tensors(query, key, value, None)
    checks.check_head_dims(query, value)
    checks.check_memory(valid, counts, tiles, cu_seqlens_q, cu_seqlens_k, seqused_k)
    checks.check_lengths(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    checks.check_valid(valid, key)
    lengths = _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    if lengths is not None and query.shape[0] != 1:
        raise ValueError(f"packed sequences lie in one batch element; got {query.shape[0]}")
    blocks = _blocks(counts, tiles, block_m, block_n)
    if blocks is not None:
        check_blocks(blocks, query, key, lengths)
    call = Call(
        query,
        key,
        value,
        get_recipe(recipe),
        _mask(valid, blocks),
        is_causal,
        causal_offset,
        softmax_scale(scale, query.shape[3]),
        lengths,
    )
    output, saved = run.attend_and_save(call, fallback)
    return _with_tokens_first(output), *(part.contiguous() for part in saved)


def _fake_training_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    valid: torch.Tensor | None,
    counts: torch.Tensor | None,
    tiles: torch.Tensor | None,
    block_m: int,
    block_n: int,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: torch.Tensor | None,
    is_causal: bool,
    causal_offset: int,
    scale: float | None,
    recipe: str,
    fallback: Fallback,
) -> tuple[torch.Tensor, ...]:
    batch, q_heads, q_len, head_dim = query.shape
    channels = padded_channels(int(head_dim))
    sequences = None if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    q_rows, kv_rows = padded_rows(q_len, sequences), padded_rows(key.shape[2], sequences)
    equalizer = (
        (batch if sequences is None else sequences, key.shape[1], channels) if get_recipe(recipe).equalize else (0,)
    )
    return (
        query.new_empty(batch, q_len, q_heads, value.shape[3]).transpose(1, 2),
        *Saved(
            query.new_empty(batch, q_heads, q_rows, channels, dtype=torch.int8),
            query.new_empty(batch, q_heads, q_rows, dtype=torch.float32),
            query.new_empty(batch, key.shape[1], kv_rows, channels, dtype=torch.int8),
            query.new_empty(batch, key.shape[1], kv_rows // KEY_BLOCK, 4, dtype=torch.bfloat16),
            query.new_empty(equalizer, dtype=torch.float32),
            query.new_empty(batch, q_heads, q_len, dtype=torch.float32),
        ),
    )


def _training_attention_backward(
    output_gradient: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    saved_query: torch.Tensor,
    query_scale: torch.Tensor,
    saved_key: torch.Tensor,
    key_scale: torch.Tensor,
    equalizer: torch.Tensor,
    lse: torch.Tensor,
    valid: torch.Tensor | None,
    counts: torch.Tensor | None,
    tiles: torch.Tensor | None,
    block_m: int,
    block_n: int,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: torch.Tensor | None,
    head_dim: int,
    kernel: str,
    is_causal: bool,
    causal_offset: int,
    scale: float | None,
    recipe: str,
    fallback: Fallback,
) -> tuple[torch.Tensor, ...]:
    lengths = _lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    call = BackwardCall(
        output_gradient,
        value,
        output,
        Saved(saved_query, query_scale, saved_key, key_scale, equalizer, lse),
        head_dim,
        get_recipe(recipe),
        _mask(valid, _blocks(counts, tiles, block_m, block_n)),
        is_causal,
        causal_offset,
        softmax_scale(scale, head_dim),
        lengths,
    )
    if not kernel:  # a traced graph, whose sizes are known only now; output and V have the sizes of Q and K
        forward = Call(output, value, value, call.recipe, call.mask, is_causal, lengths=lengths)
        request = replace(run.request_of(forward, grad=True), head_dim=head_dim)
        kernel = run.plan_training(request, fallback).backward
    gradients = run.backward(call, kernel)
    return tuple(_with_tokens_first(gradient) for gradient in gradients)


def _fake_training_attention_backward(
    output_gradient: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    saved_query: torch.Tensor,
    query_scale: torch.Tensor,
    saved_key: torch.Tensor,
    key_scale: torch.Tensor,
    equalizer: torch.Tensor,
    lse: torch.Tensor,
    valid: torch.Tensor | None,
    counts: torch.Tensor | None,
    tiles: torch.Tensor | None,
    block_m: int,
    block_n: int,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: torch.Tensor | None,
    head_dim: int,
    *options: object,
) -> tuple[torch.Tensor, ...]:
    batch, q_heads, q_len, _ = output.shape
    kv_heads, kv_len, v_head_dim = value.shape[1:]
    sizes = ((q_len, q_heads, head_dim), (kv_len, kv_heads, head_dim), (kv_len, kv_heads, v_head_dim))
    return tuple(value.new_empty(batch, *size).transpose(1, 2) for size in sizes)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, valid, counts, tiles, *sizes = inputs[:8]
    *packing, is_causal, causal_offset, scale, recipe, fallback = inputs[8:]
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k = packing
    ctx.save_for_backward(value, *output, valid, counts, tiles, cu_seqlens_q, cu_seqlens_k, seqused_k)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    kernel = ""
    if type(query) in (torch.Tensor, torch.nn.Parameter):  # not a tracer's tensor, whose sizes may change
        mask = _mask(valid, _blocks(counts, tiles, *sizes))
        call = Call(query, key, value, get_recipe(recipe), mask, is_causal, lengths=_lengths(*packing))
        kernel = run.plan_training(run.request_of(call, grad=True), fallback).backward
    ctx.sizes, ctx.longest = sizes, (max_seqlen_q, max_seqlen_k)
    ctx.options = (query.shape[3], kernel, is_causal, causal_offset, scale, recipe, fallback)


def _backward(ctx: Any, output_gradient: torch.Tensor | None, *others: None) -> tuple[torch.Tensor | None, ...]:
    rest = (None,) * (len(ctx.needs_input_grad) - 3)
    if output_gradient is None:
        return None, None, None, *rest
    value, output, *saved, valid, counts, tiles, cu_seqlens_q, cu_seqlens_k, seqused_k = ctx.saved_tensors
    blocks, lengths = (counts, tiles, *ctx.sizes), (cu_seqlens_q, cu_seqlens_k, *ctx.longest, seqused_k)
    gradients = torch.ops.sage_kernels.training_attention_backward(
        output_gradient, value, output, *saved, valid, *blocks, *lengths, *ctx.options
    )
    wanted = zip(gradients, ctx.needs_input_grad, strict=False)
    return *(gradient if needed else None for gradient, needed in wanted), *rest


def _no_second_derivative(ctx: Any, *gradients: torch.Tensor) -> None:
    raise NotImplementedError(
        "low-bit attention has no second derivative: use exact attention where a gradient is differentiated again "
        '(recipe="exact", attn_implementation="sage_exact" or "sdpa")'
    )


def _training_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    lse: torch.Tensor,
    valid: torch.Tensor | None,
    scale: float | None,
    recipe: str,
) -> torch.Tensor:
    """Return `Saved.lse` plus what K's mean, subtracted before quantising, contributes to each row's scores."""
    if 0 in (*query.shape, key.shape[2]) or not get_recipe(recipe).smooth_k:
        return lse.clone()
    scale = query.shape[3] ** -0.5 if scale is None else scale
    with torch.autocast(query.device.type, enabled=False):
        key, counted = key.float(), None if valid is None else valid[:, None, :, None]
        if get_recipe(recipe).equalize:
            counted = transforms.quiet_keys(key, counted)
        mean = transforms.mean_of_tokens(key, counted)
        grouped = query.float().unflatten(1, (key.shape[1], -1))
        return lse + scale * grouped.matmul(mean.unsqueeze(2).mT).flatten(1, 2).squeeze(-1)


def _fake_training_lse(query: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, *options: object) -> torch.Tensor:
    return torch.empty_like(lse)


for _name, _run, _fake in (
    ("training_attention", _training_attention, _fake_training_attention),
    ("training_attention_backward", _training_attention_backward, _fake_training_attention_backward),
    ("training_lse", _training_lse, _fake_training_lse),
):
    _library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sage_kernels::{_name}", _fake, lib=_library)
torch.library.register_autograd(
    "sage_kernels::training_attention", _backward, setup_context=_save_for_backward, lib=_library
)
torch.library.register_autograd("sage_kernels::training_attention_backward", _no_second_derivative, lib=_library)
