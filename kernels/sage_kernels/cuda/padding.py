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

    key_mask: ConstBytes
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


def key_padding(key_mask: torch.Tensor) -> KeyPadding:
    """Find the spans of existing keys; bool `key_mask`, (batch or 1, kv_len), is False where a key does not exist.

    Raises:
        CompileError: see `launch.launch`.
    """
    padding = KeyPadding.of(key_mask)
    write_spans(padding)
    return padding


def write_spans(padding: KeyPadding) -> None:
    """Write the spans of a padding, from the keys that exist.

    Raises:
        CompileError: see `launch.launch`.
    """
    key_mask_u8 = padding.key_mask_u8
    batch, kv_len = key_mask_u8.shape
    arguments = SpansArguments(key_mask=key_mask_u8, spans=padding.spans, kv_len=kv_len)
    launch(kernel(), batch, SpansParameters(arguments), key_mask_u8.device)
