"""The errors raised for attention that none of our processors can compute."""

from __future__ import annotations


class UnsupportedAttentionError(ValueError):
    """Error that names an attention module, or a mode of running it, that low-bit attention cannot serve."""


class FixedBackendError(UnsupportedAttentionError):
    """Error for a processor that attends only by a backend of its own choice: its layer is not changed."""
