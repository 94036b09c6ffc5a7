"""One attention call as data: its sizes and mask, its tensors, and the named calls of the benchmarks."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

from sage_kernels.dispatch.curves import CallSizes
from sage_kernels.spec.call import Call, Mask, MaskKind
from sage_kernels.spec.recipe import get_recipe

MaskName = Literal["none", "causal", "lower_right", "lengths", "causal_lengths", "keys", "window", "documents", "bias"]
KINDS: dict[MaskName, MaskKind] = {
    "lengths": "keys",
    "causal_lengths": "keys",
    "keys": "keys",
    "window": "bool",
    "documents": "bool",
    "bias": "additive",
}
"""Kinds of masks, as `sage_kernels` names them; masks that are missing here have no tensor that it reads."""

CACHED = ("decoding", "chunked prefill")
"""Names of calls whose K and V come from a cache."""
WINDOW = 1024
DOCUMENT = 700
"""Length of documents that share a sequence."""
BACKWARD = 3.5
"""Operations of forward and backward pass (two and five matrix products), relative to the forward pass."""


@dataclass(frozen=True)
class BenchCase:
    """One call of attention.

    Attributes:
        name: a short name for the command line and tables; in the grid, the kind of call.
        batch, q_heads, kv_heads, q_len, kv_len, head_dim: sizes of query, and of key and value.
        mask: "none"; "causal", upper left; "lower_right", causal with the last query at the last key; "lengths", each
            sample has its own number of keys; "causal_lengths", "lengths" and causal; "keys", as "lengths" with padding
            in the middle; "window", a band of WINDOW keys on each side of the diagonal; "documents", blocks on the
            diagonal; "bias", a bias for each head.
        training: run forward and backward pass.
    """

    name: str
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    mask: MaskName = "none"
    training: bool = False

    @classmethod
    def square(
        cls, name: str, sizes: tuple[int, int, int, int, int], causal: bool = False, training: bool = False
    ) -> BenchCase:
        """Make a call with as many queries as keys; `sizes` are batch, q_heads, kv_heads, tokens and head_dim."""
        batch, q_heads, kv_heads, tokens, head_dim = sizes
        return cls(name, batch, q_heads, kv_heads, tokens, tokens, head_dim, "causal" if causal else "none", training)

    @classmethod
    def parse(cls, text: str, training: bool = False) -> BenchCase:
        """Read B,Hq,Hkv,N,D or B,Hq,Hkv,N,D,causal, such as 1,32,8,4096,128,causal.

        Raises:
            ValueError: the text has another form, a size is below 1, or Hq is no multiple of Hkv.
        """
        numbers, _, after_mask = text.partition(",causal")
        try:
            batch, q_heads, kv_heads, tokens, head_dim = sizes = tuple(map(int, numbers.split(",")))
        except ValueError:
            raise ValueError(f"{text!r} is no shape: expected B,Hq,Hkv,N,D or B,Hq,Hkv,N,D,causal") from None
        if after_mask or min(sizes) < 1 or q_heads % kv_heads:
            raise ValueError(f"{text!r} is no shape: sizes must be at least 1, and Hq a multiple of Hkv")
        return cls.square(text, (batch, q_heads, kv_heads, tokens, head_dim), text.endswith("causal"), training)

    @classmethod
    def of_row(cls, row: dict[str, Any]) -> BenchCase:
        """Return the call that a row of a result belongs to."""
        mask: MaskName = row["mask"] if "mask" in row else "causal" if row["causal"] else "none"
        sizes = {name: row[name] for name in ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim")}
        training = row["direction"] == "forward_backward"
        return cls(row.get("kind") or row["shape"], **sizes, mask=mask, training=training)

    def to_row(self) -> dict[str, Any]:
        """Return the call's part of a row of a result of named shapes; its "causal" means aligned upper left."""
        names = ("batch", "q_heads", "kv_heads", "q_len", "kv_len", "head_dim")
        sizes = {name: getattr(self, name) for name in names}
        return {"shape": self.name, **sizes, "causal": self.upper_left, "direction": self.direction}

    def __str__(self) -> str:
        heads = str(self.q_heads) if self.q_heads == self.kv_heads else f"{self.q_heads}/{self.kv_heads}"
        tokens = str(self.q_len) if self.q_len == self.kv_len else f"{self.q_len}·{self.kv_len}"
        text = f"{self.batch}×{heads}×{tokens}×{self.head_dim}"
        return text if self.mask == "none" else f"{text}, {self.mask}"

    @property
    def sizes(self) -> CallSizes:
        """Return the sizes of the call as a cost model takes them."""
        return CallSizes(self.batch, self.q_heads, self.kv_heads, self.q_len, self.kv_len, self.head_dim)

    @property
    def direction(self) -> str:
        """Return the direction in a row of a result."""
        return "forward_backward" if self.training else "forward"

    @property
    def kind(self) -> MaskKind:
        """Return the kind of the mask that kernels read; causality is not a mask."""
        return KINDS.get(self.mask, "none")

    @property
    def upper_left(self) -> bool:
        """Return whether the call is causal, aligned upper left: query i attends to no key behind key i."""
        return self.mask in ("causal", "causal_lengths")

    @property
    def is_causal(self) -> bool:
        """Return whether the call is causal, with either alignment; `causal_offset` states which."""
        return self.upper_left or self.mask == "lower_right"

    @property
    def causal_offset(self) -> int:
        """Return the offset of causality: query i attends to keys up to i plus this offset."""
        return self.kv_len - self.q_len if self.mask == "lower_right" else 0

    @property
    def scores(self) -> int:
        """Return the number of scores."""
        return self.batch * self.q_heads * self.q_len * self.kv_len

    @property
    def dense_operations(self) -> float:
        """Return the multiplications and additions of both matrix products of a forward pass without a mask."""
        return 4.0 * self.scores * self.head_dim

    @property
    def attended_pairs(self) -> int:
        """Return the number of pairs of a query and a key, of all heads, that causality leaves; other masks hide none.

        The lengths of samples, windows and documents do not count, because they are drawn or no part of the sizes.
        """
        pairs = self.q_len * self.kv_len
        if self.is_causal:
            ends = self.q_len + self.causal_offset, self.causal_offset, self.q_len + self.causal_offset - self.kv_len
            pairs = _triangle(ends[0]) - _triangle(ends[1]) - _triangle(ends[2])
        return self.batch * self.q_heads * pairs

    @property
    def operations(self) -> float:
        """Return the multiplications and additions of all matrix products, for the pairs that causality leaves."""
        return 4.0 * self.attended_pairs * self.head_dim * (BACKWARD if self.training else 1.0)

    @property
    def input_bytes(self) -> int:
        """Return the bytes of query, key and value in bfloat16."""
        return 2 * self.batch * (self.q_heads * self.q_len + 2 * self.kv_heads * self.kv_len) * self.head_dim

    @property
    def output_bytes(self) -> int:
        """Return the bytes of the output in bfloat16."""
        return 2 * self.batch * self.q_heads * self.q_len * self.head_dim


