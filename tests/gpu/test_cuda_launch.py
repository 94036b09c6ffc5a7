"""CUDA C++ kernels get their arguments, wait for the kernel before, and read tensors through tensor maps."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated

import pytest
import torch

from sage_kernels.cuda import compiler
from sage_kernels.cuda.launch import ConfiguredKernel, KernelSource
from sage_kernels.cuda.launch import launch as launch_kernel
from sage_kernels.cuda.parameters import Bytes, ConstFloats, CType, Float, Int, Int64, Map
from sage_kernels.cuda.tensor_map import tensor_map

pytestmark = pytest.mark.skipif(bool(compiler.unavailable()), reason=compiler.unavailable())

SOURCE = "kernels.cu"
KERNELS = """
#include "parameters.cuh"

extern "C" __global__ void add(ADD_PARAMETERS) { x[threadIdx.x] += value * TIMES; }

extern "C" __global__ void copy(COPY_PARAMETERS) {
  Given* copied = reinterpret_cast<Given*>(out);
  *copied = given;
  copied->narrow += more;
}

extern "C" __global__ void unlike(int* x, int64 value) {}

extern "C" __global__ void last_byte(LAST_BYTE_PARAMETERS) {
  extern __shared__ uint8 memory[];
  memory[bytes - 1] = 7;
  __syncthreads();
  *out = memory[bytes - 1];
}

#if HOPPER
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

extern "C" __global__ void read_box(READ_BOX_PARAMETERS) {
  extern __shared__ __align__(1024) uint8 box[];
  unsigned to = (unsigned)__cvta_generic_to_shared(box), barrier = to + bytes;
  if (to % 1024) __trap();  // swizzles follow the address
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\\n"
                 "fence.mbarrier_init.release.cluster;\\n"
                 "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.tensor." TEXT(RANK) "d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, " COORDINATES "], [%2];"
                 :: "r"(to), "l"(&map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4) : "memory");
  }
  __syncthreads();
  asm volatile("{ .reg .pred done;\\n"
               "waiting: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\\n"
               "@!done bra waiting; }" :: "r"(barrier) : "memory");
  for (int i = threadIdx.x; i < bytes; i += blockDim.x) out[i] = box[i];
}

extern "C" __global__ void produce(PRODUCE_PARAMETERS) {
  asm volatile("griddepcontrol.launch_dependents;");
  for (long long start = clock64(); clock64() - start < 100000000;) {}
  *static_cast<volatile int*>(flag) = 1;
}

