"""Portable GPU kernels in Triton. `registration` lists them; nothing is imported here."""
