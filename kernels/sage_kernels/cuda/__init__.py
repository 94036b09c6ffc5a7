"""GPU kernels in CUDA C++, compiled at first use. `jit` compiles and launches them; nothing is imported here."""
