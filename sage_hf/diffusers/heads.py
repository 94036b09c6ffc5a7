"""Norms and rotation of queries and keys by one kernel, where diffusers' processors run a dozen operators for them.

A processor calls `attn.norm_q(query)`, and rotates what that returns by a table of angles (RoPE). Here it gets a
stand-in for `attn` whose norms rotate as well, and no table; all else is its own code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from sage_hf import record
from sage_kernels.heads import Norm, Rope
from sage_kernels.norm_rope import is_served, norm_rope

from .stand_in import StandIn

NORMS = "norm_q", "norm_k", "norm_added_q", "norm_added_k"

Ropes: TypeAlias = dict[str, Rope]
"""Names among NORMS -> the rotation behind that norm."""


@dataclass(frozen=True)
class Rotary:
    """Rotation of queries and keys by a processor of diffusers.

    Attributes:
        argument: the name of its argument with the angles.
        ropes: (the angles, its attention module, its arguments by name) -> the rotations; None if they are none of this
            kind.
    """

    argument: str
    ropes: Callable[[Any, Any, Mapping[str, Any]], Ropes | None]


def _real_table(table: Any, tokens: int) -> tuple[Tensor, Tensor] | None:
    """Return cosine and sine, each (tokens, …), or None if the table is of another kind."""
    if not isinstance(table, (tuple, list)) or len(table) != 2:
        return None
    cosine, sine = table
    fits = cosine.dim() in (2, 3) and len(cosine) == tokens and cosine.dtype == sine.dtype == torch.float32
    return (cosine, sine) if fits else None


def _rotate_all(table: Any, attn: Any, given: Mapping[str, Any]) -> Ropes | None:
    """Rotate [context, sample], as Flux does."""
    context = given.get("encoder_hidden_states")
    length = 0 if context is None else context.shape[1]
    if (found := _real_table(table, length + given["hidden_states"].shape[1])) is None:
        return None
    sample, added = Rope(*found, offset=length), Rope(*found)
    return dict(zip(NORMS, (sample, sample, added, added), strict=True))


def _rotate_sample(table: Any, attn: Any, given: Mapping[str, Any]) -> Ropes | None:
    """Rotate the sample, before whose norm the context may stand behind it, as HunyuanVideo does."""
    if (found := _real_table(table, given["hidden_states"].shape[1])) is None:
        return None
    return dict.fromkeys(NORMS[:2], Rope(*found))


def _rotate_halves_of_sample(table: Any, attn: Any, given: Mapping[str, Any]) -> Ropes | None:
    """Rotate the halves of the sample's heads, in self-attention, as Cosmos does."""
    found = _real_table(table, given["hidden_states"].shape[1])
    if found is None or given.get("encoder_hidden_states") is not None:
        return None
    return dict.fromkeys(NORMS[:2], Rope(*found, halves=True))


def _rotate_behind_text(table: Any, attn: Any, given: Mapping[str, Any], halves: bool = False) -> Ropes | None:
    """Rotate the sample, whose text is before it unless it has norms of its own, as CogVideoX does."""
    found = _real_table(table, given["hidden_states"].shape[1])
    if found is None or attn.is_cross_attention:
        return None
    length = given["encoder_hidden_states"].shape[1] if attn.add_q_proj is None else 0
    return dict.fromkeys(NORMS[:2], Rope(*found, -length, halves))


def _rotate_by_complex(table: Any, attn: Any, given: Mapping[str, Any]) -> Ropes | None:
    """Rotate sample and context by complex numbers of their own, (tokens, head_dim / 2) each, as Qwen-Image does."""
    lengths = given["hidden_states"].shape[1], given["encoder_hidden_states"].shape[1]
    if not all(one.dtype == torch.complex64 and len(one) == length for one, length in zip(table, lengths, strict=True)):
        return None
    sample, added = map(Rope, table)
    return dict(zip(NORMS, (sample, sample, added, added), strict=True))


def _rotate_by_complex_of_batch(table: Any, attn: Any, given: Mapping[str, Any]) -> Ropes | None:
    """Rotate by complex numbers (batch or 1, tokens, head_dim / 2), as Z-Image does."""
    sample = given["hidden_states"]
    fits = table.dtype == torch.complex64 and table.dim() == 3 and table.shape[1] == sample.shape[1]
    return dict.fromkeys(NORMS[:2], Rope(table.unsqueeze(2))) if fits and len(table) in (1, len(sample)) else None


