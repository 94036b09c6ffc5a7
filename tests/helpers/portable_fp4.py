"""Portable functions that stand for the instructions of GPUs with FP4, so that the native forward runs without."""

import pytest
import triton
import triton.language as tl

from sage_kernels.triton import nvfp4_forward
from sage_kernels.triton.common import nvfp4
from sage_kernels.triton.common.formats import dequantize, encode_e2m1, round_to_e2m1


@triton.jit
def portable_dot(a, a_scale, b, b_scale, accumulator, NATIVE: tl.constexpr):
    """Do as `dot_nvfp4`, in float16, which holds every product's factors."""
    return tl.dot(dequantize(a, a_scale), tl.trans(dequantize(b, b_scale)), accumulator)


@triton.jit
def portable_bytes(words):
    """Do as `native_bytes`, in any layout."""
    shift = (8 * tl.arange(0, 4))[None, None, :]
    return tl.reshape((words[:, :, None] >> shift).to(tl.uint8), (words.shape[0], words.shape[1] * 4))


@triton.jit
def portable_pack(x):
    """Do as `native_pack_e2m1`."""
    value = tl.reshape(round_to_e2m1(x), (x.shape[0], x.shape[1] // 8, 8))
    code = encode_e2m1(value, value) & 7
    words = tl.sum(code << (4 * tl.arange(0, 8))[None, None, :], 2)
    return words, tl.sum((2 * value).to(tl.int32), 2)


@triton.jit
def portable_log2(x):
    """Do as `native_log2`."""
    return tl.log2(x)


@triton.jit
def portable_scale_rows(x, factor):
    """Do as `native_scale_rows`."""
    return x * factor[:, None]


def without_fp4_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace what only GPUs with FP4 run: the products, the rounding of P, and what relies on their layouts."""
    monkeypatch.setattr(nvfp4_forward, "dot_nvfp4", portable_dot)
    monkeypatch.setattr(nvfp4, "dot_nvfp4", portable_dot)
    monkeypatch.setattr(nvfp4, "native_bytes", portable_bytes)
    monkeypatch.setattr(nvfp4, "native_pack_e2m1", portable_pack)


def without_inline_assembly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace all that the interpreter does not know."""
    without_fp4_instructions(monkeypatch)
    monkeypatch.setattr(nvfp4, "native_log2", portable_log2)
    monkeypatch.setattr(nvfp4, "native_scale_rows", portable_scale_rows)
