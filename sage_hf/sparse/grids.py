"""The grid of video tokens in diffusers' denoisers, the place of text, and other tensors with a row for each token."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sage_hf.identity import name_in_diffusers

Grid = tuple[int, int, int]


@dataclass(frozen=True)
class TokenLayout:
    """Order of the tokens in a family's self-attention, and its blocks' arguments with an entry for each token.

    Attributes:
        grid: function(model, arguments of its forward by name) that returns (frames, height, width) in tokens; None if
            a call does not define it.
        text: the place of the tokens that self-attention has in addition to the grid.
        blocks: the model's lists of blocks in the order in which they run. The first argument of a block, and its
            output or the first of its outputs, are video tokens, `hidden_states` (batch, tokens, channels).
        of_tokens: other arguments of blocks that may have an entry for each video token: the number of dimensions of
            their tensors, and the dimension of tokens.
    """

    grid: Callable[[Any, dict[str, Any]], Grid | None]
    text: Literal["first", "last"]
    blocks: tuple[str, ...]
    of_tokens: Mapping[str, tuple[int, int]]


def layout_of(model: Any) -> TokenLayout | None:
    """Return the layout of a denoiser; None if it is unknown: its tokens then stay in raster order."""
    return _LAYOUTS.get(name_in_diffusers(type(model)))


def arguments_of(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of the model's forward by name."""
    return by_name(list(inspect.signature(type(model).forward).parameters)[1:], args, kwargs)


def by_name(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name; `names` are the names of positional arguments."""
    return {names[place]: x for place, x in enumerate(args[: len(names)])} | kwargs


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


def _ltx(model: Any, arguments: dict[str, Any]) -> Grid | None:
    if arguments.get("video_coords") is not None:  # tokens of conditions lie among the video's tokens
        return None
    return arguments["num_frames"], arguments["height"], arguments["width"]


_ROTARY = {"image_rotary_emb": (2, 0), "freqs_cis": (2, 0)}
_DOUBLE_AND_SINGLE = ("transformer_blocks", "single_transformer_blocks")
_LAYOUTS = {
    "CogVideoXTransformer3DModel": TokenLayout(_cogvideox, "first", ("transformer_blocks",), _ROTARY),
    "HunyuanVideoTransformer3DModel": TokenLayout(_hunyuan_video, "last", _DOUBLE_AND_SINGLE, _ROTARY),
    "LTXVideoTransformer3DModel": TokenLayout(
        _ltx, "last", ("transformer_blocks",), {"image_rotary_emb": (3, 1), "temb": (3, 1)}
    ),
    "MochiTransformer3DModel": TokenLayout(_mochi, "last", ("transformer_blocks",), {"image_rotary_emb": (3, 0)}),
    "WanTransformer3DModel": TokenLayout(_wan, "last", ("blocks",), {"rotary_emb": (4, 1), "temb": (4, 1)}),
}
