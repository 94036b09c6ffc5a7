"""What is done to Q, K and V before they are quantised. Each transform is exact in real arithmetic.

smooth  x - mean: of K it adds a constant to each row of scores, which softmax ignores (arXiv 2410.02367, section 4.2);
        of V the mean is added back to the output, because rows of P sum to 1 (arXiv 2411.10958, section 3.4); of Q, per
        block of rows, the scores get mean·Kᵀ back (arXiv 2411.10958, section 3.1).
rotate  the same orthonormal matrix on the head dimension of Q and K leaves every dot product unchanged and spreads loud
        channels over all of them.
"""

from __future__ import annotations

from functools import lru_cache

import torch

ROTATION_SEED = 0x5A6E


def mean_of_tokens(x: torch.Tensor, valid: torch.Tensor | None = None) -> torch.Tensor:
    """Mean over valid tokens, non-finite elements counted as 0 (so that one bad token does not spoil the others).

    Args:
        x: float32 (..., tokens, channels).
        valid: bool broadcastable to (..., tokens, 1); None: every token is valid. Without a valid token the mean is 0.

    Returns:
        float32 (..., 1, channels).
    """
    x = torch.where(x.isfinite(), x, 0.0)
    if valid is None:
        return x.mean(-2, keepdim=True)
    valid = valid.expand(*valid.shape[:-2], x.shape[-2], 1)
    return torch.where(valid, x, 0.0).sum(-2, keepdim=True) / valid.sum(-2, keepdim=True).clamp_min(1)


def smooth(x: torch.Tensor, valid: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Subtract the mean over valid tokens; see `mean_of_tokens` for shapes. Returns (x - mean, mean)."""
    mean = mean_of_tokens(x, valid)
    return x - mean, mean


def smooth_blocks(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Subtract from every block of `block` consecutive tokens its own mean.

    Args:
        x: float32 (..., tokens, channels), any number of tokens; the last block may be short.
        block: tokens a block.

    Returns:
        (x - mean, mean): (..., tokens, channels); (..., ceil(tokens/block), channels).
    """
    parts = [smooth(part) for part in x.split(block, dim=-2)]
    return torch.cat([part for part, _ in parts], -2), torch.cat([mean for _, mean in parts], -2)


@lru_cache(maxsize=16)
def rotation(size: int) -> torch.Tensor:
    """The orthonormal rotation: a Hadamard matrix (Sylvester's construction) whose rows have fixed random signs.

    Args:
        size: a power of two.

    Returns:
        float32 (size, size) on the CPU; rotation @ rotation.T is the identity.

    Raises:
        ValueError: size is not a power of two.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"rotation needs a power of two; got {size}: pad the head dimension with zeros")
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    generator = torch.Generator("cpu").manual_seed(ROTATION_SEED)
    signs = torch.randint(0, 2, (size, 1), generator=generator, device="cpu") * 2 - 1
    return signs * matrix / size**0.5


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotate the head dimension, in blocks of the largest power of two that divides it (64 and 128: one block).

    Args:
        x: float32 (..., head_dim).

    Returns:
        float32 (..., head_dim); dot products of two rotated vectors are those of the vectors.
    """
    block = x.shape[-1] & -x.shape[-1]
    return (x.unflatten(-1, (-1, block)) @ rotation(block).to(x.device)).flatten(-2)
