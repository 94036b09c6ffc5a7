"""Block lists: the tiles of keys that each block of rows attends to (sparse attention)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from .checks import check_memory
from .layout import Lengths, ceil_div

BLOCK_SIZES = (64, 128)


class BlockList(NamedTuple):
    """Tiles of keys that each block of rows attends to. Every row of a block attends to the same tiles.

    The last block of rows and the last tile of keys may be partial. Missing keys and causality hide scores of listed
    tiles as they do without a list. No key is heavy with a list (`recipe.Recipe.heavy_keys`): unlisted tiles are not
    attended to, and all listed tiles are in low bits.

    Attributes:
        counts: int32 (batch or 1, q_heads or 1, blocks of rows), the number of tiles listed; 0: the rows attend to
            nothing, so their output is 0 and their lse -inf. With packed sequences, sequences are the batch.
        tiles: int32 (batch or 1, q_heads or 1, blocks of rows, places): the first `counts` of a block are its tiles,
            each once, in any order; contents of further places are ignored.
        block_m: rows of a block, 64 or 128.
        block_n: keys of a tile, 64 or 128.
    """

    counts: torch.Tensor
    tiles: torch.Tensor
    block_m: int = 128
    block_n: int = 128

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tensors."""
        return self.counts, self.tiles

    @property
    def sizes(self) -> tuple[int, int]:
        """Return the rows of a block and the keys of a tile."""
        return self.block_m, self.block_n

    @classmethod
    def of_kept(
        cls, kept: torch.Tensor, block_m: int = 128, block_n: int = 128, places: int | None = None
    ) -> BlockList:
        """List tiles in ascending order.

        Args:
            kept: bool (batch or 1, q_heads or 1, blocks of rows, tiles), True where a tile is attended to.
            places: upper bound on the listed tiles of a block, to store less; default all tiles.
        """
        rank = kept.cumsum(-1, dtype=torch.int32)
        tile_count = kept.shape[-1]
        places = tile_count if places is None else places
        tiles = rank.new_zeros((*kept.shape[:-1], places + 1))  # one place more takes unlisted tiles
        at = torch.where(kept, rank - 1, places).clamp_(max=places).long()
        tiles.scatter_(-1, at, torch.arange(tile_count, dtype=torch.int32, device=kept.device).expand_as(at))
        counts = rank[..., -1] if tile_count else rank.new_zeros(kept.shape[:-1])
        return cls(counts.contiguous(), tiles[..., :places], block_m, block_n)

    def kept(self, kv_len: int) -> torch.Tensor:
        """Return which tiles are listed: bool (batch or 1, q_heads or 1, blocks of rows, tiles of kv_len keys)."""
        tile_count = ceil_div(kv_len, self.block_n)
        listed = torch.arange(self.tiles.shape[-1], device=self.tiles.device) < self.counts.unsqueeze(-1)
        at = torch.where(listed, self.tiles, tile_count).long()
        kept = torch.zeros((*self.tiles.shape[:3], tile_count + 1), dtype=torch.bool, device=self.tiles.device)
        return kept.scatter_(-1, at, torch.ones_like(at, dtype=torch.bool))[..., :tile_count]

    def kept_by_rows(self, kv_len: int, first_row: int, stop_row: int) -> torch.Tensor:
        """Return which tiles rows attend to: bool (batch or 1, q_heads or 1, rows, tiles of kv_len keys)."""
        first = first_row // self.block_m
        lists = slice(first, ceil_div(stop_row, self.block_m))
        part = BlockList(self.counts[:, :, lists], self.tiles[:, :, lists], self.block_m, self.block_n)
        rows = torch.arange(first_row, stop_row, device=self.tiles.device) // self.block_m - first
        return part.kept(kv_len)[:, :, rows]

    def mask(self, kv_len: int, first_row: int, stop_row: int) -> torch.Tensor:
        """Return which keys rows may attend to: bool (batch or 1, q_heads or 1, rows, kv_len)."""
        keys = torch.arange(kv_len, device=self.tiles.device) // self.block_n
        return self.kept_by_rows(kv_len, first_row, stop_row)[..., keys]

    def of_sequence(self, index: int, q_len: int, kv_len: int, max_kv_len: int) -> BlockList:
        """Return the list of one of several packed sequences, without tiles and blocks beyond its end.

        Args:
            index: the sequence's number.
            q_len, kv_len: its numbers of queries and keys.
            max_kv_len: the upper bound on all sequences' keys that tiles are numbered for.
        """
        batch = slice(None) if self.counts.shape[0] == 1 else slice(index, index + 1)
        rows = slice(ceil_div(q_len, self.block_m))
        part = self._replace(counts=self.counts[batch, :, rows], tiles=self.tiles[batch, :, rows])
        return self.of_kept(part.kept(max_kv_len)[..., : ceil_div(kv_len, self.block_n)], self.block_m, self.block_n)


