"""GPU kernels in CUDA C++, compiled at first use: `compiler` and `launch`. Nothing is imported here."""
