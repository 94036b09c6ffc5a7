"""Decoding from a low-bit KV cache: split over keys, codes fed to the tensor cores, parts merged by a second kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from ..replay.cache import MAX_ENTRIES
from ..runtime.hardware import multiprocessors
from ..spec.kv_cache import FIRST_TOKENS, PAGE, RING, WINDOW, KVCache
from ..spec.layout import ceil_div, power_of_two
from .common.launch import DIVISIBILITY, INTERPRETED, strides
from .common.replayed_launches import KernelLaunch, run_step
from .common.rotation import sign_bits
from .configs import LITTLE_SHARED_MEMORY
from .kv_append import append_launch
from .kv_decode_kernels import OTHER_PARTS, attend_to_kv_part, merge_kv_parts

MAX_TILE_ROWS = 16
"""Rows of Q in one program; more would not fit into registers."""
MAX_PARTS = 252
FEW_PAIRS, FEW_WAVES, MANY_WAVES = 64, 3, 7
"""Programs per multiprocessor if at most FEW_PAIRS (batch, KV head) pairs share it, and if more do."""
FEWEST_PARTS, FEWEST_TILES = 4, 4
"""Parts of a pair's codes, however many pairs there are; tiles of a part, however few codes there are."""
MERGE_WARPS = 4


@dataclass(frozen=True)
class DecodeConfig:
    """Tokens that a warp takes at once, warps and stages of `attend_to_kv_part`."""

    warp_tokens: int
    num_warps: int
    num_stages: int


FEW_ROWS = 8
LARGE_SHARED = {4: DecodeConfig(64, 2, 3), 8: DecodeConfig(64, 2, 2)}
"""By bits of a code, for at most FEW_ROWS rows of Q: fastest on an H200 from 128k tokens on."""
MORE_ROWS = DecodeConfig(32, 2, 3)
"""For more rows of Q: scores of 64 tokens would take twice the registers."""
SMALL_SHARED = DecodeConfig(32, 4, 2)
"""For GPUs of LITTLE_SHARED_MEMORY."""


def config_for(capability: tuple[int, int], bits: int, rows: int) -> DecodeConfig:
    """Return the configuration for a GPU, codes of so many bits, and so many rows of Q in one program."""
    if capability in LITTLE_SHARED_MEMORY:
        return SMALL_SHARED
    return LARGE_SHARED[bits] if rows <= FEW_ROWS else MORE_ROWS


