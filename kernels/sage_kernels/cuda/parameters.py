"""A kernel's parameters, described once: dataclasses here, from which C++ is written and bytes are packed.

    @dataclass(slots=True)
    class Sizes:
        q_len: Int
        kv_len: Int

    @dataclass(slots=True)
    class Parameters:
        output: Floats
        sizes: Sizes

are `struct Sizes { int q_len; int kv_len; };` and the parameters `float* output, Sizes sizes` of a kernel `extern "C"
__global__ void attend(ATTEND_PARAMETERS)` whose source includes "parameters.cuh". That header also asserts that the
compiler lays structs out as the host packs them.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, NewType, get_args, get_type_hints

import torch

from ..spec.layout import round_up

HEADER = "parameters.cuh"

TensorMap = NewType("TensorMap", bytes)
"""A tensor's layout as the tensor memory accelerator reads it: the 128 bytes of a CUtensorMap."""
NO_TENSOR_MAP = TensorMap(bytes(128))


@dataclass(frozen=True)
class CType:
    """A type of C++, as kernels name it, and how Python's `struct` packs it."""

    name: str
    format: str
    alignment: int

    @property
    def size(self) -> int:
        """Return its bytes."""
        return struct.calcsize("=" + self.format)

    @property
    def is_pointer(self) -> bool:
        """Return whether the type is packed as a tensor's address or a null pointer."""
        return self.name.endswith("*")


Int = Annotated[int, CType("int", "i", 4)]
UInt32 = Annotated[int, CType("uint32", "I", 4)]
Int64 = Annotated[int, CType("int64", "q", 8)]
Float = Annotated[float, CType("float", "f", 4)]
# A tensor of a dtype with elements of this size; None: a null pointer.
Floats = Annotated[torch.Tensor | None, CType("float*", "Q", 8)]
ConstFloats = Annotated[torch.Tensor | None, CType("const float*", "Q", 8)]
Ints = Annotated[torch.Tensor | None, CType("int*", "Q", 8)]
ConstInts = Annotated[torch.Tensor | None, CType("const int*", "Q", 8)]
Bytes = Annotated[torch.Tensor | None, CType("uint8*", "Q", 8)]
ConstBytes = Annotated[torch.Tensor | None, CType("const uint8*", "Q", 8)]
HalfWords = Annotated[torch.Tensor | None, CType("uint16*", "Q", 8)]
ConstHalfWords = Annotated[torch.Tensor | None, CType("const uint16*", "Q", 8)]
Map = Annotated[TensorMap, CType("TensorMap", "128s", 64)]


@dataclass(frozen=True)
class Field:
    """A field of a struct, or of one inside it: its path ("query.first"), type and first byte."""

    path: str
    type: CType
    offset: int


@dataclass(frozen=True)
class StructLayout:
    """Layout of a struct: its fields, with the fields of structs inside it, and its size and alignment in bytes."""

    fields: tuple[Field, ...]
    size: int
    alignment: int


class Packer:
    """Packs the parameters that a dataclass describes.

    Attributes:
        sizes: bytes of each parameter.
        starts: first byte of each parameter in the result of `pack`.
        addresses: first bytes of the tensors' addresses in that result, including addresses in tensor maps.
    """

    def __init__(self, parameters: type) -> None:
        """Lay the parameters out; raise TypeError if a field's type is neither of this module nor such a dataclass."""
        self.parameters = parameters
        layouts = {name: layout(member) for name, member in members(parameters).items()}
        self.sizes = [one.size for one in layouts.values()]
        ends = list(itertools.accumulate(self.sizes, initial=0))
        self.starts = ends[:-1]
        format, end = "=", 0
        self._fields: list[Field] = []
        self.addresses: list[int] = []
        for (name, one), start in zip(layouts.items(), self.starts, strict=True):
            for field in one.fields:
                format += f"{start + field.offset - end}x{field.type.format}"
                end = start + field.offset + field.type.size
                if field.type.is_pointer or field.type.name == "TensorMap":  # a map begins with the address
                    self.addresses.append(start + field.offset)
                self._fields.append(replace(field, path=f"{name}.{field.path}".rstrip(".")))
        self._struct = struct.Struct(format + f"{ends[-1] - end}x")
        # Get the class too: with a single name, attrgetter would return no tuple.
        self._values = attrgetter("__class__", *(field.path for field in self._fields))
        self._pointers = [(place, field) for place, field in enumerate(self._fields) if field.type.is_pointer]

    def pack(self, parameters: Any, index: int) -> bytes:
        """Return the parameters for a kernel that runs on device `index`.

        Raises:
            TypeError: the parameters are of another dataclass.
            ValueError: a tensor is on another device, or a number does not fit its field.
        """
        if parameters.__class__ is not self.parameters:
            raise TypeError(f"{self.parameters} is needed, was given {parameters.__class__}")
        _, *values = self._values(parameters)
        for place, field in self._pointers:
            tensor = values[place]
            if tensor is None:
                values[place] = 0
            elif tensor.get_device() == index:
                values[place] = tensor.data_ptr()
            else:
                raise ValueError(f"{field.path} is on {tensor.device}, but the kernel runs on cuda:{index}")
        try:
            return self._struct.pack(*values)
        except (struct.error, OverflowError) as error:
            raise ValueError(f"{self._unpackable(values)} ({error})") from error

    def _unpackable(self, values: list[Any]) -> str:
        """Name the fields that cannot hold their values."""
        misfits = []
        for field, value in zip(self._fields, values, strict=True):
            try:
                struct.pack("=" + field.type.format, value)
            except (struct.error, OverflowError):
                misfits.append(f"{field.path} = {value!r} is no {field.type.name}")
        return ", ".join(misfits)


