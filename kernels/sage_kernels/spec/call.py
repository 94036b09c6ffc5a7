"""One attention call: its tensors, its mask and all options that affect the result."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from .block_list import BlockList
from .layout import BLOCK, Lengths, Sequences, at_aligned_address, padded_channels, token_axes
from .masks import as_key_mask
from .operands import Saved
from .options import Options
from .recipe import Recipe, get_recipe
from .transforms import LATE_SHARE, MIN_LATE

PADDING_BIAS = -1e4
"""Value of an additive mask at and below which a key counts as padding, if each query has another key left."""

AttentionOutput = tuple[torch.Tensor, torch.Tensor | None]
"""(output, lse): the lse may be None, or have any value, if it is not wanted."""
MaskKind = Literal["none", "keys", "bool", "additive", "blocks", "block_keys"]


@dataclass(frozen=True)
class Mask:
    """Mask that says which keys each query may attend to.

    Attributes:
        kind: "none"; "keys" (says which keys exist, the same for all queries and heads); "bool"; "additive"; "blocks"
            (a list of tiles); or "block_keys" (a list of tiles, and which keys exist).
        tensor: 4-D, bool (True: may attend) or additive, broadcastable to (batch, q_heads, q_len, kv_len); None for
            kinds "none" and "blocks".
        key_mask: for kinds "keys" and "block_keys", bool (batch or 1, kv_len), False where a key does not exist; else
            None.
        blocks: for kinds "blocks" and "block_keys", the tiles of keys that each block of rows attends to; else None.
    """

    kind: MaskKind = "none"
    tensor: torch.Tensor | None = None
    key_mask: torch.Tensor | None = None
    blocks: BlockList | None = None

    @property
    def list_sizes(self) -> tuple[int, int]:
        """Return the rows of a block, and the keys of a tile, of the block list; (0, 0) without one."""
        return (0, 0) if self.blocks is None else (self.blocks.block_m, self.blocks.block_n)

    @classmethod
    def of(cls, mask: torch.Tensor | None, kv_len: int) -> Mask:
        """Return the `Mask` of a 4-D tensor, or NO_MASK for None."""
        if mask is None:
            return NO_MASK
        if mask.dtype != torch.bool:
            return cls("additive", mask)
        key_mask = as_key_mask(mask, kv_len)
        return cls("bool", mask) if key_mask is None else cls("keys", mask, key_mask)

    @classmethod
    def of_keys(cls, key_mask: torch.Tensor | None) -> Mask:
        """Return the `Mask` of existing keys; `key_mask` is bool (batch or 1, kv_len), or None if all keys exist."""
        return NO_MASK if key_mask is None else cls("keys", key_mask[:, None, None], key_mask)

    @classmethod
    def of_blocks(cls, blocks: BlockList, mask: torch.Tensor | None, kv_len: int) -> Mask:
        """Return the `Mask` of a block list, and of a 4-D mask that says which keys exist, or None.

        Raises:
            ValueError: the mask says more than which keys exist.
        """
        padding = cls.of(mask, kv_len)
        if padding.kind not in ("none", "keys"):
            raise ValueError(
                "with a block list a mask may only say which keys exist: bool, the same for all queries and heads; "
                f"got a mask of kind {padding.kind!r}"
            )
        return replace(padding, kind="blocks" if padding.kind == "none" else "block_keys", blocks=blocks)

    def without_first_keys(self, count: int) -> Mask:
        """Return the mask without its first `count` keys."""
        if self.tensor is None:
            return self
        tensor = self.tensor if self.tensor.shape[-1] == 1 else self.tensor[..., count:]
        return replace(self, tensor=tensor, key_mask=None if self.key_mask is None else self.key_mask[:, count:])


NO_MASK = Mask()


@dataclass(frozen=True)
class Call:
    """Forward call. With `lengths`, tensors are packed: (1, heads, total tokens, channels).

    Attributes:
        query: (batch, q_heads, q_len, head_dim) float16, bfloat16 or float32, any strides.
        key, value: (batch, kv_heads, kv_len, head_dim), (batch, kv_heads, kv_len, v_head_dim), dtype and device of
            query; q_heads a multiple of kv_heads.
        recipe: formats and transforms.
        mask: the mask; for packed sequences none, or a block list whose batch is the sequences: tiles beyond a
            sequence's keys, and blocks beyond its rows, are ignored.
        is_causal: row i attends to keys 0…i + causal_offset.
        causal_offset: see is_causal; 0 aligns upper left.
        scale: factor of the scores.
        lengths: lengths of packed sequences, each of which attends to itself only; None: an ordinary batch.
        return_lse: whether the log-sum-exp of each row's scores is wanted.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    recipe: Recipe
    mask: Mask = NO_MASK
    is_causal: bool = False
    causal_offset: int = 0
    scale: float = 1.0
    lengths: Lengths | None = None
    return_lse: bool = False

    def __post_init__(self) -> None:
        if self.lengths is not None and self.mask.kind not in ("none", "blocks"):
            raise ValueError("packed sequences take no mask: their lengths say which keys exist")

    @classmethod
    def of(
        cls,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: Mask,
        options: Options,
        lengths: Lengths | None = None,
    ) -> Call:
        """Return a call with a caller's options; raise ValueError if their recipe is unknown."""
        return cls(
            query,
            key,
            value,
            get_recipe(options.recipe),
            mask,
            is_causal=bool(options.is_causal),
            causal_offset=options.causal_offset,
            scale=softmax_scale(options.scale, query.shape[3]),
            lengths=lengths,
            return_lse=options.return_lse,
        )

    @property
    def batch(self) -> int:
        """Return the number of sequences."""
        return self.query.shape[0] if self.lengths is None else self.lengths.sequences

    @property
    def q_len(self) -> int:
        """Return the number of queries of the longest sequence."""
        return self.query.shape[2] if self.lengths is None else self.lengths.max_seqlen_q

    @property
    def kv_len(self) -> int:
        """Return the number of keys of the longest sequence."""
        return self.key.shape[2] if self.lengths is None else self.lengths.max_seqlen_k

    @property
    def is_empty(self) -> bool:
        """Return whether sizes tell that no query attends to any key."""
        return 0 in (*self.query.shape[:3], self.key.shape[2], self.batch, self.q_len, self.kv_len)

    @cached_property
    def token_axes(self) -> tuple[Sequences, Sequences]:
        """Return the token axes of Q, and of K and V."""
        return token_axes(self.query.shape[2], self.key.shape[2], self.lengths)

    @property
    def heavy_keys(self) -> int:
        """Return the number of keys of each sequence that are attended to in 16 bits.

        With a block list there are none.
        """
        return heavy_keys_of(self.recipe, self.kv_len, self.mask.kind)

    @property
    def chooses_heavy_keys(self) -> bool:
        """Return whether heavier keys may take the places of first keys (`transforms.heavy_places`, `late_keys`).

        They may if no mask says more than which keys exist; a causal call must also have many keys.
        """
        return chooses_heavy_keys(self.recipe, self.kv_len, self.mask.kind, self.is_causal)

    @property
    def late_keys(self) -> int:
        """Return the number of heavy keys that are late keys, or 0 (`transforms.late_keys`)."""
        return late_keys_of(self.recipe, self.kv_len, self.mask.kind, self.is_causal)

    @property
    def first_keys(self) -> int:
        """Return how many leading keys are in the heavy keys' operand instead of quantised K and V."""
        return self.heavy_keys - self.late_keys

    @property
    def replaceable_keys(self) -> int:
        """Return how many of the first keys, counted from their end, other keys may replace."""
        return self.late_keys or self.heavy_keys if self.chooses_heavy_keys else 0

    @property
    def has_recent_keys(self) -> bool:
        """Return whether the latest keys of each row are attended to in 16 bits (`recent_start`).

        Heavy keys among them stay heavy. Without causality, or with a block list, there are no recent keys.
        """
        return has_recent_keys(self.recipe, self.mask.kind, self.is_causal)

    @property
    def recent_start(self) -> int:
        """Return the first recent key of a call with recent keys, counted after the first keys (`recent_start`)."""
        return recent_start(self.causal_offset - self.first_keys, self.recipe.recent_keys)

    @property
    def wants_mean_score(self) -> bool:
        """Return whether NVFP4 kernels need Q's products with K's mean: for the LSE, or for recent keys."""
        return self.return_lse or self.has_recent_keys

    @property
    def tail(self) -> Call:
        """Return the call without its first keys; positions are counted from the first key that is left.

        Late keys are among the keys left: kernels skip them (`triton.common.tokens.tail_source`).
        """
        # A call that held itself would keep its tensors until the garbage collector runs.
        return self._without_first_keys if self.first_keys else self

    @cached_property
    def _without_first_keys(self) -> Call:
        heavy, lengths = self.first_keys, self.lengths
        if lengths is not None:
            stored = lengths.cu_seqlens_k.diff()
            counted = stored if lengths.seqused_k is None else torch.minimum(stored, lengths.seqused_k)
            lengths = lengths._replace(
                max_seqlen_k=lengths.max_seqlen_k - heavy, seqused_k=(counted - heavy).clamp(min=0)
            )
        return replace(
            self,
            key=self.key[:, :, heavy:],
            value=self.value[:, :, heavy:],
            mask=self.mask.without_first_keys(heavy),
            causal_offset=self.causal_offset - heavy,
            lengths=lengths,
        )

    def for_kernel(self) -> Call:
        """Return a call with the same result in the form that kernels take.

        Its scale is not negative, because kernels take a tile's largest score before scaling; its offset fits a
        kernel's integers; addresses are aligned.
        """
        offset = clamped_offset(self.causal_offset, self.q_len, self.kv_len)
        query, key, value = (at_aligned_address(x) for x in (self.query, self.key, self.value))
        if self.scale < 0:
            query = -query
        return replace(self, query=query, key=key, value=value, scale=abs(self.scale), causal_offset=offset)

    def without_memory(self) -> Call:
        """Return the call with its tensors, and its key-padding mask, on the meta device; other masks are left out."""

        def empty(x: torch.Tensor) -> torch.Tensor:
            return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")

        mask = Mask.of_keys(None if self.mask.key_mask is None else empty(self.mask.key_mask))
        return replace(self, query=empty(self.query), key=empty(self.key), value=empty(self.value), mask=mask)

    def new_outputs(self, saves_lse: bool = False) -> AttentionOutput:
        """Allocate the output, laid out as (batch, q_len, q_heads, v_head_dim), and the LSE if it is wanted or saved.

        They are filled with 0 and -inf if a kernel may leave rows unwritten: in empty calls, and for packed sequences,
        whose lengths only the GPU knows.
        """
        batch, q_heads, q_len, _ = self.query.shape
        output = self.query.new_empty(batch, q_len, q_heads, self.value.shape[3]).transpose(1, 2)
        lse = None
        if self.return_lse or saves_lse:
            lse = self.query.new_empty((batch, q_heads, q_len), dtype=torch.float32)
        if self.is_empty or self.lengths is not None:
            output.zero_()
            if lse is not None:
                lse.fill_(-torch.inf)
        return output, lse


