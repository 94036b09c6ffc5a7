"""The grid: several hundred attention calls as models make them, some systematic and some random, as data.

The name of a call is its kind, a row of the heat map. Calls have as many heads as real models, but fewer where a long
call would need more than `MOST_OPERATIONS`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from sage_hf.bench.cases import BACKWARD, BenchCase, MaskName

MOST_OPERATIONS = 6e12
"""Largest number of multiplications and additions of a call, without regard to its mask."""


def capped(case: BenchCase, most_operations: float = MOST_OPERATIONS) -> BenchCase:
    """Return the case; if it has too many operations, with a smaller batch and then with fewer heads."""
    batch, kv_heads, group = case.batch, case.kv_heads, case.q_heads // case.kv_heads
    of_a_head = case.dense_operations / (batch * case.q_heads) * (BACKWARD if case.training else 1)
    while batch * kv_heads * group > max(1, most_operations / of_a_head):
        if batch > 1:
            batch //= 2
        elif kv_heads > 1:
            kv_heads //= 2
        else:
            group //= 2
    return replace(case, batch=batch, q_heads=kv_heads * group, kv_heads=kv_heads)


def _square(kind: str, batch: int, heads: int, tokens: int, head_dim: int, mask: MaskName = "none") -> BenchCase:
    return BenchCase(kind, batch, heads, heads, tokens, tokens, head_dim, mask)


def _rectangle(kind: str, heads: int, q_len: int, kv_len: int, head_dim: int, mask: MaskName = "none") -> BenchCase:
    return BenchCase(kind, 1, heads, heads, q_len, kv_len, head_dim, mask)


_LENGTHS = (1, 16, 64, 256, 512, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 32768, 65536, 131072)
_OTHER_HEAD_DIMS = (32, 40, 48, 72, 80, 96, 112, 160, 192, 256)


def _self_attention() -> Iterator[BenchCase]:
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


def _causal() -> Iterator[BenchCase]:
    for head_dim in (64, 128):
        for tokens in (*_LENGTHS[2:6], *_LENGTHS[7:8], *_LENGTHS[9:]):
            yield _square("causal", 2 if tokens < 4096 else 1, 32, tokens, head_dim, "causal")
    for head_dim in (80, 96, 192, 256):
        yield from (_square("causal", 1, 16, tokens, head_dim, "causal") for tokens in (2048, 8192))
    for q_heads, kv_heads, head_dim in ((32, 8, 128), (28, 4, 128), (32, 8, 64), (16, 1, 256)):
        for tokens in (512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)[
            :: 1 if (q_heads, head_dim) == (32, 128) else 3
        ]:
            yield BenchCase("causal, grouped queries", 1, q_heads, kv_heads, tokens, tokens, head_dim, "causal")


def _cross_attention() -> Iterator[BenchCase]:
    for kv_len in (77, 128, 226, 256, 333, 512):
        yield from (_rectangle("cross-attention", 12, q_len, kv_len, 128) for q_len in (1024, 4096, 16384, 32760))
    for kv_len in (77, 256, 512):
        yield from (_rectangle("cross-attention", 20, q_len, kv_len, 64) for q_len in (256, 1024, 4096, 17550))
    yield from (_rectangle("cross-attention", 8, q_len, 77, head_dim) for q_len, head_dim in ((4096, 40), (1024, 80)))
    yield _rectangle("cross-attention", 40, 75600, 512, 128)


def _masked() -> Iterator[BenchCase]:
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


def _after_a_cache() -> Iterator[BenchCase]:
    lengths = (128, 1024, 4096, 8192, 32768, 131072)
    for batch, q_heads, kv_heads, head_dim in ((1, 32, 8, 128), (16, 32, 8, 128), (1, 32, 32, 128), (8, 16, 16, 64)):
        for kv_len in lengths:
            if 4 * batch * kv_heads * kv_len * head_dim <= 2**33:
                yield BenchCase("decoding", batch, q_heads, kv_heads, 1, kv_len, head_dim)
    yield from (BenchCase("decoding", 16, 32, 8, 1, kv_len, 128, "lengths") for kv_len in (1024, 8192))
    for q_len in (4, 16):
        for kv_len in (4096, 32768):
            yield BenchCase("chunked prefill", 1, 32, 8, q_len, kv_len, 128, "lower_right")
    for q_len in (512, 2048, 8192):
        for kv_len in (4096, 16384, 32768, 131072):
            if q_len < kv_len:
                yield BenchCase("chunked prefill", 1, 32, 8, q_len, kv_len, 128, "lower_right")
    yield from (BenchCase("chunked prefill", 1, 16, 16, 2048, kv_len, 64, "lower_right") for kv_len in (8192, 32768))


def drawn(count: int, seed: int, most_operations: float = MOST_OPERATIONS) -> list[BenchCase]:
    """Draw calls of every kind except training, at lengths and sizes that nobody tuned for; a seed gives fixed
    calls."""
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
    cases = []
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
        case = BenchCase(kind, batch, kv_heads * group, kv_heads, q_len, kv_len, head_dim, mask)
        cases.append(capped(case, most_operations))
    return cases


def _training() -> Iterator[BenchCase]:
    training_case = partial(BenchCase, training=True)
    for head_dim in (64, 128):
        for tokens in (256, 512, 1024, 2048, 4096, 8192, 16384):
            batch = max(1, 8192 // tokens)
            yield training_case("training", batch, 16, 16, tokens, tokens, head_dim)
            yield training_case("training, causal", batch, 16, 16, tokens, tokens, head_dim, "causal")
    for q_heads, kv_heads, head_dim in ((32, 8, 128), (28, 4, 128), (32, 8, 64)):
        for tokens in (1024, 2048, 4096, 8192, 32768)[:: 1 if (q_heads, head_dim) == (32, 128) else 2]:
            yield training_case(
                "training, causal", max(1, 4096 // tokens), q_heads, kv_heads, tokens, tokens, head_dim, "causal"
            )
    for head_dim in (32, 48, 72, 80, 96, 112, 192, 256):
        yield from (training_case("training", 2, 16, 16, tokens, tokens, head_dim) for tokens in (1024, 4096))
    for batch, tokens in ((8, 512), (32, 512), (16, 128), (4, 2048), (2, 4608)):
        yield training_case("training, key mask", batch, 12, 12, tokens, tokens, 64, "lengths")
    for q_len, head_dim in ((4096, 64), (4096, 128), (16384, 128)):
        yield from (training_case("training", 1, 12, 12, q_len, kv_len, head_dim) for kv_len in (77, 512))
    # CogVideoX-2B, Wan 1.3B, Flux, GPT-2, BERT.
    yield training_case("training", 1, 30, 30, 17776, 17776, 64)
    yield training_case("training", 1, 12, 12, 32760, 32760, 128)
    yield training_case("training", 1, 24, 24, 4608, 4608, 128)
    yield training_case("training, causal", 8, 12, 12, 1024, 1024, 64, "causal")
    random_ = random.Random(18)
    for index in range(8):
        tokens, causal = round(2 ** random_.uniform(7, 14)), index % 2
        heads, head_dim = random_.choice((8, 12, 16, 20)), 8 * random_.randint(4, 16)
        kind, mask = ("training, causal", "causal") if causal else ("training", "none")
        yield training_case(kind, max(1, 8192 // tokens), heads, heads, tokens, tokens, head_dim, mask)  # type: ignore[arg-type]


def _all_cases() -> tuple[BenchCase, ...]:
    forward = (*_self_attention(), *_causal(), *_cross_attention(), *_masked(), *_after_a_cache(), *drawn(66, seed=17))
    return tuple(dict.fromkeys(capped(case) for case in (*forward, *_training())))


CASES = _all_cases()
"""All cases: first forward passes (systematic, then random), then training."""
