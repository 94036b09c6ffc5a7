"""A GPU that runs nothing: enough of PyTorch and the driver for the host code of calls on Hopper to be counted."""

import contextlib
import itertools
import struct
from types import SimpleNamespace

import torch

from sage_kernels import driver, rehearsal, tape
from sage_kernels.cuda import launch, tensor_map
from sage_kernels.cuda.parameters import packer

DEVICE = torch.device("cuda", 0)
CAPABILITY = (9, 0)
STREAM = 7


class FakeLibrary:
    """The driver's library; it counts launches and keeps what each was given.

    Attributes:
        launched: (grid, stream, bytes of the parameters' addresses) of each launch.
    """

    def __init__(self):
        self.launched = []

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        import ctypes

        fields = struct.unpack(driver.CONFIG, ctypes.string_at(config.value, struct.calcsize(driver.CONFIG)))
        self.launched.append((function.value, fields[:3], fields[7], parameters.value))
        return 0


class FakeFunction:
    """A kernel of `cuda.launch`, as if it were loaded."""

    handles = itertools.count(1)

    def __init__(self, kernel, index):
        self.kernel, self.index, self.handle = kernel, index, next(self.handles)
        self.packer = packer(kernel.source.parameters[kernel.name])

    packed = launch._Function.packed


def install(monkeypatch) -> FakeLibrary:
    """Let the host code of calls find the GPU."""
    library = FakeLibrary()
    monkeypatch.setattr(driver, "library", lambda: library)
    monkeypatch.setattr(
        driver, "encode_tensor_map", lambda address, *layout: struct.pack("<Q", address) + bytes(driver.MAP_BYTES - 8)
    )
    monkeypatch.setattr(tensor_map, "device_context", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(launch, "_function", FakeFunction)
    monkeypatch.setattr(tape, "current_device", lambda: 0)
    monkeypatch.setattr(tape, "current_stream", lambda index: STREAM)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return library


def new(rehearsed: rehearsal.Rehearsal, *shape: int, dtype=torch.bfloat16) -> rehearsal.StandIn:
    """Return a stand-in on the GPU, contiguous."""
    meta = torch.empty(shape, dtype=dtype, device="meta")
    return rehearsal.StandIn(meta, rehearsed.new_memory(meta), DEVICE, rehearsed)
