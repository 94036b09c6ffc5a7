"""Entry points of a Hub kernel: FlashAttention's functions and transformers' attention function, in low bits.

transformers loads a Hub kernel by these names. It calls `flash_attn_func` and `flash_attn_varlen_func` from its own
FlashAttention wrapper, or `flash_attn_forward` with the masks of `sdpa`. FlashAttention parameters that are missing
here (softcap) are not supported: transformers reads the signatures and refuses such calls itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .attend import attend
from .ops import as_one_sequence
from .packed import READS_LENGTHS, attend_packed, attend_to_each, checked_call
from .runtime import dynamo
from .spec.derivatives import wants_gradient
from .spec.layout import Lengths
from .spec.options import Options

RECIPE = "sage2"
TRAINING_RECIPE = "sage_bwd"
EVERYWHERE = (-1, -1)

supports_flash_attn = True

HARMLESS = frozenset(
    {
        "sliding_window",  # contained in the mask
        "position_ids",  # packing is in the mask, and the rotary embedding has been applied
        "seq_idx",
        "cu_seq_lens_q",  # FlashAttention's form of facts that the mask or the batch already holds
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "deterministic",
        "cache_position",
        "use_cache",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "logits_to_keep",
    }
)
"""Keywords of models that do not change what `sdpa` and `eager` compute."""


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = EVERYWHERE,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention with the arguments of FlashAttention's function of this name.

    Args:
        q: (batch, q_len, q_heads, head_dim).
        k, v: (batch, kv_len, kv_heads, head_dim), (batch, kv_len, kv_heads, v_head_dim); q_heads is a multiple of
            kv_heads.
        dropout_p: probability of dropping a weight; exact attention runs unless it is 0.
        softmax_scale: factor of the scores; None: head_dim ** -0.5.
        causal: query i attends to keys 0…i + kv_len - q_len (lower right).
        window_size: how many keys query i attends to, left and right of key i + kv_len - q_len; -1: all.
        s_aux: (q_heads,) logits of attention sinks, without a gradient.

    Returns:
        (batch, q_len, q_heads, v_head_dim) in q's dtype, or under autocast in autocast's; 0 for a query that attends to
        no key.

    Raises:
        NotImplementedError: there are sinks and gradients are wanted.
        ValueError, TypeError: see `sage_hf.sage_attention`.
    """
    options = _options((q, k, v), dropout_p, softmax_scale, causal, s_aux)
    offset = k.shape[1] - q.shape[1]
    mask = _window(q, k.shape[1], offset, window_size)
    options = options.replace(tokens_first=True, causal_offset=offset if causal else 0)
    output, lse = attend(q, k, v, mask, None, options)
    return output if s_aux is None or lse is None else _with_sinks(output, lse.transpose(1, 2), s_aux)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = EVERYWHERE,
    s_aux: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `flash_attn_func` within each of several sequences that are packed one after another.

    With windows, or if causal offsets differ, each sequence is a separate call; the host reads the lengths. The host
    also reads and compares them in causal calls whose cu_seqlens_q and cu_seqlens_k are two tensors.

    Args:
        q: (total queries, q_heads, head_dim).
        k, v: (total keys, kv_heads, head_dim), (total keys, kv_heads, v_head_dim).
        cu_seqlens_q, cu_seqlens_k: integers (sequences + 1,), from 0 to the total.
        max_seqlen_q, max_seqlen_k: upper bound on the length of a sequence.
        dropout_p, softmax_scale, causal, window_size, s_aux: as in `flash_attn_func`.

    Returns:
        (total queries, q_heads, v_head_dim) in q's dtype, or under autocast in autocast's.

    Raises:
        NotImplementedError, ValueError, TypeError: see `flash_attn_func`; also if lengths do not fit.
    """
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    aligned = not causal or cu_seqlens_q is cu_seqlens_k or torch.equal(cu_seqlens_q, cu_seqlens_k)
    options = _options((q, k, v), dropout_p, softmax_scale, causal, s_aux)
    if tuple(window_size) == EVERYWHERE and aligned:
        output, lse = attend_packed(q, k, v, lengths, options)
        return output if s_aux is None or lse is None else _with_sinks(output, lse.transpose(0, 1), s_aux)
    arguments = (dropout_p, softmax_scale, causal, window_size, s_aux)
    return _attend_one_by_one(*checked_call(q, k, v, lengths, options), arguments)


@dynamo.run_uncompiled(READS_LENGTHS)
def _attend_one_by_one(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: Lengths, arguments: tuple[Any, ...]
) -> torch.Tensor:
    """Attend within each sequence; `arguments` are the arguments of `flash_attn_func` after the tensors."""

    def attend_to_one(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, None]:
        output = flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), *arguments)
        return output.transpose(1, 2), None

    q, k, v = map(as_one_sequence, (q, k, v))
    return attend_to_each(attend_to_one, q, k, v, lengths)[0]


def flash_attn_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers' attention interface asks for it, with the masks of `sdpa`.

    Args:
        module: the calling layer, whose `is_causal` is the default of the argument.
        query: (batch, q_heads, q_len, head_dim).
        key, value: (batch, kv_heads, kv_len, head_dim), not repeated.
        attention_mask: None, bool (True: may attend) or additive, broadcastable to (batch, q_heads, q_len, kv_len); a
            mask overrides causality.
        dropout: probability of dropping a weight.
        scaling: factor of the scores; None: head_dim ** -0.5.
        is_causal: query i attends to keys 0…i (upper left), if there are several queries and no mask.
        kwargs: `s_aux`, as in `flash_attn_func`, and keywords that change nothing (`HARMLESS`, or empty).

    Returns:
        The output (batch, q_len, q_heads, v_head_dim), contiguous; and None for the weights.

    Raises:
        TypeError: a keyword may change the result, such as softcap.
        NotImplementedError, ValueError: see `flash_attn_func`.
    """
    sinks = kwargs.pop("s_aux", None)
    for name, argument in kwargs.items():
        if name not in HARMLESS and argument is not None and argument is not False:
            raise TypeError(
                f"{type(module).__name__} hands {name}= to its attention, which this kernel does not support: use "
                'attn_implementation="eager", or install sage-hf and use attn_implementation="sage2"'
            )
    s_aux = sinks if isinstance(sinks, torch.Tensor) else None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(query.shape[2] > 1 and attention_mask is None and causal)
    if causal:  # an empty rest of a static cache
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
    options = _options((query, key, value), dropout, scaling, causal, s_aux)
    output, lse = attend(query, key, value, attention_mask, None, options)
    if s_aux is not None and lse is not None:
        output = _with_sinks(output.transpose(1, 2), lse.transpose(1, 2), s_aux).transpose(1, 2)
    return output.transpose(1, 2).contiguous(), None


