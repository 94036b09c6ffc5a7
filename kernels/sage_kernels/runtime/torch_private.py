"""Private names of PyTorch, each with a default that means "slower, not wrong" where a version of PyTorch lacks it.

No other file of this package uses a private name of PyTorch, except operators of `torch.ops.aten`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

try:
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError:

    class TorchDispatchMode:  # type: ignore[no-redef]
        """Mode that cannot be entered: no call is traced."""

        def __enter__(self) -> None:
            raise NotImplementedError("this PyTorch has no TorchDispatchMode")


def _find(path: str, default: Any) -> Any:
    """Return the object at a path below `torch`, or the default."""
    attribute: Any = torch
    for name in path.split("."):
        attribute = getattr(attribute, name, None)
    return default if attribute is None else attribute


def _true() -> bool:
    return True


transforms_are_active: Callable[[], bool] = _find("_C._are_functorch_transforms_active", _true)
"""() -> whether code runs inside a transform of torch.func."""
autocast_is_active: Callable[[], bool] = _find("_C._is_any_autocast_enabled", _true)
"""() -> whether autocast is on for any kind of device."""
dispatch_modes: Callable[[], int] = _find("_C._len_torch_dispatch_stack", _true)
"""() -> number of modes that see PyTorch's operators."""
function_modes: Callable[[], int] = _find("_C._len_torch_function_stack", _true)
"""() -> number of modes that see PyTorch's functions."""
function_mode_stack: Callable[[], list[Any]] = _find("overrides._get_current_function_mode_stack", list)
"""() -> the modes that see PyTorch's functions."""
_tracing_state: Callable[[], object] = _find("_C._get_tracing_state", _true)

scaled_dot_product_attention: Callable[..., torch.Tensor] = _find(
    "_C._nn.scaled_dot_product_attention", F.scaled_dot_product_attention
)
"""PyTorch's attention, even if the name in torch.nn.functional has been replaced."""
fused_sdp_choice: Callable[..., int] = _find("_fused_sdp_choice", lambda *call: -1)
"""(query, key, value, mask, dropout, causal) -> value of the `SDPBackend` that PyTorch would choose; -1: unknown."""
sdp_priority_order: Callable[[], list[int]] = _find("_C._get_sdp_priority_order", list)
"""() -> values of `SDPBackend` in the order in which PyTorch tries them; none: unknown."""

no_torch_function: Any = _find("_C._disabled_torch_function_impl", torch.Tensor.__torch_function__)
"""`__torch_function__` of tensors that only modes see."""


_is_transformed: Callable[[torch.Tensor], bool] = _find("_C._functorch.is_functorch_wrapped_tensor", lambda x: False)
_unwrapped: Callable[[torch.Tensor], torch.Tensor | None] = _find("_C._functorch.get_unwrapped", lambda x: None)


def without_transforms(x: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that transforms of torch.func have wrapped; x if not wrapped, None if PyTorch does not tell."""
    unwrapped: torch.Tensor | None = x
    while unwrapped is not None and _is_transformed(unwrapped):
        unwrapped = _unwrapped(unwrapped)
    return unwrapped


def tangents_are_active() -> bool:
    """Return whether code runs inside a level of forward-mode differentiation."""
    return bool(getattr(forward_ad, "_current_level", 0) >= 0)


def modes_are_active() -> bool:
    """Return whether operators are traced, transformed, or seen by a mode."""
    return bool(
        dispatch_modes()
        or function_modes()
        or transforms_are_active()
        or _tracing_state() is not None
        or tangents_are_active()
    )


def is_fake(x: torch.Tensor) -> bool:
    """Return whether FakeTensorMode made a tensor, which has no values."""
    fake = getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)
    return fake is not None and isinstance(x, fake)


def is_checkpointed() -> bool:
    """Return whether the current calls belong to `torch.utils.checkpoint`, which runs their forward pass again."""
    saving = _saved_tensors_hooks(True)
    if saving is not None:
        return bool(getattr(saving[0], "__module__", None) == "torch.utils.checkpoint")  # built-in methods lack it
    return _graph_task() != -1  # run again inside the backward pass: a reentrant checkpoint


_saved_tensors_hooks: Callable[[bool], Any] = _find(
    "_C._autograd._top_saved_tensors_default_hooks", lambda ignore_tracing: None
)
_graph_task: Callable[[], int] = _find("_C._current_graph_task_id", lambda: -1)

current_device: Callable[[], int] = _find("_C._cuda_getDevice", torch.cuda.current_device)
"""() -> number of PyTorch's current GPU."""


def _current_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


current_stream: Callable[[int], int] = _find("_C._cuda_getCurrentRawStream", _current_stream)
"""(number of a GPU) -> the driver's handle of PyTorch's current stream on that GPU."""


def mark_static(x: torch.Tensor) -> None:
    """Declare that a tensor keeps its address, so that CUDA graphs of compiled code need no copy of it."""
    _find("_dynamo.mark_static_address", lambda x: None)(x)  # not earlier: it imports the compiler


def tensor_of_class(cls: type, x: torch.Tensor) -> Any:
    """Return a tensor of a subclass with the sizes and memory of x."""
    return torch.Tensor._make_subclass(cls, x)


def share_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors share a storage."""
    return bool(x.untyped_storage()._cdata == y.untyped_storage()._cdata)


# The default returns a new object at each call, so that no two calls agree in a setting that cannot be read.
_FLOAT32_PRODUCTS: tuple[Callable[[], object], ...] = (_find("_C._get_float32_matmul_precision", object),)
if (_getter := _find("_C._get_fp32_precision_getter", None)) is not None:  # since PyTorch 2.9; older getters may raise
    _FLOAT32_PRODUCTS = tuple(partial(_getter, device, "matmul") for device in ("cuda", "mkldnn"))
_FLAGS: tuple[Callable[[], object], ...] = (
    *_FLOAT32_PRODUCTS,
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    torch.get_default_dtype,
    _find("_C._get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled),
    _find("_C._get_cudnn_sdp_enabled", torch.backends.cuda.cudnn_sdp_enabled),
    _find("_C._get_flash_sdp_enabled", torch.backends.cuda.flash_sdp_enabled),
    _find("_C._get_mem_efficient_sdp_enabled", torch.backends.cuda.mem_efficient_sdp_enabled),
    _find("_C._get_math_sdp_enabled", torch.backends.cuda.math_sdp_enabled),
    _find("_C._get_cublas_allow_fp16_reduced_precision_reduction", object),
    _find("_C._get_cublas_allow_bf16_reduced_precision_reduction", object),
    _find("_C._get_math_sdp_allow_fp16_bf16_reduction", object),
)
_priority_order = _find("_C._get_sdp_priority_order", object)
_AUTOCAST_DEVICES = ("cpu", "cuda", "xpu")


def settings() -> tuple[object, ...]:
    """Return the settings of this process and thread that can change a call's results, or its plan.

    Settings are: whether gradients are recorded, inference mode, autocast and its dtype on each kind of device, the
    default dtype, deterministic algorithms, the precision of float32 products and of reductions in 16 bits, and which
    of PyTorch's attention backends are allowed, and their order. Modes and transforms are told by `modes_are_active`.
    """
    autocast = None
    if autocast_is_active():
        autocast = tuple((torch.is_autocast_enabled(x), torch.get_autocast_dtype(x)) for x in _AUTOCAST_DEVICES)
    order = _priority_order()
    return autocast, tuple(order) if isinstance(order, list) else order, *[flag() for flag in _FLAGS]
