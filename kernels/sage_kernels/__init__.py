"""The kernel backend of sage-hf: low-bit attention for PyTorch.

Knows torch (and, for its GPU kernels, triton). `ops.attention` is the door; `registry` says what each kernel can do;
`reference` is the specification of every recipe in plain PyTorch.
"""
