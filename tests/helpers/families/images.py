"""Families that make images."""

from __future__ import annotations

import diffusers
import torch
from packaging.version import Version

from .family import Family
from .inputs import BATCH, Inputs, normal, timestep, valid

_SD3 = {
    "sample_size": 16,
    "patch_size": 2,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 2,
    "joint_attention_dim": 16,
    "caption_projection_dim": 64,
    "pooled_projection_dim": 8,
    "pos_embed_max_size": 16,
}
_UNET = {
    "sample_size": 8,
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "cross_attention_dim": 16,
    "attention_head_dim": 2,
    "norm_num_groups": 8,
}


def _image_tokens_and_text() -> Inputs:
    return {
        "hidden_states": normal(BATCH, 64, 8),
        "encoder_hidden_states": normal(BATCH, 13, 16),
        "timestep": torch.full((BATCH,), 0.5),
    }


def _flux_inputs(axes: int = 3) -> Inputs:
    return _image_tokens_and_text() | {
        "img_ids": torch.cartesian_prod(torch.arange(8.0), torch.arange(8.0), *[torch.zeros(1)] * (axes - 2)),
        "txt_ids": torch.zeros(13, axes),
    }


IMAGES: tuple[Family, ...] = (
    Family(
        "flux",
        "FluxTransformer2DModel",
        {
            "in_channels": 8,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "pooled_projection_dim": 8,
            "axes_dims_rope": (8, 12, 12),
        },
        lambda: _flux_inputs() | {"pooled_projections": normal(BATCH, 8)},
    ),
    Family(
        "flux-2",
        "Flux2Transformer2DModel",
        {
            "in_channels": 8,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "timestep_guidance_channels": 16,
            "axes_dims_rope": (8, 8, 8, 8),
        },
        lambda: _flux_inputs(4) | {"guidance": torch.full((BATCH,), 4.0)},
    ),
    Family(
        "chroma",
        "ChromaTransformer2DModel",
        {
            "in_channels": 8,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "axes_dims_rope": (8, 12, 12),
            "approximator_num_channels": 8,
            "approximator_hidden_dim": 16,
            "approximator_layers": 1,
        },
        lambda: _flux_inputs() | {"attention_mask": valid((77, 70), 77).bool()},
    ),
    Family(
        "sd3",
        "SD3Transformer2DModel",
        _SD3,
        lambda: {
            "hidden_states": normal(BATCH, 4, 16, 16),
            "encoder_hidden_states": normal(BATCH, 13, 16),
            "pooled_projections": normal(BATCH, 8),
            "timestep": timestep(),
        },
    ),
    Family(
        "sd3.5",
        "SD3Transformer2DModel",
        _SD3 | {"qk_norm": "rms_norm", "dual_attention_layers": (0,)},
        lambda: {
            "hidden_states": normal(BATCH, 4, 16, 16),
            "encoder_hidden_states": normal(BATCH, 13, 16),
            "pooled_projections": normal(BATCH, 8),
            "timestep": timestep(),
        },
    ),
    Family(
        "qwen-image",
        "QwenImageTransformer2DModel",
        {
            "in_channels": 8,
            "out_channels": 2,
            "num_layers": 2,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "joint_attention_dim": 16,
            "axes_dims_rope": (8, 12, 12),
        },
        lambda: (
            _image_tokens_and_text()
            | {
                # [text, image]: the padding of the text lies in the middle of the sequence
                "encoder_hidden_states_mask": valid((13, 5), 13),
                "img_shapes": [[(1, 8, 8)]] * BATCH,
            }
            | ({"txt_seq_lens": [13, 13]} if Version(diffusers.__version__) < Version("0.37") else {})
        ),
    ),
    Family(
        "unet",
        "UNet2DConditionModel",
        _UNET,
        lambda: {
            "sample": normal(BATCH, 4, 16, 16),
            "timestep": timestep(),
            "encoder_hidden_states": normal(BATCH, 13, 16),
            "encoder_attention_mask": valid((13, 5), 13),
        },
    ),
    Family(
        "cogview4",
        "CogView4Transformer2DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "text_embed_dim": 16,
            "time_embed_dim": 16,
            "condition_dim": 8,
            "pos_embed_max_size": 16,
            "sample_size": 16,
            "rope_axes_dim": (16, 16),
        },
        lambda: {
            "hidden_states": normal(BATCH, 4, 16, 16),
            "encoder_hidden_states": normal(BATCH, 13, 16),
            "timestep": timestep(),
            "original_size": torch.full((BATCH, 2), 16.0),
            "target_size": torch.full((BATCH, 2), 16.0),
            "crop_coords": torch.zeros(BATCH, 2),
            "attention_mask": valid((13, 5), 13),
        },
    ),
    Family(
        "cogview3+",
        "CogView3PlusTransformer2DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 32,
            "num_attention_heads": 2,
            "text_embed_dim": 16,
            "time_embed_dim": 16,
            "condition_dim": 8,
            "pos_embed_max_size": 16,
            "sample_size": 16,
        },
        lambda: {
            "hidden_states": normal(BATCH, 4, 16, 16),
            "encoder_hidden_states": normal(BATCH, 13, 16),
            "timestep": timestep(),
            "original_size": torch.full((BATCH, 2), 16.0),
            "target_size": torch.full((BATCH, 2), 16.0),
            "crop_coords": torch.zeros(BATCH, 2),
        },
    ),
    Family(
        "lumina2",
        "Lumina2Transformer2DModel",
        {
            "sample_size": 16,
            "in_channels": 4,
            "hidden_size": 96,
            "num_layers": 1,
            "num_refiner_layers": 1,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "multiple_of": 16,
            "axes_dim_rope": (8, 8, 8),
            "axes_lens": (32, 32, 32),
            "cap_feat_dim": 16,
        },
        lambda: {
            "hidden_states": normal(BATCH, 4, 16, 16),
            "timestep": torch.full((BATCH,), 0.5),
            "encoder_hidden_states": normal(BATCH, 13, 16),
            "encoder_attention_mask": valid((13, 5), 13).bool(),
        },
    ),
    Family(
        "lumina",
        "LuminaNextDiT2DModel",
        {
            "sample_size": 16,
            "in_channels": 4,
            "hidden_size": 96,
            "num_layers": 1,
            "num_attention_heads": 4,
            "num_kv_heads": 2,
            "multiple_of": 16,
            "cross_attention_dim": 16,
        },
        lambda: {
            "hidden_states": normal(BATCH, 4, 16, 16),
            "timestep": torch.full((BATCH,), 0.5),
            "encoder_hidden_states": normal(BATCH, 13, 16),
            "encoder_mask": valid((13, 5), 13),
            "image_rotary_emb": torch.polar(torch.ones(8, 8, 12), torch.rand(8, 8, 12)),
            "cross_attention_kwargs": {"base_sequence_length": 16},
        },
    ),
    Family(
        "z-image",
        "ZImageTransformer2DModel",
        {
            "in_channels": 4,
            "dim": 64,
            "n_layers": 1,
            "n_refiner_layers": 1,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 16,
            "axes_dims": [8, 12, 12],
            "axes_lens": [64, 32, 32],
        },
        lambda: {
            "x": [normal(4, 1, 16, 16), normal(4, 1, 8, 8)],
            "t": torch.full((BATCH,), 0.5),
            "cap_feats": [normal(13, 16), normal(5, 16)],
        },
    ),
    Family(
        "hunyuan-image",
        "HunyuanImageTransformer2DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 32,
            "num_layers": 1,
            "num_single_layers": 1,
            "num_refiner_layers": 1,
            "text_embed_dim": 16,
            "rope_axes_dim": (16, 16),
        },
        lambda: {
            "hidden_states": normal(BATCH, 4, 8, 8),
            "timestep": timestep(),
            "encoder_hidden_states": normal(BATCH, 13, 16),
            "encoder_attention_mask": valid((13, 5), 13),
        },
    ),
)
