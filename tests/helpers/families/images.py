"""Families that make images."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from packaging.version import Version

from tests.helpers.families.family import Family
from tests.helpers.families.inputs import BATCH, Inputs, half, image, normal, timestep, valid, with_text

_TOKENS = {"in_channels": 8, "num_layers": 1}
_COGVIEW = {"original_size": 16.0, "target_size": 16.0, "crop_coords": 0.0}


def _flux(axes: int = 3, **more: Any) -> Inputs:
    places = torch.cartesian_prod(torch.arange(8.0), torch.arange(8.0), *[torch.zeros(1)] * (axes - 2))
    return with_text(64, 8, timestep=half(), img_ids=places, txt_ids=torch.zeros(13, axes), **more)


def _sd3() -> Inputs:
    return image(pooled_projections=normal(BATCH, 8))


def _cogview(**more: Any) -> Inputs:
    return image(**{name: torch.full((BATCH, 2), value) for name, value in _COGVIEW.items()}, **more)


def _qwen() -> Inputs:
    """The padding of the text lies in the middle of the sequence, [text, image]."""
    older = {"txt_seq_lens": [13, 13]} if Version(diffusers.__version__) < Version("0.37") else {}
    shapes = [[(1, 8, 8)]] * BATCH
    mask = valid((13, 5), 13)
    return with_text(64, 8, timestep=half(), encoder_hidden_states_mask=mask, img_shapes=shapes, **older)


IMAGES: tuple[Family, ...] = (
    Family("flux", "FluxTransformer2DModel", _TOKENS, lambda: _flux(pooled_projections=normal(BATCH, 8))),
    Family(
        "flux-2",
        "Flux2Transformer2DModel",
        _TOKENS | {"timestep_guidance_channels": 16, "axes_dims_rope": (8, 8, 8, 8)},
        lambda: _flux(4, guidance=torch.full((BATCH,), 4.0)),
    ),
    Family(
        "chroma",
        "ChromaTransformer2DModel",
        _TOKENS | {"approximator_num_channels": 8, "approximator_hidden_dim": 16, "approximator_layers": 1},
        lambda: _flux(attention_mask=valid((77, 70), 77).bool()),
    ),
    Family("sd3", "SD3Transformer2DModel", {"patch_size": 2, "caption_projection_dim": 64}, _sd3),
    Family(
        "sd3.5",
        "SD3Transformer2DModel",
        {"patch_size": 2, "caption_projection_dim": 64, "qk_norm": "rms_norm", "dual_attention_layers": (0,)},
        _sd3,
    ),
    Family("qwen-image", "QwenImageTransformer2DModel", {"in_channels": 8, "out_channels": 2}, _qwen),
    Family(
        "unet",
        "UNet2DConditionModel",
        {
            "sample_size": 8,
            "block_out_channels": (32, 64),
            "layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "cross_attention_dim": 16,
            "attention_head_dim": 2,
            "num_attention_heads": None,
            "norm_num_groups": 8,
        },
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
        {"rope_axes_dim": (16, 16)},
        lambda: _cogview(attention_mask=valid((13, 5), 13)),
    ),
    Family("cogview3+", "CogView3PlusTransformer2DModel", {}, _cogview),
    Family(
        "lumina2",
        "Lumina2Transformer2DModel",
        {"hidden_size": 96, "num_layers": 1, "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 16}
        | {"axes_dim_rope": (8, 8, 8), "axes_lens": (32, 32, 32)},
        lambda: image(timestep=half(), encoder_attention_mask=valid((13, 5), 13).bool()),
    ),
    Family(
        "lumina",
        "LuminaNextDiT2DModel",
        {"hidden_size": 96, "num_layers": 1, "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 16}
        | {"cross_attention_dim": 16},
        lambda: image(
            timestep=half(),
            encoder_mask=valid((13, 5), 13),
            image_rotary_emb=torch.polar(torch.ones(8, 8, 12), torch.rand(8, 8, 12)),
            cross_attention_kwargs={"base_sequence_length": 16},
        ),
    ),
    Family(
        "z-image",
        "ZImageTransformer2DModel",
        {"dim": 64, "n_heads": 2, "n_kv_heads": 2, "axes_lens": [64, 32, 32]},
        lambda: {
            "x": [normal(4, 1, 16, 16), normal(4, 1, 8, 8)],
            "t": half(),
            "cap_feats": [normal(13, 16), normal(5, 16)],
        },
    ),
    Family(
        "hunyuan-image",
        "HunyuanImageTransformer2DModel",
        {"num_layers": 1, "rope_axes_dim": (16, 16)},
        lambda: with_text(4, 8, 8, encoder_attention_mask=valid((13, 5), 13)),
    ),
)
