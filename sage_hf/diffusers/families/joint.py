"""Joint attention over two streams with separate projections: SD 3 and 3.5, EasyAnimate, HunyuanVideo."""

from __future__ import annotations

import torch

from sage_hf.diffusers.families.layout import (
    Attend,
    AttentionModule,
    join_tokens,
    merge_heads,
    normalize_query_key,
    project_out,
    project_qkv,
    split_heads,
)
from sage_hf.diffusers.families.registry import computes


def _project_context(
    attn: AttentionModule, encoder_hidden_states: torch.Tensor, fused: bool = False
) -> list[torch.Tensor]:
    if fused:
        projected = attn.to_added_qkv(encoder_hidden_states).chunk(3, dim=-1)
    else:
        projected = [project(encoder_hidden_states) for project in (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)]
    query, key, value = (split_heads(x, attn.heads) for x in projected)
    return [*normalize_query_key(attn.norm_added_q, attn.norm_added_k, query, key), value]


def _project_streams(
    attn: AttentionModule, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return query, key and value, (batch, heads, tokens, head_dim) each, of the sample and of the context.

    Without a context the second list is empty.
    """
    query, key, value = project_qkv(attn, hidden_states)
    sample = [*normalize_query_key(attn.norm_q, attn.norm_k, query, key), value]
    return sample, [] if encoder_hidden_states is None else _project_context(attn, encoder_hidden_states)


def _project_streams_out(
    attn: AttentionModule, sample: torch.Tensor, context: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the output projections of the sample and of the context, if a block has them."""
    if attn.to_out is not None:
        sample = project_out(attn, sample)
    if attn.to_add_out is not None:
        context = attn.to_add_out(context)
    return sample, context


def attend_jointly(
    attend: Attend,
    attn: AttentionModule,
    sample: list[torch.Tensor],
    encoder_hidden_states: torch.Tensor | None,
    fused: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attend over [sample, context] as SD 3 does, or over the sample alone.

    Args:
        sample: the result of `project_qkv`.
        fused: as in `project_qkv`, for the context.

    Returns:
        The sample, (batch, tokens, heads · head_dim), before its output projection; the context, after its output
        projection.
    """
    query, key, value = sample
    length = query.shape[2]
    query, key = normalize_query_key(attn.norm_q, attn.norm_k, query, key)
    if encoder_hidden_states is None:
        return merge_heads(attend(query, key, value)).to(query.dtype), None
    context = _project_context(attn, encoder_hidden_states, fused)
    joint = map(join_tokens, (query, key, value), context)
    states = merge_heads(attend(*joint)).to(query.dtype)
    states, encoder_states = states[:, :length], states[:, length:]
    return states, encoder_states if attn.context_pre_only else attn.to_add_out(encoder_states)


@computes("JointAttnProcessor2_0", fused="FusedJointAttnProcessor2_0")
def joint_attention(
    attend: Attend,
    attn: AttentionModule,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    *,
    fused: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute what `JointAttnProcessor2_0` does: attention over [sample, context], or over the sample alone.

    The second attention of a dual block has no context. With `fused` as in `project_qkv`, norms are applied, as SD 3.5
    was trained; diffusers' `FusedJointAttnProcessor2_0` leaves them out.

    Raises:
        ValueError: `attention_mask` is given: the joint attention of SD 3 has no mask (diffusers ignores one).
    """
    if attention_mask is not None:
        raise ValueError("joint attention (SD 3) takes no attention_mask: remove it from the call")
    sample = project_qkv(attn, hidden_states, fused=fused)
    states, encoder_states = attend_jointly(attend, attn, sample, encoder_hidden_states, fused)
    states = project_out(attn, states)
    return states if encoder_states is None else (states, encoder_states)


@computes("EasyAnimateAttnProcessor2_0")
def easyanimate_attention(
    attend: Attend,
    attn: AttentionModule,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what `EasyAnimateAttnProcessor2_0` does: attention over [text, video].

    Only the multimodal blocks have separate projections for text.
    """
    from diffusers.models.embeddings import apply_rotary_emb

    text_length = encoder_hidden_states.shape[1]
    if attn.add_q_proj is None:
        states = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        (query, key, value), _ = _project_streams(attn, states, None)
    else:
        video, text = _project_streams(attn, hidden_states, encoder_hidden_states)
        query, key, value = map(join_tokens, text, video)

    if image_rotary_emb is not None:
        query[:, :, text_length:] = apply_rotary_emb(query[:, :, text_length:], image_rotary_emb)
        if not attn.is_cross_attention:
            key[:, :, text_length:] = apply_rotary_emb(key[:, :, text_length:], image_rotary_emb)

    states = merge_heads(attend(query, key, value, attn_mask=attention_mask)).to(query.dtype)
    return _project_streams_out(attn, states[:, text_length:], states[:, :text_length])


@computes("HunyuanVideoAttnProcessor2_0")
def hunyuan_video_attention(
    attend: Attend,
    attn: AttentionModule,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute what `HunyuanVideoAttnProcessor2_0` does in diffusers 0.35, where it does not use the dispatcher.

    It attends over [video, text] with RoPE on the video tokens. Double-stream blocks have separate projections for
    text; single-stream blocks have neither these nor an output projection.
    """
    from diffusers.models.embeddings import apply_rotary_emb

    length = hidden_states.shape[1]
    if attn.add_q_proj is None:
        both, _ = _project_streams(attn, torch.cat([hidden_states, encoder_hidden_states], dim=1), None)
        video, text = [x[:, :, :length] for x in both], [x[:, :, length:] for x in both]
    else:
        video, text = _project_streams(attn, hidden_states, encoder_hidden_states)
    if image_rotary_emb is not None:
        video[:2] = (apply_rotary_emb(x, image_rotary_emb) for x in video[:2])
    query, key, value = map(join_tokens, video, text)

    states = merge_heads(attend(query, key, value, attn_mask=attention_mask)).to(query.dtype)
    return _project_streams_out(attn, states[:, :length], states[:, length:])
