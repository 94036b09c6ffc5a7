"""Changes that make Triton's interpreter several times as fast, and leave what it computes as it is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest


def speed_up(patch: pytest.MonkeyPatch) -> None:
    """Patch Triton's interpreter, which must be the one that runs kernels: TRITON_INTERPRET=1."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    dtype_of = interpreter._get_np_dtype

    @cache
    def names_of_builtins(package: object) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]

    def builtins_of(package: object) -> list[tuple[str, Any]]:
        """Return the members that each call of a device function looks for, to patch those that are not yet."""
        return [(name, getattr(package, name)) for name in names_of_builtins(package)]

    patch.setattr(interpreter, "inspect", SimpleNamespace(**{**vars(inspect), "getmembers": builtins_of}))
    patch.setattr(interpreter, "_get_np_dtype", by_name(dtype_of))
    patch.setattr(interpreter.ReduceOps, "generic_reduce", reduce_halves)
    patch.setattr(tl.block_type, "__init__", block_types_once(tl.block_type.__init__, tl.constexpr))
    patch.setattr(tl.tensor, "__init__", shapes_once(tl.tensor.__init__))
    patch.setattr(interpreter, "_patch_lang", once_a_launch(interpreter._patch_lang, (tl, tl.core)))
    # Ten operations for each sum of integers, whose result the interpreter drops: it asserts nothing on the device.
    patch.setattr(TritonSemantic, "binary_op_sanitize_overflow_impl", lambda *arguments: None)
    broadcast = unless_alike(TritonSemantic.broadcast_impl_value, interpreter.TensorHandle)
    patch.setattr(TritonSemantic, "broadcast_impl_value", broadcast)


def by_name(dtype_of: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Remember what a function returns for each of Triton's types."""
    known: dict[str, Any] = {}

    def remembered(dtype: Any) -> Any:
        if dtype.name not in known:
            known[dtype.name] = dtype_of(dtype)
        return known[dtype.name]

    return remembered


def block_types_once(init: Callable[..., None], constexpr: type) -> Callable[..., None]:
    """Check and name each type of blocks once."""
    known: dict[tuple[Any, ...], dict[str, Any]] = {}

    def remembered(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = [size.value if isinstance(size, constexpr) else size for size in shape]
        key = (element_ty.name, *sizes)
        if key not in known:
            init(self, element_ty, shape)
            known[key] = dict(vars(self))
        vars(self).update(known[key])

    return remembered


def shapes_once(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap the sizes of each type of tensors once."""
    known: dict[str, dict[str, Any]] = {}

    def remembered(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known:
            init(self, handle, type)
            known[type.name] = dict(vars(self))
        vars(self).update(known[type.name], handle=handle, type=type)

    return remembered


def once_a_launch(patch_lang: Callable[[Any], Any], languages: tuple[Any, ...]) -> Callable[[Any], Any]:
    """Make a kernel's device functions leave the language as the kernel itself, or one of them before, patched it."""
    patched: set[int] = set()

    @cache
    def seen_by(function: Any) -> set[int]:
        return {id(value) for value in function.__globals__.values() if any(value is one for one in languages)}

    def remembered(function: Any) -> Any:
        seen = seen_by(function)
        if seen and seen <= patched:
            return SimpleNamespace(restore=lambda: None)
        scope, of_kernel = patch_lang(function), not patched
        if hasattr(scope, "restore"):
            patched.update(seen)
            if of_kernel:
                restore = scope.restore
                scope.restore = lambda: (patched.clear(), restore())
        return scope

    return remembered


def unless_alike(broadcast: Callable[..., Any], handle: Callable[..., Any]) -> Callable[..., Any]:
    """Broadcast nothing where both blocks have the same shape, or both are scalars, and a scalar by NumPy at once."""
    types: dict[tuple[str, str], Any] = {}

    def like(scalar: Any, block: Any) -> Any:
        key = scalar.type.name, block.type.name
        if key not in types:
            types[key] = block.type.with_element_ty(scalar.type)
        value = scalar.handle.data
        return type(block)(
            handle(np.full(block.handle.data.shape, value, value.dtype), scalar.handle.dtype), types[key]
        )

    def remembered(semantic: Any, x: Any, y: Any) -> Any:
        if x.type.is_block() != y.type.is_block():
            return (x, like(y, x)) if x.type.is_block() else (like(x, y), y)
        if x.handle.data.shape == y.handle.data.shape:
            return x, y
        return broadcast(semantic, x, y)

    return remembered


def reduce_halves(reduction: Any, inputs: tuple[Any, ...]) -> list[Any]:
    """Combine halves of the axis, which has a power of two elements, as tensors: Triton's own goes by elements."""
    dtypes = [x.dtype for x in inputs]
    inputs, axis = reduction.unravel(inputs, reduction.axis)
    arrays = [x.handle.data for x in inputs]

    def part(index: slice | int) -> list[Any]:
        where = (*[slice(None)] * axis, index)
        return [reduction.to_tensor(x[where], dtype) for x, dtype in zip(arrays, dtypes, strict=True)]

    while (half := arrays[0].shape[axis] // 2) > 0:
        combined = reduction.combine_fn.fn(*part(slice(half)), *part(slice(half, None)))
        arrays = [x.handle.data for x in (combined if isinstance(combined, tuple) else (combined,))]
    return part(slice(None) if reduction.keep_dims else 0)
