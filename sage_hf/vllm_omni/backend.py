"""Attention backends of vLLM-Omni's diffusion models."""

from __future__ import annotations

from typing import Any

import torch
from vllm_omni.diffusion.attention.backends.abstract import AttentionBackend, AttentionImpl, AttentionMetadata

from sage_hf.attention import attend_observed, chosen_fallback
from sage_kernels.spec.options import Options


class Sage2Impl(AttentionImpl):
    """Attention of one layer by the recipe `sage2`."""

    recipe = "sage2"

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        softmax_scale: float,
        causal: bool = False,
        num_kv_heads: int | None = None,
        prefix: str = "",
        backend_kwargs: dict[str, Any] | None = None,
        **extra_impl_args: object,
    ) -> None:
        if backend_kwargs:
            raise ValueError(f"sage-hf's backend has no settings; got {sorted(backend_kwargs)}")
        self.causal, self.softmax_scale = causal, softmax_scale

    def forward_cuda(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_metadata: AttentionMetadata | None = None,
    ) -> torch.Tensor:
        """Attend to (batch, tokens, heads, head_dim).

        Args:
            query, key, value: key and value may have fewer heads; query's number of heads is a multiple.
            attn_metadata: its `attn_mask` is (batch, kv_len), nonzero where a key exists, or broadcastable to (batch,
                heads, q_len, kv_len), bool or additive.
        """
        mask = None if attn_metadata is None else attn_metadata.attn_mask
        if mask is not None and mask.ndim == 2:
            mask = mask.bool()[:, None, None]
        options = Options(
            is_causal=self.causal,
            scale=self.softmax_scale,
            recipe=self.recipe,
            fallback=chosen_fallback(None),
            tokens_first=True,
        )
        output, _ = attend_observed(query, key, value, mask, None, options)
        return output


class Sage3Impl(Sage2Impl):
    """Attention of one layer by the recipe `sage3`."""

    recipe = "sage3"


class Sage2Backend(AttentionBackend):
    """Backend SAGE_ATTN."""

    accept_output_buffer = True
    name, impl = "SAGE_ATTN", Sage2Impl

    @classmethod
    def get_name(cls) -> str:
        """Return the name by which vLLM-Omni selects the backend."""
        return cls.name

    @classmethod
    def get_impl_cls(cls) -> type[Sage2Impl]:
        """Return the class that attends."""
        return cls.impl

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Return every head_dim; a head_dim outside 16…256 runs exactly."""
        return list(range(1, 1025))

    @classmethod
    def supports_attention_mask(cls, attention_spec: object | None = None) -> bool:
        """Return True: masks are honoured."""
        return True


class Sage3Backend(Sage2Backend):
    """Backend SAGE_ATTN_3."""

    name, impl = "SAGE_ATTN_3", Sage3Impl