def _options(
    tensors: tuple[torch.Tensor, ...], dropout_p: float, scale: float | None, causal: bool, s_aux: torch.Tensor | None
) -> Options:
    grad = wants_gradient(*tensors, s_aux)
    if grad and s_aux is not None:
        raise NotImplementedError('attention sinks have no gradient here: train with attn_implementation="eager"')
    recipe = TRAINING_RECIPE if grad else RECIPE
    return Options(
        is_causal=bool(causal), scale=scale, dropout_p=dropout_p, recipe=recipe, return_lse=s_aux is not None
    )


def _window(q: torch.Tensor, kv_len: int, offset: int, window_size: tuple[int, int]) -> torch.Tensor | None:
    """Return the bool mask (q_len, kv_len) of a window around key i + offset of query i; None if it is unbounded."""
    left, right = window_size
    if left < 0 and right < 0:
        return None
    diagonal = torch.arange(q.shape[1], device=q.device)[:, None] + offset
    keys = torch.arange(kv_len, device=q.device)
    mask = torch.ones(q.shape[1], kv_len, dtype=torch.bool, device=q.device)
    if left >= 0:
        mask &= keys >= diagonal - left
    if right >= 0:
        mask &= keys <= diagonal + right
    return mask


def _with_sinks(output: torch.Tensor, lse: torch.Tensor, s_aux: torch.Tensor) -> torch.Tensor:
    """Scale (…, heads, channels) by the weight that sinks (heads,) leave: a sink adds exp(sink) to each exp(lse)."""
    return (output * torch.sigmoid(lse - s_aux.to(lse.dtype)).unsqueeze(-1)).to(output.dtype)
