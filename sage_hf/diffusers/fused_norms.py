"""QK-norm and RoPE of diffusers' processors by one kernel, in place of a dozen operators.

A processor calls `attn.norm_q(query)`, and applies RoPE to the result by a table of angles. Here the processor gets an
overlay of `attn` whose norms also apply RoPE, and no table; the rest of the processor runs unchanged. Only processors
and norms of diffusers and PyTorch are served in this way, and only after their first queries and keys matched the
results of their own operators.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.nn.functional as F
from huggingface_hub.utils import logging
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sage_hf.identity import name_in_diffusers, path_of
from sage_kernels.qk_norm_rope import is_served, qk_norm_rope
from sage_kernels.spec.layout import ceil_div
from sage_kernels.spec.qk_norm_rope import Norm, Rope

logger = logging.get_logger(__name__)

NORMS = "norm_q", "norm_k", "norm_added_q", "norm_added_k"

Ropes: TypeAlias = dict[str, Rope]
"""Names among NORMS -> the RoPE after that norm."""


@dataclass(frozen=True)
class ProcessorRope:
    """RoPE as a processor of diffusers applies it.

    Attributes:
        argument: name of the processor's argument with the angles.
        ropes: (the angles, the attention module, the processor's arguments by name) -> the RoPE after each norm;
            None if the angles are of another kind.
    """

    argument: str
    ropes: Callable[[Any, Any, Mapping[str, Any]], Ropes | None]


def _real_table(table: Any, tokens: int) -> tuple[Tensor, Tensor] | None:
    """Return cosine and sine, each (tokens, …); None if the table is of another kind."""
    if not isinstance(table, (tuple, list)) or len(table) != 2:
        return None
    cosine, sine = table
    fits = cosine.dim() in (2, 3) and len(cosine) == tokens and cosine.dtype == sine.dtype == torch.float32
    return (cosine, sine) if fits else None


def _rope_of_all(table: Any, attn: Any, arguments: Mapping[str, Any]) -> Ropes | None:
    """Return the RoPE of [context, sample], as Flux applies it."""
    context = arguments.get("encoder_hidden_states")
    length = 0 if context is None else context.shape[1]
    if (angles := _real_table(table, length + arguments["hidden_states"].shape[1])) is None:
        return None
    sample, added = Rope(*angles, offset=length), Rope(*angles)
    return dict(zip(NORMS, (sample, sample, added, added), strict=True))


def _rope_of_sample(table: Any, attn: Any, arguments: Mapping[str, Any]) -> Ropes | None:
    """Return the RoPE of the sample; the norm may get the context after it, as in HunyuanVideo."""
    if (angles := _real_table(table, arguments["hidden_states"].shape[1])) is None:
        return None
    return dict.fromkeys(NORMS[:2], Rope(*angles))


def _rope_by_halves(table: Any, attn: Any, arguments: Mapping[str, Any]) -> Ropes | None:
    """Return the RoPE of the sample with channels paired by halves, in self-attention, as in Cosmos."""
    angles = _real_table(table, arguments["hidden_states"].shape[1])
    if angles is None or arguments.get("encoder_hidden_states") is not None:
        return None
    return dict.fromkeys(NORMS[:2], Rope(*angles, halves=True))


def _rope_behind_text(table: Any, attn: Any, arguments: Mapping[str, Any], halves: bool = False) -> Ropes | None:
    """Return the RoPE of the sample, which follows the text unless the text has its own norms, as in CogVideoX."""
    angles = _real_table(table, arguments["hidden_states"].shape[1])
    if angles is None or attn.is_cross_attention:
        return None
    length = arguments["encoder_hidden_states"].shape[1] if attn.add_q_proj is None else 0
    return dict.fromkeys(NORMS[:2], Rope(*angles, -length, halves))


def _rope_by_complex(table: Any, attn: Any, arguments: Mapping[str, Any]) -> Ropes | None:
    """Return the RoPE of sample and context by separate complex numbers, (tokens, head_dim / 2), as in Qwen-Image."""
    lengths = arguments["hidden_states"].shape[1], arguments["encoder_hidden_states"].shape[1]
    if any(x.dtype != torch.complex64 or len(x) != length for x, length in zip(table, lengths, strict=True)):
        return None
    sample, added = map(Rope, table)
    return dict(zip(NORMS, (sample, sample, added, added), strict=True))


def _rope_by_complex_of_batch(table: Any, attn: Any, arguments: Mapping[str, Any]) -> Ropes | None:
    """Return the RoPE by complex numbers (batch or 1, tokens, head_dim / 2), as in Z-Image."""
    sample = arguments["hidden_states"]
    fits = table.dtype == torch.complex64 and table.dim() == 3 and table.shape[1] == sample.shape[1]
    return dict.fromkeys(NORMS[:2], Rope(table.unsqueeze(2))) if fits and len(table) in (1, len(sample)) else None


def _rope_of_heads(table: Any, attn: Any, arguments: Mapping[str, Any]) -> Ropes | None:
    """Return the RoPE by tables (batch or 1, tokens, 1, head_dim), as in Wan."""
    cosine, sine = table
    fits = cosine.dim() == 4 and cosine.shape[1] == arguments["hidden_states"].shape[1]
    fits = fits and cosine.dtype == sine.dtype == torch.float32
    return dict.fromkeys(NORMS[:2], Rope(cosine, sine)) if fits else None


def _rope_of_channels(table: Any, attn: Any, arguments: Mapping[str, Any]) -> Ropes | None:
    """Return the RoPE by tables (batch or 1, tokens, heads · head_dim), as in LTX."""
    cosine, sine = (angles.unflatten(-1, (attn.heads, -1)) if angles.dim() == 3 else angles for angles in table)
    return _rope_of_heads((cosine, sine), attn, arguments)


ROPE_OF_PROCESSORS: dict[str, ProcessorRope] = {
    **dict.fromkeys(
        (
            *("FluxAttnProcessor", "Flux2AttnProcessor", "Flux2ParallelSelfAttnProcessor"),
            *("BriaAttnProcessor", "BriaFiboAttnProcessor", "LongCatImageAttnProcessor", "OvisImageAttnProcessor"),
        ),
        ProcessorRope("image_rotary_emb", _rope_of_all),
    ),
    **dict.fromkeys(
        (
            *("HunyuanVideoAttnProcessor2_0", "HunyuanVideo15AttnProcessor2_0", "HunyuanImageAttnProcessor"),
            "MochiAttnProcessor2_0",
        ),
        ProcessorRope("image_rotary_emb", _rope_of_sample),
    ),
    **dict.fromkeys(
        ("CogVideoXAttnProcessor2_0", "FusedCogVideoXAttnProcessor2_0", "EasyAnimateAttnProcessor2_0"),
        ProcessorRope("image_rotary_emb", _rope_behind_text),
    ),
    "CogView4AttnProcessor": ProcessorRope("image_rotary_emb", partial(_rope_behind_text, halves=True)),
    "CosmosAttnProcessor2_0": ProcessorRope("image_rotary_emb", _rope_by_halves),
    "QwenDoubleStreamAttnProcessor2_0": ProcessorRope("image_rotary_emb", _rope_by_complex),
    "ZSingleStreamAttnProcessor": ProcessorRope("freqs_cis", _rope_by_complex_of_batch),
    **dict.fromkeys(("WanAttnProcessor", "SkyReelsV2AttnProcessor"), ProcessorRope("rotary_emb", _rope_of_heads)),
    "LTXVideoAttnProcessor": ProcessorRope("image_rotary_emb", _rope_of_channels),
}
"""RoPE by class names of diffusers' processors that apply it right after their norms, or only to the norms' results."""


@dataclass(frozen=True)
class NormClass:
    """Arithmetic of a class of norms.

    Attributes:
        kind, rounds: as in `sage_kernels.spec.qk_norm_rope.Norm`.
        any_weight: the norm takes weights of any dtype; other norms take only the tensor's dtype.
        one_operator: the norm runs one operator of PyTorch.
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
"""Norm classes by module and name."""

LARGE_ROW = 256
"""Number of channels above which PyTorch's norms are as fast as our kernel, which has no gradients there."""
LARGE_SAMPLE = 2**20
"""Number of a sample's elements from which our kernel is faster than one operator of PyTorch."""
LARGE_TRAINING_SAMPLE = 2**22
"""The same number with gradients, because autograd records calls at a cost."""


@dataclass(frozen=True)
class FusedCall:
    """A processor's call whose QK-norm and RoPE a kernel computes.

    Attributes:
        norms: names among NORMS -> functions that replace these norms.
        arguments: the processor's arguments by name, without the angles if the norms apply RoPE.
        trial_key: kind of the call; the first call of a kind must agree with the processor. None: there is no RoPE.
    """

    norms: dict[str, Callable[[Tensor], Tensor]]
    arguments: dict[str, Any]
    trial_key: Hashable | None


def prepare_fused_norms(
    processor: Any, attn: Any, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any], heads_first: bool
) -> FusedCall | None:
    """Prepare a processor's call in which a kernel computes QK-norm and RoPE; None: call the processor unchanged.

    Args:
        processor: the processor; the result is None if it is not diffusers'.
        attn: the attention module.
        names: names of the arguments after the module.
        args, kwargs: the arguments after the module.
        heads_first: the norms get (batch, heads, tokens, head_dim), as in our own functions, not (batch, tokens, heads,
            head_dim), as in diffusers' processors.
    """
    arguments = dict(zip(names, args, strict=False)) | kwargs
    sample = arguments.get("hidden_states")
    if not isinstance(sample, Tensor) or not is_served(sample):
        return None
    family = name_in_diffusers(type(processor), "__call__")
    if not family:
        return None
    processor_rope, ropes = ROPE_OF_PROCESSORS.get(family), None
    if processor_rope is not None and (table := arguments.get(processor_rope.argument)) is not None:
        ropes = processor_rope.ropes(table, attn, arguments)
        if ropes is None or attn.norm_q is None or attn.norm_k is None:
            return None
        if any(rope.cosine.is_cpu for rope in ropes.values()):  # processors also move such angles in each call
            ropes = {name: _moved(rope, sample.device) for name, rope in ropes.items()}
        if any(rope.cosine.device != sample.device for rope in ropes.values()):
            return None
        arguments[processor_rope.argument] = None
    norms: dict[str, Callable[[Tensor], Tensor]] = {}
    kinds = []
    for name in NORMS:
        if (module := getattr(attn, name, None)) is None:
            continue
        rope = None if ropes is None else ropes.get(name)
        norm = norm_of(module, sample)
        if norm is not None and rope is not None:
            norms[name] = partial(_run, norm, rope, heads_first)
            kinds.append((name, norm.kind, norm.rounds, rope.halves, rope.cosine.dim()))
        elif norm is not None and gains(module, sample):
            norms[name] = partial(_run_if_it_agrees, module, norm, heads_first)
        elif rope is not None:
            return None
    if not norms:
        return None
    kind = (type(processor), sample.dtype, sample.device, *kinds) if kinds else None
    return FusedCall(norms, arguments, kind)