@dataclass(frozen=True)
class BackwardCall:
    """Backward pass of a call.

    Attributes:
        output_gradient: (batch, q_heads, q_len, v_head_dim), value's dtype, any strides.
        value: (batch, kv_heads, kv_len, v_head_dim) float16, bfloat16 or float32, the forward's argument.
        output, saved: the results of the forward pass.
        head_dim: head_dim of Q and K.
        recipe, mask, is_causal, causal_offset, scale, lengths: as in `Call`.
    """

    output_gradient: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    saved: Saved
    head_dim: int
    recipe: Recipe
    mask: Mask = NO_MASK
    is_causal: bool = False
    causal_offset: int = 0
    scale: float = 1.0
    lengths: Lengths | None = None

    def __post_init__(self) -> None:
        if self.lengths is not None and self.mask.kind not in ("none", "blocks"):
            raise ValueError("packed sequences take no mask: their lengths say which keys exist")

    @property
    def batch(self) -> int:
        """Return the number of sequences."""
        return self.output.shape[0] if self.lengths is None else self.lengths.sequences

    @property
    def q_len(self) -> int:
        """Return the number of queries of the longest sequence."""
        return self.token_axes[0].tokens

    @property
    def kv_len(self) -> int:
        """Return the number of keys of the longest sequence."""
        return self.token_axes[1].tokens

    @property
    def channels(self) -> int:
        """Return the number of channels of the operands of Q and K."""
        return self.saved.query.shape[3]

    @property
    def v_channels(self) -> int:
        """Return the number of channels of the operands of V and dO."""
        return padded_channels(self.value.shape[3])

    @property
    def is_empty(self) -> bool:
        """Return whether sizes tell that no query attends to any key."""
        sizes = (*self.output_gradient.shape, *self.value.shape[1:3])
        return 0 in sizes or (self.lengths is not None and 0 in (self.lengths.sequences, *self.lengths[2:4]))

    @cached_property
    def token_axes(self) -> tuple[Sequences, Sequences]:
        """Return the token axes of Q, and of K and V."""
        return token_axes(self.output.shape[2], self.value.shape[2], self.lengths)

    @property
    def kernel_offset(self) -> int:
        """Return an equivalent causal offset that fits a kernel's integers."""
        return clamped_offset(self.causal_offset, self.q_len, self.kv_len)

    def new_gradients(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Allocate dQ, dK and dV in value's dtype, each laid out as (batch, tokens, heads, channels).

        They are filled with 0 if a kernel may leave rows unwritten: in empty calls, and for packed sequences, whose
        lengths only the GPU knows.
        """
        new = self.value.new_zeros if self.is_empty or self.lengths is not None else self.value.new_empty
        batch, q_heads, q_len, _ = self.output.shape
        kv_heads, kv_len, v_head_dim = self.value.shape[1:]
        return (
            new(batch, q_len, q_heads, self.head_dim).transpose(1, 2),
            new(batch, kv_len, kv_heads, self.head_dim).transpose(1, 2),
            new(batch, kv_len, kv_heads, v_head_dim).transpose(1, 2),
        )


def heavy_keys_of(recipe: Recipe, kv_len: int, mask: MaskKind) -> int:
    """Return the number of heavy keys of calls with so many keys and a mask of that kind."""
    return recipe.heavy_keys if kv_len > recipe.heavy_keys and mask not in ("blocks", "block_keys") else 0


def chooses_heavy_keys(recipe: Recipe, kv_len: int, mask: MaskKind, is_causal: bool) -> bool:
    """Return whether such calls choose which keys are heavy.

    Causal calls with few keys do not: the first keys are most of the keys, and giving up first keys would cost more
    than late keys gain.
    """
    heavy_keys = heavy_keys_of(recipe, kv_len, mask)
    may_choose = heavy_keys > 0 and recipe.heavy_choice == "heaviest" and mask in ("none", "keys")
    return may_choose and not (is_causal and kv_len < MIN_LATE * heavy_keys)


def late_keys_of(recipe: Recipe, kv_len: int, mask: MaskKind, is_causal: bool) -> int:
    """Return the number of heavy keys of such calls that are late keys, or 0."""
    chooses = is_causal and chooses_heavy_keys(recipe, kv_len, mask, is_causal)
    return heavy_keys_of(recipe, kv_len, mask) // LATE_SHARE if chooses else 0


def has_recent_keys(recipe: Recipe, mask: MaskKind, is_causal: bool) -> bool:
    """Return whether the latest keys of each row of such calls are attended to in 16 bits."""
    return recipe.recent_keys > 0 and is_causal and mask not in ("blocks", "block_keys")


def recent_start(causal_offset: int, recent_keys: int) -> int:
    """Return the first recent key, attended to in 16 bits, of causal rows 0…BLOCK - 1; it may be below 0.

    Each later block of BLOCK rows begins BLOCK keys later. All keys from there on are recent: whole tiles of BLOCK, as
    tensor cores need. So the other keys are whole tiles too, and no row of the block sees such a tile in part.

    Args:
        causal_offset: row i sees keys up to i + causal_offset. Keys are counted from the first key that is not heavy.
        recent_keys: least number of recent keys of a row, if the row sees so many.
    """
    return (causal_offset + 1 - recent_keys) // BLOCK * BLOCK


def softmax_scale(scale: float | None, head_dim: int) -> float:
    """Return the factor of the scores: `scale`, by default head_dim ** -0.5."""
    return max(1, head_dim) ** -0.5 if scale is None else scale


def clamped_offset(causal_offset: int, q_len: int, kv_len: int) -> int:
    """Return an equivalent causal offset that fits a kernel's integers."""
    return max(-q_len, min(causal_offset, kv_len))
