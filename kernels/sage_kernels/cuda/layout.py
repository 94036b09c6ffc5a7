"""Sizes that the CUDA kernels share with their host code."""

CHANNELS = (64, 128)
"""Channels of Q, K and V in the operands."""
