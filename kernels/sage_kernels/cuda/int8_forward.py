"""Attend in INT8 on Hopper: operands of `quantize`, or of `triton.quantize.int8`, by `int8_forward.cu`.

Block lists of 128 × 128 are sorted by `block_lists`; an item's rows are then the rows of a list.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial

import torch

from ..dispatch.kernels import Quantizer
from ..dispatch.request import Request
from ..dispatch.support import HEAVY_KEYS
from ..formats.fp16 import FP16_HEADROOM
from ..formats.weights import P_SCALE
from ..runtime.hardware import multiprocessors
from ..spec.call import Call, MaskKind, heavy_keys_of, late_keys_of
from ..spec.layout import KEY_BLOCK, THREAD_TOKENS, ceil_div, power_of_two
from ..spec.operands import MEAN_PARTS, Int8Operands, KeyPadding, Saved
from ..spec.recipe import Recipe, get_recipe
from ..spec.saved import saving
from . import block_lists, quantize, tokens
from .block_lists import SortedLists
from .item_order import LONG_KV_LEN, heads_at_once, heads_in_cache, last_parts
from .launch import ConfiguredKernel, KernelSource, compile_together, launch
from .parameters import NO_TENSOR_MAP, ConstBytes, ConstFloats, ConstHalfWords, ConstInts, Float, Floats, Int, Ints, Map
from .tensor_map import tensor_map
from .tokens import NO_TOKENS, Tokens

WARPGROUP_ROWS = 64  # rows of Q that a warpgroup takes
LINE_BYTES = 128  # bytes side by side in shared memory, of float16 V and of the output
LINE_CHANNELS = LINE_BYTES // 2
STAGES = 2  # stages of Q, K and V
SUMMED_KEYS = 1536  # keys whose products the tensor cores sum: as accurate as 128 keys if V keeps a small mean
CONTROL_BYTES = 3072  # shared memory for barriers, scales and factors


@dataclass(frozen=True)
class Int8ForwardConfig:
    """Configuration of the blocks of the grid.

    Heads have `head_dim` channels, 64 or 128; two or three warpgroups have 64 rows each; P·V is in e4m3 ("fp8") or
    float16 ("fp16"); `padded`: some keys may not exist; `heavy`: some keys are attended to in 16 bits; `centred`: K is
    without its mean; `quantizes_query`: Q comes in 16 bits, and the kernel rotates and quantises it; `lists`: items
    attend to the tiles of block lists, whose rows belong to two warpgroups.

    With 128 channels two warpgroups are faster up to `LONG_KV_LEN` keys (4×32×4096: 899 against 863 TFLOP/s), and three
    beyond (2×32×16384: 954 against 942; 1×24×119056: 963 against 928), but equal with causality (906, 908). With 64
    channels three are faster (631 against 557; in float16 2×32×8192: 550, 509). With three warpgroups and 128 channels
    or float16 weights, 96 keys per tile are as many as a thread's 160 registers hold.
    """

    head_dim: int
    warpgroups: int
    pv: str
    padded: bool
    heavy: bool
    centred: bool
    quantizes_query: bool
    lists: bool

    @classmethod
    def of(
        cls, *, recipe: Recipe, head_dim: int, kv_len: int, mask: MaskKind, is_causal: bool, may_leave_query: bool
    ) -> Int8ForwardConfig:
        """Return the fastest configuration for such calls; the operands may leave Q to the kernel.

        Three warpgroups have no shared memory for 16-bit Q with 128 channels; with P in float16 the compiler would wait
        for each matrix product.
        """
        head_dim, pv, heavy = power_of_two(head_dim), recipe.pv, heavy_keys_of(recipe, kv_len, mask) > 0
        padded, lists = mask in ("keys", "block_keys"), mask in ("blocks", "block_keys")
        if lists:
            warpgroups = block_lists.BLOCK_M // WARPGROUP_ROWS
        elif head_dim == 128:
            warpgroups = 2 if padded or pv == "fp16" or is_causal or kv_len < LONG_KV_LEN else 3
        else:
            warpgroups = 2 if padded and pv == "fp16" else 3
        has_memory = warpgroups == 2 or (head_dim == 64 and pv == "fp8")
        quantizes_query = may_leave_query and heavy and recipe.rotate and has_memory
        return cls(head_dim, warpgroups, pv, padded, heavy, recipe.smooth_k, quantizes_query, lists)

    @classmethod
    def of_call(cls, call: Call, may_leave_query: bool = False) -> Int8ForwardConfig:
        """Return the fastest configuration for a call.

        The tensor memory accelerator reads no Q whose heads, or tokens, share an address.
        """
        return cls.of(
            recipe=call.recipe,
            head_dim=call.query.shape[3],
            kv_len=call.kv_len,
            mask=call.mask.kind,
            is_causal=call.is_causal,
            may_leave_query=may_leave_query and 0 not in call.query.stride(),
        )

    @property
    def block_m(self) -> int:
        """Return the query rows of an item."""
        return WARPGROUP_ROWS * self.warpgroups

    @property
    def block_n(self) -> int:
        """Return the keys of a tile."""
        return 96 if self.warpgroups == 3 and (self.head_dim == 128 or self.pv == "fp16") else 128

    @property
    def value_width(self) -> int:
        """Return the keys of V in e4m3 that lie side by side in shared memory: the bytes of a swizzle."""
        return 128 if self.block_n % 128 == 0 else 32

    @property
    def threads(self) -> int:
        """Return the threads of a block: one of its warpgroups brings tiles to the others."""
        return 128 * (self.warpgroups + 1)

    @property
    def shared_bytes(self) -> int:
        """Return the bytes of the tiles of Q, K and V, of the float32 sums or outputs, of heavy keys, and other bytes.

        16-bit Q has one 16-bit tile and one INT8 tile.
        """
        value, sums = (2, 2) if self.pv == "fp16" else (1, 4)
        query = 1 + 2 if self.quantizes_query else STAGES
        of_tiles = query * self.block_m + STAGES * (1 + value) * self.block_n
        heavy = 4 * HEAVY_KEYS * self.heavy + 2 * MEAN_PARTS * self.quantizes_query
        return (of_tiles + sums * self.block_m + heavy) * self.head_dim + CONTROL_BYTES


@dataclass(slots=True)
class Int8ForwardArguments:
    """The tensors that the kernel reads by address or writes, and numbers.

    Attributes:
        query_scale: (batch, q_heads, q_rows), unless Q comes in 16 bits.
        query_factors: (batch, kv_heads, CHANNELS), the bits of the factors of Q's rotation, if Q comes in 16 bits.
        key_scale: bfloat16 (batch, kv_heads, kv_rows / KEY_BLOCK, 4): thread i of a quad has scale i.
        value_scale, value_mean: (batch, kv_heads, CHANNELS).
        mean_score: (batch, q_heads, q_rows): Q's products with K's mean, added to the LSE, and subtracted from heavy
            keys' scores unless Q comes in 16 bits; or None.
        lse: (batch, q_heads, q_len), or None.
        late: (batch, kv_heads, LATE_KEYS), as in `operands.HeavyKeys`, or None.
        key_mask: (batch or 1, keys): keys that exist; tiles that lack keys need a mask. None without padding.
            `key_mask` and `spans` count all keys; kv_len and causal_offset count from the key after the first keys.
        spans: (batch or 1, 3): the first key that exists, the next key that does not exist, the end of all keys that
            exist.
        heads_at_once: number of heads whose causal items are taken together; a group of fewer heads comes first.
        parts: number of parts of each item of the last round, unless the call is causal.
        key_mask_stride, spans_stride: strides from batch element to batch element.
        query_factors_stride: stride from one (batch, kv head) to the next.
        head_dim: head_dim of Q.
        lists, queue: fields of `block_lists.SortedLists`, the queue's first number written; or None and the queue of
            `operands.Int8Operands`, written.
        list_stride: stride from list to list.
        lists_of_batch, lists_of_head: lists from batch element to batch element, and from head to head.
    """

    query_scale: ConstFloats
    query_factors: ConstFloats
    key_scale: ConstHalfWords
    value_scale: ConstFloats
    value_mean: ConstFloats
    mean_score: ConstFloats
    lse: Floats
    late: ConstInts
    key_mask: ConstBytes
    spans: ConstInts
    batch: Int
    q_heads: Int
    kv_heads: Int
    q_len: Int
    kv_len: Int
    q_rows: Int
    kv_rows: Int
    causal_offset: Int
    heads_at_once: Int
    parts: Int
    key_mask_stride: Int
    spans_stride: Int
    query_factors_stride: Int
    head_dim: Int
    softmax_scale: Float
    lists: ConstInts = None
    queue: Ints = None
    list_stride: Int = 0
    lists_of_batch: Int = 0
    lists_of_head: Int = 0


@dataclass(slots=True)
class Int8ForwardParameters:
    """Parameters of the kernel.

    Attributes:
        query: Q in INT8, in boxes (WARPGROUP_ROWS, CHANNELS), or in 16 bits, in boxes (1, 1, WARPGROUP_ROWS,
            LINE_CHANNELS).
        key: boxes (1, BLOCK_N, CHANNELS).
        value: boxes (CHANNELS, VALUE_WIDTH) in e4m3; (1, BLOCK_N, LINE_CHANNELS) in float16.
        output: boxes (1, 1, WARPGROUP_ROWS, LINE_CHANNELS).
        heavy_key, heavy_value: boxes (HEAVY_KEYS, LINE_CHANNELS), or NO_TENSOR_MAP; if Q comes in 16 bits, boxes of
            heavy_key have MEAN_PARTS more rows.
        query_tokens: Q in 16 bits, with heavy keys and Q in INT8, or NO_TOKENS.
        arguments: all other arguments.
    """

    query: Map
    key: Map
    value: Map
    output: Map
    heavy_key: Map
    heavy_value: Map
    query_tokens: Tokens
    arguments: Int8ForwardArguments


@cache
def kernel(
    config: Int8ForwardConfig, is_causal: bool, return_lse: bool, dtype: torch.dtype, late_keys: int = 0
) -> ConfiguredKernel:
    """Return `int8_forward` with outputs of a dtype, which 16-bit Q has too, for so many late keys."""
    largest_p = FP16_HEADROOM if config.pv == "fp16" else P_SCALE[config.pv]
    macros = {
        **tokens.macros(config.head_dim, dtype),
        "WARPGROUPS": config.warpgroups,
        "THREADS": config.threads,
        "WARPGROUP_ROWS": WARPGROUP_ROWS,
        "BLOCK_N": config.block_n,
        "STAGES": STAGES,
        "SHARED_BYTES": config.shared_bytes,
        "CONTROL_BYTES": CONTROL_BYTES,
        "KEY_BLOCK": KEY_BLOCK,
        "KEYS_PER_SCALE": THREAD_TOKENS,
        "LINE_BYTES": LINE_BYTES,
        "VALUE_WIDTH": config.value_width,
        "SUMMED_TILES": SUMMED_KEYS // config.block_n,
        "LARGEST_P_LOG2": f"{math.log2(largest_p)}f",
        "PV_FLOAT16": config.pv == "fp16",
        "CAUSAL": is_causal,
        "PADDED": config.padded,
        "LSE": return_lse,
        "QUANTIZES_QUERY": config.quantizes_query,
        "HEAVY": config.heavy,
        "CENTRED": config.centred,
        "LISTS": config.lists,
        "LIST_HEAD": block_lists.LIST_HEAD,
        "HEAVY_KEYS": HEAVY_KEYS,
        "LATE_KEYS": late_keys,
        "MEAN_PARTS": MEAN_PARTS,
    }
    source = KernelSource("int8_forward.cu", {"int8_forward": Int8ForwardParameters}, macros)
    return ConfiguredKernel(source, "int8_forward", config.threads, config.shared_bytes)


def unsupported(request: Request, may_leave_query: bool) -> str:
    """Return why the kernel for a request of `registration.CudaInt8Forward` is unavailable; "" if available.

    Args:
        request: the request.
        may_leave_query: whether `quantize` makes the operands, and may leave Q to the kernel.
    """
    recipe, return_lse = get_recipe(request.recipe), request.return_lse or request.grad
    config = Int8ForwardConfig.of(
        recipe=recipe,
        head_dim=request.head_dim,
        kv_len=request.kv_len,
        mask=request.mask,
        is_causal=request.is_causal,
        may_leave_query=may_leave_query and not return_lse,
    )
    late_keys = late_keys_of(recipe, request.kv_len, request.mask, request.is_causal)
    reason = kernel(config, request.is_causal, return_lse, request.dtype, late_keys).source.unavailable()
    if reason or not config.lists:
        return reason
    return block_lists.kernel(request.is_causal, config.padded).source.unavailable()


def attend(call: Call, quantizer: Quantizer, may_leave_query: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (output, lse or None) of a call that `registration.CudaInt8Forward` serves.

    Without the LSE, rows of P in e4m3 are divided by the sums of their rounded weights; with it, by sums in float32.

    Args:
        call: the call.
        quantizer: the quantiser that makes the operands.
        may_leave_query: whether it does so by `quantize`, which may leave Q to the kernel.
    """
    output, lse = call.new_outputs()
    if not call.is_empty:
        _quantize_and_attend(call.for_kernel(), quantizer, may_leave_query, output, lse)
    return output, lse


