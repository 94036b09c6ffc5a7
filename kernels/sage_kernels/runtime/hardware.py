"""Facts of the GPUs at hand."""

from __future__ import annotations

from functools import cache

import torch

Capability = tuple[int, int]


def capability_of(device: torch.device) -> Capability | None:
    """Return the compute capability of an NVIDIA GPU; None for other devices, AMD's GPUs among them.

    PyTorch numbers AMD's architectures in the same way: gfx90a would pass for Hopper.
    """
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return torch.cuda.get_device_capability(device) if is_nvidia else None


def device_of(capability: Capability | None) -> torch.device:
    """Return the current GPU if it has this capability, else the first GPU that has it, else the CPU."""
    if capability is None or not torch.cuda.is_available():
        return torch.device("cpu")
    indices = torch.cuda.current_device(), *range(torch.cuda.device_count())
    matching = (i for i in indices if torch.cuda.get_device_capability(i) == capability)
    return torch.device("cuda", next(matching, indices[0]))


@cache
def multiprocessors(index: int) -> int:
    """Return the number of multiprocessors of GPU `index`."""
    return torch.cuda.get_device_properties(index).multi_processor_count


def is_capturing() -> bool:
    """Return whether a graph is captured on the current stream."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
