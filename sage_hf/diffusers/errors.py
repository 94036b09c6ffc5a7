"""The error raised for attention that none of our processors can compute."""

from __future__ import annotations


class UnsupportedAttentionError(ValueError):
    """Error for an attention module, or a way of running it, that low-bit attention cannot serve, and that it names."""
