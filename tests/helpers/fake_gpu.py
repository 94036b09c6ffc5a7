"""A GPU that runs nothing: enough of PyTorch and the driver for the host code of calls on Hopper to be counted."""

import contextlib
import ctypes
import itertools
import struct
from types import SimpleNamespace
from typing import NamedTuple

import torch

from sage_kernels.cuda import launch, tensor_map
from sage_kernels.cuda.parameters import packer
from sage_kernels.replay import driver, launch_plan, prepared, trace

DEVICE = torch.device("cuda", 0)
CAPABILITY = (9, 0)
STREAM = 7


class FakeLibrary:
    """The driver's library; it keeps what each launch and each kernel was given."""

    def __init__(self):
        self.launched = []
        self.attributes = {}

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        fields = struct.unpack(driver.CONFIG, ctypes.string_at(config.value, struct.calcsize(driver.CONFIG)))
        self.launched.append(Launched(function.value, fields[:3], fields[7], parameters.value))
        return 0

    def cuEventRecord(self, *arguments):
        return 0

    def cuFuncSetAttribute(self, function, attribute, value):
        self.attributes[function, attribute] = value
        return 0

    cuEventCreate = cuStreamCreate = cuStreamWaitEvent = cuThreadExchangeStreamCaptureMode = cuEventRecord
    cuStreamGetCaptureInfo_v2 = cuCtxGetCurrent = cuCtxSetCurrent = cuDevicePrimaryCtxRetain = cuEventRecord


class Launched(NamedTuple):
    """A launch that the driver was given.

    Attributes:
        function, stream: handles.
        grid: blocks along three axes.
        parameters: address of the parameters' addresses.
    """

    function: int
    grid: tuple[int, int, int]
    stream: int
    parameters: int

    def word(self, parameter: int, byte: int = 0) -> int:
        """64 bits of a parameter."""
        address = ctypes.c_uint64.from_address(self.parameters + 8 * parameter).value
        return ctypes.c_uint64.from_address(address + byte).value


class FakeFunction:
    """A kernel of `cuda.launch`, as if it were loaded."""

    handles = itertools.count(1)

    def __init__(self, kernel, index):
        self.kernel, self.index, self.handle = kernel, index, next(self.handles)
        self.packer = packer(kernel.source.parameters[kernel.name])

    packed = launch._Function.packed


def install(monkeypatch) -> FakeLibrary:
    """Let the host code of calls find the GPU, whose results, which nothing computes, are taken for right."""
    library = FakeLibrary()
    monkeypatch.setattr(prepared, "are_same", lambda found, expected: True)
    monkeypatch.setattr(driver, "library", lambda: library)
    monkeypatch.setattr(
        driver, "encode_tensor_map", lambda address, *layout: struct.pack("<Q", address) + bytes(driver.MAP_BYTES - 8)
    )
    monkeypatch.setattr(tensor_map, "device_context", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(launch, "_function", FakeFunction)
    monkeypatch.setattr(launch, "_try_to_compile", lambda source, arch: None)
    monkeypatch.setattr(launch_plan, "current_device", lambda: 0)
    monkeypatch.setattr(launch_plan, "current_stream", lambda index: STREAM)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: CAPABILITY)
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    monkeypatch.setattr(trace.Rehearsal, "stand_in", stand_in)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return library


def stand_in(rehearsed: trace.Rehearsal, x: torch.Tensor, device: object = None) -> trace.StandIn:
    """Return a stand-in for a CPU's tensor that says it is the GPU's."""
    meta = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")
    return trace.StandIn(meta, rehearsed.new_memory(meta), DEVICE, rehearsed)


def pack(kernel, grid, arguments, options) -> trace.PackedLaunch:
    """Pack a Triton launch without compiling it: its addresses, one after the other."""
    tensors = [getattr(value, "base", value) for value in arguments.values()]
    addresses = [x.data_ptr() for x in tensors if isinstance(x, torch.Tensor)]
    places = tuple(range(0, 8 * len(addresses), 8))
    packed = struct.pack(f"<{len(addresses)}Q", *addresses)
    return trace.PackedLaunch(1, (*grid, 1, 1)[:3], 128, 0, False, packed, places, places)
