"""A tiny model of a diffusers family, and the run of one forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import pytest
import torch
from packaging.version import Version

from tests.helpers.families.inputs import Inputs

_DIFFUSERS = Version(diffusers.__version__)
_SIZES = {
    1: "num_single_layers num_refiner_layers n_layers n_refiner_layers",
    2: "num_layers num_attention_heads",
    4: "in_channels",
    8: "pooled_projection_dim condition_dim",
    16: "joint_attention_dim text_embed_dim text_dim caption_channels cap_feat_dim time_embed_dim sample_size "
    "pos_embed_max_size",
    32: "attention_head_dim",
    (8, 12, 12): "axes_dims_rope rope_axes_dim axes_dims",
}
SIZES = {name: size for size, names in _SIZES.items() for name in names.split()}
"""Arguments of model classes whose config does not give them."""


@dataclass(frozen=True)
class Family:
    """A model class of diffusers at toy size.

    Attributes:
        name: of the case.
        model_class: name in `diffusers`.
        config: arguments of the model class; `SIZES` has others, and the output has as many channels as the input.
        inputs: makes the keyword arguments of one forward pass (float32, batch 2), by torch's global generator.
        bfloat16_since: the diffusers whose own processors run it in bfloat16.
    """

    name: str
    model_class: str
    config: dict[str, Any]
    inputs: Callable[[], Inputs]
    bfloat16_since: str = "0"

    def __post_init__(self) -> None:
        model_class = getattr(diffusers, self.model_class, None)
        names = () if model_class is None else inspect.signature(model_class).parameters
        sizes = SIZES | self.config
        sizes.setdefault("out_channels", sizes["in_channels"])
        object.__setattr__(
            self, "config", {name: sizes[name] for name in sizes if name in names or name in self.config}
        )

    def build(self, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
        """The model in evaluation mode with seeded weights; skips the test where diffusers lacks the class."""
        if not hasattr(diffusers, self.model_class):
            pytest.skip(f"diffusers {diffusers.__version__} has no {self.model_class}")
        if dtype == torch.bfloat16 and Version(self.bfloat16_since) > _DIFFUSERS:
            pytest.skip(f"diffusers {diffusers.__version__} does not run {self.name} in bfloat16")
        torch.manual_seed(0)
        model = getattr(diffusers, self.model_class)(**self.config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                # Gates and output layers that start at 0 would hide the attention; pad tokens are not initialised.
                if name.endswith("pad_token") or not parameter.any():
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

    def draw(self, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, Inputs]:
        """The model and its inputs."""
        return self.build(dtype), self.make_inputs(dtype)

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
