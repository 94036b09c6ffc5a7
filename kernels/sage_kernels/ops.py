"""The torch.library operators of attention without gradients; `training` holds the operators with gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from . import backends  # noqa: F401 - `backends` registers the kernels
from .dispatch import execution, replays
from .dispatch.decide import runs_one_by_one
from .exact import sdpa
from .replay import cache
from .spec import checks
from .spec.arguments import SCHEMA, OperatorArguments
from .spec.block_list import BlockList, check_blocks
from .spec.call import AttentionOutput, Call, Mask
from .spec.derivatives import refuse_tangents
from .spec.layout import Lengths, with_tokens_first
from .spec.masks import mask_in_dtype, without_causal_bias
from .spec.options import Fallback, Options

library = torch.library.Library("sage_kernels", "DEF")
for _schema in (
    f"attention(Tensor query, Tensor key, Tensor value, Tensor? mask, {SCHEMA}, bool return_lse) -> (Tensor, Tensor)",
    "log_sum_exp(Tensor query, Tensor key, Tensor? mask, bool is_causal, int causal_offset, float? scale) -> Tensor",
):
    library.define(_schema, tags=torch.Tag.pt2_compliant_tag)


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
    blocks: BlockList | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute low-bit attention, forward only, by the best kernel for the call.

    Args:
        query: (batch, q_heads, q_len, head_dim) float16, bfloat16, float32, or float64 (which runs exact attention);
            any strides.
        key, value: (batch, kv_heads, kv_len, head_dim), (batch, kv_heads, kv_len, v_head_dim), dtype and device of
            query; q_heads a multiple of kv_heads.
        mask: 4-D, bool (True: may attend) or additive, broadcastable to (batch, q_heads, q_len, kv_len).
        is_causal: row i attends to keys 0…i + causal_offset.
        causal_offset: 0 aligns causality upper left, as PyTorch's SDPA; kv_len - q_len lower right, as in decoding.
        scale: finite factor of the scores; default head_dim ** -0.5.
        recipe: a name in `recipe.RECIPES`.
        fallback: see `select.select`.
        return_lse: compute the log-sum-exp of each row's scores.
        blocks: the tiles of keys that each block of rows attends to; None: all tiles. With a list, the mask may only
            say which keys exist, and no key is heavy.

    Returns:
        (output, lse): output (batch, q_heads, q_len, v_head_dim) in query's dtype, laid out in memory as (batch, q_len,
        q_heads, v_head_dim); lse (batch, q_heads, q_len) float32, or (0,) without return_lse. A row that may attend to
        nothing has output 0 and lse -inf.

    Raises:
        TypeError: a tensor is not dense or has another dtype, or the scale is not a number.
        ValueError: shapes, dtypes or devices do not fit, or the scale is not finite; see also `select.select`.
        KernelUnavailableError: see `select.select`.
        NotImplementedError: on backward, or in forward-mode differentiation.
    """
    options = Options.of_operator(is_causal, causal_offset, scale, recipe, fallback, return_lse)
    return call_operator(query, key, value, mask, blocks, None, options)


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
    blocks: BlockList | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `attention` of sequences of any lengths that are packed one after another without padding; forward only.

    Args:
        query: (total queries, q_heads, head_dim).
        key, value: (total keys, kv_heads, head_dim), (total keys, kv_heads, v_head_dim).
        cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1,), from 0 to the total: sequence i consists of the tokens
            cu_seqlens[i] to cu_seqlens[i + 1] - 1.
        max_seqlen_q, max_seqlen_k: upper bound on the length of a sequence.
        seqused_k: int32 (sequences,), how many keys of each sequence take part. With equal steps in cu_seqlens_k, the
            call is an ordinary batch whose keys are padded to one length.
        is_causal, causal_offset, scale, recipe, fallback, return_lse: as in `attention`, for each sequence.
        blocks: as in `attention`, with sequences as its batch and blocks of rows for max_seqlen_q: blocks and tiles
            beyond a sequence's end are ignored. Blocks and tiles are counted from 0 in each sequence.

    Where no native kernel takes packed sequences but a sequence alone has one, each sequence is planned and run as a
    call of its own, and the host reads the lengths.

    Returns:
        (output, lse): output (total queries, q_heads, v_head_dim) in query's dtype; lse (q_heads, total queries)
        float32, or (0,) without return_lse.

    Raises:
        TypeError: see `attention`.
        ValueError: see `attention`; also if lengths do not fit. Values of lengths are checked on a CPU only.
        KernelUnavailableError: see `select.select`.
        NotImplementedError: on backward, or in forward-mode differentiation.
    """
    options = Options.of_operator(is_causal, causal_offset, scale, recipe, fallback, return_lse)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    checks.check_kinds(query, key, value, None, options)
    query, key, value = map(as_one_sequence, (query, key, value))
    output, lse = call_operator(query, key, value, None, blocks, lengths, options)
    return output.squeeze(0).transpose(0, 1), lse.squeeze(0) if return_lse else lse


def as_one_sequence(packed: torch.Tensor) -> torch.Tensor:
    """Return packed sequences, (total tokens, heads, channels), as one batch element: (1, heads, tokens, channels)."""
    return packed.transpose(0, 1).unsqueeze(0)


def call_operator(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    blocks: BlockList | None,
    lengths: Lengths | None,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run `attention` by the operator. With `lengths`, sequences are packed into one batch element."""
    checks.check_kinds(query, key, value, mask, options)
    mask, options = without_causal_bias(mask, options, query, key)
    refuse_tangents(query, key, value, mask)
    return torch.ops.sage_kernels.attention(query, key, value, mask, *OperatorArguments.of(blocks, lengths, options))