def attend_and_save(call: Call, quantizer: Quantizer, may_leave_query: bool) -> tuple[torch.Tensor, Saved]:
    """Return the output, 0 in rows without a key, and the tensors for its gradients; parameters as in `attend`."""
    return saving(call, partial(_quantize_and_attend, quantizer=quantizer, may_leave_query=may_leave_query))


def _quantize_and_attend(
    call: Call, quantizer: Quantizer, may_leave_query: bool, output: torch.Tensor, lse: torch.Tensor | None
) -> Int8Operands:
    padding = None if call.mask.key_mask is None else KeyPadding.of(call.mask.key_mask)
    config = Int8ForwardConfig.of_call(call, may_leave_query and lse is None)
    # Allocate before the quantiser takes memory that it frees: lists are sorted while its last kernel runs.
    lists = None if call.mask.blocks is None else SortedLists.empty(call, padding)
    if may_leave_query:
        attend = kernel(config, call.is_causal, lse is not None, output.dtype, call.late_keys)
        sorts = (block_lists.kernel(call.is_causal, config.padded),) if config.lists else ()
        compile_together((attend, *sorts, *quantize.kernels_of(call, config.padded)), output.device)
        operands = quantize.quantize_operands(call, padding, leaves_query=config.quantizes_query)
    else:
        operands = quantizer.quantize(call, padding)
    if lists is not None:
        block_lists.sort_lists(call, padding, lists, heads_in_cache(call))
    forward(operands, output, lse, call, config, padding, lists)
    return operands


