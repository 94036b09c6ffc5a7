"""Entry point of packed sequences: any recipe and head_dim, with gradients. `attend` is the entry point of batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import ops, training
from .attend import attend
from .dispatch.decide import decide
from .runtime import dynamo
from .spec import checks
from .spec.autocast import in_autocast_dtype
from .spec.call import NO_MASK, AttentionOutput
from .spec.derivatives import has_tangent, wants_gradient
from .spec.layout import Lengths, sequence_slices
from .spec.options import Options

READS_LENGTHS = "the host reads the lengths of packed sequences, and runs each as a call of its own"
"""Reason for which a compiled graph ends before the sequences: in a graph, so many calls would compile for minutes."""


def attend_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Lengths, options: Options
) -> AttentionOutput:
    """Compute attention within each of several sequences that are packed one after another; differentiable.

    A native kernel that takes packed sequences runs all of them, short ones too. Where there is none, but a sequence
    alone has another plan (`dispatch.decide.runs_one_by_one`), and where exact attention computes gradients or dropout,
    each sequence becomes a separate call: it runs as `attend` decides, and the host reads the lengths.

    Args:
        query: (total queries, q_heads, head_dim).
        key, value: (total keys, kv_heads, head_dim), (total keys, kv_heads, v_head_dim).
        lengths: the sequences; int32 or int64.
        options: the options of each sequence's call; `tokens_first` is ignored.

    Returns:
        (output, lse): output (total queries, q_heads, v_head_dim) in query's dtype, or under autocast in autocast's;
        lse (q_heads, total queries) float32, valid with `return_lse` only.

    Raises:
        ValueError, TypeError, KernelUnavailableError: see `sage_hf.sage_attention`; also if lengths do not fit.
    """
    query, key, value, lengths = checked_call(query, key, value, lengths, options)
    q, k, v = map(ops.as_one_sequence, (query, key, value))
    if not _is_served(q, k, v, lengths, options):
        return _attend_one_by_one(q, k, v, lengths, options)
    keywords: dict[str, Any] = dict(zip(Lengths._fields, lengths, strict=True))
    for name in ("is_causal", "causal_offset", "scale", "recipe", "fallback"):
        keywords[name] = getattr(options, name)
    if wants_gradient(query, key, value):
        return training.packed_attention(query, key, value, **keywords), None
    return ops.packed_attention(query, key, value, **keywords, return_lse=options.return_lse)


def checked_call(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Lengths, options: Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Lengths]:
    """Return the tensors in autocast's dtype, if it is on, and the lengths in int32.

    Raises:
        ValueError, TypeError: `attend_packed` refuses such a call.
    """
    checks.check_kinds(query, key, value, None, options)
    query, key, value = in_autocast_dtype(query, key, value)
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k = lengths
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k), ("seqused_k", seqused_k)):
        if x is not None and x.is_floating_point():
            raise ValueError(f"{name} must hold integers; got {x.dtype}")
    lengths = Lengths(cu_seqlens_q.int(), cu_seqlens_k.int(), int(max_seqlen_q), int(max_seqlen_k), seqused_k)
    q, k, v = map(ops.as_one_sequence, (query, key, value))
    checks.check_tensors(q, k, v, None, options.enable_gqa)
    checks.check_lengths(q, k, lengths)
    return query, key, value, lengths


def attend_to_each(
    attend_to_one: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], AttentionOutput],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Lengths,
) -> AttentionOutput:
    """Attend within each packed sequence by a call of its own; differentiable. The host reads and checks the lengths.

    Args:
        attend_to_one: (query, key, value) of a sequence, each (1, heads, tokens, channels), -> (output, lse).
        query, key, value: (1, heads, total tokens, channels).

    Returns:
        (output, lse): (total queries, q_heads, v_head_dim), 0 for tokens of no sequence; (q_heads, total queries), -inf
        for such tokens, or None if sequences have none.

    Raises:
        ValueError: lengths do not fit.
    """
    checks.check_values_of_lengths(query, key, lengths)
    _, q_heads, total, _ = query.shape
    outputs, lses, end = [], [], 0
    # Without sequences, the call of an empty one gives the output its gradients.
    for queries, keys in list(sequence_slices(lengths)) or [(slice(0, 0), slice(0, 0))]:
        output, lse = attend_to_one(query[:, :, queries], key[:, :, keys], value[:, :, keys])
        outputs.append(output[0].transpose(0, 1))
        lses.append(lse)
        end = queries.stop
    output = torch.cat([*outputs, query.new_zeros(total - end, q_heads, value.shape[3])])
    wanted = [lse for lse in lses if lse is not None]
    if not wanted:
        return output, None
    hidden = query.new_full((1, q_heads, total - end), -torch.inf, dtype=torch.float32)
    return output, torch.cat([*wanted, hidden], 2)[0]


def _is_served(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Lengths, options: Options) -> bool:
    """Return whether the operators for packed sequences take a call with tensors (1, heads, tokens, channels)."""
    derivative = wants_gradient(query, key, value) or has_tangent(query, key, value)
    if not derivative:
        return not options.dropout_p
    if options.return_lse:
        return False
    return not decide(query, key, value, NO_MASK, options, wants_gradient=True, lengths=lengths).bypasses_kernels


@dynamo.run_uncompiled(READS_LENGTHS)
def _attend_one_by_one(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Lengths, options: Options
) -> AttentionOutput:
    """Attend within each sequence of (1, heads, tokens, channels) as `attend` decides."""
    options = options.replace(tokens_first=False)

    def attend_to_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> AttentionOutput:
        output, lse = attend(q, k, v, None, None, options)
        return output, lse if options.return_lse else None

    return attend_to_each(attend_to_one, query, key, value, lengths)
