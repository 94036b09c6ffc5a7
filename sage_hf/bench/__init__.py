"""Measure speed, error and memory of low-bit attention, and of other providers, on the GPU at hand: `sage-hf bench`."""
