"""Number formats in plain PyTorch: quantise and dequantise. The kernels are tested against these files.

One policy for all of them: a non-finite input poisons exactly the values that share its scale (they dequantise to NaN),
so that a NaN is never laundered into a number; an all-zero group dequantises to zeros.
"""
