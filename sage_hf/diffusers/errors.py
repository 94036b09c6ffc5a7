"""What is raised for attention that no processor of ours computes."""

from __future__ import annotations


class UnsupportedAttentionError(ValueError):
    """An attention module, or a way of running it, that low-bit attention cannot serve; the message names it."""
