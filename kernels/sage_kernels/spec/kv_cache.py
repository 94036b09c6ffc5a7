"""The data of a low-bit cache of keys and values: the tensors of one attention layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .kv_format import KVFormat
from .layout import round_up

FIRST_TOKENS = 64
"""First tokens of a sequence, which stay in 16 bits."""
WINDOW = 64
"""Newest tokens (the window), in 16 bits too; a token is quantised when it leaves the window."""
RING = 128
"""Slots of the newest tokens: the window, and room for the tokens that one step adds or a crop restores."""
PAGE = 128
"""Tokens whose words of V are stored together."""
STRIP = 512
"""Tokens by which a cache grows at least: a decoding kernel reads whole strips."""
MAX_QUERIES = 16
"""Most tokens that one step of decoding appends and attends with."""
KV_HEAD_DIMS = 64, 128
"""Least and largest head_dim of a cache."""


class KVCache:
    """Keys and values of one attention layer, of sequences of equal length.

    Columns are tokens, including padding. Column c of sequence b is in 16 bits if it is one of the sequence's first
    FIRST_TOKENS tokens, `start[b]`…, or one of the newest tokens, from `coded_columns` on. All other columns are in
    low bits.

    Word w of a token's codes (int16, W words) holds channels w, w + W, w + 2 W …, the first in the lowest bits.

    Attributes:
        format: the format of the codes.
        length: number of columns.
        coded_columns: number of columns before the window.
        highest: largest length so far: the ring holds columns from `highest` - RING on.
        is_frozen: the transforms are decided.
        head_dim, dtype: of K and V.
        channels: head_dim padded with zeros to 64 or 128.
        key_codes: int16 (batch, kv_heads, capacity, W).
        value_codes: int16 (batch, kv_heads, capacity / PAGE, W, PAGE).
        key_scales, value_scales: (batch, kv_heads, capacity, 2) float16, scale and lowest value; for NVFP4 (…, channels
            / 16) float8_e4m3fn.
        exact_key, exact_value: float16 (batch, kv_heads, FIRST_TOKENS + RING, channels), transformed: the first tokens,
            then column c in slot FIRST_TOKENS + (c modulo RING).
        key_mean: float32 (batch, kv_heads, channels), subtracted from K.
        equalizer: float32, shaped as key_mean; K is divided by it.
        value_unit: float32 (batch, kv_heads), the powers of two by which V is divided.
        start: int32 (batch,), first column that is not padding.
        counts: int32 (2,), `length` and `coded_columns` on the device, if the capacity is fixed; else None.
        counts_on_device: only `counts` are up to date, until `read_counts`.
    """

    PER_TOKEN = ("key_codes", "value_codes", "key_scales", "value_scales")
    PER_SEQUENCE = ("exact_key", "exact_value", "key_mean", "equalizer", "value_unit", "start")
    STORED = (*PER_TOKEN, *PER_SEQUENCE)
    FIXED = (*STORED, "counts")

    def __init__(self, format: KVFormat, key: torch.Tensor) -> None:
        """Make an empty cache for keys like `key`, (batch, kv_heads, tokens, head_dim).

        Raises:
            ValueError: head_dim is outside 64…128.
        """
        batch, heads, _, self.head_dim = key.shape
        least, most = KV_HEAD_DIMS
        if not least <= self.head_dim <= most:
            raise ValueError(f"KV cache: head_dim {self.head_dim} is not supported ({least}…{most})")
        self.format, self.dtype = format, key.dtype
        self.channels = least if self.head_dim == least else most
        self.length = self.coded_columns = self.highest = self.capacity = 0
        self.is_frozen = False
        words = format.words(self.channels)

        def zeros(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.zeros(batch, heads, *size, dtype=dtype, device=key.device)

        self.key_codes = zeros(0, words, dtype=torch.int16)
        self.value_codes = zeros(0, words, PAGE, dtype=torch.int16)
        if format.group:
            scales = zeros(0, self.channels // format.group, dtype=torch.float8_e4m3fn)
        else:
            scales = zeros(0, 2, dtype=torch.float16)
        self.key_scales, self.value_scales = scales, scales.clone()
        self.exact_key = zeros(FIRST_TOKENS + RING, self.channels, dtype=torch.float16)
        self.exact_value = zeros(FIRST_TOKENS + RING, self.channels, dtype=torch.float16)
        self.key_mean, self.equalizer = zeros(self.channels), zeros(self.channels) + 1
        self.value_unit = zeros() + 1
        self.start = torch.zeros(batch, dtype=torch.int32, device=key.device)
        self.counts: torch.Tensor | None = None
        self.counts_on_device = False

    @classmethod
    def of(cls, format: KVFormat, head_dim: int, dtype: torch.dtype, tensors: Sequence[torch.Tensor]) -> KVCache:
        """Return a cache that `counts_on_device`, with the tensors of a fixed cache in the order of `FIXED`."""
        cache = cls.__new__(cls)
        vars(cache).update(zip(cls.FIXED, tensors, strict=True))
        cache.format, cache.head_dim, cache.dtype = format, head_dim, dtype
        cache.is_frozen = cache.counts_on_device = True
        cache.channels, cache.capacity = cache.exact_key.shape[3], cache.key_codes.shape[2]
        cache.length = cache.coded_columns = cache.highest = 0
        return cache

    @property
    def device(self) -> torch.device:
        """Return the device of all tensors."""
        return self.start.device

    @property
    def batch(self) -> int:
        """Return the number of sequences."""
        return self.start.shape[0]

    @property
    def kv_heads(self) -> int:
        """Return the number of heads of K and V."""
        return self.exact_key.shape[1]

    @property
    def bytes(self) -> int:
        """Return the bytes of all tensors."""
        return sum(getattr(self, name).nbytes for name in self.STORED)

    def reserve(self, length: int) -> None:
        """Make room for so many columns, and for an eighth more if the tensors must grow.

        Raises:
            ValueError: the capacity is fixed and too small.
        """
        if length <= self.capacity:
            return
        if self.counts is not None:
            raise ValueError(
                f"KV cache: {length} tokens do not fit into a cache of {self.capacity}: make one with a larger "
                "max_cache_len"
            )
        capacity = round_up(max(length, self.capacity + self.capacity // 8), STRIP)
        for name in self.PER_TOKEN:
            stored = getattr(self, name)
            size = (*stored.shape[:2], capacity // PAGE if name == "value_codes" else capacity, *stored.shape[3:])
            grown = torch.zeros(size, dtype=stored.dtype, device=self.device)
            grown[:, :, : stored.shape[2]] = stored
            setattr(self, name, grown)
        self.capacity = capacity

    def fix_capacity(self, columns: int) -> None:
        """Fix the capacity at so many columns, and let the device count them: no tensor is replaced from now on."""
        self.reserve(columns)
        self.counts = torch.zeros(2, dtype=torch.int32, device=self.device)

    def clear(self) -> None:
        """Forget all tokens and the transforms; the tensors stay."""
        self.length = self.coded_columns = self.highest = 0
        self.is_frozen = False
        self.equalizer.fill_(1)
        self.start.zero_()
        self._write_counts()

    def read_counts(self) -> None:
        """Read `length` and `coded_columns` from the device; this waits for the device."""
        if self.counts is not None:
            self.length, self.coded_columns = self.counts.tolist()
            self.highest = max(self.highest, self.length)
            self.counts_on_device = False

    def _write_counts(self) -> None:
        if self.counts is not None:
            self.counts.copy_(torch.tensor((self.length, self.coded_columns)))

    def coded_after(self, tokens: int) -> int:
        """Return `coded_columns` once so many tokens have been appended."""
        return max(self.coded_columns, self.length + tokens - WINDOW)

    def advance(self, tokens: int) -> None:
        """Count tokens that have been appended."""
        self.coded_columns = self.coded_after(tokens)
        self.length += tokens
        self.highest = max(self.highest, self.length)
        self._write_counts()

    def crop(self, length: int) -> None:
        """Keep the first columns. Tokens that return to the window are in 16 bits again if the ring still has them.

        Raises:
            ValueError: the cache has fewer columns.
        """
        if not 0 <= length <= self.length:
            raise ValueError(f"KV cache: {length} of {self.length} tokens cannot be kept")
        self.coded_columns = max(min(self.coded_columns, max(length - WINDOW, self.highest - RING), length), 0)
        self.length = length
        self._write_counts()

    def select(self, sequences: torch.Tensor) -> None:
        """Replace the sequences by the sequences of these numbers, int64 (new batch,).

        Raises:
            ValueError: the capacity is fixed, and the number of sequences differs.
        """
        if self.counts is not None and len(sequences) != self.batch:
            raise ValueError(
                f"KV cache: a cache of fixed max_cache_len keeps its {self.batch} sequences, got {len(sequences)}"
            )
        sequences = sequences.to(self.device)
        for name in (*self.PER_TOKEN, *self.PER_SEQUENCE):
            x = getattr(self, name)
            selected = _as_bytes(x).index_select(0, sequences).view(x.dtype)
            if self.counts is None:
                setattr(self, name, selected)
            else:
                x.copy_(selected)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes for pickle, with float8 tensors as bytes, because pickle cannot load float8."""
        return {name: _as_bytes(x) if isinstance(x, torch.Tensor) else x for name, x in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take attributes as `__getstate__` returns them."""
        scales = {name: x.view(torch.float8_e4m3fn) for name, x in state.items() if _is_bytes(x)}
        vars(self).update(state | scales)


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Return a float8 tensor as uint8, any other tensor unchanged."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x


def _is_bytes(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype == torch.uint8
