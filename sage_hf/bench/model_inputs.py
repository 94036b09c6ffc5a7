"""Inputs of the models whose steps are measured, as the pipelines make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ModelInputs = dict[str, Any]
"""Arguments of a model's forward, by name."""


class Draw:
    """Random inputs of models, on a device; each new `Draw` draws the same inputs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(0)

    def normal(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return standard normal elements."""
        return torch.randn(size, generator=self._generator, device=self.device, dtype=dtype)

    def ids(self, vocabulary: int, *size: int) -> Tensor:
        """Return token ids below `vocabulary`."""
        return torch.randint(vocabulary, size, generator=self._generator, device=self.device)

    def full(self, value: float, *size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Return elements that are all `value`."""
        return torch.full(size, value, device=self.device, dtype=dtype)

    def padding(self, batch: int, tokens: int, valid: int) -> Tensor:
        """Return a mask (batch, tokens), True for the first `valid` tokens."""
        mask = torch.arange(tokens, device=self.device) < valid
        return mask.expand(batch, tokens).contiguous()


def cogvideox(batch: int, rotary: bool = False) -> Callable[[Draw], ModelInputs]:
    """Return a drawer for CogVideoX: `batch` videos of 49 frames, 480×720; `rotary` for the larger models."""

    def inputs(draw: Draw) -> ModelInputs:
        tensors: ModelInputs = {
            "hidden_states": draw.normal(batch, 13, 16, 60, 90),
            "encoder_hidden_states": draw.normal(batch, 226, 4096),
            "timestep": draw.full(500, batch, dtype=torch.int64),
        }
        if rotary:
            angles = draw.normal(13 * 30 * 45, 64, dtype=torch.float32)
            tensors["image_rotary_emb"] = (angles.cos(), angles.sin())
        return tensors

    return inputs


def hunyuanvideo(draw: Draw) -> ModelInputs:
    """Draw for HunyuanVideo: 129 frames of 720×1280, text of 64 tokens padded to 256."""
    return {
        "hidden_states": draw.normal(1, 16, 33, 90, 160),
        "timestep": draw.full(500, 1, dtype=torch.int64),
        "encoder_hidden_states": draw.normal(1, 256, 4096),
        "encoder_attention_mask": draw.padding(1, 256, 64),
        "pooled_projections": draw.normal(1, 768),
        "guidance": draw.full(6000, 1),
    }


def mochi(draw: Draw) -> ModelInputs:
    """Draw for Mochi: both halves of guidance, 163 frames of 480×848."""
    return {
        "hidden_states": draw.normal(2, 12, 28, 60, 106),
        "encoder_hidden_states": draw.normal(2, 256, 4096),
        "timestep": draw.full(500, 2, dtype=torch.int64),
        "encoder_attention_mask": draw.padding(2, 256, 256),
    }


def wan(frames: int, height: int, width: int) -> Callable[[Draw], ModelInputs]:
    """Return a drawer for Wan: one video of that size in latents."""

    def inputs(draw: Draw) -> ModelInputs:
        return {
            "hidden_states": draw.normal(1, 16, frames, height, width),
            "timestep": draw.full(500, 1, dtype=torch.int64),
            "encoder_hidden_states": draw.normal(1, 512, 4096),
        }

    return inputs


def flux(side: int) -> Callable[[Draw], ModelInputs]:
    """Return a drawer for Flux: one image of `side`² pixels."""

    def inputs(draw: Draw) -> ModelInputs:
        tokens = (side // 16) ** 2
        return {
            "hidden_states": draw.normal(1, tokens, 64),
            "encoder_hidden_states": draw.normal(1, 512, 4096),
            "pooled_projections": draw.normal(1, 768),
            "timestep": draw.full(0.5, 1),
            "img_ids": draw.full(1, tokens, 3),
            "txt_ids": draw.full(0, 512, 3),
            "guidance": draw.full(3.5, 1, dtype=torch.float32),
        }

    return inputs


def sd3(draw: Draw) -> ModelInputs:
    """Draw for SD 3.5: both halves of guidance, 1024² pixels."""
    return {
        "hidden_states": draw.normal(2, 16, 128, 128),
        "encoder_hidden_states": draw.normal(2, 333, 4096),
        "pooled_projections": draw.normal(2, 2048),
        "timestep": draw.full(500, 2, dtype=torch.int64),
    }


def sdxl(draw: Draw) -> ModelInputs:
    """Draw for SDXL: both halves of guidance, 1024² pixels."""
    return {
        "sample": draw.normal(2, 4, 128, 128),
        "timestep": draw.full(500, dtype=torch.int64),
        "encoder_hidden_states": draw.normal(2, 77, 2048),
        "added_cond_kwargs": {"text_embeds": draw.normal(2, 1280), "time_ids": draw.full(1024, 2, 6)},
    }


def qwen_image(draw: Draw) -> ModelInputs:
    """Draw for Qwen-Image: one image of 1024² pixels."""
    return {
        "hidden_states": draw.normal(1, 64 * 64, 64),
        "encoder_hidden_states": draw.normal(1, 128, 3584),
        "timestep": draw.full(0.5, 1),
        "img_shapes": [[(1, 64, 64)]],
    }


def text(tokens: int, vocabulary: int) -> Callable[[Draw], ModelInputs]:
    """Return a drawer of a prompt; the model computes the last token's logits."""
    return lambda draw: {"input_ids": draw.ids(vocabulary, 1, tokens), "logits_to_keep": 1}


def token_batch(tokens: int, vocabulary: int) -> Callable[[Draw], ModelInputs]:
    """Return a drawer of a batch for training, with its attention mask: if it is missing, older transformers makes
    one."""
    return lambda draw: {
        "input_ids": draw.ids(vocabulary, 1, tokens),
        "attention_mask": draw.full(1, 1, tokens, dtype=torch.int64),
        "use_cache": False,
    }
