"""The kernel of dQ on Hopper: the work of `triton.bwd_dq` in specialised warps.

One warp loads tiles of keys. Two or three warpgroups, each with 64 of the program's rows, walk over these tiles out of
step; each starts the scores of its next tile before it finishes the current tile. The arithmetic of a tile is as in
`triton.bwd_dq` in 16 bits.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ..language.launch import UNSPECIALIZED
from ..language.padding import key_exists, key_tiles
from ..language.scores import LOG2E
from ..language.sequences import operand_row, sequence_range
from ..language.weights import weights_of_queries
from .stages import (
    LOADING_REGISTERS,
    ROWS,
    new_barriers,
    product_layout,
    store_gradient,
    tma_load,
    wait_until_empty,
    wait_until_full,
)


@gluon.jit
def item_of_program(together):
    """Return (block, head, batch) of a program in a grid (blocks, heads, batch).

    The heads of all batch elements follow one another in groups of `together`. In a group, every head's first block
    comes before any second block.
    """
    blocks, heads, batches = gl.num_programs(0), gl.num_programs(1), gl.num_programs(2)
    item = gl.program_id(0) + blocks * (gl.program_id(1) + heads * gl.program_id(2))
    first = item // (blocks * together) * together
    item -= blocks * first
    together = gl.minimum(together, heads * batches - first)
    head = first + item % together
    return item // together, (head % heads).to(gl.int64), (head // heads).to(gl.int64)


@gluon.jit
def tile_at(step, tiles, PADDED: gl.constexpr):
    """Return the tile of a step: first the tiles that need no mask, then the tiles before and after these."""
    if PADDED:
        begin, full_begin, unmasked, _count = tiles
        masked, before = step - unmasked, full_begin - begin
        tile = gl.where(masked < 0, full_begin + step, gl.where(masked < before, begin + masked, begin + step))
    else:
        tile = step
    return tile


@gluon.jit
def load_keys(loads, WARPGROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PADDED: gl.constexpr):
    """Load the rows that stay, then the tiles of every step: the body of the loading warp."""
    operands, first, tiles, stages, held = loads
    key, value, key_operand = operands
    CODES: gl.constexpr = key.block_type.nbytes
    VALUES: gl.constexpr = value.block_type.nbytes
    kv_first, value_first, value_column = first
    key_stages, value_stages, operand_stages, full, empty = stages
    _begin, _full_begin, _unmasked, count = tiles
    query, gradient, q_first, gradient_first, gradient_column, query_memory, gradient_memory, held_barrier = held
    mbarrier.expect(held_barrier, WARPGROUPS * (query.block_type.nbytes + gradient.block_type.nbytes))
    for part in gl.static_range(WARPGROUPS):
        tma_load(query, [(q_first + part * ROWS).to(gl.int32), 0], held_barrier, query_memory.index(part))
        row = (gradient_first + part * ROWS).to(gl.int32)
        tma_load(gradient, [row, gradient_column], held_barrier, gradient_memory.index(part))
    for step in range(0, count):
        stage = step % STAGES
        row = (kv_first + tile_at(step, tiles, PADDED) * BLOCK_N).to(gl.int32)
        value_row = (value_first + tile_at(step, tiles, PADDED) * BLOCK_N).to(gl.int32)
        arrived = full.index(stage)
        wait_until_empty(empty, step, STAGES)
        mbarrier.expect(arrived, CODES + 2 * VALUES)
        tma_load(key, [row, 0], arrived, key_stages.index(stage))
        tma_load(value, [value_row, value_column], arrived, value_stages.index(stage))
        tma_load(key_operand, [row, 0], arrived, operand_stages.index(stage))


@gluon.jit
def load_key_scale(key_scale, step, tiles, LAYOUT: gl.constexpr, PADDED: gl.constexpr):
    """Return the scales of a step's tile by thread, float32 (1, 4); 0 after the last step."""
    _begin, _full_begin, _unmasked, count = tiles
    at = tile_at(step, tiles, PADDED) * 4 + gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))
    return gl.load(key_scale + at, mask=step < count, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def add_keys(
    q,
    q_scale,
    do,
    row_lse,
    row_delta,
    s,
    k_scale,
    dq,
    row,
    keys,
    tiles,
    stages,
    step,
    causal_offset,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    PADDED: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Return (scores of the next step, scales of its keys, dq after adding this step's tile of keys).

    `s` and `k_scale` are the scores and scales of this step, `row` the queries' indices in their sequence.
    """
    S: gl.constexpr = product_layout(BLOCK_N, 32)
    P: gl.constexpr = product_layout(BLOCK_N, 16)
    K_SCALE: gl.constexpr = k_scale.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dq.type.layout, k_width=2)
    key_scale, valid, kv_len = keys
    key_stages, value_stages, operand_stages, full, empty = stages
    _begin, _full_begin, _unmasked, count = tiles
    stage = step % STAGES
    next_k_scale = load_key_scale(key_scale, step + 1, tiles, K_SCALE, PADDED)
    dp = gl.zeros((ROWS, BLOCK_N), gl.float32, P)
    dp = warpgroup_mma(do, value_stages.index(stage).permute((1, 0)), dp, use_acc=False, is_async=True)
    p = gl.convert_layout(weights_of_queries(s, q_scale, k_scale, row_lse), P)
    # Start the next scores only now, in the registers that held this tile's: starting before the weights, with
    # registers for both, is 7 % slower. After the last tile the scores are computed from stale data and never used.
    wait_until_full(full, step + 1, STAGES, pred=step + 1 < count)
    k = key_stages.index((step + 1) % STAGES).permute((1, 0))
    next_s = warpgroup_mma(q, k, gl.zeros((ROWS, BLOCK_N), gl.int32, S), use_acc=False, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = p * (dp - row_delta[:, None])
    if MASKED:
        column = tile_at(step, tiles, PADDED) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, P))
        allowed = key_exists(column, kv_len, valid, PADDED)[None, :]
        if CAUSAL:
            allowed = allowed & (column[None, :] <= row[:, None] + causal_offset)
        ds = gl.where(allowed, ds, 0.0)
    left = gl.convert_layout(ds.to(do.dtype), LEFT)
    dq = warpgroup_mma(left, operand_stages.index(stage), warpgroup_mma_init(dq), is_async=True)
    next_s, dq = warpgroup_mma_wait(0, deps=(next_s, dq))
    mbarrier.arrive(empty.index(stage), count=1)
    return next_s, next_k_scale, dq


@gluon.jit
def walk_over_keys(
    work,
    WARPGROUP: gl.constexpr,
    CHANNELS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    PADDED: gl.constexpr,
):
    """Compute dQ of 64 of the program's rows: the body of a warpgroup."""
    rows, keys, tiles, stages, gradient, causal_offset, softmax_scale = work
    S: gl.constexpr = product_layout(BLOCK_N, 32)
    P: gl.constexpr = product_layout(BLOCK_N, 16)
    query_memory, gradient_memory, held, query_scale, lse, delta, q_first, q_start, q_len, first_query = rows
    query_gradient, stride_token, head_dim = gradient
    key_scale, _valid, _kv_len = keys
    key_stages, _value_stages, _operand_stages, full, _empty = stages
    _begin, _full_begin, unmasked, count = tiles
    q, do = query_memory.index(WARPGROUP), gradient_memory.index(WARPGROUP)
    mbarrier.wait(held, 0)
    q_first += WARPGROUP * ROWS
    first_query += WARPGROUP * ROWS
    s = gl.zeros((ROWS, BLOCK_N), gl.int32, S)
    BY_THREAD: gl.constexpr = s.reshape((ROWS, 1, 8, 4, 2)).type.layout
    BY_SCALE: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(4, BY_THREAD))
    Q_SCALE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, BY_SCALE))
    LSE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, BY_THREAD))))
    at = gl.arange(0, ROWS, Q_SCALE)
    q_scale = gl.load(query_scale + q_first + at, mask=first_query + at < q_len, other=0.0) * (softmax_scale * LOG2E)
    at = gl.arange(0, ROWS, LSE)
    row_lse = gl.load(lse + q_first + at, mask=first_query + at < q_len, other=float("inf"))
    at = gl.arange(0, ROWS, gl.SliceLayout(1, P))
    row = first_query + at
    row_delta = gl.load(delta + q_first + at, mask=row < q_len, other=0.0)
    k_scale = load_key_scale(key_scale, 0, tiles, gl.SliceLayout(0, BY_SCALE), PADDED)
    wait_until_full(full, 0, STAGES, pred=count > 0)
    s = warpgroup_mma(q, key_stages.index(0).permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    dq = gl.zeros((ROWS, CHANNELS), gl.float32, product_layout(CHANNELS, 16))
    for step in range(0, unmasked):
        s, k_scale, dq = add_keys(
            q, q_scale, do, row_lse, row_delta, s, k_scale, dq, row, keys, tiles, stages, step, causal_offset,
            BLOCK_N, STAGES, CAUSAL, PADDED, False,
        )  # fmt: skip
    for step in range(unmasked, count):
        s, k_scale, dq = add_keys(
            q, q_scale, do, row_lse, row_delta, s, k_scale, dq, row, keys, tiles, stages, step, causal_offset,
            BLOCK_N, STAGES, CAUSAL, PADDED, True,
        )  # fmt: skip
    store_gradient(
        dq * softmax_scale, do, query_gradient, q_start, first_query, q_len, stride_token, head_dim, CHANNELS
    )


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def hopper_bwd_dq(
    query,
    query_scale,
    gradient,
    gradient_rows_of_batch,
    gradient_rows_of_head,
    gradient_columns_of_head,
    key,
    key_operand,
    value,
    value_rows_of_batch,
    value_rows_of_head,
    value_columns_of_head,
    key_scale,
    query_gradient,
    lse,
    delta,
    valid,
    spans,
    valid_stride,
    spans_stride,
    q_ranges,
    kv_ranges,
    q_len,
    kv_len,
    q_rows,
    kv_rows,
    group,
    heads_together,
    causal_offset,
    softmax_scale,
    head_dim,
    stride_batch,
    stride_head,
    stride_token,
    CHANNELS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    REGISTERS: gl.constexpr,
    CAUSAL: gl.constexpr,
    PADDED: gl.constexpr,
    PACKED: gl.constexpr,
    RAGGED: gl.constexpr,
):
    """Compute dQ of BLOCK_M rows of one (batch, q head), 64 for each of two or three warpgroups."""
    gl.static_assert(BLOCK_N == 64)  # one block of K's scales
    WARPGROUPS: gl.constexpr = BLOCK_M // ROWS
    # Later rows attend to more keys: start with later rows, so that short programs fill the gaps at the end.
    block, head, batch = item_of_program(heads_together)
    block = gl.num_programs(0) - 1 - block if CAUSAL else block
    q_heads = gl.num_programs(1)
    kv_heads = q_heads // group
    q_start, q_len, q_operand_start = sequence_range(q_ranges, batch, q_len, RAGGED)
    _, kv_len, kv_operand_start = sequence_range(kv_ranges, batch, kv_len, RAGGED)
    first_query = block * BLOCK_M
    q_first = operand_row(batch, head, q_heads, q_rows, q_operand_start, PACKED) + first_query
    kv_first = operand_row(batch, head // group, kv_heads, kv_rows, kv_operand_start, PACKED)
    query_gradient += batch * stride_batch + head * stride_head
    if PADDED:
        valid += batch * valid_stride
    query_memory = gl.allocate_shared_memory(query.dtype, [WARPGROUPS, ROWS, CHANNELS], query.layout)
    gradient_memory = gl.allocate_shared_memory(gradient.dtype, [WARPGROUPS, ROWS, CHANNELS], gradient.layout)

    begin, full_begin, full_end, columns = key_tiles(
        spans, batch, spans_stride, kv_len, block, causal_offset, BLOCK_M, BLOCK_N, CAUSAL, PADDED
    )
    count = gl.maximum(gl.cdiv(columns, BLOCK_N), full_end) - begin
    count = gl.where(first_query < q_len, count, 0)
    tiles = (begin, full_begin, gl.minimum(full_end - full_begin, count), count)
    stages = (
        gl.allocate_shared_memory(key.dtype, [STAGES, BLOCK_N, CHANNELS], key.layout),
        gl.allocate_shared_memory(value.dtype, [STAGES, BLOCK_N, CHANNELS], value.layout),
        gl.allocate_shared_memory(value.dtype, [STAGES, BLOCK_N, CHANNELS], value.layout),
        new_barriers(STAGES, 1),
        new_barriers(STAGES, WARPGROUPS),
    )
    held_barrier = new_barriers(1, 1).index(0)
    fence_async_shared()
    gradient_first = batch * gradient_rows_of_batch + head * gradient_rows_of_head + q_operand_start + first_query
    gradient_column = (head * gradient_columns_of_head).to(gl.int32)
    held = (query, gradient, q_first, gradient_first, gradient_column, query_memory, gradient_memory, held_barrier)
    rows = (query_memory, gradient_memory, held_barrier, query_scale, lse, delta, q_first, q_start, q_len, first_query)
    keys = (key_scale + kv_first // 16, valid, kv_len)
    kv_head = head // group
    value_first = batch * value_rows_of_batch + kv_head * value_rows_of_head + kv_operand_start
    first = (kv_first, value_first, (kv_head * value_columns_of_head).to(gl.int32))
    result = (query_gradient, stride_token, head_dim)
    work = (rows, keys, tiles, stages, result, causal_offset, softmax_scale)
    loads = ((key, value, key_operand), first, tiles, stages, held)
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (walk_over_keys, (work, 0, CHANNELS, BLOCK_N, STAGES, CAUSAL, PADDED)),
                (walk_over_keys, (work, 1, CHANNELS, BLOCK_N, STAGES, CAUSAL, PADDED)),
                (load_keys, (loads, WARPGROUPS, BLOCK_N, STAGES, PADDED)),
            ],
            [4, 1],
            [REGISTERS, LOADING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (walk_over_keys, (work, 0, CHANNELS, BLOCK_N, STAGES, CAUSAL, PADDED)),
                (walk_over_keys, (work, 1, CHANNELS, BLOCK_N, STAGES, CAUSAL, PADDED)),
                (walk_over_keys, (work, 2, CHANNELS, BLOCK_N, STAGES, CAUSAL, PADDED)),
                (load_keys, (loads, WARPGROUPS, BLOCK_N, STAGES, PADDED)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADING_REGISTERS],
        )
