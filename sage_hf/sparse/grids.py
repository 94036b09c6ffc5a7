"""The grid of video tokens in diffusers' denoisers, and where text lies beside it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class Layout:
    """Order of the tokens in a family's self-attention.

    Attributes:
        grid: function(model, arguments of its forward by name) that returns (frames, height, width) in tokens.
        text: where the tokens lie that self-attention has beyond those of the grid.
    """

    grid: Callable[[Any, dict[str, Any]], Grid]
    text: Literal["first", "last"]


def layout_of(model: Any) -> Layout | None:
    """Return the layout of a denoiser, or None if it is not known: its tokens then stay in raster order."""
    return _LAYOUTS.get(type(model).__name__)


def arguments_of(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of the model's forward by name."""
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    return dict(zip(names, args, strict=False)) | kwargs


def _patches(states: torch.Tensor, patch: tuple[int, int, int], first: int = 2) -> Grid:
    """Return the grid of latents (batch, …, frames, …, height, width), whose frames are dimension `first`."""
    frames, height, width = states.shape[first], states.shape[-2], states.shape[-1]
    return frames // patch[0], height // patch[1], width // patch[2]


def _wan(model: Any, arguments: dict[str, Any]) -> Grid:
    return _patches(arguments["hidden_states"], tuple(model.config.patch_size))


def _cogvideox(model: Any, arguments: dict[str, Any]) -> Grid:
    size, size_t = model.config.patch_size, model.config.patch_size_t or 1
    return _patches(arguments["hidden_states"], (size_t, size, size), first=1)


def _hunyuan_video(model: Any, arguments: dict[str, Any]) -> Grid:
    size, size_t = model.config.patch_size, model.config.patch_size_t
    return _patches(arguments["hidden_states"], (size_t, size, size))


def _mochi(model: Any, arguments: dict[str, Any]) -> Grid:
    return _patches(arguments["hidden_states"], (1, model.config.patch_size, model.config.patch_size))


def _ltx(model: Any, arguments: dict[str, Any]) -> Grid:
    return arguments["num_frames"], arguments["height"], arguments["width"]


_LAYOUTS = {
    "CogVideoXTransformer3DModel": Layout(_cogvideox, "first"),
    "HunyuanVideoTransformer3DModel": Layout(_hunyuan_video, "last"),
    "LTXVideoTransformer3DModel": Layout(_ltx, "last"),
    "MochiTransformer3DModel": Layout(_mochi, "last"),
    "WanTransformer3DModel": Layout(_wan, "last"),
}
