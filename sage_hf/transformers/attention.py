"""The attention function that transformers calls: it honours all arguments, runs exact attention, or raises an
error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sage_hf import record
from sage_hf.attention import attend_observed, chosen_fallback
from sage_hf.attributes import FALLBACK, IMPLEMENTATION, RECIPE, TRAINING
from sage_hf.names import name_of
from sage_hf.transformers.bridge import cuts_masks
from sage_hf.transformers.exact import exact_attention
from sage_hf.transformers.keywords import eager_attention_of, sort_keywords
from sage_hf.transformers.masks import Causality, causality_of
from sage_kernels.dispatch import execution
from sage_kernels.dispatch.request import Request
from sage_kernels.spec.masks import with_causality
from sage_kernels.spec.options import Fallback, Options
from sage_kernels.spec.recipe import get_recipe


def sage_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    output_attentions: bool | None = None,
    *,
    recipe: str,
    fallback: str | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute attention by a recipe, with the arguments that transformers' models pass.

    Masks and causality work as in transformers' `sdpa`: a mask wins over causality, `is_causal` wins over
    `module.is_causal`, and causal attention is aligned upper left and needs more than one query. A mask (batch, kv_len)
    comes from `masks.sage_training_mask`, or in a compiled model from `sage_mask`, for causal attention with padding:
    attention is causal among the keys that the mask marks True. `module.sage_recipe` and `module.sage_fallback` win
    over `recipe` and `fallback`; while the module is in training mode, `module.sage_training` wins over
    `module.sage_recipe`.

    Exact attention takes over, recorded and logged, for a softcap, for sinks if gradients are wanted, for dropout, for
    attention weights (`output_attentions`), and for a keyword that only the model's eager attention knows.

    Args:
        module: the calling attention layer.
        query: (batch, q_heads, q_len, head_dim).
        key, value: (batch, kv_heads, kv_len, head_dim or v_head_dim), not repeated. Their batch, or query's, may be 1.
        attention_mask: None, bool (True: may attend) or additive, broadcastable to (batch, q_heads, q_len, kv_len).
            Before transformers 5, a longer mask is cut to kv_len, as in `sdpa`. Or, if q_len equals kv_len, bool
            (batch, kv_len), see above.
        dropout: dropout probability of the attention weights.
        scaling: factor of Q·Kᵀ; default head_dim ** -0.5.
        is_causal: whether attention is causal; default `module.is_causal`.
        position_bias: added to the scores, broadcastable to (batch, q_heads, q_len, kv_len) (T5).
        softcap: bound on the magnitude of the logits (Gemma 2).
        s_aux: (q_heads,) logits of the attention sinks (GPT-OSS).
        output_attentions: return the attention weights as well.
        recipe, fallback: as in `sage_hf.sage_attention`.
        kwargs: other keywords that models pass, see `keywords.sort_keywords`.

    Returns:
        The output, (batch, q_len, q_heads, v_head_dim), contiguous; and the attention weights, None unless requested.

    Raises:
        TypeError: a keyword that cannot be honoured may change the result.
        ValueError: the model passes a paged cache, or `sage_hf.sage_attention` refuses the arguments.
    """
    recipe, fallback = _settings_of(module, recipe, fallback)
    for_eager = sort_keywords(module, kwargs)

    if query.shape[0] != key.shape[0]:
        batch = max(query.shape[0], key.shape[0])
        query, key, value = (tensor.expand(batch, -1, -1, -1) for tensor in (query, key, value))
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    # The comparison comes first: with dynamic shapes it is a SymBool, but the last operand of `and` must be a bool.
    causal = query.shape[2] > 1 and attention_mask is None and is_causal
    if causal and key.shape[2] > query.shape[2]:  # the first tokens of a static cache; its other places are empty
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        position_bias = None if position_bias is None else position_bias[..., : query.shape[2]]
    mask = attention_mask
    if mask is not None and mask.shape[-1] > key.shape[2] and cuts_masks():
        mask = mask[..., : key.shape[2]]
    if mask is not None and mask.dim() == 2 and mask.dtype == torch.bool:
        batch, kv_len = key.shape[0], key.shape[2]
        if mask.shape[0] == batch and mask.shape[1] == kv_len and query.shape[2] == kv_len:
            mask, causal = mask[:, None, None], True

    if output_attentions or for_eager:
        reason = (
            "attention weights are asked for" if output_attentions else f"{', '.join(for_eager)} given by the model"
        )
        extras = {"position_bias": position_bias, "softcap": softcap, "s_aux": s_aux}
        for_eager |= {name: extra for name, extra in extras.items() if extra is not None}
        call = _ModelCall(query, key, value, mask, causal, scaling, dropout, recipe, chosen_fallback(fallback))
        return record.run_in_layer(module, _eager, module, call, for_eager, reason)
    if position_bias is not None:
        mask = with_causality(mask, query, key) if causal else mask
        mask, causal = _add_to_bias(position_bias, mask), False
    call = _ModelCall(query, key, value, mask, causal, scaling, dropout, recipe, chosen_fallback(fallback))
    output = record.run_in_layer(module, _attend_by_recipe, call, softcap, s_aux)
    return output.transpose(1, 2).contiguous(), None


