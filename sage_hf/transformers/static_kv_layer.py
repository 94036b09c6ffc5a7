"""A low-bit cache layer with static shapes, for decoding that transformers compiles.

The first tokens, and more than one token at once, are handled as in a growing layer, outside compiled code. A step of
one token is one operator of PyTorch; the device counts the tokens, and the layer's Python state does not change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers.cache_utils import StaticLayer

from sage_hf import kv_record
from sage_hf.transformers.kv_layer import AttentionForward, QuantizedLayer, eagerly, limit_of_keywords
from sage_kernels import kv_step
from sage_kernels.runtime.torch_private import mark_static
from sage_kernels.spec.kv_cache import KVCache


class StaticQuantizedLayer(QuantizedLayer):
    """Low-bit cache layer of fixed capacity."""

    is_compileable = True

    def __init__(
        self,
        config: Any,
        record: kv_record.KVRecord,
        number: int,
        before: QuantizedLayer | None,
        plain: StaticLayer,
        layers: list[Any],
    ) -> None:
        """Make an empty layer.

        Args:
            config, record, number, before: as in `QuantizedLayer`.
            plain: transformers' layer of the same capacity.
            layers: the cache's layers, in which `plain` replaces this layer if K and V cannot be quantised.
        """
        self.plain, self.layers, self.max_cache_len = plain, layers, plain.max_cache_len
        self.cache: KVCache | None = None
        super().__init__(config, record, number, before)

    def reset(self) -> None:
        """Forget all tokens and the transforms; the memory stays."""
        cache = self.cache
        super().reset()
        self.is_filled = self.is_emulated = False
        if cache is not None:
            cache.clear()
            self.cache, self.is_decided, self.is_initialized = cache, True, True

    @torch.inference_mode(False)  # compiled code writes into the tensors in any mode
    def _decide(self, key: torch.Tensor, value: torch.Tensor) -> None:
        super()._decide(key, value)
        if self.cache is not None:
            self.cache.fix_capacity(self.max_cache_len)
            for name in KVCache.FIXED:
                mark_static(getattr(self.cache, name))

    def _keep(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Let transformers' layer replace this layer; the mask of these tokens has the sizes of `get_mask_sizes`."""
        self.layers[self.number] = self.plain
        whole: tuple[torch.Tensor, torch.Tensor] = self.plain.update(key_states, value_states)
        return whole if key_states.shape[2] == 1 else (key_states, value_states)

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
            key_states, value_states, args, kwargs, unused: as in `QuantizedLayer`.

        Returns:
            The new tokens: our attention reads the past tokens from the cache.

        Raises:
            ValueError: there is no room, gradients are wanted, the tokens have other numbers of sequences or heads than
                earlier tokens, or attention would need whole K and V.
            RuntimeError: attention in an earlier step, or in the previous layer, did not take the cache.
        """
        if not self._is_step(key_states):
            return self._update_eagerly(key_states, value_states, kwargs)
        if self.cache is not None and not torch.compiler.is_compiling():
            self.cache.length += 1  # at least this many: compiled steps are not counted
            self.cache.reserve(self.cache.length)
        return self._update(key_states, value_states, kwargs)

    @eagerly
    def _update_eagerly(
        self, key_states: torch.Tensor, value_states: torch.Tensor, kwargs: dict[str, Any] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.cache is not None:
            self.cache.read_counts()
        past = 0 if self.cache is None else self.cache.length
        if past + key_states.shape[2] > self.max_cache_len:
            raise ValueError(
                f"KV cache: {key_states.shape[2]} tokens behind {past} do not fit into a cache of "
                f"{self.max_cache_len}: make one with a larger max_cache_len"
            )
        return self._update(key_states, value_states, kwargs)

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
            module, query, key, value, mask, scaling, forward, keywords: as in `QuantizedLayer`.

        Returns:
            As `sage_attention_forward`.

        Raises:
            ValueError: attention would need whole K and V.
            RuntimeError: there are no new tokens, or the model changed them in a step after the prompt.
        """
        if reason := limit_of_keywords(module, query, key, scaling, keywords):
            self._note_whole(reason)
        if not self._is_step(key):
            return self._attend_eagerly(module, query, key, value, mask, scaling, forward, keywords)
        assert self.cache is not None
        self.pending = None
        if mask is not None and mask.shape[1:3] != (1, 1):
            self._note_whole(f"a mask of shape {tuple(mask.shape)}")
        scale = query.shape[3] ** -0.5 if scaling is None else scaling
        key_mask = None if mask is None else mask[:, 0, 0]
        return kv_step.step(self.cache, query, key, value, key_mask, scale, emulated=self.is_emulated), None

    @eagerly
    def _attend_eagerly(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        *others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert self.cache is not None
        if mask is not None and query.shape[2] == 1:  # a prompt of one token, for which `get_mask_sizes` is wrong
            mask = mask[..., : self.cache.length + 1]
        result = super().attend(module, query, key, value, mask, *others)
        if self.whole_reason:
            self._note_whole(self.whole_reason)
        kernel, reason, self.is_emulated = kv_step.serving_kernel(self.cache, query[:, :, -1:])
        self.record.kernels[kernel] = reason
        return result

    def _store(
        self, query: torch.Tensor | None, key: torch.Tensor, value: torch.Tensor, key_mask: torch.Tensor | None
    ) -> None:
        super()._store(query, key, value, key_mask)
        self.is_filled = True

    def get_seq_length(self, *args: Any) -> Any:
        """Return the number of tokens, as a tensor on the device if there are any, like transformers' static layers."""
        return 0 if self.cache is None else kv_step.length_of(self.cache)

    def get_max_length(self) -> int:
        """Return the capacity."""
        return self.max_cache_len

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and the offset of the keys in a mask; in a step of one token, the length is the
        capacity."""
        if query_length == 1:
            return self.max_cache_len, 0
        return int(self.get_seq_length()) + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens; their number is given as a negative number."""
        if self.cache is not None:
            self.cache.read_counts()
        super().crop(tokens_to_remove)

    @property
    def has_past(self) -> bool:
        """Return whether there are tokens; compiled code asks, because it does not know the number."""
        return self.is_filled

    def _is_step(self, key: torch.Tensor) -> bool:
        return key.shape[2] == 1 and self.is_filled

    def _note_size(self) -> None:
        super()._note_size()
        assert self.cache is not None and self.cache.counts is not None
        self.record.tokens = self.cache.counts

    def _note_whole(self, reason: str) -> None:
        """Raise ValueError: a static cache is not dequantised."""
        raise ValueError(
            f"a KV cache with max_cache_len is decoded from its codes alone, which this model or call rules out: "
            f"{reason}; leave max_cache_len out"
        )
