"""Find the spans of keys that exist by `find_spans.cu`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from ..spec.operands import KeyPadding
from .launch import ConfiguredKernel, KernelSource, launch
from .parameters import ConstBytes, Int, Ints

THREADS = 1024


@dataclass(slots=True)
class SpansArguments:
    """Which keys exist, (batch, kv_len), and the spans to write, (batch, 3)."""

    valid: ConstBytes
    spans: Ints
    kv_len: Int


@dataclass(slots=True)
class SpansParameters:
    """Parameters of the kernel."""

    arguments: SpansArguments


@cache
def kernel() -> ConfiguredKernel:
    """Return `find_spans`."""
    return ConfiguredKernel(
        KernelSource("find_spans.cu", {"find_spans": SpansParameters}, {"THREADS": THREADS}), "find_spans", THREADS
    )


def key_padding(valid: torch.Tensor) -> KeyPadding:
    """Find the spans of existing keys; bool `valid`, (batch or 1, kv_len), is False where a key does not exist.

    Raises:
        CompileError: see `launch.launch`.
    """
    padding = KeyPadding.empty(valid)
    write_spans(padding.valid, padding.spans)
    return padding


def write_spans(valid: torch.Tensor, spans: torch.Tensor) -> None:
    """Write the spans of keys that exist; the arguments are the fields of a `KeyPadding`.

    Raises:
        CompileError: see `launch.launch`.
    """
    batch, kv_len = valid.shape
    launch(kernel(), batch, SpansParameters(SpansArguments(valid=valid, spans=spans, kv_len=kv_len)), valid.device)
