"""Portable GPU kernels in Triton. `registration` says what there is; nothing is imported here."""
