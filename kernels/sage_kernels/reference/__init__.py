"""The specification of every recipe in plain PyTorch; it also runs on CPUs and emulates recipes on other hardware."""