def decode(
    cache: KVCache,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    scale: float,
    capability: tuple[int, int],
) -> torch.Tensor:
    """Append tokens and attend with them to the cache; see `reference.kv_cache.attend_to_cache`.

    Args:
        cache: INT8 or INT4.
        query: (batch, q_heads, q_len, head_dim), q_heads / kv_heads · q_len at most `registration.SPLIT_ROWS`.
        key, value: (batch, kv_heads, q_len, head_dim).
        key_mask: bool (batch or 1, length + q_len); None: all.
        scale: factor of the scores, above 0.
        capability: the GPU's compute capability.

    If the cache `counts_on_device`, the same launches serve every length, `key_mask` has `capacity` columns,
    and a step on a full cache stores nothing and returns NaN.
    """
    batch, q_heads, q_len, head_dim = query.shape
    device, kv_heads, coded_after = query.device, key.shape[1], cache.coded_after(q_len)
    counts = cache.counts if cache.counts_on_device else None
    most_coded = coded_after if counts is None else cache.capacity
    pairs, rows = batch * kv_heads, max(8, power_of_two(q_heads // kv_heads * q_len))
    config = config_for(capability, cache.format.bits, min(rows, MAX_TILE_ROWS))
    tiles = ceil_div(most_coded, config.warp_tokens * config.num_warps)
    parts = _code_parts(pairs, tiles, device) + OTHER_PARTS.value
    cache.reserve(cache.length + q_len)
    if key_mask is not None:
        key_mask = key_mask.expand(batch, -1).view(torch.uint8)
    output = torch.empty(batch, q_len, q_heads, head_dim, dtype=query.dtype, device=device).transpose(1, 2)
    buffers = _Buffers(pairs, parts, rows, cache.channels, device)
    changing = {name: getattr(cache, name).data_ptr() for name in KVCache.STORED}
    changing |= buffers.addresses()
    changing["query"], changing["key"], changing["value"] = query.data_ptr(), key.data_ptr(), value.data_ptr()
    changing["output"], changing["length"], changing["capacity"] = output.data_ptr(), cache.length, cache.capacity
    changing["coded_columns"], changing["coded_after"] = cache.coded_columns, coded_after
    if key_mask is not None:
        changing["key_mask"], changing["key_mask_stride"] = key_mask.data_ptr(), key_mask.stride(0)
    if counts is not None:
        changing["counts"] = counts.data_ptr()
    facts = (
        *(cache.format.name, parts, scale, capability, counts is None),
        None if key_mask is None else (key_mask.stride(1), key_mask.data_ptr() % DIVISIBILITY),
    )
    step = _Step(
        cache=cache,
        query=query,
        key=key,
        value=value,
        scale=scale,
        key_mask=key_mask,
        output=output,
        buffers=buffers,
        config=config,
        overlap=capability >= (9, 0) and not INTERPRETED.value,
    )
    run_step("kv_decode", step.launches, output, counts, changing, (query, key, value), facts)
    if counts is None:
        cache.advance(q_len)
    return output


def _code_parts(pairs: int, tiles: int, device: torch.device) -> int:
    """Return into how many parts the tiles of each pair's codes are divided."""
    processors = multiprocessors(device.index or 0) if device.type == "cuda" else 4
    waves = FEW_WAVES if pairs <= FEW_PAIRS else MANY_WAVES
    return max(1, min(max(FEWEST_PARTS, waves * processors // pairs), tiles // FEWEST_TILES, MAX_PARTS))


class _Buffers:
    """Memory of a step: Q as `append_launch` prepares it, and the parts' outputs, maxima and sums."""

    def __init__(self, pairs: int, parts: int, rows: int, channels: int, device: torch.device) -> None:
        self.parts = parts
        self.places, size = _places(pairs, parts, rows, channels)
        self.memory = torch.empty(size, dtype=torch.uint8, device=device)

    def addresses(self) -> dict[str, int]:
        """Return the tensors' addresses by name."""
        start = self.memory.data_ptr()
        return {name: start + place for name, (place, _, _) in self.places.items()}

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor in this memory."""
        place, dtype, size = self.places[name]
        return self.memory[place : place + dtype.itemsize * math.prod(size)].view(dtype).view(size)


@lru_cache(maxsize=MAX_ENTRIES)
def _places(
    pairs: int, parts: int, rows: int, channels: int
) -> tuple[dict[str, tuple[int, torch.dtype, tuple[int, ...]]], int]:
    """Return each tensor's start in a step's memory, its dtype and shape; and the bytes of all tensors."""
    sizes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "rows": (torch.float16, (pairs, rows, channels)),
        "constants": (torch.float32, (pairs, 3, rows)),
        "partial": (torch.float32, (pairs, parts, rows, channels)),
        "statistics": (torch.float32, (pairs, parts, 2, rows)),
    }
    places, end = {}, 0
    for name, (dtype, size) in sizes.items():
        places[name], end = (end, dtype, size), end + dtype.itemsize * math.prod(size)
    return places, end


@dataclass(slots=True, eq=False)
class _Step:
    """A step of decoding.

    Attributes:
        cache, query, key, value, scale: as in `decode`.
        key_mask: uint8 (batch, columns); None: all keys exist.
        output: written.
        buffers: memory that the launches share.
        config: the configuration of `attend_to_kv_part`.
        overlap: whether a kernel may start before the kernel before it has ended.
    """

    cache: KVCache
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    key_mask: torch.Tensor | None
    output: torch.Tensor
    buffers: _Buffers
    config: DecodeConfig
    overlap: bool

    def launches(self) -> list[KernelLaunch]:
        """Return the launches that append the tokens, attend to the parts and merge them."""
        cache, key_mask, config, buffers, overlap = self.cache, self.key_mask, self.config, self.buffers, self.overlap
        batch, q_heads, q_len, head_dim = self.query.shape
        group, parts = q_heads // cache.kv_heads, buffers.parts
        rows, constants, partial, statistics = map(buffers.tensor, ("rows", "constants", "partial", "statistics"))
        padded_rows, block_m = rows.shape[1], min(rows.shape[1], MAX_TILE_ROWS)
        attend = dict(
            rows=rows,
            constants=constants,
            exact_key=cache.exact_key,
            exact_value=cache.exact_value,
            key_codes=cache.key_codes,
            value_codes=cache.value_codes,
            key_scales=cache.key_scales.view(torch.int32),
            value_scales=cache.value_scales.view(torch.int32),
            start=cache.start,
            counts=cache.counts if cache.counts_on_device else None,
            key_mask=key_mask,
            partial=partial,
            statistics=statistics,
            length=cache.length,
            coded_after=cache.coded_after(q_len),
            q_len=q_len,
            group_rows=group * q_len,
            code_parts=parts - OTHER_PARTS.value,
            capacity=cache.capacity,
            key_mask_stride=0 if key_mask is None else key_mask.stride(0),
            key_mask_stride_key=1 if key_mask is None else key_mask.stride(1),
            CHANNELS=cache.channels,
            BITS=cache.format.bits,
            ROWS=padded_rows,
            BLOCK_M=block_m,
            WARPS=config.num_warps,
            WARP_TOKENS=config.warp_tokens,
            WARP_WINDOW=RING // config.num_warps,
            STAGES=config.num_stages,
            FIRST=FIRST_TOKENS,
            RING=RING,
            PAGE=PAGE,
            WINDOW=WINDOW,
            PADDED=key_mask is not None,
            OVERLAP=overlap,
            dependent=overlap,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        merge = dict(
            partial=partial,
            statistics=statistics,
            output=self.output,
            value_unit=cache.value_unit,
            counts=cache.counts if cache.counts_on_device else None,
            part_count=parts,
            q_len=q_len,
            group=group,
            capacity=cache.capacity,
            head_dim=head_dim,
            **strides("output", self.output.stride()[:3]),
            CHANNELS=cache.channels,
            ROWS=padded_rows,
            PARTS=power_of_two(parts),
            AT_ONCE=min(64, power_of_two(parts)),
            SIGN_BITS=sign_bits(cache.channels),
            WINDOW=WINDOW,
            OVERLAP=overlap,
            dependent=overlap,
            num_warps=MERGE_WARPS,
        )
        return [
            append_launch(cache, self.query, self.key, self.value, self.scale, rows, constants, overlap),
            (attend_to_kv_part, (parts * (padded_rows // block_m), cache.kv_heads, batch), attend),
            (merge_kv_parts, (group * q_len, cache.kv_heads, batch), merge),
        ]
