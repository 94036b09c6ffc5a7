"""The dtype of a call under autocast."""

from __future__ import annotations

import torch

from .checks import check_memory


def autocast_dtype(x: torch.Tensor) -> torch.dtype | None:
    """Return the dtype to which PyTorch's attention would cast x under autocast; None without autocast."""
    device_type = x.device.type
    if device_type in ("cpu", "cuda", "xpu") and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def in_autocast_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors as PyTorch's attention casts them under autocast; all are on the device of the first.

    Raises:
        RuntimeError: autocast is on, and a tensor has no memory to read; see `checks.check_memory`.
    """
    dtype = autocast_dtype(tensors[0])
    if dtype is None:
        return tensors
    check_memory(*tensors)
    eligible = (torch.float16, torch.bfloat16, torch.float32)
    return tuple(tensor.to(dtype) if tensor.dtype in eligible else tensor for tensor in tensors)
