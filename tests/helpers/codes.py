"""INT8 codes and scales of two implementations, which may sum a rotation in different orders."""

import torch


def codes_agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether codes are equal but for almost-ties, one in 10,000, that another order of sums moved by 1."""
    difference = (found.float() - expected.float()).abs()
    return difference.numel() == 0 or (difference.max() <= 1 and difference.count_nonzero() <= 1 + 1e-4 * found.numel())


def scales_agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Return whether scales are equal but for the rounding of float32 sums, NaN where the other is NaN."""
    return torch.allclose(found.float(), expected.float(), rtol=2.0**-20, atol=0, equal_nan=True)
