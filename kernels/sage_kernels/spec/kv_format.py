"""Formats of a low-bit cache of keys and values, known without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVFormat:
    """A format of stored K and V.

    Attributes:
        name: name of the format, a key of FORMATS.
        bits: bits of a code.
        group: channels that share a scale; 0: all channels of a token share a scale and a lowest value, each in
            float16.
    """

    name: str
    bits: int
    group: int = 0

    def words(self, channels: int) -> int:
        """Return the number of 16-bit words of a token's codes."""
        return channels * self.bits // 16


FORMATS = {one.name: one for one in (KVFormat("int8", 8), KVFormat("int4", 4), KVFormat("nvfp4", 4, group=16))}
"""The formats by name; NVFP4 has the numerics of Blackwell, emulated."""


def get_format(name: str) -> KVFormat:
    """Return a format by its name.

    Raises:
        ValueError: no format has that name.
    """
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"KV cache: {name!r} is not one of {', '.join(FORMATS)}")
    return FORMATS[name]