def _moved(rope: Rope, device: torch.device) -> Rope:
    """Return a RoPE whose angles lie on a device."""
    return replace(rope, cosine=rope.cosine.to(device), sine=None if rope.sine is None else rope.sine.to(device))


def norm_of(module: nn.Module, sample: Tensor) -> Norm | None:
    """Describe a norm for the kernel; None if its class is unknown, it has hooks, or no kernel computes its
    gradients."""
    norm_class = NORM_CLASSES.get(path_of(type(module), "forward"))
    if norm_class is None or "forward" in vars(module) or _has_hooks(module):
        return None
    norm: Any = module
    weight, bias, eps = norm.weight, getattr(norm, "bias", None), norm.eps
    if not isinstance(eps, float) or (norm_class.kind == "rms" and bias is not None) or len(_sizes(module)) != 1:
        return None
    for vector in (weight, bias):
        if vector is None:
            continue
        if type(vector) is not nn.Parameter or not (norm_class.any_weight or vector.dtype == sample.dtype):
            return None
    trains = torch.is_grad_enabled() and (sample.requires_grad or (weight is not None and weight.requires_grad))
    if trains and (sample.numel() < LARGE_TRAINING_SAMPLE or _sizes(module)[0] > LARGE_ROW):
        return None
    return Norm(norm_class.kind, eps, weight, bias, rounds=norm_class.rounds)


