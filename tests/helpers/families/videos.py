"""Families that make videos."""

from __future__ import annotations

from typing import Any

import torch

from tests.helpers.families.family import Family
from tests.helpers.families.inputs import BATCH, Inputs, normal, rope, valid, video, with_text

_COGVIDEOX = {"attention_head_dim": 64, "sample_frames": 9, "max_text_seq_length": 11}
_COGVIDEOX |= {"sample_width": 12, "sample_height": 12}
_WAN = {"freq_dim": 32, "ffn_dim": 32, "rope_max_seq_len": 32}
_LTX = {"in_channels": 8, "cross_attention_dim": 64}
_LTX2 = _LTX | {
    "audio_in_channels": 8,
    "audio_out_channels": 8,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 16,
    "audio_cross_attention_dim": 32,
    "rope_double_precision": False,
}


def _ltx(**more: Any) -> Inputs:
    sizes = {"num_frames": 3, "height": 4, "width": 4}
    return with_text(3 * 4 * 4, 8, tokens=9, encoder_attention_mask=valid((9, 4), 9), **sizes, **more)


def _ltx2(**more: Any) -> Inputs:
    return _ltx(
        audio_hidden_states=normal(BATCH, 17, 8),
        audio_encoder_hidden_states=normal(BATCH, 9, 16),
        audio_encoder_attention_mask=valid((9, 4), 9),
        audio_num_frames=17,
        **more,
    )


def _allegro_rope(frames: int, height: int, width: int, head_dim: int) -> tuple[Any, Any]:
    """Make what the Allegro pipeline makes: per axis cosine and sine, and the positions."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    *frequencies, grid_t, grid_h, grid_w = get_3d_rotary_pos_embed_allegro(
        head_dim, ((0, 0), (height, width)), (height, width), frames
    )
    positions = torch.cartesian_prod(grid_t.long(), grid_h.long(), grid_w.long())
    return tuple(frequencies), tuple(positions.T.reshape(3, 1, -1))


VIDEOS: tuple[Family, ...] = (
    Family("cogvideox", "CogVideoXTransformer3DModel", _COGVIDEOX, lambda: with_text(3, 4, 12, 12, tokens=11)),
    Family(
        "cogvideox-1.5",
        "CogVideoXTransformer3DModel",
        _COGVIDEOX
        | {"use_rotary_positional_embeddings": True, "patch_size_t": 2, "patch_bias": False, "ofs_embed_dim": 16},
        lambda: with_text(4, 4, 12, 12, tokens=11, ofs=torch.full((1,), 2.0), image_rotary_emb=rope(72, 64)),
    ),
    Family(
        "hunyuan-video",
        "HunyuanVideoTransformer3DModel",
        {"num_layers": 1},
        lambda: video(
            encoder_attention_mask=valid((13, 5), 13),
            pooled_projections=normal(BATCH, 8),
            guidance=torch.full((BATCH,), 6000.0),
        ),
    ),
    Family(
        "hunyuan-video-1.5",
        "HunyuanVideo15Transformer3DModel",
        {"text_embed_2_dim": 8, "image_embed_dim": 8, "patch_size": 2},
        lambda: video(
            encoder_attention_mask=valid((13, 5), 13),
            encoder_hidden_states_2=normal(BATCH, 6, 8),
            encoder_attention_mask_2=valid((2, 6), 6),
            image_embeds=torch.zeros(BATCH, 3, 8),
        ),
    ),
    Family(
        "mochi",
        "MochiTransformer3DModel",
        {"attention_head_dim": 64, "pooled_projection_dim": 16, "time_embed_dim": 8, "max_sequence_length": 13},
        lambda: video(encoder_attention_mask=valid((13, 5), 13).bool()),
    ),
    Family("wan-t2v", "WanTransformer3DModel", _WAN, video),
    Family(
        "wan-i2v",
        "WanTransformer3DModel",
        _WAN | {"image_dim": 8, "added_kv_proj_dim": 64},
        lambda: video(tokens=512, encoder_hidden_states_image=normal(BATCH, 5, 8)),
    ),
    Family("ltx", "LTXVideoTransformer3DModel", _LTX, _ltx),
    Family("ltx-2", "LTX2VideoTransformer3DModel", _LTX2, _ltx2),
    Family(
        "ltx-2-gated",
        "LTX2VideoTransformer3DModel",
        _LTX2 | {"gated_attn": True, "audio_gated_attn": True, "perturbed_attn": True},
        lambda: _ltx2(spatio_temporal_guidance_blocks=[1], perturbation_mask=torch.tensor([0.0, 1.0])),
    ),
    Family(
        "allegro",
        "AllegroTransformer3DModel",
        {"attention_head_dim": 24, "cross_attention_dim": 48, "sample_frames": 3}
        | {"sample_height": 8, "sample_width": 8},
        lambda: video(
            attention_mask=torch.ones(BATCH, 3, 8, 8),
            encoder_attention_mask=valid((13, 5), 13)[:, None].float(),
            image_rotary_emb=_allegro_rope(3, 4, 4, 24),
        ),
    ),
    Family(
        "easyanimate",
        "EasyAnimateTransformer3DModel",
        {"patch_size": 2, "mmdit_layers": 1, "sample_width": 8, "sample_height": 8},
        video,
    ),
    Family(
        "cosmos",
        "CosmosTransformer3DModel",
        {"adaln_lora_dim": 4, "max_size": (4, 16, 16), "concat_padding_mask": False},
        video,
    ),
    Family(
        "kandinsky-5",
        "Kandinsky5Transformer3DModel",
        {"in_visual_dim": 4, "out_visual_dim": 4, "in_text_dim": 16, "in_text_dim2": 8, "time_dim": 16}
        | {"model_dim": 64, "ff_dim": 64, "num_text_blocks": 1, "num_visual_blocks": 1},
        lambda: {
            "hidden_states": normal(1, 3, 8, 8, 4),
            "encoder_hidden_states": normal(1, 13, 16),
            "timestep": torch.full((1,), 500.0),
            "pooled_projections": normal(1, 8),
            "visual_rope_pos": [torch.arange(3), torch.arange(4), torch.arange(4)],
            "text_rope_pos": torch.arange(13),
        },
        bfloat16_since="0.37",
    ),
)
