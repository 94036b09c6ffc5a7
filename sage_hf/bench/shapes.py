"""The attention calls that are measured, and what a kernel must do and keep for them."""

from __future__ import annotations

from dataclasses import dataclass

from sage_kernels.spec.layout import KEY_BLOCK, padded_channels, padded_rows


@dataclass(frozen=True)
class Shape:
    """One call, with as many queries as keys.

    Attributes:
        name: short, for the command line and tables.
        batch, q_heads, kv_heads, tokens, head_dim: sizes of query, and of key and value.
        causal: row i attends to keys 0…i.
    """

    name: str
    batch: int
    q_heads: int
    kv_heads: int
    tokens: int
    head_dim: int
    causal: bool = False

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Read B,Hq,Hkv,N,D or B,Hq,Hkv,N,D,causal, such as 1,32,8,4096,128,causal.

        Raises:
            ValueError: it is not such a text, a size is below 1, or Hq is no multiple of Hkv.
        """
        sizes, _, causal = text.partition(",causal")
        try:
            batch, q_heads, kv_heads, tokens, head_dim = map(int, sizes.split(","))
        except ValueError:
            raise ValueError(f"{text!r} is no shape: expected B,Hq,Hkv,N,D or B,Hq,Hkv,N,D,causal") from None
        if causal or min(batch, q_heads, kv_heads, tokens, head_dim) < 1 or q_heads % kv_heads:
            raise ValueError(f"{text!r} is no shape: sizes must be at least 1, and Hq a multiple of Hkv")
        return cls(text, batch, q_heads, kv_heads, tokens, head_dim, "causal" in text)

    @property
    def operations(self) -> float:
        """Return the number of multiplications and additions of both matrix products; half of it if causal."""
        full = 4.0 * self.batch * self.q_heads * self.tokens**2 * self.head_dim
        return full / 2 if self.causal else full

    @property
    def training_operations(self) -> float:
        """Return the operations of forward and backward: two and five matrix products, one of them S again."""
        return 3.5 * self.operations

    @property
    def input_bytes(self) -> int:
        """Return the bytes of query, key and value in bfloat16."""
        return 2 * self.batch * (self.q_heads + 2 * self.kv_heads) * self.tokens * self.head_dim

    @property
    def output_bytes(self) -> int:
        """Return the bytes of the output in bfloat16."""
        return 2 * self.batch * self.q_heads * self.tokens * self.head_dim

    @property
    def saved_bytes(self) -> int:
        """Return the bytes that 16-bit attention keeps for backward: Q, K, V and output in bfloat16, and the LSE."""
        return self.input_bytes + self.output_bytes + 4 * self.batch * self.q_heads * self.tokens

    @property
    def low_bit_saved_bytes(self) -> int:
        """Return the bytes that ours keeps: Q and K in INT8 with scales, their equalizer, V, output and LSE."""
        rows, channels = padded_rows(self.tokens), padded_channels(self.head_dim)
        query = self.q_heads * rows * (channels + 4)
        key = self.kv_heads * (rows * channels + rows // KEY_BLOCK * 4 * 2)
        equalizer = 4 * self.kv_heads * channels
        value = 2 * self.kv_heads * self.tokens * self.head_dim
        return self.batch * (query + key + equalizer + value + 4 * self.q_heads * self.tokens) + self.output_bytes

    def __str__(self) -> str:
        heads = str(self.q_heads) if self.q_heads == self.kv_heads else f"{self.q_heads}/{self.kv_heads}"
        text = f"{self.batch}×{heads}×{self.tokens}×{self.head_dim}"
        return f"{text}, causal" if self.causal else text


# From 4k to 119k tokens, at the head_dims of today's models. The smallest inputs are larger than any L2, so that no
# flush is needed between calls.
SHAPES: tuple[Shape, ...] = (
    Shape("4k-128", 4, 32, 32, 4096, 128),
    Shape("8k-128", 2, 32, 32, 8192, 128),
    Shape("16k-128", 2, 32, 32, 16384, 128),
    Shape("16k-128-causal", 2, 32, 32, 16384, 128, causal=True),
    Shape("4k-64", 4, 32, 32, 4096, 64),
    Shape("16k-64", 2, 32, 32, 16384, 64),
    Shape("16k-64-causal", 2, 32, 32, 16384, 64, causal=True),
    Shape("cogvideox-2b", 2, 30, 30, 17776, 64),
    Shape("mochi", 1, 24, 24, 44776, 128),
    Shape("hunyuanvideo-720p", 1, 24, 24, 119056, 128),
    Shape("flux", 1, 24, 24, 4608, 128),
    Shape("llama-3-prefill", 1, 32, 8, 32768, 128, causal=True),
)

# What models are trained on: plain, causal, a small head_dim, a language model's grouped queries, a video's tokens.
TRAINING_SHAPES: tuple[Shape, ...] = (
    Shape("8k-128", 2, 32, 32, 8192, 128),
    Shape("8k-128-causal", 2, 32, 32, 8192, 128, causal=True),
    Shape("8k-64", 2, 32, 32, 8192, 64),
    Shape("llama-3-training", 1, 32, 8, 16384, 128, causal=True),
    Shape("cogvideox-2b-training", 1, 30, 30, 17776, 64),
)
