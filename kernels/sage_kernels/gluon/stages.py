"""Shared-memory stages of the Hopper backward kernels: a warp fills them with tiles by TMA, warpgroups empty them.

Each warpgroup holds 64 rows of the operands that stay, and sums the gradient of those rows. Step i of a program uses
stage i % STAGES. A stage has two barriers: `full` completes when its loads have arrived, `empty` when every warpgroup
is done with it.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared  # its name up to Triton 3.6

ROWS = gl.constexpr(64)  # rows of a warpgroup's matrix instructions
LOADING_REGISTERS = gl.constexpr(24)  # registers of a thread of the loading warp


def stage_tiles(x: torch.Tensor, block: int, channels: int) -> TensorDescriptor:
    """Describe tiles of `block` rows to TMA.

    Args:
        x: an operand (batch, heads, rows, channels), a matrix (rows, columns) that holds an operand, or numbers per row
            (batch, heads, rows).
    """
    if x.dim() == 3:
        return TensorDescriptor.from_tensor(x.view(-1), [block], gl.NVMMASharedLayout(0, 8 * x.element_size(), 1))
    layout = gl.NVMMASharedLayout(min(128, channels * x.element_size()), 8 * x.element_size(), 2)
    return TensorDescriptor.from_tensor(x if x.dim() == 2 else x.view(-1, channels), [block, channels], layout)


@gluon.constexpr_function
def product_layout(columns, depth):
    """Return the layout of a warpgroup's product (64, columns); one instruction sums over `depth` (32 or 16)."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, depth])


@gluon.constexpr_function
def memory_layout(channels, channel_bytes):
    """Return the layout in which a warpgroup loads and stores 64 rows: 16 bytes a thread, whole rows together."""
    together = 16 // channel_bytes
    across = channels // together
    return gl.BlockedLayout([1, together], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def store_gradient(x, through, gradient, start, first, length, stride_token, channels, CHANNELS: gl.constexpr):
    """Store float32 sums (64, CHANNELS) as the gradient of tokens start + first… of a sequence of `length` tokens.

    They pass through `through`, unused shared memory (64, CHANNELS) in the gradient's dtype, so that whole rows are
    stored together.
    """
    through.store(x.to(through.dtype))
    index = first + gl.arange(0, ROWS, gl.SliceLayout(1, memory_layout(CHANNELS, 2)))
    channel = gl.arange(0, CHANNELS, gl.SliceLayout(0, memory_layout(CHANNELS, 2)))
    at = gradient + (start + index).to(gl.int64)[:, None] * stride_token + channel[None, :]
    inside = (index < length)[:, None] & (channel < channels)[None, :]
    gl.store(at, through.load(memory_layout(CHANNELS, 2)), mask=inside)


@gluon.jit
def new_barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """Allocate `count` barriers, each of which completes with that many arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(count):
        mbarrier.init(barriers.index(i), count=arrivals)
    return barriers


@gluon.jit
def wait_until_full(full, step, STAGES: gl.constexpr, pred=True):
    """Wait for the loads of a step."""
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1, pred=pred)


@gluon.jit
def wait_until_empty(empty, step, STAGES: gl.constexpr):
    """Wait until the stage of a step may be overwritten; the first round does not wait."""
    mbarrier.wait(empty.index(step % STAGES), ((step // STAGES) & 1) ^ 1)
