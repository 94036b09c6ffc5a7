"""RoPE of queries and keys by one kernel in transformers' models, whose own function runs ten operators.

Each modelling file has its own function `apply_rotary_pos_emb`. In layers that run our recipe, the kernel replaces it,
if the kernel gives the same bits for random tensors. All other layers run the original function. The files are changed
only while a model runs our recipe.
"""

from __future__ import annotations

import functools
import sys
import threading
import weakref
from collections.abc import Callable
from inspect import unwrap
from typing import Any, NamedTuple

import torch
from huggingface_hub.utils import logging
from torch import Tensor, nn

from sage_hf import record
from sage_hf.attributes import RECIPE
from sage_hf.names import NAMES
from sage_hf.transformers.bridge import ROPE_FUNCTION, implementation_of
from sage_hf.transformers.inspection import built_classes, calls_interface
from sage_kernels.qk_norm_rope import is_served, qk_norm_rope
from sage_kernels.spec.qk_norm_rope import Rope

logger = logging.get_logger(__name__)

MARK = "_sage_rotary"
"""Attribute of functions that this file has wrapped."""

LARGE = 2**18
"""Number of the queries' elements from which two launches cost the host no more than the operators."""
LARGE_WITH_GRADIENTS = 2**22
"""The same number with gradients, because autograd records calls at a cost."""

RopeFunction = Callable[..., tuple[Tensor, Tensor]]


class _RotaryState(threading.local):
    """Thread state: the layer that the thread is running, if the layer has a recipe of ours."""

    layer: nn.Module | None = None


_thread = _RotaryState()
_agreements: dict[tuple[RopeFunction, torch.dtype, int, torch.device], bool] = {}
"""Bit-for-bit agreement of modelling files' functions with the kernel."""


class _Replacement(NamedTuple):
    """Original and replacement of an attribute of a modelling file or a layer's class, and the models that need it."""

    original: Any
    ours: Any
    models: weakref.WeakSet[nn.Module]


_lock = threading.RLock()  # a model may be collected while the lock is held
_replacements: dict[tuple[Any, str], _Replacement] = {}


def use_rope_kernel(model: nn.Module) -> None:
    """Let the layers of a model's class use the kernel while they run a low-bit recipe of ours."""
    for layer in filter(calls_interface, built_classes(type(model))):
        owner: Any = next((base for base in layer.__mro__ if "forward" in vars(base)), None)
        if owner is None or ROPE_FUNCTION not in unwrap(owner.forward).__code__.co_names:
            continue
        file = sys.modules.get(unwrap(owner.forward).__module__)
        if hasattr(file, ROPE_FUNCTION):
            _replace(file, ROPE_FUNCTION, _with_kernel, model)
            _replace(owner, "forward", _noting_recipe, model)
            weakref.finalize(model, _put_back_unneeded).atexit = False


def _replace(place: Any, name: str, wrap: Callable[[Any], Any], model: nn.Module) -> None:
    with _lock:
        original = vars(place)[name]
        if (place, name) not in _replacements and not hasattr(original, MARK):
            _replacements[place, name] = _Replacement(original, wrap(original), weakref.WeakSet((model,)))
            setattr(place, name, _replacements[place, name].ours)
        if (place, name) in _replacements:
            _replacements[place, name].models.add(model)


def forget_model(model: nn.Module) -> None:
    """Undo `use_rope_kernel` for a model and the models inside it, except where another model needs the kernel."""
    with _lock:
        for replacement in list(_replacements.values()):
            for module in model.modules():
                replacement.models.discard(module)
    _put_back_unneeded()


def _put_back_unneeded() -> None:
    """Put back originals whose replacements no model needs any more."""
    with _lock:
        for (place, name), replacement in list(_replacements.items()):
            if list(replacement.models) or _replacements.pop((place, name), None) is not replacement:
                continue
            if vars(place)[name] is replacement.ours:  # but leave an object that somebody has put there since
                setattr(place, name, replacement.original)


def _noting_recipe(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a layer's forward pass to tell the functions that it calls whether the layer runs our recipe."""

    @functools.wraps(forward)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return forward(self, *args, **kwargs)
        before, _thread.layer = _thread.layer, self if _runs_ours(self) else None
        try:
            return forward(self, *args, **kwargs)
        finally:
            _thread.layer = before

    vars(wrapper)[MARK] = True
    return wrapper


def _runs_ours(layer: Any) -> bool:
    """Check whether a layer runs a low-bit recipe of ours."""
    recipe, _ = NAMES.get(implementation_of(layer) or "", ("exact", None))
    return recipe != "exact" and vars(layer).get(RECIPE) != "exact"


def _with_kernel(original: RopeFunction) -> RopeFunction:
    """Return a function equal to `original`, which uses the kernel where it serves and gives the same bits."""

    @functools.wraps(original)
    def apply_rotary_pos_emb(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _thread.layer is None or len(args) != 4 or kwargs or not _serves(*args):
            return original(*args, **kwargs)
        query = args[0]
        key = original, query.dtype, query.shape[3], query.device
        if key not in _agreements:
            if query.is_cuda and torch.cuda.is_current_stream_capturing():
                return original(*args)
            _agreements[key] = _agrees(*key)
        if not _agreements[key]:
            return original(*args)
        record.with_qk_norm_rope.add(_thread.layer)
        return _by_kernel(*args)

    vars(apply_rotary_pos_emb)[MARK] = True
    return apply_rotary_pos_emb


def _serves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Check whether the kernel takes these tensors and is faster."""
    if not all(isinstance(x, Tensor) for x in (q, k, cos, sin)) or not is_served(q):
        return False
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape:
        return False
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)
    if q.numel() < (LARGE_WITH_GRADIENTS if grad else LARGE) or cos.requires_grad:
        return False
    sizes = cos.shape[0] in (1, q.shape[0]) and cos.shape[1:] == q.shape[2:] == k.shape[2:]
    return sizes and q.dtype == k.dtype == cos.dtype == sin.dtype


def _by_kernel(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    rope = Rope(cos.unsqueeze(2), sin.unsqueeze(2), halves=True)
    query, key = (qk_norm_rope(x.transpose(1, 2), rope=rope).transpose(1, 2) for x in (q, k))
    return query, key


@torch.no_grad()
def _agrees(original: RopeFunction, dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Check that a function and the kernel give the same bits for random tensors; False if either raises an error."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = (
        (1, 16, 3, head_dim),
        (1, 8, 3, head_dim),
        (1, 3, head_dim),
        (1, 3, head_dim),
    )  # as compiled for most models
    samples = [torch.randn(size, generator=generator, dtype=dtype, device=device) for size in sizes]
    try:
        return all(map(torch.equal, _by_kernel(*samples), original(*samples)))
    except Exception as error:  # whatever fails here, the model's own function serves
        logger.warning(
            f"{original.__module__}.{ROPE_FUNCTION} stays in use: comparing it with our kernel failed: {error!r}"
        )
        return False