def forward(
    operands: Int8Operands,
    output: torch.Tensor,
    lse: torch.Tensor | None,
    call: Call,
    config: Int8ForwardConfig,
    padding: KeyPadding | None = None,
    lists: SortedLists | None = None,
) -> None:
    """Attend to quantised operands. The kernel starts while the stream's last kernel ends, and waits for it.

    Args:
        operands: with 64 or 128 channels in Q, K and V; Q may be as `quantize` leaves it if there is neither an LSE nor
            padding, and the stream's last kernel has not written Q.
        output: float16 or bfloat16 (batch, q_heads, q_len, v_head_dim), channels contiguous, other strides multiples
            of 8, written.
        lse: float32 (batch, q_heads, q_len), contiguous, written; or None.
        call: a result of `Call.for_kernel`.
        config: the call's configuration, which quantises Q if `operands` hold it in 16 bits.
        padding: which keys exist; None: all.
        lists: the call's block lists, with an unused queue; None without lists.

    Raises:
        CompileError: see `launch.launch`.
    """
    heavy, tail, is_causal = operands.heavy, call.tail, call.is_causal
    batch, q_heads, q_len, _ = output.shape
    kv_heads, kv_rows, channels = operands.key.shape[1:]
    if config.pv == "fp16":
        value = tensor_map(operands.value.view(-1, kv_rows, channels), (1, config.block_n, LINE_CHANNELS), LINE_BYTES)
    else:
        value = tensor_map(operands.value.view(-1, kv_rows), (channels, config.value_width), config.value_width)
    items = batch * q_heads * ceil_div(q_len, config.block_m)
    device, box = output.device, (1, 1, WARPGROUP_ROWS, LINE_CHANNELS)
    blocks_at_once = multiprocessors(output.get_device())
    parts = 1
    if (config.heavy or config.warpgroups == 2) and not is_causal and lists is None:
        parts = last_parts(items, blocks_at_once, ceil_div(min(q_len, config.block_m), WARPGROUP_ROWS))
    if config.quantizes_query:
        query = tensor_map(operands.query, box, LINE_BYTES)
    else:
        query = tensor_map(operands.query.view(-1, channels), (WARPGROUP_ROWS, channels), channels)
    key_mask_stride, spans_stride = (0, 0) if padding is None else padding.strides
    heavy_key = heavy_value = NO_TENSOR_MAP
    if heavy is not None:
        heavy_key, heavy_value = (
            tensor_map(x.view(-1, channels), (x.shape[2], LINE_CHANNELS), LINE_BYTES) for x in (heavy.key, heavy.value)
        )
    arguments = Int8ForwardArguments(
        query_scale=operands.query_scale,
        query_factors=operands.query_factors,
        key_scale=operands.key_scale,
        value_scale=operands.value_scale,
        value_mean=operands.value_mean,
        mean_score=operands.mean_score,
        lse=lse,
        late=None if heavy is None else heavy.late,
        key_mask=None if padding is None else padding.key_mask_u8,
        spans=None if padding is None else padding.spans,
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        q_len=q_len,
        kv_len=tail.kv_len,
        q_rows=operands.query.shape[2],
        kv_rows=kv_rows,
        causal_offset=tail.causal_offset,
        heads_at_once=heads_at_once(call),
        parts=parts,
        key_mask_stride=key_mask_stride,
        spans_stride=spans_stride,
        query_factors_stride=operands.query_factors.stride(1) if operands.query_factors is not None else 0,
        head_dim=call.query.shape[3],
        softmax_scale=float(call.scale),
        queue=operands.queue,
    )
    if lists is not None:
        arguments.lists, arguments.queue = lists.lists, lists.queue
        arguments.list_stride = lists.lists.stride(2)
        arguments.lists_of_batch, arguments.lists_of_head = lists.of_batch, lists.of_head
    parameters = Int8ForwardParameters(
        query=query,
        key=tensor_map(operands.key.view(-1, kv_rows, channels), (1, config.block_n, channels), channels),
        value=value,
        output=tensor_map(output, box, LINE_BYTES),
        heavy_key=heavy_key,
        heavy_value=heavy_value,
        query_tokens=NO_TOKENS if heavy is None or config.quantizes_query else Tokens.of(call.query),
        arguments=arguments,
    )
    launch(
        kernel(config, is_causal, lse is not None, output.dtype, call.late_keys),
        min(items * parts, blocks_at_once),
        parameters,
        device,
        dependent=True,
    )
