"""Equalizing and rotation of head_dim (`transforms`) in Triton kernels: by butterflies, or as a matrix product."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from ...replay import trace
from ...spec.transforms import rotation_signs


@lru_cache(maxsize=16)
def sign_bits(size: int) -> int:
    """Return `rotation_signs` as a kernel's constant, which needs no memory: bit j is set where sign j is -1."""
    return sum(1 << j for j, sign in enumerate(rotation_signs(size).tolist()) if sign < 0)


@lru_cache(maxsize=16)
def rotation_matrix(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the rotation times size ** 0.5, (size, size) of ±1: x @ matrix is x rotated."""
    with trace.keeping():
        index = torch.arange(size, device="cpu")
        matrix = torch.ones(size, size, device="cpu")
        for bit in range(size.bit_length() - 1):
            matrix *= 1 - 2 * ((index[:, None] & index) >> bit & 1)
        return (matrix * rotation_signs(size)[:, None]).to(dtype).to(device)


@triton.jit
def channel_factor(equalizer, channel, head_dim, DIVIDE: tl.constexpr):
    """Load the factors of channels (`transforms.equalize`), or with DIVIDE their reciprocals; 1 from head_dim on."""
    factor = tl.load(equalizer + channel, mask=channel < head_dim, other=1.0)
    if DIVIDE:  # reciprocals of powers of two are exact
        factor = (0x7F000000 - factor.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    return factor


@triton.jit
def butterflies(x, DISTANCE: tl.constexpr):
    """Replace columns i and i + DISTANCE of x (rows, columns) by their sum and difference."""
    pairs = tl.reshape(x, (x.shape[0], x.shape[1] // (2 * DISTANCE), 2, DISTANCE))
    first, second = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
    pairs = tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2))
    return tl.reshape(pairs, (x.shape[0], x.shape[1]))


@triton.jit
def add_butterflies(x, ROTATION: tl.constexpr):
    """Multiply x (rows, columns) by the Walsh-Hadamard matrix of ±1, in blocks of ROTATION columns."""
    for level in tl.static_range(9):
        if (1 << level) < ROTATION:
            x = butterflies(x, 1 << level)
    return x


@triton.jit
def rotation_sign(channel, ROTATION: tl.constexpr, SIGN_BITS: tl.constexpr):
    """Return the signs of channels in float32, ±1; ROTATION channels are a block of the rotation."""
    channel = channel % ROTATION
    word = tl.zeros_like(channel)
    for index in tl.static_range((ROTATION + 15) // 16):
        word = tl.where(channel // 16 == index, (SIGN_BITS >> (16 * index)) & 0xFFFF, word)
    return (1 - 2 * ((word >> (channel % 16)) & 1)).to(tl.float32)


@triton.jit
def rotate(x, ROTATION: tl.constexpr, SIGN_BITS: tl.constexpr):
    """Rotate x (rows, columns) in blocks of ROTATION columns, with the bits of `transforms.rotate`."""
    sign = rotation_sign(tl.arange(0, x.shape[1]), ROTATION, SIGN_BITS)
    return add_butterflies(x * sign[None, :], ROTATION) * ROTATION**-0.5


@triton.jit
def unrotate(x, ROTATION: tl.constexpr, SIGN_BITS: tl.constexpr):
    """Undo `rotate`, with the bits of `transforms.unrotate`."""
    sign = rotation_sign(tl.arange(0, x.shape[1]), ROTATION, SIGN_BITS)
    return add_butterflies(x, ROTATION) * ROTATION**-0.5 * sign[None, :]
