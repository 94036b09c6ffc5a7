"""Quantisers in Triton, and the statistics that they need."""
