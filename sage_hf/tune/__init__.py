"""Measure the times of attention calls on the GPU at hand, and compile their kernels beforehand."""
