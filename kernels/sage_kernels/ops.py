"""The torch.library operators without gradients. Kernels are called only through these and those of `training`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from . import backends  # noqa: F401 - `backends` registers the kernels
from .dispatch import replays, run
from .exact import sdpa
from .replay import cache
from .spec import checks
from .spec.block_list import BlockList, check_blocks
from .spec.call import NO_MASK, Call, Mask, softmax_scale
from .spec.derivatives import refuse_tangents
from .spec.layout import Lengths
from .spec.masks import mask_in_dtype
from .spec.options import Fallback, Options
from .spec.recipe import get_recipe

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
    "block_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor counts, Tensor tiles, int block_m, "
    "int block_n, bool is_causal, int causal_offset, float? scale, str recipe, str fallback, bool return_lse) -> "
    "(Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "packed_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "int max_seqlen_q, int max_seqlen_k, Tensor? seqused_k, bool is_causal, int causal_offset, float? scale, "
    "str recipe, str fallback, bool return_lse) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "packed_block_attention(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
    "int max_seqlen_q, int max_seqlen_k, Tensor? seqused_k, Tensor counts, Tensor tiles, int block_m, int block_n, "
    "bool is_causal, int causal_offset, float? scale, str recipe, str fallback, bool return_lse) -> (Tensor, Tensor)",
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
        blocks: the tiles of keys that each block of rows attends to; None: all. Beside a list the mask may only say
            which keys exist, and no key is heavy.

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
    checks.check_causal(is_causal)
    checks.check_kinds(query, key, value, mask, scale)
    refuse_tangents(query, key, value, mask)
    if blocks is not None:
        return torch.ops.sage_kernels.block_attention(
            query, key, value, mask, *blocks, is_causal, causal_offset, scale, recipe, fallback, return_lse
        )
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
    blocks: BlockList | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `attention` of sequences of any lengths that are packed one after another without padding; forward only.

    Args:
        query: (total queries, q_heads, head_dim).
        key, value: (total keys, kv_heads, head_dim), (total keys, kv_heads, v_head_dim).
        cu_seqlens_q, cu_seqlens_k: int32 (sequences + 1,), from 0 to the total: sequence i consists of the tokens
            cu_seqlens[i] to cu_seqlens[i + 1] - 1.
        max_seqlen_q, max_seqlen_k: upper bound on the length of a sequence.
        seqused_k: int32 (sequences,), number of keys of each sequence that take part. With equal steps in cu_seqlens_k
            this is an ordinary batch whose keys are padded to one length.
        is_causal, causal_offset, scale, recipe, fallback, return_lse: as in `attention`, for each sequence.
        blocks: as in `attention`, with sequences as its batch and blocks of rows for max_seqlen_q: blocks and tiles
            that a sequence does not have do not count. It has its own rows' first one at 0, and so its keys.

    Returns:
        (output, lse): output (total queries, q_heads, v_head_dim) in query's dtype; lse (q_heads, total queries)
        float32, or (0,) without return_lse.

    Raises:
        TypeError: see `attention`.
        ValueError: see `attention`; also if lengths do not fit, whose values are checked on a CPU only.
        KernelUnavailableError: see `select.select`.
        NotImplementedError: on backward, or in forward-mode differentiation.
    """
    checks.check_causal(is_causal)
    checks.check_kinds(query, key, value, None, scale)
    refuse_tangents(query, key, value)
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k
    if blocks is not None:
        return torch.ops.sage_kernels.packed_block_attention(
            query, key, value, *lengths, *blocks, is_causal, causal_offset, scale, recipe, fallback, return_lse
        )
    return torch.ops.sage_kernels.packed_attention(
        query, key, value, *lengths, is_causal, causal_offset, scale, recipe, fallback, return_lse
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
    """Return the exact log-sum-exp of each row's scores, (batch, q_heads, q_len) float32; see `attention`."""
    return torch.ops.sage_kernels.log_sum_exp(query, key, mask, is_causal, causal_offset, scale)


def find(
    kind: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    blocks: BlockList | None,
    options: Options,
    grad: bool = False,
) -> cache.Entry | None:
    """Return the cache's entry for a call (`cache.find`)."""
    lists, sizes = ((), ()) if blocks is None else (blocks[:2], blocks[2:])
    return cache.find(kind, (query, key, value, mask, *lists), (*options, *sizes), grad)


def replay(
    prepared: cache.Replay,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    blocks: BlockList | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Announce and replay a call that `find` found."""
    run.announce(prepared.plan)
    result: tuple[torch.Tensor, torch.Tensor | None] = prepared(query, key, value, mask, *(blocks or ())[:2])
    return result


def forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    blocks: BlockList | None,
    options: Options,
    entry: cache.Entry | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Check, plan, announce and run a call without gradients, outside of operators.

    Args:
        query, key, value, mask, blocks: as in `attention`.
        options: the call's.
        entry: what `find` knows of it.

    Returns:
        (output, lse): see `run.run`.
    """
    checks.check_tensors(query, key, value, mask)
    checks.check_head_dims(query, value)
    bias = mask
    if mask is not None and mask.dtype == torch.float64 and query.dtype != torch.float64:
        bias = mask_in_dtype(mask, torch.float32, sdpa.LARGEST_BIAS)  # kernels add masks in float32
    if blocks is None:
        keys = Mask.of(bias, key.shape[2])
    else:
        checks.check_memory(blocks.counts, blocks.tiles)
        check_blocks(blocks, query, key)
        keys = Mask.of_blocks(blocks, bias, key.shape[2])
    recipe, scale = get_recipe(options.recipe), softmax_scale(options.scale, query.shape[3])
    is_causal, offset = bool(options.is_causal), options.causal_offset
    call = Call(query, key, value, recipe, keys, is_causal, offset, scale, return_lse=options.return_lse)
    plan = run.plan_of(call, options.fallback)
    result = run.run(call, plan)
    if entry is not None:
        entry.consider(partial(replays.of_call, call, plan, mask, result))
    return result


def _run(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    blocks: BlockList | None,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replay a call without gradients, or run it as an operator does: with outputs that have memory of their own."""
    entry = find("attention", query, key, value, mask, blocks, options)
    if entry is not None and entry.replay is not None:
        output, lse = replay(entry.replay, query, key, value, mask, blocks)
    else:
        output, lse = forward(query, key, value, mask, blocks, options, entry)
    output = output.transpose(1, 2).contiguous().transpose(1, 2)
    return output, lse if options.return_lse and lse is not None else output.new_empty(0, dtype=torch.float32)


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _run(query, key, value, mask, None, _options(*options))


def _block_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _run(query, key, value, mask, BlockList(*arguments[:4]), _options(*arguments[4:]))


def _options(
    is_causal: bool, causal_offset: int, scale: float | None, recipe: str, fallback: Fallback, return_lse: bool
) -> Options:
    """Return the options that the schema of each operator ends with."""
    return Options(is_causal, causal_offset, scale, recipe=recipe, fallback=fallback, return_lse=return_lse)


def _packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _attend_packed(query, key, value, Lengths(*arguments[:5]), None, _options(*arguments[5:]))


def _packed_block_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return _attend_packed(
        query, key, value, Lengths(*arguments[:5]), BlockList(*arguments[5:9]), _options(*arguments[9:])
    )


def _attend_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Lengths,
    blocks: BlockList | None,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    # As one batch element that holds all sequences: (1, heads, total tokens, channels).
    query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    checks.check_tensors(query, key, value, None)
    checks.check_head_dims(query, value)
    lists = (None, None) if blocks is None else (blocks.counts, blocks.tiles)
    checks.check_memory(lengths.cu_seqlens_q, lengths.cu_seqlens_k, lengths.seqused_k, *lists)
    checks.check_lengths(query, key, *lengths)
    if blocks is not None:
        check_blocks(blocks, query, key, lengths)
    call = Call(
        query,
        key,
        value,
        get_recipe(options.recipe),
        NO_MASK if blocks is None else Mask.of_blocks(blocks, None, lengths.max_seqlen_k),
        options.is_causal,
        options.causal_offset,
        softmax_scale(options.scale, query.shape[3]),
        lengths,
        options.return_lse,
    )
    output, lse = run.attend(call, options.fallback)
    output = output[0].transpose(0, 1).contiguous()
    return output, lse[0] if options.return_lse and lse is not None else query.new_empty(0, dtype=torch.float32)


def _log_sum_exp(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    causal_offset: int,
    scale: float | None,
) -> torch.Tensor:
    with torch.autocast(query.device.type, enabled=False):
        return sdpa.log_sum_exp(query, key, mask=mask, is_causal=is_causal, causal_offset=causal_offset, scale=scale)


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
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    (batch, q_heads, q_len, _), return_lse = query.shape, arguments[-1]
    output = query.new_empty(batch, q_len, q_heads, value.shape[-1]).transpose(1, 2)
    return output, query.new_empty((batch, q_heads, q_len) if return_lse else 0, dtype=torch.float32)


def _fake_packed_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    (tokens, q_heads, _), return_lse = query.shape, arguments[-1]
    output = query.new_empty(tokens, q_heads, value.shape[-1])
    return output, query.new_empty((q_heads, tokens) if return_lse else 0, dtype=torch.float32)


def _no_backward(ctx: torch.autograd.function.FunctionCtx, *gradients: torch.Tensor) -> None:
    raise NotImplementedError(
        "this operator of sage_kernels is forward only: call sage_hf.sage_attention, which honours gradients for every "
        "recipe, or sage_kernels.training, or run under torch.no_grad()"
    )


for _name, _implementation, _fake in (
    ("attention", _attention, _fake_attention),
    ("block_attention", _block_attention, _fake_attention),
    ("packed_attention", _packed_attention, _fake_packed_attention),
    ("packed_block_attention", _packed_block_attention, _fake_packed_attention),
    ("log_sum_exp", _log_sum_exp, _fake_log_sum_exp),
):
    _library.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sage_kernels::{_name}", _fake, lib=_library)
    torch.library.register_autograd(f"sage_kernels::{_name}", _no_backward, lib=_library)
