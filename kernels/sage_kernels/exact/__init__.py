"""Exact attention: PyTorch's kernels for 16-bit and wider tensors."""
