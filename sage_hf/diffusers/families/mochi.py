"""Mochi: each sample attends over its video tokens and its valid text tokens only."""

from __future__ import annotations

import torch

from sage_hf.diffusers.families.layout import (
    Attend,
    AttentionModule,
    join_tokens,
    merge_heads,
    project_out,
    split_heads,
)
from sage_hf.diffusers.families.registry import computes


def _rotate(states: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    even, odd = states[..., 0::2].float(), states[..., 1::2].float()
    cosine, sine = cosine.transpose(0, 1), sine.transpose(0, 1)
    rotated = (even * cosine - odd * sine).to(states.dtype), (even * sine + odd * cosine).to(states.dtype)
    return torch.stack(rotated, dim=-1).flatten(-2)


@computes("MochiAttnProcessor2_0")
def mochi_attention(
    attend: Attend,
    attn: AttentionModule,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    attention_mask: torch.Tensor,
    image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what `MochiAttnProcessor2_0` does: attention over [video, valid text], one sample at a time.

    Attention outputs 0 for padded text tokens, before the output projection.

    Args:
        hidden_states: (batch, video tokens, dim).
        encoder_hidden_states: (batch, text tokens, text dim).
        attention_mask: (batch, text tokens), nonzero where a text token is valid.
        image_rotary_emb: cosine and sine, each (video tokens, heads, head_dim / 2).

    Returns:
        Video (batch, video tokens, dim), and text (batch, text tokens, text dim); without `to_add_out` text has width
        heads · head_dim.
    """
    video_length, text_length = hidden_states.shape[1], encoder_hidden_states.shape[1]
    video = [split_heads(p(hidden_states), attn.heads) for p in (attn.to_q, attn.to_k, attn.to_v)]
    text = [
        split_heads(p(encoder_hidden_states), attn.heads) for p in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
    ]
    for i, (norm, norm_added) in enumerate(((attn.norm_q, attn.norm_added_q), (attn.norm_k, attn.norm_added_k))):
        if norm is not None:
            video[i] = norm(video[i])
        if norm_added is not None:
            text[i] = norm_added(text[i])
        if image_rotary_emb is not None:
            video[i] = _rotate(video[i], *image_rotary_emb)

    outputs = []
    for sample in range(hidden_states.shape[0]):
        valid = attention_mask[sample].flatten().nonzero().flatten()
        sample_slice = slice(sample, sample + 1)
        query, key, value = (
            join_tokens(v[sample_slice], t[sample_slice][:, :, valid]) for v, t in zip(video, text, strict=True)
        )
        output = merge_heads(attend(query, key, value))
        outputs.append(torch.nn.functional.pad(output, (0, 0, 0, video_length + text_length - output.shape[1])))

    states = torch.cat(outputs)
    hidden_states, encoder_hidden_states = states.split_with_sizes((video_length, text_length), dim=1)
    hidden_states = project_out(attn, hidden_states)
    if hasattr(attn, "to_add_out"):
        encoder_hidden_states = attn.to_add_out(encoder_hidden_states)
    return hidden_states, encoder_hidden_states