def gains(module: nn.Module, sample: Tensor) -> bool:
    """Check whether a kernel is faster than a norm of a known class, without RoPE."""
    norm_class = NORM_CLASSES[path_of(type(module), "forward")]
    return not norm_class.one_operator or (_sizes(module)[0] <= LARGE_ROW and sample.numel() >= LARGE_SAMPLE)


HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


def _has_hooks(module: nn.Module) -> bool:
    """Check whether a call of a module runs more than its forward pass; True if this PyTorch cannot tell."""
    if any(vars(module).get(name, True) for name in HOOKS):
        return True
    of_all_modules: Callable[[], bool] | None = getattr(nn.modules.module, "_has_any_global_hook", None)
    return of_all_modules is None or bool(of_all_modules())


def _sizes(module: Any) -> Sequence[int]:
    """Return the sizes of the axes over which a norm is taken."""
    sizes: Sequence[int] = module.normalized_shape if hasattr(module, "normalized_shape") else module.dim
    return sizes


def _run(norm: Norm, rope: Rope | None, heads_first: bool, x: Tensor) -> Tensor:
    """Compute the norm, and the RoPE if any, of the input of a norm.

    Args:
        norm, rope: the norm, and the RoPE; None: no RoPE.
        heads_first: x is (batch, heads, tokens, head_dim).
        x: queries or keys, (batch, tokens, heads, head_dim) unless another size is given above; or (batch, tokens,
            heads · head_dim), if all heads share one norm, or any other size without RoPE.
    """
    if x.dim() == 3:
        # Without RoPE, channels may be divided in any way.
        head_dim = LARGE_ROW if rope is None else rope.cosine.shape[-1] * (2 if rope.sine is None else 1)
        heads = x.unflatten(-1, (-1, math.gcd(head_dim, x.shape[-1])))
        return qk_norm_rope(heads, replace(norm, across_heads=True), rope).flatten(2)
    if x.dim() != 4:
        return qk_norm_rope(x.reshape(1, -1, 1, x.shape[-1]), norm, rope).view(x.shape)
    if x.stride(1) < x.stride(2) if rope is None else heads_first:  # a norm of each head allows any order of axes
        return qk_norm_rope(x.transpose(1, 2), norm, rope).transpose(1, 2)
    return qk_norm_rope(x, norm, rope)


