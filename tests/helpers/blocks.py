"""Block lists drawn at random."""

import torch

from sage_kernels.spec.block_list import BlockList


def draw_blocks(batch, heads, q_len, kv_len, block_m=128, block_n=128, share=0.5, seed=0) -> BlockList:
    """A list in random order; the first of several blocks of rows has no tile, the last one all."""
    generator = torch.Generator().manual_seed(seed)
    row_blocks, tiles = -(-q_len // block_m), -(-kv_len // block_n)
    kept = torch.rand(batch, heads, row_blocks, tiles, generator=generator, dtype=torch.float32) < share
    kept[:, :, 0] = False
    kept[:, :, -1] = True
    order = torch.rand(kept.shape, generator=generator, dtype=torch.float32).masked_fill(~kept, 2.0).argsort(-1).int()
    return BlockList(kept.sum(-1, dtype=torch.int32), order, block_m, block_n)


def as_mask(blocks: BlockList, q_len: int, kv_len: int) -> torch.Tensor:
    """The list as a bool mask, made tile by tile."""
    batch, heads, row_blocks = blocks.counts.shape
    mask = torch.zeros(batch, heads, q_len, kv_len, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            for r in range(row_blocks):
                rows = slice(r * blocks.block_m, (r + 1) * blocks.block_m)
                for tile in blocks.tiles[b, h, r, : blocks.counts[b, h, r]].tolist():
                    mask[b, h, rows, tile * blocks.block_n : (tile + 1) * blocks.block_n] = True
    return mask
