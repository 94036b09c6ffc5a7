"""Triton's private interface: how it compiles, loads and launches a kernel.

If another version of Triton differs, its own launcher runs: slower, not wrong.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

import torch
import triton

from ...replay import driver
from ...replay.driver import MAP_ALIGNMENT, MAP_BYTES
from ...replay.trace import NotReplayableError, PackedLaunch, Placeholder, relocatable

WARP = 32
SCALARS = {
    **{"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q"},
    **{"u1": "B", "u8": "B", "u16": "H", "u32": "I", "u64": "Q"},
    **{"fp32": "f", "fp64": "d"},
}
"""Types of a kernel's parameters as Python's `struct` packs them."""
SWIZZLE_BYTES = (0, 32, 64, 128)


_digested: set[int] = set()


def compile_kernel(
    kernel: triton.JITFunction, grid: tuple[int, ...], arguments: dict[str, Any], options: dict[str, Any]
) -> Any:
    """Return a kernel compiled for its arguments, without running it; see `pack`."""
    return kernel.run(grid=grid, warmup=True, **arguments, **options)


def pack(
    kernel: triton.JITFunction,
    grid: tuple[int, ...],
    arguments: dict[str, Any],
    options: dict[str, Any],
    dependent: bool = False,
) -> PackedLaunch:
    """Return a launch in the driver's format; compile the kernel if necessary.

    Args:
        kernel, grid, arguments, options, dependent: as in `launch.launch`; tensors may be placeholders.

    Raises:
        NotReplayableError: the kernel needs more than parameters at launch, or parameters of unknown types.
    """
    compiled = compile_kernel(kernel, grid, arguments, options)
    function, metadata = _load(compiled), compiled.metadata
    for name in ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl"):
        if getattr(metadata, name, 0):
            raise NotReplayableError(f"{kernel.__name__} has a {name}")
    if metadata.num_ctas != 1:
        raise NotReplayableError(f"{kernel.__name__} runs in clusters")
    values = [arguments[name] for name in kernel.arg_names]
    tensor_maps = iter(getattr(metadata, "tensordesc_meta", None) or ())
    parts = [
        part
        for kind, value in zip(compiled.src.signature.values(), values, strict=True)
        for part in _parts(kind, value, tensor_maps)
    ]
    parts += [("Q", 0), ("Q", 0)]  # two scratch buffers, unused by the kernel
    sizes = [MAP_BYTES if kind == "map" else struct.calcsize(kind) for kind, _ in parts]
    if (actual_sizes := driver.parameter_sizes(function)) != sizes:
        raise NotReplayableError(f"{kernel.__name__} has parameters of {actual_sizes} bytes, {sizes} are known of")
    parameters, starts, addresses = bytearray(), [], []
    for (kind, value), size in zip(parts, sizes, strict=True):
        parameters += bytes(-len(parameters) % (MAP_ALIGNMENT if kind == "map" else size))
        starts.append(len(parameters))
        if kind in ("map", "Q"):
            addresses.append(len(parameters))
        parameters += value if kind == "map" else struct.pack("=" + kind, value)
    return PackedLaunch(
        function=function,
        grid=(*grid, 1, 1)[:3],  # type: ignore[arg-type]
        threads=WARP * metadata.num_warps,
        shared_bytes=metadata.shared,
        dependent=dependent,
        parameters=bytes(parameters),
        starts=tuple(starts),
        addresses=tuple(addresses),
        constants=tuple(x for x in values if isinstance(x, torch.Tensor) and not isinstance(x, Placeholder)),
    )


@cache
def _load(compiled: Any) -> int:
    """Return the driver's handle of a kernel, loaded without Triton's launcher, which a C compiler would have to make.

    Raises:
        RuntimeError: the driver refuses.
    """
    if compiled.module is None:
        active = triton.runtime.driver.active
        device = active.get_current_device()
        _, function, *_ = active.utils.load_binary(compiled.name, compiled.kernel, compiled.metadata.shared, device)
        return function
    return compiled.function


def _parts(kind: Any, value: Any, tensor_maps: Iterator[dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield format and value of each packed part of a parameter."""
    if kind == "constexpr":
        return
    if isinstance(kind, str) and kind.startswith("*"):
        yield "Q", 0 if value is None else value.data_ptr()
    elif isinstance(kind, str) and kind.startswith("tensordesc"):
        described = next(tensor_maps, None)
        if described is None or described["fp4_padded"] or described.get("is_im2col") or value.padding != "zero":
            raise NotReplayableError("a tensor descriptor of an unknown kind")
        dtype, pitches = value.base.dtype, [stride * value.base.element_size() for stride in value.strides[:-1]]
        swizzle, box = SWIZZLE_BYTES[described["swizzle"]], described["block_size"]

        def tensor_map(address: int) -> bytes:
            return driver.encode_tensor_map(
                address, dtype, value.shape, pitches, box, swizzle, driver.L2_PROMOTION_128B
            )

        yield "map", relocatable(tensor_map, value.base.data_ptr())
        yield from (("i", size) for size in value.shape)
        yield from (("q", stride) for stride in value.strides)
    elif kind in SCALARS:
        yield SCALARS[kind], value
    else:
        raise NotReplayableError(f"a parameter of type {kind}")


def digest(function: Any) -> None:
    """Have Triton digest a kernel's source, its key in Triton's cache, after the functions that the kernel calls.

    A digest covers the constants of called functions. Up to Triton 3.6 it covers only functions that were digested
    before: a process that launches other kernels first would not find this kernel, and compile it again.
    """
    if not hasattr(type(function), "cache_key") or id(function) in _digested:
        return
    for name in function.fn.__code__.co_names:
        if (called := function.fn.__globals__.get(name)) is not function:
            digest(called)
    _ = function.cache_key
    _digested.add(id(function))


def build_driver() -> None:
    """Build Triton's driver by a C compiler; a failure shows again where Triton builds it."""
    with contextlib.suppress(Exception):
        triton.runtime.driver.active.get_current_device()


def digest_compiler() -> None:
    """Digest the files of Triton's compiler, for the keys of its cache; a failure shows again where Triton does."""
    with contextlib.suppress(Exception):
        import_module("triton.runtime.cache").triton_key()
