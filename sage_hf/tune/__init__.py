"""Measure what attention calls cost on the GPU at hand, and compile their kernels beforehand."""
