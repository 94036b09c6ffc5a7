"""Attention with an IP-Adapter: UNets and SD 3. (Flux's adapter attends through diffusers' dispatch.)"""

from __future__ import annotations

from typing import Any

import torch

from sage_hf.diffusers.families.generic import generic_attention
from sage_hf.diffusers.families.joint import attend_jointly
from sage_hf.diffusers.families.layout import (
    Attend,
    AttentionModule,
    merge_heads,
    project_out,
    project_qkv,
    split_heads,
)
from sage_hf.diffusers.families.registry import computes_adapter


@computes_adapter("IPAdapterAttnProcessor2_0")
def unet_ip_adapter_attention(
    attend: Attend,
    attn: AttentionModule,
    adapter: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | tuple[torch.Tensor, list[torch.Tensor]],
    attention_mask: torch.Tensor | None = None,
    temb: torch.Tensor | None = None,
    scale: float = 1.0,
    ip_adapter_masks: list[torch.Tensor | None] | torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute what `IPAdapterAttnProcessor2_0` does: cross-attention to the text, plus cross-attention to each image
    prompt.

    Args:
        adapter: the processor of diffusers, for its weights and scales.
        encoder_hidden_states: the text, (batch, text tokens, dim), and each adapter's images, (batch, images, image
            tokens, dim). A single tensor holds the text, then the first adapter's image.
        scale: has no effect, as in diffusers; the scales are the adapter's.
        ip_adapter_masks: a (1, images, height, width) mask for each adapter, or None for an adapter without effect;
            as one tensor, (adapters, 1, height, width).

    Raises:
        ValueError: masks do not fit the adapters or their images.
    """
    if isinstance(encoder_hidden_states, tuple):
        text, images = encoder_hidden_states
    else:
        end = encoder_hidden_states.shape[1] - adapter.num_tokens[0]
        text, images = encoder_hidden_states[:, :end], [encoder_hidden_states[:, end:]]
    if isinstance(ip_adapter_masks, torch.Tensor):
        ip_adapter_masks = list(ip_adapter_masks.unsqueeze(1))
    if ip_adapter_masks is not None and not len(ip_adapter_masks) == len(adapter.scale) == len(images):
        raise ValueError(
            f"{len(ip_adapter_masks)} ip_adapter_masks for {len(adapter.scale)} IP-Adapters with {len(images)} image "
            "prompts: pass one mask for each"
        )

    def attend_to_all(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None
    ) -> torch.Tensor:
        states = attend(query, key, value, attn_mask=attn_mask)
        for i, (image, strength) in enumerate(zip(images, adapter.scale, strict=False)):
            project = [adapter.to_k_ip[i], adapter.to_v_ip[i]]
            if ip_adapter_masks is None:
                if _is_nonzero(strength):
                    image_key, image_value = (split_heads(p(image).flatten(1, -2), attn.heads) for p in project)
                    states = states + strength * attend(query, image_key, image_value)
                continue
            mask = ip_adapter_masks[i]
            if mask is None:
                continue
            strengths = _strength_of_each_image(strength, mask, image, i)
            if not _is_nonzero(strength):
                continue
            for j, (image_strength, area) in enumerate(zip(strengths, _areas(mask, query), strict=True)):
                attended = attend(query, *(split_heads(p(image[:, j]), attn.heads) for p in project))
                states = states + image_strength * (attended * split_heads(area, attn.heads))
        return states

    return generic_attention(attend_to_all, attn, hidden_states, text, attention_mask, temb)


def _is_nonzero(strength: float | list[float]) -> bool:
    return any(strength) if isinstance(strength, list) else strength != 0


def _strength_of_each_image(
    strength: float | list[float], mask: torch.Tensor, image: torch.Tensor, index: int
) -> list[float]:
    """Return the scale of every image of adapter `index`; raise ValueError if its mask does not fit."""
    if not isinstance(mask, torch.Tensor) or mask.ndim != 4:
        raise ValueError(
            f"ip_adapter_masks[{index}] must be a (1, images, height, width) tensor: prepare it with "
            "IPAdapterMaskProcessor"
        )
    strengths = strength if isinstance(strength, list) else [strength] * mask.shape[1]
    if not mask.shape[1] == image.shape[1] == len(strengths):
        raise ValueError(
            f"IP-Adapter {index} has {mask.shape[1]} masks, {image.shape[1]} images and {len(strengths)} scales: "
            "pass as many of each"
        )
    return strengths


def _areas(mask: torch.Tensor, query: torch.Tensor) -> list[torch.Tensor]:
    """Return each image's mask at the resolution of the query tokens, (batch, query tokens, heads · head_dim)."""
    from diffusers.image_processor import IPAdapterMaskProcessor

    batch, heads, tokens, head_dim = query.shape
    return [
        IPAdapterMaskProcessor.downsample(mask[:, j], batch, tokens, heads * head_dim).to(query)
        for j in range(mask.shape[1])
    ]


@computes_adapter("SD3IPAdapterJointAttnProcessor2_0")
def joint_ip_adapter_attention(
    attend: Attend,
    attn: AttentionModule,
    adapter: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    ip_hidden_states: torch.Tensor | None = None,
    temb: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute what `SD3IPAdapterJointAttnProcessor2_0` does: joint attention, plus attention over [sample, image
    prompt].

    Args:
        adapter: the processor of diffusers, for its weights and scale.
        ip_hidden_states: (batch, image tokens, image dim); None: joint attention alone.
        temb: embedding of the timestep, (batch, dim).

    Raises:
        ValueError: `attention_mask` is given: the joint attention of SD 3 has no mask (diffusers ignores one).
    """
    if attention_mask is not None:
        raise ValueError("joint attention (SD 3) takes no attention_mask: remove it from the call")
    sample = project_qkv(attn, hidden_states)
    states, encoder_states = attend_jointly(attend, attn, sample, encoder_hidden_states)
    if adapter.scale != 0 and ip_hidden_states is not None:
        image = adapter.norm_ip(ip_hidden_states, temb=temb)
        query, key, value = sample
        key = torch.cat([adapter.norm_k(key), adapter.norm_ip_k(split_heads(adapter.to_k_ip(image), attn.heads))], 2)
        value = torch.cat([value, split_heads(adapter.to_v_ip(image), attn.heads)], dim=2)
        query = adapter.norm_q(query)
        states = states + merge_heads(attend(query, key, value)).to(query.dtype) * adapter.scale
    states = project_out(attn, states)
    return states if encoder_states is None else (states, encoder_states)
