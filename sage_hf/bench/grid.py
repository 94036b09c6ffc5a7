"""The grid: some hundred attention calls as models make them, systematic ones and drawn ones, as data.

Each call belongs to a kind, which is a row of the heat map. Heads are as many as models have, but fewer where sequences
are so long that a call would need more than `MOST_OPERATIONS`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from sage_kernels.dispatch.curves import Sizes

MaskName = Literal["none", "causal", "lower_right", "lengths", "keys", "window", "documents", "bias"]

MOST_OPERATIONS = 6e12
"""Largest number of multiplications and additions of a call, without regard to its mask."""
SIZES = ("kind", "batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim", "mask")
"""Names of a point's attributes in a row of the result, in their order."""
CACHED = ("decoding", "chunked prefill")
"""Kinds whose K and V come from a cache."""
WINDOW = 1024
DOCUMENT = 700
"""Length of the documents that share a sequence."""


@dataclass(frozen=True)
class Point:
    """One call of attention.

    Attributes:
        kind: row of the heat map.
        batch, q_heads, kv_heads, q_len, kv_len, head_dim: sizes of query, and of key and value.
        mask: "none"; "causal", upper left; "lower_right", causal with the last query at the last key; "lengths", each
            sample has its own number of keys; "keys", the same with padding in the middle; "window", a band of WINDOW
            keys on each side of the diagonal; "documents", blocks on the diagonal; "bias", added, for each head.
        training: forward and backward.
    """

    kind: str
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    mask: MaskName = "none"
    training: bool = False

    def __str__(self) -> str:
        heads = str(self.q_heads) if self.q_heads == self.kv_heads else f"{self.q_heads}/{self.kv_heads}"
        tokens = str(self.q_len) if self.q_len == self.kv_len else f"{self.q_len}·{self.kv_len}"
        text = f"{self.kind}, {self.batch}×{heads}×{tokens}×{self.head_dim}"
        return text if self.mask == "none" else f"{text}, {self.mask}"

    @property
    def sizes(self) -> dict[str, Any]:
        """Return what identifies the point in a row of the result."""
        direction = "forward_backward" if self.training else "forward"
        return {name: getattr(self, name) for name in SIZES} | {"direction": direction}

    @property
    def call(self) -> Sizes:
        """Return the sizes of the call."""
        return Sizes(self.batch, self.q_heads, self.kv_heads, self.q_len, self.kv_len, self.head_dim)

    @property
    def operations(self) -> float:
        """Return the number of multiplications and additions of both matrix products, as if there were no mask."""
        return 4.0 * self.batch * self.q_heads * self.q_len * self.kv_len * self.head_dim

    @property
    def scores(self) -> int:
        """Return the number of scores."""
        return self.batch * self.q_heads * self.q_len * self.kv_len


@dataclass(frozen=True)
class Arguments:
    """The tensors of a point on a device, with its mask in every form that a provider may take.

    Attributes:
        query, key, value: bfloat16 (batch, heads, tokens, head_dim), laid out as models do.
        point: whose tensors these are.
        mask: bool or bfloat16, broadcastable to (batch, q_heads, q_len, kv_len); None without a mask and where
            `is_causal` says it.
        lengths: int32 (batch,), the number of keys of each sample where they come first; else None.
        gradient: of the output, for training; else None.
    """

    point: Point
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    lengths: Tensor | None
    gradient: Tensor | None

    @property
    def is_causal(self) -> bool:
        """Return whether attention is causal, aligned upper left."""
        return self.point.mask == "causal"

    @property
    def grouped(self) -> bool:
        """Return whether heads of Q share one of K."""
        return self.point.q_heads != self.point.kv_heads

    @cached_property
    def lower_right(self) -> Any:
        """Return PyTorch's own object for a causal mask that is aligned lower right."""
        return causal_lower_right(self.point.q_len, self.point.kv_len)