_agreements: dict[Hashable, bool] = {}
"""Agreement of the kernel with processors and norms, by kind of call."""


def _run_if_it_agrees(module: nn.Module, norm: Norm, heads_first: bool, x: Tensor) -> Tensor:
    """Normalise by the kernel if its result for the first such x equalled the module's own result."""
    kind = type(module), norm.kind, x.dtype, x.shape[-1], x.device
    if (agrees := _agreements.get(kind)) is None:
        if _is_capturing(x):
            return module(x)
        with torch.no_grad():
            some = x[:1, :SAMPLED_TOKENS]
            expected = module.forward(some)
            if not _tells(expected):
                return module(x)
            agrees = _agreements[kind] = _are_close(expected, _run(norm, None, heads_first, some))
        if not agrees:
            logger.warning(f"{type(module).__name__} keeps its own norm: the kernel for norms gave different numbers")
    return _run(norm, None, heads_first, x) if agrees else module(x)


def agrees(fused: FusedCall, attn: nn.Module, run_original: Callable[[], Any], run_fused: Callable[[], Any]) -> bool:
    """Check that a processor attends with the same queries and keys as with its own operators.

    The first call of a kind is run up to its attention in both ways, in a layer whose submodules have no hooks to
    notice.

    Args:
        fused: the call.
        attn: the attention module.
        run_original: runs the processor of diffusers unchanged.
        run_fused: runs the processor with our norms.
    """
    if fused.trial_key is None:
        return True
    agreement = _agreements.get(fused.trial_key)
    if agreement is None:
        if _is_capturing(fused.arguments["hidden_states"]):
            return False
        if any(_has_hooks(module) for name, module in attn.named_modules() if name):
            return False
        with torch.no_grad(), _SeenByPyTorch():
            expected = _first_attended(run_original)
        with torch.no_grad():
            actual = _first_attended(run_fused)
        if expected is not None and not all(map(_tells, expected)):
            return False
        agreement = expected is not None and actual is not None and all(map(_are_close, expected, actual))
        _agreements[fused.trial_key] = agreement
        if not agreement:
            logger.warning(
                f"{fused.trial_key[0].__name__} keeps its own norms and RoPE: the fused kernel gave different "  # type: ignore[index]
                "queries or keys"
            )
    return agreement