def _triangle(rows: int) -> int:
    """Return 1 + 2 + … + rows; 0 for negative numbers."""
    return max(0, rows) * (max(0, rows) + 1) // 2


@dataclass(frozen=True)
class CaseInputs:
    """The tensors of a call on a device, with its mask in every form that a provider may take.

    Attributes:
        case: the call.
        query, key, value: bfloat16 (batch, heads, tokens, head_dim).
        mask: bool or bfloat16, broadcastable to (batch, q_heads, q_len, kv_len); None without a mask. Causality
            aligned upper left is not in it; causality aligned lower right is.
        lengths: int32 (batch,), the number of keys of each sample, if existing keys come first; else None.
        gradient: gradient of the output, for training; else None.
    """

    case: BenchCase
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None = None
    lengths: Tensor | None = None
    gradient: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value."""
        return self.query, self.key, self.value

    @property
    def grouped(self) -> bool:
        """Return whether several heads of Q share a head of K."""
        return self.case.q_heads != self.case.kv_heads

    def call(self, recipe: str) -> Call:
        """Return the call as kernels take it; causality is stated with its offset, and is in no mask."""
        case = self.case
        mask = Mask.of(None if case.mask == "lower_right" else self.mask, case.kv_len)
        return Call(
            *self.tensors,
            get_recipe(recipe),
            mask,
            is_causal=case.is_causal,
            causal_offset=case.causal_offset,
            scale=case.head_dim**-0.5,
        )

    @cached_property
    def lower_right(self) -> Any:
        """Return PyTorch's own object for a causal mask that is aligned lower right."""
        return causal_lower_right(self.case.q_len, self.case.kv_len)


