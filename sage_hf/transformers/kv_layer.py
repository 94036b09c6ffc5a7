"""Layers of transformers' cache with low-bit keys and values, and the attention function that decodes from them.

A cache layer puts itself into the keywords of the same call's attention function, and returns only the new tokens.
Other attention does not know the keyword: for it, and for models that do not pass keywords on, the layer returns whole
K and V, dequantised.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from huggingface_hub.utils import logging
from torch import nn
from transformers.cache_utils import DynamicLayer

from sage_hf import kv_record
from sage_hf.names import NAMES
from sage_hf.transformers.attention import sage_attention_forward
from sage_hf.transformers.bridge import implementation_of_config, keeps_weights
from sage_hf.transformers.keywords import has_eager_attention, sort_keywords
from sage_hf.transformers.masks import causality_of
from sage_kernels import kv_cache
from sage_kernels.spec.checks import SUPPORTED_DTYPES
from sage_kernels.spec.kv_cache import KV_HEAD_DIMS, MAX_QUERIES, KVCache
from sage_kernels.spec.kv_format import get_format

logger = logging.get_logger(__name__)

HANDLE = "sage_kv_layer"
"""Keyword that passes a cache layer to the attention function."""
WHOLE = "whole K and V"

AttentionForward = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]

Method = TypeVar("Method", bound=Callable[..., Any])

_warned: set[str] = set()


def eagerly(method: Method) -> Method:
    """Let the compiler run a method eagerly; an eager call does not pay for this wrapper."""
    disabled = torch.compiler.disable(method)

    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        return disabled(*args, **kwargs) if torch.compiler.is_compiling() else method(*args, **kwargs)

    return cast(Method, run)


class QuantizedLayer(DynamicLayer):
    """Cache layer in low bits, or in 16 bits if K and V cannot be quantised."""

    supports_early_init = False  # None until the first K and V decide

    def __init__(
        self, config: Any, record: kv_record.KVRecord, number: int, before: QuantizedLayer | None = None
    ) -> None:
        super().__init__()
        self.config, self.record, self.number, self.before = config, record, number, before
        self.reset()

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedLayer:
        """Copy everything except the config, which is the model's: it names the attention that comes next."""
        memo.setdefault(id(self.config), self.config)
        copied = object.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update(copy.deepcopy(vars(self), memo))
        return copied

    def reset(self) -> None:
        """Forget all tokens and the transforms."""
        self.keys = self.values = None
        self.is_initialized = self.is_decided = False
        self.cache: KVCache | None = None
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        self.whole_reason = ""
        self.noted_size: tuple[int, int] | None = None

    def _decide(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Decide from the first K and V whether the layer is quantised."""
        head_dim, v_head_dim = key.shape[-1], value.shape[-1]
        reason, (least, most) = "", KV_HEAD_DIMS
        if not least <= head_dim <= most:
            reason = f"head_dim {head_dim} is outside {least}…{most}"
        elif head_dim != v_head_dim:
            reason = f"V has head_dim {v_head_dim}, K {head_dim}"
        elif key.dtype not in SUPPORTED_DTYPES:
            reason = f"{key.dtype}"
        self.is_decided = True
        if reason:
            layers = self.record.exact_layers.setdefault(reason, [])
            if self.number not in layers:  # after reset() it exists already
                layers.append(self.number)
            warn_once(f"KV cache: layers stay in 16 bits: {reason}")
        else:
            self.cache = KVCache(get_format(self.record.format), key)
            self.device, self.dtype, self.is_initialized = key.device, key.dtype, True

    @eagerly
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *args: Any,
        kwargs: dict[str, Any] | None = None,
        **unused: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take new tokens, (batch, kv_heads, tokens, head_dim).

        Args:
            key_states, value_states: the new tokens.
            args: arguments of transformers before 5.24; not used.
            kwargs: the keywords of the attention function that is called next.
            unused: not used.

        Returns:
            The new tokens if our attention comes next, or else whole K and V.

        Raises:
            ValueError: gradients are wanted, or the tokens have other numbers of sequences or heads than earlier
                tokens.
            RuntimeError: attention in an earlier step, or in the previous layer, did not take the cache.
        """
        return self._update(key_states, value_states, kwargs)

    def _update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, kwargs: dict[str, Any] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.before is not None:
            self.before.check_taken()
        self.settle()
        if not self.is_decided:
            self._decide(key_states, value_states)
        if self.cache is None:
            return self._keep(key_states, value_states)
        batch, heads, head_dim = self.cache.batch, self.cache.kv_heads, self.cache.head_dim
        for x in (key_states, value_states):
            if (*x.shape[:2], x.shape[3]) != (batch, heads, head_dim):
                raise ValueError(
                    f"the KV cache is of {batch} sequences, {heads} heads and head_dim {head_dim}, got {tuple(x.shape)}"
                )
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ValueError("a quantised KV cache carries no gradients: call the model under torch.no_grad()")
        implementation = implementation_of_config(self.config)
        if kwargs is not None and not self.whole_reason and implementation in NAMES:
            self.pending = key_states, value_states
            kwargs[HANDLE] = self
            return key_states, value_states
        self._note_whole(
            "the installed transformers does not hand the cache to attention"
            if kwargs is None
            else f"attention {implementation!r} cannot read a quantised cache"
            if implementation not in NAMES
            else self.whole_reason
        )
        whole = self._with_past(key_states, value_states)
        self._store(None, key_states, value_states, None)
        return whole

    def _keep(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Take new tokens in 16 bits, and return all tokens."""
        return super().update(key_states, value_states)

    @eagerly
    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
        forward: AttentionForward,
        keywords: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend with the tokens of the latest `update` to the cache, and store them.

        Args:
            module: the calling attention layer.
            query: (batch, q_heads, q_len, head_dim).
            key, value: the new tokens, which the model may have changed since.
            mask, scaling: as in `sage_attention_forward`.
            forward: `sage_attention_forward` with a recipe.
            keywords: other keywords for `forward`.

        Returns:
            As `sage_attention_forward`.

        Raises:
            RuntimeError: there are no new tokens, or the model changed them in a step after the prompt.
        """
        attend = functools.partial(forward, module, query, scaling=scaling, **keywords)
        if self.pending is None and self.whole_reason:  # another call with the prompt's K and V
            return attend(key, value, mask)
        if self.cache is None or self.pending is None:
            raise RuntimeError("the KV cache has no new tokens for this attention: update it once before each call")
        new_key, new_value = self.pending
        past = self.cache.length
        is_changed = not (_is_same(key, new_key) and _is_same(value, new_value))
        if is_changed and past:
            raise RuntimeError("the model changes K and V after giving them to the KV cache, but did not at the prompt")
        self.pending = None
        kv_record.records[module] = self.record
        if not past and (is_changed or (mask is not None and mask.dtype != torch.bool)):
            self.whole_reason = (
                "the model changes K and V after giving them to the cache"
                if is_changed
                else "the prompt has an additive mask"
            )
        if past:
            reason = limit_of_keywords(module, query, key, scaling, keywords)
            reason = reason or _limit_of_mask(mask, query.shape[2], past)
            if not reason:
                scale = query.shape[3] ** -0.5 if scaling is None else scaling
                key_mask = _keys_of(mask, query.shape[2], past)
                output, kernel, why = kv_cache.decode(self.cache, query, key, value, key_mask, scale)
                self.record.kernels[kernel] = why
                self._note_size()
                return output.transpose(1, 2).contiguous(), None
            self.record.kernels[WHOLE] = reason
        result = attend(*(self._with_past(key, value) if past else (key, value)), mask)
        key_mask = None if past else _tokens_of(mask, query.shape[2])
        self._store(None if is_changed else query, new_key, new_value, key_mask)
        return result

    def get_seq_length(self, *args: Any) -> int:
        """Return the number of tokens."""
        if self.cache is None:
            return super().get_seq_length()
        return self.cache.length + (0 if self.pending is None else self.pending[0].shape[2])

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens; their number is given as a negative number."""
        self.settle()
        if self.cache is None:
            super().crop(tokens_to_remove)
        else:
            self.cache.crop(max(0, self.cache.length + tokens_to_remove))
            self._note_size()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Reorder the batch: sequence i becomes sequence `beam_idx[i]`; beam_idx is (batch,)."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence."""
        if self.cache is None:
            super().batch_repeat_interleave(repeats)
        else:
            self.batch_select_indices(torch.arange(self.cache.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences with these indices, in this order; or the sequences that a mask marks True."""
        self.settle()
        if self.cache is None:
            if self.is_initialized:
                super().batch_select_indices(indices)
        else:
            self.cache.select(indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices)
            self._note_size()

    def offload(self) -> None:
        """Raise ValueError: a quantised cache is not offloaded."""
        raise ValueError("a quantised KV cache is not offloaded: it is kept small so that it fits on the GPU")

    prefetch = offload

    def _with_past(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of all tokens: past tokens dequantised, new tokens unchanged."""
        assert self.cache is not None
        if not self.cache.length:
            return key, value
        past_key, past_value = kv_cache.read_all(self.cache)
        return torch.cat((past_key, key), 2), torch.cat((past_value, value), 2)

    def _store(
        self, query: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor, key_mask: torch.Tensor | None
    ) -> None:
        assert self.cache is not None
        kv_cache.store(self.cache, query, key, value, key_mask)
        self._note_size()

    @property
    def has_past(self) -> bool:
        """Return whether there are tokens that attention without the cache would miss."""
        return self.cache is not None and self.cache.length > 0

    def check_taken(self) -> None:
        """Raise RuntimeError if the latest attention saw new tokens without the past tokens."""
        if self.pending is not None and self.has_past:
            raise RuntimeError(
                "attention did not take the KV cache in the latest step, and saw the new tokens only: an exception "
                "ended that step, the attention function was exchanged, or the cache is of another model's config; "
                "reset() the cache, or make a new one"
            )

    def settle(self) -> None:
        """Store tokens that our attention has not taken: a prompt's tokens, of which attention saw all.

        Raises:
            RuntimeError: see `check_taken`.
        """
        self.check_taken()
        if self.pending is None:
            return
        (key, value), self.pending = self.pending, None
        self.whole_reason = "the model does not hand the cache to attention"
        self._store(None, key, value, None)

    def _note_size(self) -> None:
        assert self.cache is not None
        self.record.tokens = self.cache.length
        size = self.cache.batch, self.cache.capacity
        if size != self.noted_size:
            self.noted_size, self.record.bytes[self.number] = size, self.cache.bytes

    def _note_whole(self, reason: str) -> None:
        self.record.kernels[WHOLE] = reason
        warn_once(f"KV cache: K and V are dequantised at every step, which is slow: {reason}")


def limit_of_keywords(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, scaling: float | None, keywords: dict[str, Any]
) -> str:
    """Return the reason why attention with these arguments cannot decode from the codes; "" if it can."""
    keyword_names = ("position_bias", "softcap", "s_aux", "output_attentions", "dropout")
    passed = [name for name in keyword_names if (x := keywords.get(name)) is not None and (torch.is_tensor(x) or x)]
    passed += sort_keywords(
        module, {name: x for name, x in keywords.items() if name not in (*keyword_names, "is_causal")}
    )
    if passed:
        return f"{', '.join(passed)} given by the model"
    if query.shape[0] != key.shape[0] or query.dtype != key.dtype:
        return "Q and K differ in batch or dtype"
    if scaling is not None and scaling <= 0:
        return f"scaling {scaling}"
    return ""


def attention_with_cache(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *args: Any,
    recipe: str,
    fallback: str | None = None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `sage_attention_forward`; if the call's keywords hold a layer of our cache, from this cache.

    Layers may not hand on the keyword that asks for attention weights, so the model that keeps them is asked too.
    """
    layer: QuantizedLayer | None = kwargs.pop(HANDLE, None)
    if keeps_weights() and has_eager_attention(module):
        kwargs["output_attentions"] = True
    forward: AttentionForward = functools.partial(sage_attention_forward, recipe=recipe, fallback=fallback)
    if layer is None:
        return forward(module, query, key, value, attention_mask, *args, scaling=scaling, **kwargs)
    return layer.attend(module, query, key, value, attention_mask, scaling, forward, kwargs)


def _keys_of(mask: torch.Tensor | None, q_len: int, past: int) -> torch.Tensor | None:
    """Return the existing keys of a mask that is only causality and padding, bool (batch or 1, past + q_len).

    None: all keys exist. For any other mask, return the mask itself.
    """
    if mask is None:
        return None
    length = past + q_len
    if q_len == 1 and mask.dtype == torch.bool and mask.shape[1:] == (1, 1, length):
        return mask[:, 0, 0]
    causality = causality_of(mask, q_len, length)
    if causality is None or causality.offset != past or causality.hides_more:
        return mask
    return causality.keys


def _limit_of_mask(mask: torch.Tensor | None, q_len: int, past: int) -> str:
    """Return the reason why a step with a mask cannot decode from the codes; "" if it can."""
    if q_len > MAX_QUERIES:
        return f"more than {MAX_QUERIES} new tokens"
    if (mask is None and q_len > 1) or (mask is not None and _keys_of(mask, q_len, past) is mask):
        return "a mask other than causality and padding"
    return ""


def _tokens_of(mask: torch.Tensor | None, q_len: int) -> torch.Tensor | None:
    """Return which tokens of a prompt are not padding, bool (batch or 1, q_len); None: all, or unknown."""
    if mask is None or mask.dim() == 2:
        return mask
    keys = _keys_of(mask, q_len, 0)
    if keys is not mask:
        return keys
    return mask.any(2).any(1) if mask.dtype == torch.bool else None  # no query sees padding


def _is_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Check whether two tensors of the same dtype share memory and shape."""
    return x is y or (x.shape == y.shape and x.stride() == y.stride() and x.data_ptr() == y.data_ptr())


def warn_once(message: str) -> None:
    """Log a warning once per process."""
    if message not in _warned:
        _warned.add(message)
        logger.warning(message)
