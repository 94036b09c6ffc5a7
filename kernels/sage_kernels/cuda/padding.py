"""Find the spans of keys that exist by `find_spans.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ..spec.operands import KeyPadding
from .launch import Kernel, Source, launch
from .parameters import ConstBytes, Int, Ints

THREADS = 1024


@dataclass(slots=True)
class Arguments:
    """Which keys exist, (batch, kv_len), and the spans, (batch, 3), which are written."""

    valid: ConstBytes
    spans: Ints
    kv_len: Int


@dataclass(slots=True)
class Parameters:
    """Parameters of the kernel."""

    arguments: Arguments


@cache
def kernel() -> Kernel:
    """Return `find_spans`."""
    return Kernel(Source("find_spans.cu", {"find_spans": Parameters}, {"THREADS": THREADS}), "find_spans", THREADS)


def read_padding(valid: torch.Tensor) -> KeyPadding:
    """Return which keys exist, and their spans.

    Args:
        valid: bool (batch or 1, kv_len), False where a key does not exist.

    Raises:
        CompileError: see `launch.launch`.
    """
    valid = valid.contiguous().view(torch.uint8)
    batch, kv_len = valid.shape
    spans = valid.new_empty((batch, 3), dtype=torch.int32)
    launch(kernel(), batch, Parameters(Arguments(valid=valid, spans=spans, kv_len=kv_len)), valid.device)
    return KeyPadding(valid, spans)