def _rotate_heads_of_token(table: Any, attn: Any, given: Mapping[str, Any]) -> Ropes | None:
    """Rotate by tables (batch or 1, tokens, 1, head_dim), as Wan does."""
    cosine, sine = table
    fits = cosine.dim() == 4 and cosine.shape[1] == given["hidden_states"].shape[1]
    fits = fits and cosine.dtype == sine.dtype == torch.float32
    return dict.fromkeys(NORMS[:2], Rope(cosine, sine)) if fits else None


def _rotate_channels_of_token(table: Any, attn: Any, given: Mapping[str, Any]) -> Ropes | None:
    """Rotate by tables (batch or 1, tokens, heads · head_dim), as LTX does."""
    cosine, sine = (one.unflatten(-1, (attn.heads, -1)) if one.dim() == 3 else one for one in table)
    return _rotate_heads_of_token((cosine, sine), attn, given)


ROTARIES: dict[str, Rotary] = {
    **dict.fromkeys(
        (
            *("FluxAttnProcessor", "Flux2AttnProcessor", "Flux2ParallelSelfAttnProcessor"),
            *("BriaAttnProcessor", "BriaFiboAttnProcessor", "LongCatImageAttnProcessor", "OvisImageAttnProcessor"),
        ),
        Rotary("image_rotary_emb", _rotate_all),
    ),
    **dict.fromkeys(
        (
            *("HunyuanVideoAttnProcessor2_0", "HunyuanVideo15AttnProcessor2_0", "HunyuanImageAttnProcessor"),
            "MochiAttnProcessor2_0",
        ),
        Rotary("image_rotary_emb", _rotate_sample),
    ),
    **dict.fromkeys(
        ("CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0", "EasyAnimateAttnProcessor2_0"),
        Rotary("image_rotary_emb", _rotate_behind_text),
    ),
    "CogView4AttnProcessor": Rotary("image_rotary_emb", partial(_rotate_behind_text, halves=True)),
    "CosmosAttnProcessor2_0": Rotary("image_rotary_emb", _rotate_halves_of_sample),
    "QwenDoubleStreamAttnProcessor2_0": Rotary("image_rotary_emb", _rotate_by_complex),
    "ZSingleStreamAttnProcessor": Rotary("freqs_cis", _rotate_by_complex_of_batch),
    **dict.fromkeys(("WanAttnProcessor", "SkyReelsV2AttnProcessor"), Rotary("rotary_emb", _rotate_heads_of_token)),
    "LTXVideoAttnProcessor": Rotary("image_rotary_emb", _rotate_channels_of_token),
}
"""By the class names of diffusers' processors that rotate right behind their norms, or on what these gave alone."""


@dataclass(frozen=True)
class NormClass:
    """Arithmetic of a class of norms.

    Attributes:
        kind, rounds: as in `heads.Norm`.
        any_weight: it takes weights of any dtype; others are of the tensor's.
        one_operator: it runs one operator of PyTorch.
    """

    kind: Literal["rms", "layer"]
    rounds: bool = False
    any_weight: bool = False
    one_operator: bool = False


NORM_CLASSES: dict[str, NormClass] = {
    "diffusers.models.normalization.RMSNorm": NormClass("rms", rounds=True),
    "diffusers.models.normalization.MochiRMSNorm": NormClass("rms", any_weight=True),
    "diffusers.models.normalization.FP32LayerNorm": NormClass("layer", any_weight=True),
    "torch.nn.modules.normalization.RMSNorm": NormClass("rms", one_operator=True),
    "torch.nn.modules.normalization.LayerNorm": NormClass("layer", one_operator=True),
}
"""By module and name of the class."""

LARGE_ROW = 256
"""Channels above which PyTorch's own norms are as fast as a kernel, which has no gradients there."""
LARGE_SAMPLE = 2**20
"""Elements of a sample from which on a kernel gains on one operator of PyTorch."""
LARGE_TRAINING_SAMPLE = 2**22
"""The same with gradients, which autograd records at a cost."""


