"""Attention kernels of other packages."""
