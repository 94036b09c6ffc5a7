"""The patches that make the interpreter fast compute what NumPy does."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from sage_kernels.triton.common.formats import max_or_nan


@triton.jit
def reduce_kernel(
    x,
    along,
    whole,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AXIS: tl.constexpr,
    KEPT: tl.constexpr,
    KEEP_DIMS: tl.constexpr,
):
    tile = tl.load(x + tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS))
    reduced = tl.reduce(tile, AXIS, max_or_nan, keep_dims=KEEP_DIMS)
    tl.store(along + tl.arange(0, KEPT), tl.reshape(reduced, [KEPT]))
    tl.store(whole, tl.reduce(tile, None, max_or_nan))


@pytest.mark.parametrize("keep_dims", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_reduction_by_a_function_goes_over_every_element_of_its_axis(axis, keep_dims):
    rows, columns = 16, 32
    generator = torch.Generator().manual_seed(0)
    for bad in (False, True):
        x = torch.randn(rows, columns, generator=generator)
        if bad:
            x[5, 9] = torch.nan
        along, whole = torch.zeros(x.shape[1 - axis]), torch.zeros(1)
        reduce_kernel[(1,)](x, along, whole, rows, columns, axis, len(along), keep_dims)
        assert np.array_equal(along, x.numpy().max(axis), equal_nan=True)
        assert np.array_equal(whole[0], x.numpy().max(), equal_nan=True)


@triton.jit
def combine_with_scalars_kernel(x, out, scalar, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tile, first = tl.load(x + places), tl.load(x)
    tl.store(out + places, tl.where((first < tile) & (places != 3), scalar - tile, tile * first))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int32])
def test_a_scalar_with_a_block_is_each_of_its_elements(dtype):
    x = torch.arange(16).sub(5).mul(3).roll(4).to(dtype)
    out = torch.zeros_like(x)
    combine_with_scalars_kernel[(1,)](x, out, 7, len(x))
    assert torch.equal(out, torch.where((x[0] < x) & (torch.arange(16) != 3), 7 - x, x * x[0]))