def run_call(
    call: Call, mask: torch.Tensor | None, fallback: Fallback, entry: cache.ReplayEntry | None
) -> AttentionOutput:
    """Plan, announce and run a call without gradients, outside of operators; return the result of `execution.compute`.

    Args:
        call: the call.
        mask: the caller's mask, 4-D.
        fallback: the caller's `fallback`.
        entry: the call's entry in the replay cache.
    """
    plan = execution.select_checked(execution.request_of(call), fallback)
    execution.announce(plan)
    result = execution.compute(call, plan)
    if entry is not None:
        entry.prepare_when_repeated(partial(replays.replay_of_call, call, plan, mask, result))
    return result


def new_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    blocks: BlockList | None,
    lengths: Lengths | None,
    options: Options,
) -> Call:
    """Make a `Call` of tensors that `checks.check_tensors` accepts.

    Raises:
        ValueError: a head_dim is 0, or the block list does not fit.
    """
    checks.check_head_dims(query, value)
    bias = mask
    if mask is not None and mask.dtype == torch.float64 and query.dtype != torch.float64:
        bias = mask_in_dtype(mask, torch.float32, sdpa.LARGEST_BIAS)  # kernels add masks in float32
    if blocks is None:
        call_mask = Mask.of(bias, key.shape[2])
    else:
        check_blocks(blocks, query, key, lengths)
        call_mask = Mask.of_blocks(blocks, bias, key.shape[2])
    return Call.of(query, key, value, call_mask, options, lengths)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *flat: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replay a call without gradients, or run it as an operator must: with outputs that share no memory."""
    arguments = OperatorArguments(*flat)
    blocks, lengths, options = arguments.blocks, arguments.lengths, arguments.options
    lists, sizes = ((), ()) if blocks is None else (blocks.tensors, blocks.sizes)
    entry = None
    if lengths is None:
        entry = cache.find("attention", (query, key, value, mask, *lists), (*options, *sizes))
    if entry is not None and entry.replay is not None:
        execution.announce(entry.replay.plan)
        output, lse = entry.replay(query, key, value, mask, *lists)
    else:
        checks.check_tensors(query, key, value, mask)
        checks.check_lengths(query, key, lengths)
        call = new_call(query, key, value, mask, blocks, lengths, options)
        if lengths is not None and runs_one_by_one(execution.request_of(call), options.fallback):
            output, lse = execution.attend_one_by_one(partial(_attend_to_one, options), call)
        else:
            output, lse = run_call(call, mask, options.fallback, entry)
    output = with_tokens_first(output)
    return output, lse if options.return_lse and lse is not None else output.new_empty(0, dtype=torch.float32)


def _attend_to_one(options: Options, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one of several packed sequences: planned, announced and replayed apart from the other sequences."""
    return _attention(call.query, call.key, call.value, None, *OperatorArguments.of(call.mask.blocks, None, options))


def _log_sum_exp(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, *causality_and_scale: Any
) -> torch.Tensor:
    names = "is_causal", "causal_offset", "scale"
    with torch.autocast(query.device.type, enabled=False):
        return sdpa.log_sum_exp(query, key, mask=mask, **dict(zip(names, causality_and_scale, strict=True)))


def _fake_log_sum_exp(query: torch.Tensor, *arguments: Any) -> torch.Tensor:
    return query.new_empty(query.shape[:3], dtype=torch.float32)


def _fake_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *flat: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    (batch, q_heads, q_len, _), return_lse = query.shape, flat[-1]
    output = query.new_empty(batch, q_len, q_heads, value.shape[-1]).transpose(1, 2)
    return output, query.new_empty((batch, q_heads, q_len) if return_lse else 0, dtype=torch.float32)


def _no_backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> None:
    raise NotImplementedError(
        "this operator of sage_kernels is forward only: call sage_hf.sage_attention, which honours gradients for every "
        "recipe, or sage_kernels.training, or run under torch.no_grad()"
    )


for _name, _implementation, _fake in (
    ("attention", _attention, _fake_attention),
    ("log_sum_exp", _log_sum_exp, _fake_log_sum_exp),
):
    library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sage_kernels::{_name}", _fake, lib=library)
    torch.library.register_autograd(f"sage_kernels::{_name}", _no_backward, lib=library)
