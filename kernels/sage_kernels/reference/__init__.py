"""The specification of every recipe in plain PyTorch, which is also the CPU path and the emulation elsewhere."""