def check_blocks(blocks: BlockList, query: torch.Tensor, key: torch.Tensor, lengths: Lengths | None = None) -> None:
    """Raise TypeError or ValueError for a list that does not fit a call.

    Values of lists on a GPU are not checked, because the host would have to wait for them. Inside a compiled graph no
    values are checked. A GPU kernel skips tiles that do not exist.

    Args:
        blocks: a list for query (batch, q_heads, q_len, head_dim) and key (batch, kv_heads, kv_len, head_dim).
        lengths: lengths of sequences that are packed into one batch element; None: an ordinary batch.

    Raises:
        RuntimeError: a storage of the list was freed.
    """
    counts, tiles = blocks.counts, blocks.tiles
    for name, x in (("counts", counts), ("tiles", tiles)):
        if not isinstance(x, torch.Tensor) or x.dtype != torch.int32:
            raise TypeError(f"blocks.{name} must be an int32 tensor; got {getattr(x, 'dtype', type(x).__name__)}")
        if x.device != query.device:
            raise ValueError(f"blocks.{name} is on {x.device}, query on {query.device}")
    if blocks.block_m not in BLOCK_SIZES or blocks.block_n not in BLOCK_SIZES:
        raise ValueError(
            f"blocks of {blocks.block_m} rows and tiles of {blocks.block_n} keys are not supported: use 64 or 128"
        )
    check_memory(counts, tiles)
    batch, q_heads, q_len, _ = query.shape
    kv_len = key.shape[2]
    if lengths is not None:
        batch, q_len, kv_len = lengths.sequences, lengths.max_seqlen_q, lengths.max_seqlen_k
    row_blocks = ceil_div(q_len, blocks.block_m)
    if counts.dim() != 3 or tiles.dim() != 4 or counts.shape != tiles.shape[:3]:
        raise ValueError(
            "blocks.counts must be (batch or 1, q_heads or 1, blocks of rows), blocks.tiles the same with places; got "
            f"{tuple(counts.shape)} and {tuple(tiles.shape)}"
        )
    sizes = zip(counts.shape[:2], (batch, q_heads), strict=True)
    # Not `size not in (1, target)`, as in `checks.check_tensors`.
    if any(size != 1 and size != target for size, target in sizes) or counts.shape[2] != row_blocks:
        raise ValueError(
            f"blocks.counts {tuple(counts.shape)} must be ({batch} or 1, {q_heads} or 1, {row_blocks}) for {q_len} "
            f"queries in blocks of {blocks.block_m}"
        )
    if query.device.type != "cpu" or not counts.numel() or torch.compiler.is_compiling():
        return
    tile_count, places = ceil_div(kv_len, blocks.block_n), tiles.shape[3]
    if not bool(((counts >= 0) & (counts <= places)).all()):
        raise ValueError(f"blocks.counts must be 0 to {places}, the places of blocks.tiles")
    listed = torch.arange(places, device=counts.device) < counts.unsqueeze(-1)
    if bool((listed & ((tiles < 0) | (tiles >= tile_count))).any()):
        raise ValueError(f"blocks.tiles must be 0 to {tile_count - 1}: {kv_len} keys in tiles of {blocks.block_n}")
    if not torch.equal(blocks.kept(kv_len).sum(-1, dtype=torch.int32), counts):
        raise ValueError("blocks.tiles names a tile of a block of rows twice")