def draw(point: Point, device: torch.device) -> Arguments:
    """Draw standard normal tensors, the same ones at every call; Q, K and V require gradients for training.

    In memory, tokens come before heads, as projections leave them; heads before tokens in the K and V of a cache.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int, tokens: int, heads_first: bool = False) -> Tensor:
        size = (heads, tokens) if heads_first else (tokens, heads)
        x = torch.randn(point.batch, *size, point.head_dim, generator=generator, device=device, dtype=torch.bfloat16)
        return x if heads_first else x.transpose(1, 2)

    cached = point.kind in CACHED
    query = normal(point.q_heads, point.q_len)
    key, value = (normal(point.kv_heads, point.kv_len, cached) for _ in range(2))
    gradient = normal(point.q_heads, point.q_len) if point.training else None
    for x in (query, key, value):
        x.requires_grad_(point.training)
    lengths = None
    if point.mask in ("lengths", "keys"):
        drawn = random.Random(str(point))
        found = [drawn.randint(max(1, point.kv_len // 4), point.kv_len) for _ in range(point.batch)]
        lengths = torch.tensor(found, dtype=torch.int32, device=device)
    mask = _mask(point, lengths, generator, device)
    return Arguments(point, query, key, value, mask, lengths if point.mask == "lengths" else None, gradient)


def _mask(point: Point, lengths: Tensor | None, generator: torch.Generator, device: torch.device) -> Tensor | None:
    queries = torch.arange(point.q_len, device=device)[:, None] + (point.kv_len - point.q_len)
    keys = torch.arange(point.kv_len, device=device)
    match point.mask:
        case "lower_right":
            return (keys <= queries)[None, None]
        case "lengths":
            assert lengths is not None
            return (keys < lengths[:, None])[:, None, None]
        case "keys":  # Half of the keys that exist come first, the other half last.
            assert lengths is not None
            first = (lengths[:, None] + 1) // 2
            return ((keys < first) | (keys >= point.kv_len - (lengths[:, None] - first)))[:, None, None]
        case "window":
            return ((keys - queries).abs() <= WINDOW)[None, None]
        case "documents":
            return (keys // DOCUMENT == queries // DOCUMENT)[None, None]
        case "bias":
            size = (1, point.q_heads, point.q_len, point.kv_len)
            return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
    return None


def _capped(point: Point, most_operations: float = MOST_OPERATIONS) -> Point:
    """Return the point with a smaller batch, then with fewer heads, if it has more operations than that."""
    batch, kv_heads, group = point.batch, point.kv_heads, point.q_heads // point.kv_heads
    of_a_head = point.operations / (batch * point.q_heads) * (3.5 if point.training else 1)
    while batch * kv_heads * group > max(1, most_operations / of_a_head):
        if batch > 1:
            batch //= 2
        elif kv_heads > 1:
            kv_heads //= 2
        else:
            group //= 2
    return replace(point, batch=batch, q_heads=kv_heads * group, kv_heads=kv_heads)


def _square(kind: str, batch: int, heads: int, tokens: int, head_dim: int, mask: MaskName = "none") -> Point:
    return Point(kind, batch, heads, heads, tokens, tokens, head_dim, mask)


def _rectangle(kind: str, heads: int, q_len: int, kv_len: int, head_dim: int, mask: MaskName = "none") -> Point:
    return Point(kind, 1, heads, heads, q_len, kv_len, head_dim, mask)


_LENGTHS = (1, 16, 64, 256, 512, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 32768, 65536, 131072)
_OTHER_HEAD_DIMS = (32, 40, 48, 72, 80, 96, 112, 160, 192, 256)


def _self_attention() -> Iterator[Point]:
    kind = "self-attention"
    for head_dim in (64, 128):
        yield from (_square(kind, 2 if tokens < 4096 else 1, 24, tokens, head_dim) for tokens in _LENGTHS)
    for head_dim in _OTHER_HEAD_DIMS:
        yield from (_square(kind, 1, 16, tokens, head_dim) for tokens in (1024, 4096, 16384))
    # Flux, Qwen-Image, SD 3.5, SDXL, SD 1.5, CogVideoX, Wan, Mochi, HunyuanVideo, Whisper, ViTs.
    sizes = (
        *((1, 24, 4608, 128), (1, 24, 4224, 128), (2, 38, 4429, 64), (2, 10, 4096, 64), (2, 20, 1024, 64)),
        *((2, 8, 4096, 40), (2, 8, 1024, 80), (2, 8, 256, 160), (2, 30, 17776, 64), (1, 12, 32760, 128)),
        *((1, 24, 44776, 128), (1, 24, 119056, 128), (8, 20, 1500, 64), (32, 16, 257, 64), (8, 16, 577, 64)),
        *((4, 16, 1369, 80), (1, 16, 12345, 72)),
    )
    yield from (_square(kind, *size) for size in sizes)


def _causal() -> Iterator[Point]:
    for head_dim in (64, 128):
        for tokens in (*_LENGTHS[2:6], *_LENGTHS[7:8], *_LENGTHS[9:]):
            yield _square("causal", 2 if tokens < 4096 else 1, 32, tokens, head_dim, "causal")
    for head_dim in (80, 96, 192, 256):
        yield from (_square("causal", 1, 16, tokens, head_dim, "causal") for tokens in (2048, 8192))
    for q_heads, kv_heads, head_dim in ((32, 8, 128), (28, 4, 128), (32, 8, 64), (16, 1, 256)):
        for tokens in (512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)[
            :: 1 if (q_heads, head_dim) == (32, 128) else 3
        ]:
            yield Point("causal, grouped queries", 1, q_heads, kv_heads, tokens, tokens, head_dim, "causal")


def _cross_attention() -> Iterator[Point]:
    for kv_len in (77, 128, 226, 256, 333, 512):
        yield from (_rectangle("cross-attention", 12, q_len, kv_len, 128) for q_len in (1024, 4096, 16384, 32760))
    for kv_len in (77, 256, 512):
        yield from (_rectangle("cross-attention", 20, q_len, kv_len, 64) for q_len in (256, 1024, 4096, 17550))
    yield from (_rectangle("cross-attention", 8, q_len, 77, head_dim) for q_len, head_dim in ((4096, 40), (1024, 80)))
    yield _rectangle("cross-attention", 40, 75600, 512, 128)


def _masked() -> Iterator[Point]:
    for batch in (8, 32, 128):
        for heads, head_dim in ((12, 64), (16, 64), (12, 32), (32, 128)):
            yield _square("padded texts", batch, heads, 512, head_dim, "lengths")
    yield from (_square("padded texts", 32, 12, tokens, 64, "lengths") for tokens in (64, 128, 256))
    for head_dim in (64, 128):
        for tokens in (1024, 2048, 4096, 8192, 16384, 32768, 65536, 119056):
            yield _square("key mask", 1, 24, tokens, head_dim, "lengths")
    yield from (_square("key mask", 1, 24, tokens, 128, "keys") for tokens in (1536, 4224, 4608, 17776))
    yield from (_rectangle("key mask", 24, q_len, 512, 128, "lengths") for q_len in (4096, 32760))
    for head_dim in (64, 128):
        yield from (_square("window", 1, 16, tokens, head_dim, "window") for tokens in (2048, 4096, 8192, 16384))
        for tokens in (1024, 2048, 4096, 8192, 16384):
            yield _square("documents", 1, 16, tokens, head_dim, "documents")
        for tokens in (128, 256, 512, 1024, 2048, 4096):
            yield _square("bias of each head", 2 if tokens == 4096 else 4, 16, tokens, head_dim, "bias")
    yield from (_square("bias of each head", 64, 8, tokens, 32, "bias") for tokens in (256, 512))


def _after_a_cache() -> Iterator[Point]:
    lengths = (128, 1024, 4096, 8192, 32768, 131072)
    for batch, q_heads, kv_heads, head_dim in ((1, 32, 8, 128), (16, 32, 8, 128), (1, 32, 32, 128), (8, 16, 16, 64)):
        for kv_len in lengths:
            if 4 * batch * kv_heads * kv_len * head_dim <= 2**33:
                yield Point("decoding", batch, q_heads, kv_heads, 1, kv_len, head_dim)
    yield from (Point("decoding", 16, 32, 8, 1, kv_len, 128, "lengths") for kv_len in (1024, 8192))
    for q_len in (4, 16):
        for kv_len in (4096, 32768):
            yield Point("chunked prefill", 1, 32, 8, q_len, kv_len, 128, "lower_right")
    for q_len in (512, 2048, 8192):
        for kv_len in (4096, 16384, 32768, 131072):
            if q_len < kv_len:
                yield Point("chunked prefill", 1, 32, 8, q_len, kv_len, 128, "lower_right")
    yield from (Point("chunked prefill", 1, 16, 16, 2048, kv_len, 64, "lower_right") for kv_len in (8192, 32768))


def drawn(count: int, seed: int, most_operations: float = MOST_OPERATIONS) -> list[Point]:
    """Draw calls of every kind but training, at lengths and sizes that nobody tuned for; the same ones for a seed."""
    random_ = random.Random(seed)
    kinds: dict[str, tuple[MaskName, ...]] = {
        "self-attention": ("none",),
        "causal": ("causal",),
        "causal, grouped queries": ("causal",),
        "cross-attention": ("none",),
        "padded texts": ("lengths",),
        "key mask": ("lengths", "keys"),
        "window": ("window",),
        "documents": ("documents",),
        "bias of each head": ("bias",),
        "chunked prefill": ("lower_right",),
        "decoding": ("none",),
    }
    grouped = ("causal, grouped queries", "chunked prefill", "decoding")
    longest = {"padded texts": 512, "bias of each head": 4096, "window": 16384, "documents": 16384}
    points = []
    for index in range(count):
        kind, masks = list(kinds.items())[index % len(kinds)]
        mask = random_.choice(masks)
        head_dim = random_.choice((64, 128, 64, 128, 8 * random_.randint(4, 32)))
        tokens = round(2 ** random_.uniform(5, 17)) if kind not in longest else random_.randint(32, longest[kind])
        kv_heads = random_.choice((1, 2, 4, 5, 8, 10, 12, 16, 20, 24, 32, 38))
        group = random_.choice((2, 4, 8) if kind in grouped else (1, 1, 1, 1, 2, 4, 8))
        batch = random_.choice((8, 16, 64) if kind == "padded texts" else (1, 1, 2, 4, 16))
        q_len = kv_len = tokens
        if kind == "cross-attention":
            kv_len = random_.randint(77, 512)
        elif kind == "chunked prefill":
            q_len = max(1, min(8192, round(tokens * random_.uniform(0.05, 0.5))))
        elif kind == "decoding":
            q_len = 1
        point = Point(kind, batch, kv_heads * group, kv_heads, q_len, kv_len, head_dim, mask)
        points.append(_capped(point, most_operations))
    return points


def _training() -> Iterator[Point]:
    def point(
        kind: str,
        batch: int,
        q_heads: int,
        kv_heads: int,
        q_len: int,
        kv_len: int,
        head_dim: int,
        mask: MaskName = "none",
    ) -> Point:
        return Point(kind, batch, q_heads, kv_heads, q_len, kv_len, head_dim, mask, training=True)

    for head_dim in (64, 128):
        for tokens in (256, 512, 1024, 2048, 4096, 8192, 16384):
            batch = max(1, 8192 // tokens)
            yield point("training", batch, 16, 16, tokens, tokens, head_dim)
            yield point("training, causal", batch, 16, 16, tokens, tokens, head_dim, "causal")
    for q_heads, kv_heads, head_dim in ((32, 8, 128), (28, 4, 128), (32, 8, 64)):
        for tokens in (1024, 2048, 4096, 8192, 32768)[:: 1 if (q_heads, head_dim) == (32, 128) else 2]:
            yield point(
                "training, causal", max(1, 4096 // tokens), q_heads, kv_heads, tokens, tokens, head_dim, "causal"
            )
    for head_dim in (32, 48, 72, 80, 96, 112, 192, 256):
        yield from (point("training", 2, 16, 16, tokens, tokens, head_dim) for tokens in (1024, 4096))
    for batch, tokens in ((8, 512), (32, 512), (16, 128), (4, 2048), (2, 4608)):
        yield point("training, key mask", batch, 12, 12, tokens, tokens, 64, "lengths")
    for q_len, head_dim in ((4096, 64), (4096, 128), (16384, 128)):
        yield from (point("training", 1, 12, 12, q_len, kv_len, head_dim) for kv_len in (77, 512))
    # CogVideoX-2B, Wan 1.3B, Flux, GPT-2, BERT.
    yield point("training", 1, 30, 30, 17776, 17776, 64)
    yield point("training", 1, 12, 12, 32760, 32760, 128)
    yield point("training", 1, 24, 24, 4608, 4608, 128)
    yield point("training, causal", 8, 12, 12, 1024, 1024, 64, "causal")
    random_ = random.Random(18)
    for index in range(8):
        tokens, causal = round(2 ** random_.uniform(7, 14)), index % 2
        heads, head_dim = random_.choice((8, 12, 16, 20)), 8 * random_.randint(4, 16)
        kind, mask = ("training, causal", "causal") if causal else ("training", "none")
        yield point(kind, max(1, 8192 // tokens), heads, heads, tokens, tokens, head_dim, mask)  # type: ignore[arg-type]


def _all_points() -> tuple[Point, ...]:
    forward = (*_self_attention(), *_causal(), *_cross_attention(), *_masked(), *_after_a_cache(), *drawn(66, seed=17))
    return tuple(dict.fromkeys(_capped(point) for point in (*forward, *_training())))


POINTS = _all_points()
"""All points: those of forward passes, systematic ones first, then those of training."""