extern "C" __global__ void consume(CONSUME_PARAMETERS) {
  seen[0] = *static_cast<volatile int*>(flag);
  asm volatile("griddepcontrol.wait;" ::: "memory");
  seen[1] = *static_cast<volatile int*>(flag);
}
#endif
"""
Ints = Annotated[torch.Tensor | None, CType("int*", "Q", 8)]


@dataclass(slots=True)
class Add:
    x: Ints
    value: Int


@dataclass(slots=True)
class Given:
    """Fill 40 bytes, some of which hold nothing."""

    narrow: Int
    pointer: ConstFloats
    null: ConstFloats
    real: Float
    wide: Int64


@dataclass(slots=True)
class Copy:
    out: Bytes
    given: Given
    more: Int


@dataclass(slots=True)
class LastByte:
    out: Bytes
    bytes: Int


@dataclass(slots=True)
class ReadBox:
    map: Map
    out: Bytes
    bytes: Int
    c0: Int
    c1: Int
    c2: Int
    c3: Int
    c4: Int


@dataclass(slots=True)
class Produce:
    flag: Ints


@dataclass(slots=True)
class Consume:
    flag: Ints
    seen: Ints


PARAMETERS = {
    "add": Add,
    "copy": Copy,
    "last_byte": LastByte,
    "read_box": ReadBox,
    "produce": Produce,
    "consume": Consume,
}


@pytest.fixture(autouse=True, scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("sources")
    (folder / SOURCE).write_text(KERNELS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "SOURCES", folder)
        patch.setenv("SAGE_KERNELS_CACHE", str(folder / "cache"))
        patch.delenv("SAGE_KERNELS_COMPILE", raising=False)
        yield


@pytest.fixture
def hopper(device: torch.device) -> None:
    if torch.cuda.get_device_capability(device)[0] < 9:
        pytest.skip("needs a tensor memory accelerator")


@cache
def source(macros: tuple[tuple[str, int | str], ...]) -> KernelSource:
    return KernelSource(SOURCE, PARAMETERS, dict(macros))


@cache
def kernel(name: str, threads: int, shared_bytes: int, macros: tuple[tuple[str, int | str], ...]) -> ConfiguredKernel:
    return ConfiguredKernel(source(macros), name, threads, shared_bytes)


def launch(
    name: str, *args, blocks=1, threads=1, shared_bytes=0, device=None, dependent=False, **macros: int | str
) -> None:
    device = args[-1].device if device is None else device
    macros = {"TIMES": 1, "HOPPER": 0, **macros}
    launched = kernel(name, threads, shared_bytes, tuple(macros.items()))
    launch_kernel(launched, blocks, PARAMETERS[name](*args), device, dependent=dependent)


def test_a_kernel_gets_its_parameters(device):
    x = torch.zeros(4, device=device)
    out = torch.zeros(40, dtype=torch.uint8, device=device)
    given = Given(narrow=-8, pointer=x[1:], null=None, real=0.1, wide=-(2**40))
    launch("copy", out, given, 3, device=device)
    assert out[:4].view(torch.int32).item() == -5
    assert out[8:24].view(torch.int64).tolist() == [x.data_ptr() + 4, 0]
    assert torch.equal(out[24:28].view(torch.float32).cpu(), torch.tensor([0.1]))
    assert out[32:].view(torch.int64).item() == -(2**40)


def test_a_block_can_have_all_of_the_shared_memory(device):
    out = torch.zeros(1, dtype=torch.uint8, device=device)
    limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    launch("last_byte", out, limit, shared_bytes=limit, device=device)
    assert out.item() == 7


@pytest.mark.parametrize("dependent", [False, True])
def test_a_dependent_kernel_starts_before_the_previous_one_ends_and_waits_for_it(dependent, device, hopper):
    flag, seen = (torch.zeros(2, dtype=torch.int32, device=device) for _ in range(2))
    macros = {"HOPPER": 1, "RANK": 2, "COORDINATES": '"{%3, %4}"'}
    for kernel, args in (("produce", (flag,)), ("consume", (flag, seen))):
        launch(kernel, *args, **macros)  # loads it
    torch.cuda.synchronize(device)
    flag.zero_()
    torch.cuda.synchronize(device)
    launch("produce", flag, **macros)
    launch("consume", flag, seen, dependent=dependent, **macros)
    assert seen.tolist() == [0 if dependent else 1, 1]


def read_box(x: torch.Tensor, box: tuple[int, ...], swizzle: int, start: tuple[int, ...], out: torch.Tensor) -> None:
    """Write a box of x as it lies in shared memory to out."""
    rank = len(box)
    coordinates = [*reversed(start), *[0] * (5 - rank)]
    names = ", ".join(f"%{3 + axis}" for axis in range(rank))
    launch(
        *("read_box", tensor_map(x, box, swizzle), out, out.numel(), *coordinates),
        threads=128,
        shared_bytes=out.numel() + 8,
        device=x.device,
        HOPPER=1,
        RANK=rank,
        COORDINATES=f'"{{{names}}}"',
    )


def swizzled(box: torch.Tensor, swizzle: int) -> torch.Tensor:
    """Bytes as they lie in shared memory: chunks of 16 change places within `swizzle` bytes, by the line of 128."""
    flat = box.view(torch.uint8).flatten()
    address = torch.arange(flat.numel())
    chunks = max(swizzle // 16, 1)
    return torch.empty_like(flat).index_put_((address ^ (address // 128 % chunks * 16),), flat)


def bits(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Any bit patterns, NaN and denormal numbers among them."""
    generator = torch.Generator().manual_seed(0)
    shape = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).view(dtype)


