"""A tiny model of every diffusers family, built from its config, and the inputs of one forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import pytest
import torch
from packaging.version import Version

_DIFFUSERS = Version(diffusers.__version__)
BATCH = 2

Inputs = dict[str, Any]


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape)


def _timestep() -> torch.Tensor:
    return torch.full((BATCH,), 500.0)


def _valid(lengths: tuple[int, ...], total: int) -> torch.Tensor:
    """(batch, total) of 1 in the first `lengths[b]` places of row b, else 0; int64."""
    return (torch.arange(total) < torch.tensor(lengths)[:, None]).long()


def _rope(tokens: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(tokens).float(), 0.7 ** torch.arange(head_dim // 2)).repeat_interleave(2, dim=1)
    return angles.cos(), angles.sin()


@dataclass(frozen=True)
class Family:
    """A model class of diffusers at toy size.

    Attributes:
        name: of the case.
        model_class: name in `diffusers`.
        config: arguments of the model class.
        inputs: makes the keyword arguments of one forward pass (float32, batch 2), by torch's global generator.
        bfloat16_since: the diffusers whose own processors run it in bfloat16.
    """

    name: str
    model_class: str
    config: dict[str, Any]
    inputs: Callable[[], Inputs]
    bfloat16_since: str = "0"

    def build(self, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
        """The model in evaluation mode with seeded weights; skips the test where diffusers lacks the class."""
        if not hasattr(diffusers, self.model_class):
            pytest.skip(f"diffusers {diffusers.__version__} has no {self.model_class}")
        if dtype == torch.bfloat16 and Version(self.bfloat16_since) > _DIFFUSERS:
            pytest.skip(f"diffusers {diffusers.__version__} does not run {self.name} in bfloat16")
        torch.manual_seed(0)
        model = getattr(diffusers, self.model_class)(**self.config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.any():  # gates and output layers that start at 0 would hide the attention
                    parameter.normal_(std=0.2)
        model.to(dtype)
        keep = set(model._keep_in_fp32_modules or ())  # as from_pretrained(torch_dtype=dtype) does
        for name, parameter in model.named_parameters():
            if keep & set(name.split(".")):
                parameter.data = parameter.data.float()
        return model

    def make_inputs(self, dtype: torch.dtype = torch.float32) -> Inputs:
        """Seeded inputs in `dtype`; masks, sizes and complex tensors as they are."""
        torch.manual_seed(1)
        return _cast(self.inputs(), dtype)

    def __str__(self) -> str:
        return self.name


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    return value


@torch.no_grad()
def run(model: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
    """One forward pass; all outputs flattened into one vector."""
    outputs = model(**inputs, return_dict=False)
    return torch.cat([leaf.flatten() for leaf in _leaves(outputs)])


def _leaves(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [leaf for item in value for leaf in _leaves(item)]


_COGVIDEOX = {
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 16,
    "text_embed_dim": 16,
    "num_layers": 2,
    "sample_width": 12,
    "sample_height": 12,
    "sample_frames": 9,
    "max_text_seq_length": 11,
}
_HUNYUAN_VIDEO = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "text_embed_dim": 16,
    "pooled_projection_dim": 8,
    "rope_axes_dim": (8, 12, 12),
}
_WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 32,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
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
_LTX2 = {
    "in_channels": 8,
    "out_channels": 8,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "cross_attention_dim": 64,
    "audio_in_channels": 8,
    "audio_out_channels": 8,
    "audio_num_attention_heads": 2,
    "audio_attention_head_dim": 16,
    "audio_cross_attention_dim": 32,
    "num_layers": 2,
    "caption_channels": 16,
    "rope_double_precision": False,
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


def _video_and_text() -> Inputs:
    return {
        "hidden_states": _normal(BATCH, 4, 3, 8, 8),
        "timestep": _timestep(),
        "encoder_hidden_states": _normal(BATCH, 13, 16),
    }


def _image_tokens_and_text() -> Inputs:
    return {
        "hidden_states": _normal(BATCH, 64, 8),
        "encoder_hidden_states": _normal(BATCH, 13, 16),
        "timestep": torch.full((BATCH,), 0.5),
    }


def _flux_inputs(axes: int = 3) -> Inputs:
    return _image_tokens_and_text() | {
        "img_ids": torch.cartesian_prod(torch.arange(8.0), torch.arange(8.0), *[torch.zeros(1)] * (axes - 2)),
        "txt_ids": torch.zeros(13, axes),
    }


def _ltx2_inputs() -> Inputs:
    return {
        "hidden_states": _normal(BATCH, 3 * 4 * 4, 8),
        "audio_hidden_states": _normal(BATCH, 17, 8),
        "encoder_hidden_states": _normal(BATCH, 9, 16),
        "audio_encoder_hidden_states": _normal(BATCH, 9, 16),
        "timestep": _timestep(),
        "encoder_attention_mask": _valid((9, 4), 9),
        "audio_encoder_attention_mask": _valid((9, 4), 9),
        "num_frames": 3,
        "height": 4,
        "width": 4,
        "audio_num_frames": 17,
    }


FAMILIES: tuple[Family, ...] = (
    Family(
        "cogvideox",
        "CogVideoXTransformer3DModel",
        _COGVIDEOX,
        lambda: {
            "hidden_states": _normal(BATCH, 3, 4, 12, 12),
            "encoder_hidden_states": _normal(BATCH, 11, 16),
            "timestep": _timestep(),
        },
    ),
    Family(
        "cogvideox-1.5",
        "CogVideoXTransformer3DModel",
        _COGVIDEOX
        | {
            "use_rotary_positional_embeddings": True,
            "patch_size_t": 2,
            "patch_bias": False,
            "ofs_embed_dim": 16,
        },
        lambda: {
            "hidden_states": _normal(BATCH, 4, 4, 12, 12),
            "encoder_hidden_states": _normal(BATCH, 11, 16),
            "timestep": _timestep(),
            "ofs": torch.full((1,), 2.0),
            "image_rotary_emb": _rope(72, 64),
        },
    ),
    Family(
        "hunyuan-video",
        "HunyuanVideoTransformer3DModel",
        _HUNYUAN_VIDEO,
        lambda: (
            _video_and_text()
            | {
                "encoder_attention_mask": _valid((13, 5), 13),
                "pooled_projections": _normal(BATCH, 8),
                "guidance": torch.full((BATCH,), 6000.0),
            }
        ),
    ),
    Family(
        "hunyuan-video-1.5",
        "HunyuanVideo15Transformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 32,
            "num_layers": 2,
            "num_refiner_layers": 1,
            "text_embed_dim": 16,
            "text_embed_2_dim": 8,
            "image_embed_dim": 8,
            "rope_axes_dim": (8, 12, 12),
            "patch_size": 2,
        },
        lambda: (
            _video_and_text()
            | {
                "encoder_attention_mask": _valid((13, 5), 13),
                "encoder_hidden_states_2": _normal(BATCH, 6, 8),
                "encoder_attention_mask_2": _valid((2, 6), 6),
                "image_embeds": torch.zeros(BATCH, 3, 8),
            }
        ),
    ),
    Family(
        "mochi",
        "MochiTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 64,
            "num_layers": 2,
            "pooled_projection_dim": 16,
            "in_channels": 4,
            "text_embed_dim": 16,
            "time_embed_dim": 8,
            "max_sequence_length": 13,
        },
        lambda: _video_and_text() | {"encoder_attention_mask": _valid((13, 5), 13).bool()},
    ),
    Family("wan-t2v", "WanTransformer3DModel", _WAN, _video_and_text),
    Family(
        "wan-i2v",
        "WanTransformer3DModel",
        _WAN | {"image_dim": 8, "added_kv_proj_dim": 64},
        lambda: (
            _video_and_text()
            | {"encoder_hidden_states": _normal(BATCH, 512, 16), "encoder_hidden_states_image": _normal(BATCH, 5, 8)}
        ),
    ),
    Family(
        "ltx",
        "LTXVideoTransformer3DModel",
        {
            "in_channels": 8,
            "out_channels": 8,
            "num_attention_heads": 2,
            "attention_head_dim": 32,
            "cross_attention_dim": 64,
            "num_layers": 2,
            "caption_channels": 16,
        },
        lambda: {
            "hidden_states": _normal(BATCH, 3 * 4 * 4, 8),
            "encoder_hidden_states": _normal(BATCH, 9, 16),
            "timestep": _timestep(),
            "encoder_attention_mask": _valid((9, 4), 9),
            "num_frames": 3,
            "height": 4,
            "width": 4,
        },
    ),
    Family("ltx-2", "LTX2VideoTransformer3DModel", _LTX2, _ltx2_inputs),
    Family(
        "ltx-2-gated",
        "LTX2VideoTransformer3DModel",
        _LTX2 | {"gated_attn": True, "audio_gated_attn": True, "perturbed_attn": True},
        lambda: (
            _ltx2_inputs() | {"spatio_temporal_guidance_blocks": [1], "perturbation_mask": torch.tensor([0.0, 1.0])}
        ),
    ),
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
        lambda: _flux_inputs() | {"pooled_projections": _normal(BATCH, 8)},
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
        lambda: _flux_inputs() | {"attention_mask": _valid((77, 70), 77).bool()},
    ),
    Family(
        "sd3",
        "SD3Transformer2DModel",
        _SD3,
        lambda: {
            "hidden_states": _normal(BATCH, 4, 16, 16),
            "encoder_hidden_states": _normal(BATCH, 13, 16),
            "pooled_projections": _normal(BATCH, 8),
            "timestep": _timestep(),
        },
    ),
    Family(
        "sd3.5",
        "SD3Transformer2DModel",
        _SD3 | {"qk_norm": "rms_norm", "dual_attention_layers": (0,)},
        lambda: {
            "hidden_states": _normal(BATCH, 4, 16, 16),
            "encoder_hidden_states": _normal(BATCH, 13, 16),
            "pooled_projections": _normal(BATCH, 8),
            "timestep": _timestep(),
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
                "encoder_hidden_states_mask": _valid((13, 5), 13),
                "img_shapes": [[(1, 8, 8)]] * BATCH,
            }
            | ({"txt_seq_lens": [13, 13]} if Version("0.37") > _DIFFUSERS else {})
        ),
    ),
    Family(
        "unet",
        "UNet2DConditionModel",
        _UNET,
        lambda: {
            "sample": _normal(BATCH, 4, 16, 16),
            "timestep": _timestep(),
            "encoder_hidden_states": _normal(BATCH, 13, 16),
            "encoder_attention_mask": _valid((13, 5), 13),
        },
    ),
    Family(
        "allegro",
        "AllegroTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 24,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "cross_attention_dim": 48,
            "caption_channels": 16,
            "sample_height": 8,
            "sample_width": 8,
            "sample_frames": 3,
        },
        lambda: (
            _video_and_text()
            | {
                "attention_mask": torch.ones(BATCH, 3, 8, 8),
                "encoder_attention_mask": _valid((13, 5), 13)[:, None].float(),
                "image_rotary_emb": _allegro_rope(3, 4, 4, 24),
            }
        ),
    ),
    Family(
        "easyanimate",
        "EasyAnimateTransformer3DModel",
        {
            "num_attention_heads": 2,
            "attention_head_dim": 32,
            "in_channels": 4,
            "out_channels": 4,
            "patch_size": 2,
            "num_layers": 2,
            "mmdit_layers": 1,
            "time_embed_dim": 16,
            "text_embed_dim": 16,
            "sample_width": 8,
            "sample_height": 8,
        },
        _video_and_text,
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
            "hidden_states": _normal(BATCH, 4, 16, 16),
            "encoder_hidden_states": _normal(BATCH, 13, 16),
            "timestep": _timestep(),
            "original_size": torch.full((BATCH, 2), 16.0),
            "target_size": torch.full((BATCH, 2), 16.0),
            "crop_coords": torch.zeros(BATCH, 2),
            "attention_mask": _valid((13, 5), 13),
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
            "hidden_states": _normal(BATCH, 4, 16, 16),
            "encoder_hidden_states": _normal(BATCH, 13, 16),
            "timestep": _timestep(),
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
            "hidden_states": _normal(BATCH, 4, 16, 16),
            "timestep": torch.full((BATCH,), 0.5),
            "encoder_hidden_states": _normal(BATCH, 13, 16),
            "encoder_attention_mask": _valid((13, 5), 13).bool(),
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
            "hidden_states": _normal(BATCH, 4, 16, 16),
            "timestep": torch.full((BATCH,), 0.5),
            "encoder_hidden_states": _normal(BATCH, 13, 16),
            "encoder_mask": _valid((13, 5), 13),
            "image_rotary_emb": torch.polar(torch.ones(8, 8, 12), torch.rand(8, 8, 12)),
            "cross_attention_kwargs": {"base_sequence_length": 16},
        },
    ),
    Family(
        "cosmos",
        "CosmosTransformer3DModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_attention_heads": 2,
            "attention_head_dim": 32,
            "num_layers": 2,
            "text_embed_dim": 16,
            "adaln_lora_dim": 4,
            "max_size": (4, 16, 16),
            "concat_padding_mask": False,
        },
        _video_and_text,
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
            "x": [_normal(4, 1, 16, 16), _normal(4, 1, 8, 8)],
            "t": torch.full((BATCH,), 0.5),
            "cap_feats": [_normal(13, 16), _normal(5, 16)],
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
            "hidden_states": _normal(BATCH, 4, 8, 8),
            "timestep": _timestep(),
            "encoder_hidden_states": _normal(BATCH, 13, 16),
            "encoder_attention_mask": _valid((13, 5), 13),
        },
    ),
    Family(
        "kandinsky-5",
        "Kandinsky5Transformer3DModel",
        {
            "in_visual_dim": 4,
            "out_visual_dim": 4,
            "in_text_dim": 16,
            "in_text_dim2": 8,
            "time_dim": 16,
            "model_dim": 64,
            "ff_dim": 64,
            "num_text_blocks": 1,
            "num_visual_blocks": 1,
            "axes_dims": (8, 12, 12),
        },
        lambda: {
            "hidden_states": _normal(1, 3, 8, 8, 4),
            "encoder_hidden_states": _normal(1, 13, 16),
            "timestep": torch.full((1,), 500.0),
            "pooled_projections": _normal(1, 8),
            "visual_rope_pos": [torch.arange(3), torch.arange(4), torch.arange(4)],
            "text_rope_pos": torch.arange(13),
        },
        bfloat16_since="0.37",
    ),
    Family(
        "stable-audio",
        "StableAudioDiTModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 32,
            "num_attention_heads": 4,
            "num_key_value_attention_heads": 2,
            "cross_attention_dim": 64,
            "time_proj_dim": 16,
            "global_states_input_dim": 16,
            "cross_attention_input_dim": 16,
        },
        lambda: {
            "hidden_states": _normal(BATCH, 4, 40),
            "timestep": torch.full((BATCH,), 0.5),
            "encoder_hidden_states": _normal(BATCH, 13, 16),
            "global_hidden_states": _normal(BATCH, 1, 16),
            "rotary_embedding": _rope(41, 16),
            "attention_mask": _valid((40, 25), 40).bool(),
            "encoder_attention_mask": _valid((13, 5), 13).bool(),
        },
    ),
)


def _allegro_rope(frames: int, height: int, width: int, head_dim: int) -> tuple[Any, Any]:
    """As the Allegro pipeline makes it: per axis cosine and sine, and the positions."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed_allegro

    *frequencies, grid_t, grid_h, grid_w = get_3d_rotary_pos_embed_allegro(
        head_dim, ((0, 0), (height, width)), (height, width), frames
    )
    positions = torch.cartesian_prod(grid_t.long(), grid_h.long(), grid_w.long())
    return tuple(frequencies), tuple(positions.T.reshape(3, 1, -1))


def family(name: str) -> Family:
    """The family of that name."""
    return next(case for case in FAMILIES if case.name == name)


each_family = pytest.mark.parametrize("case", FAMILIES, ids=str)
