"""Kernels in Gluon, Triton's language of explicit layouts; nothing is imported here."""
