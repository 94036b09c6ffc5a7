"""Quantisers in Triton, and the statistics they need."""
