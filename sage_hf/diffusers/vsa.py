"""VSA, trainable sparse attention, in the self-attention of diffusers' Wan transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sage_hf.attributes import ORDER
from sage_hf.diffusers.bridge import ParallelProcessor
from sage_hf.diffusers.errors import UnsupportedAttentionError
from sage_hf.sparse.grids import arguments_of, layout_of
from sage_hf.sparse.order import TileOrder
from sage_hf.sparse.vsa import tiles_kept, vsa_attention
from sage_kernels.runtime import dynamo

GATE = "to_gate_compress"
"""Name of a block's gate, as in FastVideo's checkpoints: `blocks.N.to_gate_compress.{weight,bias}`."""
NO_VSA_SHARDS = (
    "VSA chooses tiles among all tokens, and context parallelism gives a process a part of them: run this model "
    "without enable_parallelism()"
)


class VSAModel:
    """State that the VSA layers of one denoiser share.

    Attributes:
        sparsity: share of the tiles that the fine stage leaves out.
        order: the order of the current call's tokens; None before any call.
    """

    def __init__(self, sparsity: float) -> None:
        self.sparsity = sparsity
        self.order: TileOrder | None = None

    @dynamo.disable
    def follow(self, denoiser: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Set the order for a call of the denoiser: a forward pre-hook."""
        self.order = order_of(denoiser, arguments_of(denoiser, args, kwargs))


def order_of(denoiser: nn.Module, arguments: dict[str, Any]) -> TileOrder:
    """Return the order of a call's tokens, from the arguments of its forward pass."""
    layout = layout_of(denoiser)
    grid = None if layout is None else layout.grid(denoiser, arguments)
    assert grid is not None  # `enable_vsa` checked the model
    return TileOrder.of(grid, arguments["hidden_states"].device)


def mark_rotary(denoiser: nn.Module, rope: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Record the order of tokens on their rotary embeddings: a forward hook of Wan's `rope`.

    A block that runs again for its gradients gets the same embeddings, but its model may have been called with another
    grid since, or may be running in another thread.
    """
    if isinstance(output, tuple) and not torch.compiler.is_compiling():
        setattr(output[0], ORDER, order_of(denoiser, {"hidden_states": args[0]}))


class VSAProcessor(ParallelProcessor):
    """Processor of a Wan block's self-attention by VSA; exact, unless `sage_hf.apply` chooses a recipe.

    Attributes:
        block: the transformer block, whose `to_gate_compress` makes the gate.
        model: the state that it shares with the denoiser's other layers.
    """

    def __init__(self, block: nn.Module, model: VSAModel) -> None:
        self.block = block
        self.model = model

    def __call__(
        self,
        attn: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Attend with an exact fine stage; see `attend`."""
        return self.attend(attn, hidden_states, encoder_hidden_states, attention_mask, rotary_emb)

    def attend(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        *,
        recipe: str = "exact",
        fallback: str | None = None,
    ) -> torch.Tensor:
        """Compute a block's self-attention from its normalised states (batch, tokens, dim).

        Args:
            attn: the WanAttention.
            hidden_states: the normalised states, from which the gate is computed too.
            encoder_hidden_states, attention_mask: must be None.
            rotary_emb: cosines and sines (1, tokens, 1, head_dim), each twice; None: no RoPE.
            recipe, fallback: recipe and fallback of the fine stage, as in `sage_attention`.

        Raises:
            ValueError: a mask or an encoder's states are given.
            RuntimeError: the model's forward has not run, so the grid of tokens is not known.
        """
        if encoder_hidden_states is not None or attention_mask is not None:
            raise ValueError("VSA is self-attention of all video tokens: it takes no mask and no encoder's states")
        if self.model.order is None:
            raise RuntimeError("VSA learns the grid of tokens from its model's forward: call the model, not its block")
        if getattr(attn, "fused_projections", False):
            query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        gate = getattr(self.block, GATE)(hidden_states)
        query, key = attn.norm_q(query), attn.norm_k(key)
        query, key, value, gate = (x.unflatten(2, (attn.heads, -1)) for x in (query, key, value, gate))
        if rotary_emb is not None:
            query, key = apply_rope(query, *rotary_emb), apply_rope(key, *rotary_emb)
        query, key, value, gate = (x.transpose(1, 2) for x in (query, key, value, gate))
        order = self.model.order if rotary_emb is None else getattr(rotary_emb[0], ORDER, self.model.order)
        sparsity = self.model.sparsity
        output = vsa_attention(query, key, value, gate, order, sparsity, recipe=recipe, fallback=fallback)
        output = output.transpose(1, 2).flatten(2).type_as(hidden_states)
        return attn.to_out[1](attn.to_out[0](output))

    def describe(self) -> str:
        """Return a line of text with the share of tiles that the latest call kept; "" before any call."""
        if self.model.order is None:
            return ""
        tiles = self.model.order.tiles
        kept = tiles_kept(tiles, self.model.sparsity)
        return f"VSA: {kept} of {tiles} tiles of 4×4×4 tokens ({kept / tiles:.1%}) with the best coarse scores"

    @property
    def parallel_config(self) -> None:
        """Return None; assigning a ParallelConfig, as `enable_parallelism` does, raises UnsupportedAttentionError."""
        return None

    @parallel_config.setter
    def parallel_config(self, config: object) -> None:
        if config is not None:
            raise UnsupportedAttentionError(NO_VSA_SHARDS)


def apply_rope(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to the pairs of channels (0, 1), (2, 3), … of x (batch, tokens, heads, head_dim), as Wan does."""
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cosine, sine = cosines[..., 0::2], sines[..., 1::2]
    return torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1).flatten(-2).type_as(x)