SAMPLED_TOKENS = 1024
"""Number of a call's tokens on which the kernel is compared."""


class _Attended(Exception):
    """Queries and keys of a trial, (batch, heads, tokens, head_dim), for some of the tokens."""

    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        self.tensors = tuple(x[:, :, :: ceil_div(x.shape[2], SAMPLED_TOKENS)] for x in tensors)


class _TrialState(threading.local):
    """Thread state: whether the thread runs a processor only for its queries and keys."""

    trial = False


_thread = _TrialState()


def end_trial(query: Tensor, key: Tensor, tokens_first: bool = False) -> None:
    """End a trial with the queries and keys that attention gets; outside a trial, do nothing.

    Args:
        query, key: (batch, heads, tokens, head_dim), or (batch, tokens, heads, head_dim) if `tokens_first`.
    """
    if _thread.trial:
        raise _Attended(*((x.transpose(1, 2) for x in (query, key)) if tokens_first else (query, key)))


class _SeenByPyTorch(TorchFunctionMode):
    """Mode that ends a trial at PyTorch's attention."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention:
            tensors = [*args, *(kwargs[name] for name in ("query", "key") if name in kwargs)]
            end_trial(*tensors[:2])
        return function(*args, **kwargs)


def _first_attended(run: Callable[[], Any]) -> tuple[Tensor, ...] | None:
    """Run until the first attention, and return its queries and keys; None if the run has no attention."""
    _thread.trial = True
    try:
        run()
    except _Attended as attended:
        return attended.tensors
    finally:
        _thread.trial = False
    return None


def _tells(x: Tensor) -> bool:
    """Check that heads are fit for a comparison: x is not empty, and all its values are finite."""
    return x.numel() > 0 and bool(x.isfinite().all())


def _are_close(expected: Tensor, actual: Tensor) -> bool:
    """Check that two computations of the same heads differ by rounding only.

    Each computation rounds twice, by at most half an ulp, and sums a head's channels in float32 in its own order.
    """
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return False
    wide = expected.double()
    bound = 2 * torch.finfo(expected.dtype).eps + expected.shape[-1] * torch.finfo(torch.float32).eps
    return bool(((actual.double() - wide).norm(dim=-1) <= bound * wide.norm(dim=-1)).all())


def _is_capturing(x: Tensor) -> bool:
    """Check whether work on the device of x is captured in a graph; the host cannot wait for captured work."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