def with_own_norms(
    processor: Any, attn: Any, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], heads_first: bool
) -> tuple[Any, dict[str, Any]] | None:
    """Return a stand-in for an attention module, and the arguments to call its processor with; None: as it is.

    Args:
        processor: that of diffusers.
        attn: the module.
        names: of the arguments behind the module.
        args, kwargs: these arguments.
        heads_first: what computes it normalises tensors (batch, heads, tokens, head_dim), as our own functions do, not
            (batch, tokens, heads, head_dim), as diffusers' processors.
    """
    given = dict(zip(names, args, strict=False)) | kwargs
    sample = given.get("hidden_states")
    if not isinstance(sample, Tensor) or not is_served(sample):
        return None
    rotary, ropes = ROTARIES.get(type(processor).__name__), None
    if rotary is not None and (table := given.get(rotary.argument)) is not None:
        ropes = rotary.ropes(table, attn, given)
        if ropes is None or attn.norm_q is None or attn.norm_k is None:
            return None
        if any(rope.cosine.device != sample.device for rope in ropes.values()):
            return None
        given[rotary.argument] = None
    norms: dict[str, Callable[[Tensor], Tensor]] = {}
    for name in NORMS:
        if (module := getattr(attn, name, None)) is None:
            continue
        rope = None if ropes is None else ropes.get(name)
        norm = norm_of(module, sample)
        if norm is not None and (rope is not None or gains(module, sample)):
            norms[name] = partial(_run, norm, rope, heads_first)
        elif rope is not None:
            return None
    if not norms:
        return None
    record.with_norm_rope.add(attn)
    return StandIn(attn, norms), given


def norm_of(module: nn.Module, sample: Tensor) -> Norm | None:
    """Return what a norm computes; None if it is of no known class, has hooks, or gradients that no kernel gives."""
    known = NORM_CLASSES.get(f"{type(module).__module__}.{type(module).__name__}")
    if known is None or "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return None
    norm: Any = module
    weight, bias, eps = norm.weight, getattr(norm, "bias", None), norm.eps
    if not isinstance(eps, float) or (known.kind == "rms" and bias is not None) or len(_sizes(module)) != 1:
        return None
    for vector in (weight, bias):
        if vector is None:
            continue
        if type(vector) is not nn.Parameter or not (known.any_weight or vector.dtype == sample.dtype):
            return None
    trains = torch.is_grad_enabled() and (sample.requires_grad or (weight is not None and weight.requires_grad))
    if trains and (sample.numel() < LARGE_TRAINING_SAMPLE or _sizes(module)[0] > LARGE_ROW):
        return None
    return Norm(known.kind, eps, weight, bias, rounds=known.rounds)


def gains(module: nn.Module, sample: Tensor) -> bool:
    """Return whether a kernel is faster than a norm of a known class, if nothing is rotated."""
    known = NORM_CLASSES[f"{type(module).__module__}.{type(module).__name__}"]
    return not known.one_operator or (_sizes(module)[0] <= LARGE_ROW and sample.numel() >= LARGE_SAMPLE)


def _sizes(module: Any) -> Sequence[int]:
    """Return the sizes of the axes that a norm is taken over."""
    sizes: Sequence[int] = module.normalized_shape if hasattr(module, "normalized_shape") else module.dim
    return sizes


def _run(norm: Norm, rope: Rope | None, heads_first: bool, x: Tensor) -> Tensor:
    """Normalise and rotate what a norm gets.

    Args:
        norm, rope: what to do.
        heads_first: x is (batch, heads, tokens, head_dim).
        x: queries or keys, (batch, tokens, heads, head_dim) unless another size is given above; or (batch, tokens,
            heads · head_dim), where all heads have one norm, or of any other size, if nothing is rotated.
    """
    if x.dim() == 3:
        # What is not rotated may be divided in any way.
        head_dim = LARGE_ROW if rope is None else rope.cosine.shape[-1] * (2 if rope.sine is None else 1)
        heads = x.unflatten(-1, (-1, math.gcd(head_dim, x.shape[-1])))
        return norm_rope(heads, replace(norm, across_heads=True), rope).flatten(2)
    if x.dim() != 4:
        return norm_rope(x.reshape(1, -1, 1, x.shape[-1]), norm, rope).view(x.shape)
    if x.stride(1) < x.stride(2) if rope is None else heads_first:  # any order of axes is right for a norm of each head
        return norm_rope(x.transpose(1, 2), norm, rope).transpose(1, 2)
    return norm_rope(x, norm, rope)
