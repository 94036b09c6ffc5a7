"""The errors raised for attention that none of our processors can compute."""

from __future__ import annotations


class UnsupportedAttentionError(ValueError):
    """Error for an attention module, or a way of running it, that low-bit attention cannot serve, and that it names."""


class FixedBackendError(UnsupportedAttentionError):
    """Error for a processor that attends by a backend of its own choice alone: its layer stays as it is."""