def draw(case: BenchCase, device: torch.device, biased: bool = False, heads_first: bool = False) -> CaseInputs:
    """Draw standard normal tensors, the same tensors at every call; Q, K and V require gradients for training.

    Args:
        case: the call.
        device: device of the tensors.
        biased: each channel also gets a mean, as in diffusion transformers: drawn with a standard deviation of 3 in K,
            and of 0.5 in V.
        heads_first: in memory, heads come before tokens. Otherwise tokens come before heads, as projections leave them;
            a cache's K and V always have heads first.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int, tokens: int, heads_first: bool = heads_first) -> Tensor:
        size = (heads, tokens) if heads_first else (tokens, heads)
        x = torch.randn(case.batch, *size, case.head_dim, generator=generator, device=device, dtype=torch.bfloat16)
        return x if heads_first else x.transpose(1, 2)

    query = normal(case.q_heads, case.q_len)
    key, value = (normal(case.kv_heads, case.kv_len, heads_first or case.name in CACHED) for _ in range(2))
    if biased:
        key += 3 * normal(case.kv_heads, 1)
        value += 0.5 * normal(case.kv_heads, 1)
    gradient = normal(case.q_heads, case.q_len) if case.training else None
    for x in (query, key, value):
        x.requires_grad_(case.training)
    lengths = None
    if KINDS.get(case.mask) == "keys":
        random_ = random.Random(f"{case.name}, {case}")
        numbers = [random_.randint(max(1, case.kv_len // 4), case.kv_len) for _ in range(case.batch)]
        lengths = torch.tensor(numbers, dtype=torch.int32, device=device)
    mask = _mask(case, lengths, generator, device)
    return CaseInputs(case, query, key, value, mask, lengths if case.mask == "lengths" else None, gradient)


def _mask(case: BenchCase, lengths: Tensor | None, generator: torch.Generator, device: torch.device) -> Tensor | None:
    queries = torch.arange(case.q_len, device=device)[:, None] + (case.kv_len - case.q_len)
    keys = torch.arange(case.kv_len, device=device)
    match case.mask:
        case "lower_right":
            return (keys <= queries)[None, None]
        case "lengths" | "causal_lengths":
            assert lengths is not None
            return (keys < lengths[:, None])[:, None, None]
        case "keys":  # Half of the existing keys come first, the other half last.
            assert lengths is not None
            first = (lengths[:, None] + 1) // 2
            return ((keys < first) | (keys >= case.kv_len - (lengths[:, None] - first)))[:, None, None]
        case "window":
            return ((keys - queries).abs() <= WINDOW)[None, None]
        case "documents":
            return (keys // DOCUMENT == queries // DOCUMENT)[None, None]
        case "bias":
            size = (1, case.q_heads, case.q_len, case.kv_len)
            return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)
    return None


# From 4k to 119k tokens, at the head_dims of today's models. The smallest inputs are larger than any L2 cache, so the
# cache need not be flushed between calls.
SHAPES: tuple[BenchCase, ...] = (
    BenchCase.square("4k-128", (4, 32, 32, 4096, 128)),
    BenchCase.square("8k-128", (2, 32, 32, 8192, 128)),
    BenchCase.square("16k-128", (2, 32, 32, 16384, 128)),
    BenchCase.square("16k-128-causal", (2, 32, 32, 16384, 128), causal=True),
    BenchCase.square("4k-64", (4, 32, 32, 4096, 64)),
    BenchCase.square("16k-64", (2, 32, 32, 16384, 64)),
    BenchCase.square("16k-64-causal", (2, 32, 32, 16384, 64), causal=True),
    BenchCase.square("cogvideox-2b", (2, 30, 30, 17776, 64)),
    BenchCase.square("mochi", (1, 24, 24, 44776, 128)),
    BenchCase.square("hunyuanvideo-720p", (1, 24, 24, 119056, 128)),
    BenchCase.square("flux", (1, 24, 24, 4608, 128)),
    BenchCase.square("llama-3-prefill", (1, 32, 8, 32768, 128), causal=True),
)

# Training calls of models: plain, causal, a small head_dim, a language model's grouped queries, a video's tokens.
TRAINING_SHAPES: tuple[BenchCase, ...] = (
    BenchCase.square("8k-128", (2, 32, 32, 8192, 128), training=True),
    BenchCase.square("8k-128-causal", (2, 32, 32, 8192, 128), causal=True, training=True),
    BenchCase.square("8k-64", (2, 32, 32, 8192, 64), training=True),
    BenchCase.square("llama-3-training", (1, 32, 8, 16384, 128), causal=True, training=True),
    BenchCase.square("cogvideox-2b-training", (1, 30, 30, 17776, 64), training=True),
)
