"""Kernels' parameters and constants are one on both sides, or the compiler says where they differ. Needs no GPU."""

import ctypes
from dataclasses import dataclass, fields, replace
from functools import partial

import pytest
import torch

from sage_kernels.cuda import block_lists, compiler, int8_forward, parameters, quantize
from sage_kernels.cuda.parameters import ConstFloats, Float, Int, Int64, Map, TensorMap, UInt32, packer
from sage_kernels.spec.recipe import get_recipe

pytestmark = pytest.mark.skipif(bool(compiler.missing()), reason=compiler.missing())

SOURCE = """#include "parameters.cuh"
extern "C" __global__ void kernel(KERNEL_PARAMETERS) {}
"""
CONFIG = int8_forward.Int8ForwardConfig.of(
    recipe=get_recipe("sage2"), head_dim=128, kv_len=4096, mask="none", is_causal=False, may_leave_query=False
)
SOURCES = {
    "int8_forward.cu": int8_forward.kernel(CONFIG, False, False, torch.bfloat16).source,
    "sort_lists.cu": block_lists.kernel(False, False).source,
    "quantize.cu": quantize.kernels(128, torch.bfloat16, "fp8", False)[0].source,
}


@dataclass(slots=True)
class Inner:
    small: Int
    wide: Int64
    number: Float


@dataclass(slots=True)
class Outer:
    real: Float
    inner: Inner
    count: UInt32
    pointer: ConstFloats


@dataclass(slots=True)
class Parameters:
    first: Int
    map: Map
    outer: Outer
    null: ConstFloats
    last: Int


class CInner(ctypes.Structure):
    _fields_ = (("small", ctypes.c_int32), ("wide", ctypes.c_int64), ("number", ctypes.c_float))


class COuter(ctypes.Structure):
    _fields_ = (("real", ctypes.c_float), ("inner", CInner), ("count", ctypes.c_uint32), ("pointer", ctypes.c_uint64))


C_TYPES = (ctypes.c_int32, ctypes.c_char * 128, COuter, ctypes.c_uint64, ctypes.c_int32)


def given(tensor=None, **changes) -> Parameters:
    inner = Inner(-5, -(2**40), 0.1)
    call = {"first": 7, "map": TensorMap(bytes(range(1, 129))), "outer": Outer(2.5, inner, 2**32 - 1, tensor)}
    return Parameters(**{**call, "null": None, "last": -8, **changes})


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SAGE_KERNELS_COMPILE", raising=False)


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """Return a function that compiles a kernel with these parameters, given the text of a changed header or none."""
    (tmp_path / "kernel.cu").write_text(SOURCE)
    monkeypatch.setattr(compiler, "SOURCES", tmp_path)

    def compiled(described, change=lambda text: text):
        text = change(parameters.header({"kernel": described}))
        return compiler.compile("kernel.cu", {}, generated={parameters.HEADER: text})

    return compiled


def test_parameters_lie_at_their_declared_offsets():
    x = torch.zeros(4)
    packed = packer(Parameters).pack(given(x), -1)  # of a CPU's tensors: their device is -1
    assert packer(Parameters).sizes == [ctypes.sizeof(c_type) for c_type in C_TYPES]
    starts = packer(Parameters).starts
    first, map, outer, null, last = (c.from_buffer_copy(packed, at) for c, at in zip(C_TYPES, starts, strict=True))
    assert (first.value, map.raw, null.value, last.value) == (7, bytes(range(1, 129)), 0, -8)
    assert (outer.real, outer.count, outer.pointer) == (2.5, 2**32 - 1, x.data_ptr())
    assert (outer.inner.small, outer.inner.wide) == (-5, -(2**40))
    assert outer.inner.number == torch.tensor(0.1).item()


def test_what_cannot_be_packed_is_refused_by_name():
    pack = partial(packer(Parameters).pack, index=-1)
    for changes, field in (
        ({"first": 2**31}, "first = 2147483648 is no int"),
        ({"last": 1.5}, "last = 1.5 is no int"),
        ({"outer": Outer(0.0, Inner(0, 0, 0.0), -1, None)}, "outer.count = -1 is no uint32"),
        ({"outer": Outer(1e300, Inner(0, 0, 0.0), 0, None)}, "outer.real = 1e[+]300 is no float"),
    ):
        with pytest.raises(ValueError, match=field):
            pack(given(**changes))
    with pytest.raises(ValueError, match=r"outer\.pointer is on cpu, but the kernel runs on cuda:0"):
        packer(Parameters).pack(given(torch.zeros(1)), 0)
    with pytest.raises(TypeError, match=r"Parameters.* is needed, was given .*Inner"):
        pack(Inner(0, 0, 0.0))
    with pytest.raises(TypeError, match=r"Parameters.* is needed, was given .*Other"):
        pack(Other(*(getattr(given(), field.name) for field in fields(Parameters))))


@dataclass(slots=True)
class Other(Parameters):
    pass


@dataclass
class Unknown:
    size: int


def test_a_field_without_a_c_type_is_refused():
    with pytest.raises(TypeError, match=r"Unknown\.size: .*int"):
        packer(Unknown)


def test_the_compiler_agrees_with_the_host(compiled):
    assert compiled(Parameters).image


@pytest.mark.parametrize(
    ("line", "changed", "message"),
    [
        ("  int64 wide;", "  int wide;", "Inner: the host packs wide as 8 bytes from byte 8 on"),
        (
            "  int small;\n  int64 wide;",
            "  int64 wide;\n  int small;",
            # The latter where the compiler lacks offsetof, as some NVRTCs do.
            "Inner: the host packs (small as 4 bytes from byte 0|24 bytes)",
        ),
        ("  uint32 count;\n", "", "count"),
        ("  float real;\n", "  float real;\n  float more[3];\n", "Outer: the host packs 48 bytes"),
    ],
)
def test_a_struct_that_lies_otherwise_does_not_compile(line, changed, message, compiled):
    with pytest.raises(compiler.CompileError, match=message):
        compiled(Parameters, lambda text: text.replace(line, changed))


# The first constant of each source; the audit tries all.
each_constant = pytest.mark.parametrize(
    ("file", "name"),
    [
        pytest.param(file, name, marks=pytest.mark.audit if place else ())
        for file, source in SOURCES.items()
        for place, name in enumerate(source.macros)
    ],
)


def unsupported(value):
    """Return a value that no constant of a source has."""
    return "-3.0f" if isinstance(value, str) else 2 if isinstance(value, bool) else -3


@each_constant
def test_a_constant_that_a_source_does_not_support_is_refused_by_name(file, name):
    source = SOURCES[file]
    wrong = replace(source, macros={**source.macros, name: unsupported(source.macros[name])})
    with pytest.raises(compiler.CompileError, match=rf"static assertion failed with \"[^\"]*\b{name}\b"):
        wrong.compile()


@each_constant
def test_a_constant_that_is_not_given_is_refused_by_name(file, name):
    source = SOURCES[file]
    wrong = replace(source, macros={other: value for other, value in source.macros.items() if other != name})
    with pytest.raises(compiler.CompileError, match=rf'identifier "{name}" is undefined'):
        wrong.compile()
