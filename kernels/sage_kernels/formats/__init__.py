"""Number formats in plain PyTorch: quantise and dequantise. Kernels are tested against these functions.

All formats treat special values in the same way: a non-finite element makes exactly the values that share its scale
dequantise to NaN, so that NaN never turns into a number; an all-zero group dequantises to zeros.

Scales are amax times the float32 reciprocal of the format's largest value (so PyTorch divides by a constant on a GPU),
elements are IEEE quotients: the same bits on every device.
"""
