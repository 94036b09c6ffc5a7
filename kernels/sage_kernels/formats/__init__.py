"""Number formats in plain PyTorch: quantise and dequantise. The kernels are tested against these files.

One policy for all of them: a non-finite input poisons exactly the values that share its scale (they dequantise to NaN),
so that a NaN is never laundered into a number; an all-zero group dequantises to zeros.

Scales are amax times the float32 reciprocal of the format's largest value (so PyTorch divides by a constant on a GPU),
elements are IEEE quotients: the same bits on every device.
"""
