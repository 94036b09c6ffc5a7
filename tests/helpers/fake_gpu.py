"""A GPU that runs nothing: enough of PyTorch and the driver for the host code of calls on Hopper to be traced."""

import contextlib
import itertools
import struct

import torch

from sage_kernels.cuda import block_lists, int8_backward, int8_forward, launch, nvfp4_forward, quantize_nvfp4
from sage_kernels.replay import driver, trace
from sage_kernels.triton.common import triton_abi

DEVICE = torch.device("cuda", 0)


def install(monkeypatch) -> None:
    """Let traced host code find the GPU."""
    handles = itertools.count(1)
    monkeypatch.setattr(
        driver, "encode_tensor_map", lambda address, *layout: struct.pack("<Q", address) + bytes(driver.MAP_BYTES - 8)
    )
    monkeypatch.setattr(driver, "device_context", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(launch, "_load", lambda kernel, index: next(handles))
    monkeypatch.setattr(launch, "_try_to_compile", lambda source, arch: None)
    monkeypatch.setattr(triton_abi, "pack", pack)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for module in (block_lists, int8_backward, int8_forward, nvfp4_forward, quantize_nvfp4):
        monkeypatch.setattr(module, "multiprocessors", lambda index: 132)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    placeholder = trace.Trace.placeholder
    monkeypatch.setattr(trace.Trace, "placeholder", lambda self, x, device=None: placeholder(self, x, DEVICE))


def pack(kernel, grid, arguments, options, dependent=False) -> trace.PackedLaunch:
    """Pack a Triton launch without compiling it: its addresses, one after the other."""
    tensors = [getattr(value, "base", value) for value in arguments.values()]
    addresses = [x.data_ptr() for x in tensors if isinstance(x, torch.Tensor)]
    places = tuple(range(0, 8 * len(addresses), 8))
    packed = struct.pack(f"<{len(addresses)}Q", *addresses)
    return trace.PackedLaunch(1, (*grid, 1, 1)[:3], 128, 0, dependent, packed, places, places)