@cache
def packer(parameters: type) -> Packer:
    """Return a packer of the parameters that a dataclass describes."""
    return Packer(parameters)


# Older compilers (NVRTC 12.8 and 13.0) cannot tell where a field lies, but they check its size and the struct's.
_LIES_AT = """\
#define LIES_AT(STRUCT, FIELD, BYTE) true
#if __has_builtin(__builtin_offsetof)
#undef LIES_AT
#define LIES_AT(STRUCT, FIELD, BYTE) (__builtin_offsetof(STRUCT, FIELD) == BYTE)
#endif
"""


def header(parameters: Mapping[str, type]) -> str:
    """Return the text of "parameters.cuh": structs, assertions that their layout is as packed, and parameters.

    Args:
        parameters: the parameters of each kernel of a source, by its name.
    """
    structs: dict[type, str] = {}
    macros = ""
    for kernel, described in parameters.items():
        names = []
        for name, member in members(described).items():
            _declare(member, structs)
            names.append(f"__grid_constant__ {_name(member)} const {name}")
        macros += f"#define {kernel.upper()}_PARAMETERS {', '.join(names)}\n"
    return "\n".join(("#pragma once", '#include "tma.cuh"\n', _LIES_AT, *structs.values(), macros))


def members(structure: type) -> dict[str, CType | type]:
    """Return the C++ type, or the dataclass, of each field by name.

    Raises:
        TypeError: the class is no dataclass, or a field has another type.
    """
    if not is_dataclass(structure):
        raise TypeError(f"{structure} is no dataclass")
    hints = get_type_hints(structure, include_extras=True)
    member_types: dict[str, CType | type] = {}
    for field in fields(structure):
        hint = hints[field.name]
        types = [extra for extra in get_args(hint) if isinstance(extra, CType)]
        if not types and not is_dataclass(hint):
            raise TypeError(f"{structure.__name__}.{field.name}: {hint} is no type of {__name__}, nor a dataclass")
        member_types[field.name] = types[0] if types else hint
    return member_types


def layout(member: CType | type) -> StructLayout:
    """Return the layout of a parameter: each field begins at the next multiple of its alignment, as in C++."""
    if isinstance(member, CType):
        return StructLayout((Field("", member, 0),), member.size, member.alignment)
    placed: list[Field] = []
    end, alignment = 0, 1
    for name, inside in members(member).items():
        inner = layout(inside)
        start = round_up(end, inner.alignment)
        placed += (Field(f"{name}.{x.path}".rstrip("."), x.type, start + x.offset) for x in inner.fields)
        end, alignment = start + inner.size, max(alignment, inner.alignment)
    return StructLayout(tuple(placed), round_up(end, alignment), alignment)


def _declare(member: CType | type, structs: dict[type, str]) -> None:
    """Add the text of a struct after the texts of structs inside it."""
    if isinstance(member, CType) or member in structs:
        return
    for inside in members(member).values():
        _declare(inside, structs)
    laid_out, name = layout(member), member.__name__
    declared = "".join(f"  {_name(inside)} {field};\n" for field, inside in members(member).items())
    proof = "".join(
        f"static_assert(LIES_AT({name}, {field.path}, {field.offset}) && "
        f"sizeof({name}::{field.path}) == {field.type.size}, "
        f'"{name}: the host packs {field.path} as {field.type.size} bytes from byte {field.offset} on");\n'
        for field in laid_out.fields
        if "." not in field.path
    )
    size = f'static_assert(sizeof({name}) == {laid_out.size}, "{name}: the host packs {laid_out.size} bytes");\n'
    structs[member] = f"struct {name} {{\n{declared}}};\n{proof}{size}"


def _name(member: CType | type) -> str:
    """Return the name of a type in C++."""
    return member.name if isinstance(member, CType) else member.__name__