@pytest.mark.parametrize("where", ["inside", "beyond the end"])
@pytest.mark.parametrize(
    ("x", "box", "swizzle"),
    [
        (bits(40, 64, dtype=torch.int8), (16, 32), 0),
        (bits(40, 64, dtype=torch.float32), (16, 64), 0),
        (bits(40, 64, dtype=torch.uint8), (16, 32), 32),
        (bits(3, 40, 48, dtype=torch.float16), (1, 16, 16), 32),
        (bits(40, 128, dtype=torch.float8_e4m3fn), (32, 64), 64),
        (bits(2, 3, 40, 64, dtype=torch.bfloat16), (1, 2, 16, 32), 64),
        (bits(300, 128, dtype=torch.int8), (256, 128), 128),
        (bits(2, 40, 3, 64, dtype=torch.bfloat16).transpose(1, 2), (1, 1, 32, 64), 128),
        (bits(2, 2, 3, 20, 64, dtype=torch.float32), (1, 2, 1, 8, 32), 128),
        (bits(1, 40, 64, dtype=torch.float8_e5m2)[:, :, None].transpose(1, 2), (1, 1, 16, 64), 64),
    ],
    ids=lambda value: f"{value.dtype}".removeprefix("torch.") if isinstance(value, torch.Tensor) else None,
)
def test_tma_reads_boxes_by_tensor_maps(x, box, swizzle, where, device, hopper):
    first = [size - step for size, step in zip(x.shape, box, strict=True)]  # of the last box
    if where == "beyond the end":
        start = tuple(last + step // 2 if last else 0 for last, step in zip(first, box, strict=True))
    else:
        start = tuple(last // 2 for last in first)
    part = x[tuple(slice(begin, begin + step) for begin, step in zip(start, box, strict=True))]
    expected = torch.zeros(*box[:-1], box[-1] * x.itemsize, dtype=torch.uint8).view(x.dtype)
    expected[tuple(map(slice, part.shape))] = part
    on_device = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)
    out = torch.full((expected.numel() * x.itemsize,), 255, dtype=torch.uint8, device=device)
    read_box(on_device, box, swizzle, start, out)
    assert torch.equal(out.cpu(), swizzled(expected, swizzle))


def test_a_box_that_tma_cannot_read_is_refused(device, hopper):
    with pytest.raises(ValueError, match=r"box \(257, 16\).*CUDA_ERROR_INVALID_VALUE"):
        tensor_map(torch.zeros(512, 16, dtype=torch.int8, device=device), (257, 16), 0)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"name": "absent"}, RuntimeError, r"absent of kernels\.cu.*CUDA_ERROR_NOT_FOUND"),
        ({"name": "unlike"}, TypeError, r"unlike of kernels\.cu has parameters of \[8, 8\] .*the host packs \[8, 4\]"),
        ({"given": Produce(None)}, TypeError, r"Add.* is needed, was given .*Produce"),
        ({"given": Add(torch.zeros(1), 1)}, ValueError, "x is on cpu"),
        ({"threads": 2048}, RuntimeError, r"add of kernels\.cu: 1 blocks of 2048 threads.*CUDA_ERROR_INVALID_VALUE"),
        ({"shared_bytes": 2**20}, RuntimeError, r"add of kernels\.cu: .*1048576 bytes.*CUDA_ERROR_INVALID_VALUE"),
        ({"macros": {}}, compiler.CompileError, "TIMES"),
    ],
    ids=lambda value: ", ".join(value) if isinstance(value, dict) else None,
)
def test_a_wrong_launch_is_an_error_that_leaves_the_gpu_usable(change, error, message, device):
    x = torch.zeros(1, dtype=torch.int32, device=device)
    macros, right = {"TIMES": 1, "HOPPER": 0}, Add(x, 1)

    def run(name="add", given=right, threads=1, shared_bytes=0, macros=macros):
        described = {**PARAMETERS, name: Add}
        launch_kernel(
            ConfiguredKernel(KernelSource(SOURCE, described, macros), name, threads, shared_bytes), 1, given, device
        )

    with pytest.raises(error, match=message):
        run(**change)
    run()
    assert x.item() == 1