def _settings_of(module: nn.Module, recipe: str, fallback: str | None) -> tuple[str, str | None]:
    """Return a layer's recipe and fallback, given its model's; see `sage_attention_forward`."""
    # This is faster than `getattr`, which for a missing attribute searches a module's parameters, buffers and children.
    attributes = module.__dict__
    if torch.compiler.is_compiling():
        attributes = {name: getattr(module, name, None) for name in (IMPLEMENTATION, RECIPE, TRAINING, FALLBACK)}
    implementation = attributes.get(IMPLEMENTATION)
    if not implementation or implementation == name_of(recipe, fallback):
        training = attributes.get(TRAINING) if module.training else None
        recipe, fallback = training or attributes.get(RECIPE) or recipe, attributes.get(FALLBACK) or fallback
    return recipe, fallback


@dataclass(frozen=True)
class _ModelCall:
    """Attention call of a model.

    Attributes:
        query, key, value: (batch, heads, tokens, head_dim).
        mask: as in `sage_hf.attention.attend_observed`.
        is_causal: whether attention is causal among the keys of the mask.
        scale: factor of the scores; None: head_dim ** -0.5.
        dropout: dropout probability of the attention weights.
        recipe, fallback: the requested recipe and fallback.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    is_causal: bool
    scale: float | None
    dropout: float
    recipe: str
    fallback: Fallback

    def report_exact(self, reason: str) -> None:
        """Record that the call runs exactly, with the reason; raise KernelUnavailableError if the fallback is
        "error"."""
        options = Options(is_causal=self.is_causal, recipe=self.recipe, fallback=self.fallback)
        execution.announce_exact(self.query, self.key, self.value, self.mask, None, options, reason)


def _attend_by_recipe(
    call: _ModelCall,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend by the recipe, or exactly for a softcap, and for sinks that need gradients or dropout.

    Args:
        call: the attention call.
        softcap: as in `sage_attention_forward`.
        sinks: (q_heads,) logits of the attention sinks.

    Returns:
        (batch, q_heads, q_len, v_head_dim).
    """
    query, key, value = call.query, call.key, call.value
    mask, is_causal, scale = call.mask, call.is_causal, call.scale
    wants_gradient = torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in (query, key, value, sinks)
    )
    if softcap is not None or (sinks is not None and (wants_gradient or call.dropout)):
        reason = "the model caps its logits (softcap)" if softcap is not None else "sinks need a gradient or dropout"
        call.report_exact(reason)
        options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "dropout_p": call.dropout}
        return exact_attention(query, key, value, mask, **options, softcap=softcap, sinks=sinks)
    # Kernels skip the tiles that causality hides, but read a mask. Recent keys stay in 16 bits only if causality is
    # stated. Exact attention and gradients do not support such an offset.
    causal_offset = 0
    causality = causality_of(mask, query.shape[2], key.shape[2])
    if causality is not None and not wants_gradient and not call.dropout and _gains(causality, call):
        causal_offset, is_causal = causality.offset, True
        key, value = (tensor[:, :, : query.shape[2] + causal_offset] for tensor in (key, value))
        if causality.hides_more and mask is not None:
            mask = mask[..., : key.shape[2]]
        else:
            mask = None if causality.keys is None else causality.keys[:, None, None]
    output, lse = attend_observed(
        query,
        key,
        value,
        mask,
        None,
        Options(
            is_causal=is_causal,
            causal_offset=causal_offset,
            scale=scale,
            dropout_p=call.dropout,
            recipe=call.recipe,
            fallback=call.fallback,
            return_lse=sinks is not None,
        ),
    )
    if sinks is None or lse is None:
        return output
    # The output was divided by exp(lse); a sink adds exp(sink) to this sum.
    share = torch.sigmoid(lse - sinks.to(lse.dtype).reshape(-1, 1))
    return (output * share.unsqueeze(-1)).to(output.dtype)


def _gains(causality: Causality, call: _ModelCall) -> bool:
    """Check whether a call gains if its mask's causality is stated: no mask is left, or recent keys stay in 16 bits."""
    if call.recipe == "exact" or not causality.hides_more:
        return call.recipe != "exact"
    if not get_recipe(call.recipe).recent_keys:
        return False
    request = Request.of(call.query, call.key, call.value, call.mask, True, call.recipe)
    return execution.select_checked(request, call.fallback).recipe == call.recipe


def _eager(
    module: nn.Module, call: _ModelCall, keywords: dict[str, object], reason: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the model's own eager attention; return its output (batch, q_len, q_heads, v_head_dim) and the weights."""
    eager = eager_attention_of(module)
    call.report_exact(reason)
    query, key, mask = call.query, call.key, call.mask
    if call.is_causal:
        mask = with_causality(mask, query, key)
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    scale = query.shape[3] ** -0.5 if call.scale is None else call.scale
    return eager(module, query, key, call.value, mask, scaling=scale, dropout=call.dropout, **keywords)


def _add_to_bias(position_bias: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return a position bias and a mask combined into one additive mask."""
    if mask is None:
        return position_bias
    return position_bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else position_bias + mask
