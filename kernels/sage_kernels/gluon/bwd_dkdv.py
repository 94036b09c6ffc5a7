"""The kernel of dK and dV on Hopper: the work of `triton.bwd_dkdv` in specialised warps.

One warp loads tiles of queries. Two or three warpgroups, each with 64 of the program's keys, walk over these tiles out
of step, so that one computes weights while another multiplies. The arithmetic of a tile is as in `triton.bwd_dkdv` in
16 bits.
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
from ..language.padding import key_exists
from ..language.scores import LOG2E
from ..language.sequences import operand_row, sequence_range
from ..language.tiles import opaque
from ..language.weights import weights_of_keys
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
def load_queries(loads, WARPGROUPS: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr):
    """Load the keys, then tiles begin…end - 1 of the queries of each head: the body of the loading warp."""
    operands, heads, queries, stages, held = loads
    query, query_scale, query_operand, gradient, lse, delta = operands
    batch, kv_head, kv_heads, q_rows, q_operand_start, gradient_place = heads
    rows_of_batch, rows_of_head, columns_of_head = gradient_place
    group, _q_len, _causal_offset, begin, end = queries
    query_stages, operand_stages, gradient_stages, vector_stages, full, empty = stages
    CODES: gl.constexpr = query.block_type.nbytes
    VALUES: gl.constexpr = gradient.block_type.nbytes
    VECTOR: gl.constexpr = lse.block_type.nbytes
    key, value, kv_first, value_first, value_column, key_memory, value_memory, held_barrier = held
    mbarrier.expect(held_barrier, WARPGROUPS * (key.block_type.nbytes + value.block_type.nbytes))
    for part in gl.static_range(WARPGROUPS):
        tma_load(key, [(kv_first + part * ROWS).to(gl.int32), 0], held_barrier, key_memory.index(part))
        row = (value_first + part * ROWS).to(gl.int32)
        tma_load(value, [row, value_column], held_barrier, value_memory.index(part))
    step = 0
    for member in range(group):
        head = kv_head * group + member
        q_first = operand_row(batch, head, kv_heads * group, q_rows, q_operand_start, PACKED)
        gradient_first = batch * rows_of_batch + head * rows_of_head + q_operand_start
        column = (head * columns_of_head).to(gl.int32)
        for tile in range(begin, end):
            stage = step % STAGES
            row = (q_first + tile * BLOCK_M).to(gl.int32)
            arrived = full.index(stage)
            wait_until_empty(empty, step, STAGES)
            mbarrier.expect(arrived, CODES + 2 * VALUES + 3 * VECTOR)
            tma_load(query, [row, 0], arrived, query_stages.index(stage))
            gradient_row = (gradient_first + tile * BLOCK_M).to(gl.int32)
            tma_load(gradient, [gradient_row, column], arrived, gradient_stages.index(stage))
            tma_load(query_scale, [row], arrived, vector_stages.index(3 * stage))
            tma_load(lse, [row], arrived, vector_stages.index(3 * stage + 1))
            tma_load(delta, [row], arrived, vector_stages.index(3 * stage + 2))
            tma_load(query_operand, [row, 0], arrived, operand_stages.index(stage))
            step += 1


@gluon.jit
def mask_causal(x, column, last_column):
    """Return x (keys, queries), 0 where a key's index `column` exceeds last_column + the query's row in the tile."""
    query = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    # `opaque` makes the compiler compare anew for P and for dS: there are no registers to keep the result between them.
    return gl.where((column - opaque(last_column))[:, None] <= query[None, :], x, 0.0)


@gluon.jit
def add_queries(
    k,
    k_scale,
    v,
    s,
    dk,
    dv,
    column,
    stages,
    step,
    count,
    tile,
    causal_offset,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Return (s, dk, dv) after adding a step's tile of queries; `column` are the keys' indices.

    With AHEAD, `s` are the scores of this step, and the returned s are the scores of the next; else both are undefined.
    """
    S: gl.constexpr = product_layout(BLOCK_M, 32)
    P: gl.constexpr = product_layout(BLOCK_M, 16)
    LEFT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=dv.type.layout, k_width=2)
    query_stages, operand_stages, gradient_stages, vector_stages, full, empty = stages
    stage = step % STAGES
    do = gradient_stages.index(stage)
    no_scores = gl.zeros((ROWS, BLOCK_M), gl.int32, S)
    dp = gl.zeros((ROWS, BLOCK_M), gl.float32, P)
    BY_THREAD: gl.constexpr = no_scores.reshape((1, 8, 4, 2, BLOCK_M)).type.layout
    BY_SCALE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, BY_THREAD))
    LSE: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, BY_THREAD))))
    if not AHEAD:
        wait_until_full(full, step, STAGES)
        q = query_stages.index(stage).permute((1, 0))
        s = warpgroup_mma(k, q, no_scores, use_acc=False, is_async=True)
    dp = warpgroup_mma(v, do.permute((1, 0)), dp, use_acc=False, is_async=True)
    q_scale = vector_stages.index(3 * stage).load(gl.SliceLayout(0, gl.SliceLayout(1, BY_SCALE)))
    lse = vector_stages.index(3 * stage + 1).load(LSE)
    if not AHEAD:
        s = warpgroup_mma_wait(1, deps=(s,))
    p = gl.convert_layout(weights_of_keys(s, k_scale, q_scale, lse), P)
    if MASKED:
        p = mask_causal(p, column, tile * BLOCK_M + causal_offset)
    dv = warpgroup_mma(gl.convert_layout(p.to(do.dtype), LEFT), do, warpgroup_mma_init(dv), is_async=True)
    delta = vector_stages.index(3 * stage + 2).load(gl.SliceLayout(0, P))
    if AHEAD:  # after the last tile they are computed from stale data and never used
        wait_until_full(full, step + 1, STAGES, pred=step + 1 < count)
        q = query_stages.index((step + 1) % STAGES).permute((1, 0))
        s = warpgroup_mma(k, q, no_scores, use_acc=False, is_async=True)
        dp = warpgroup_mma_wait(2, deps=(dp,))
    else:
        dp = warpgroup_mma_wait(1, deps=(dp,))
    ds = p * (dp - delta[None, :])
    if MASKED:
        ds = mask_causal(ds, column, tile * BLOCK_M + causal_offset)
    left = gl.convert_layout(ds.to(do.dtype), LEFT)
    dk = warpgroup_mma(left, operand_stages.index(stage), warpgroup_mma_init(dk), is_async=True)
    # If a sum were in flight over the loop's back edge, ptxas would serialise all matrix instructions.
    s, dk, dv = warpgroup_mma_wait(0, deps=(s, dk, dv))
    mbarrier.arrive(empty.index(stage), count=1)
    return s, dk, dv


@gluon.jit
def walk_over_queries(
    work,
    WARPGROUP: gl.constexpr,
    CHANNELS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    CAUSAL: gl.constexpr,
    PADDED: gl.constexpr,
):
    """Compute dK and dV of 64 keys from tiles begin…end - 1 of each head's queries: the body of a warpgroup."""
    keys, queries, gradients, stages, softmax_scale = work
    SUM: gl.constexpr = product_layout(CHANNELS, 16)
    key_memory, value_memory, held, key_scale, valid, kv_first, kv_start, kv_len, first_key = keys
    group, q_len, causal_offset, begin, end = queries
    key_gradient, value_gradient, key_stride_token, value_stride_token, head_dim, v_head_dim = gradients
    k, v = key_memory.index(WARPGROUP), value_memory.index(WARPGROUP)
    first_key += WARPGROUP * ROWS
    s = gl.zeros((ROWS, BLOCK_M), gl.int32, product_layout(BLOCK_M, 32))
    BY_THREAD: gl.constexpr = s.reshape((1, 8, 4, 2, BLOCK_M)).type.layout
    K_SCALE: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(1, gl.SliceLayout(3, BY_THREAD)))
    thread = gl.arange(0, 4, gl.SliceLayout(0, K_SCALE))
    at = key_scale + (kv_first // ROWS + WARPGROUP) * 4 + thread
    k_scale = gl.load(at, mask=first_key < kv_len, other=0.0).to(gl.float32)[None, :]
    k_scale *= softmax_scale * LOG2E
    column = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, product_layout(BLOCK_M, 16)))
    dk, dv = gl.zeros((ROWS, CHANNELS), gl.float32, SUM), gl.zeros((ROWS, CHANNELS), gl.float32, SUM)
    # Queries from tile `full_begin` on see all keys.
    full_begin = begin
    if CAUSAL:
        full_begin = gl.maximum(gl.cdiv(gl.maximum(first_key + ROWS - 1 - causal_offset, 0), BLOCK_M), begin)
        full_begin = gl.minimum(full_begin, end)
    step = 0
    count = group * (end - begin)
    mbarrier.wait(held, 0)
    if AHEAD:
        query_stages, _operand_stages, _gradient_stages, _vector_stages, full, _empty = stages
        wait_until_full(full, 0, STAGES, pred=count > 0)
        s = warpgroup_mma(k, query_stages.index(0).permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
    for _member in range(group):
        if CAUSAL:
            for tile in range(begin, full_begin):
                s, dk, dv = add_queries(
                    k, k_scale, v, s, dk, dv, column, stages, step, count, tile, causal_offset,
                    BLOCK_M, STAGES, AHEAD, True,
                )  # fmt: skip
                step += 1
        for tile in range(full_begin, end):
            s, dk, dv = add_queries(
                k, k_scale, v, s, dk, dv, column, stages, step, count, tile, causal_offset,
                BLOCK_M, STAGES, AHEAD, False,
            )  # fmt: skip
            step += 1

    column = first_key + gl.arange(0, ROWS, gl.SliceLayout(1, SUM))
    attended = key_exists(column, kv_len, valid, PADDED)
    if CAUSAL:
        attended = attended & (column < q_len + causal_offset)
    dv = gl.where(attended[:, None], dv, 0.0)
    store_gradient(dv, v, value_gradient, kv_start, first_key, kv_len, value_stride_token, v_head_dim, CHANNELS)
    dk = gl.where(attended[:, None], dk * softmax_scale, 0.0)
    store_gradient(dk, v, key_gradient, kv_start, first_key, kv_len, key_stride_token, head_dim, CHANNELS)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def hopper_bwd_dkdv(
    key,
    key_scale,
    value,
    value_rows_of_batch,
    value_rows_of_head,
    value_columns_of_head,
    query,
    query_scale,
    query_operand,
    gradient,
    lse,
    delta,
    gradient_rows_of_batch,
    gradient_rows_of_head,
    gradient_columns_of_head,
    key_gradient,
    value_gradient,
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
    causal_offset,
    softmax_scale,
    head_dim,
    v_head_dim,
    key_stride_batch,
    key_stride_head,
    key_stride_token,
    value_stride_batch,
    value_stride_head,
    value_stride_token,
    CHANNELS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    AHEAD: gl.constexpr,
    REGISTERS: gl.constexpr,
    CAUSAL: gl.constexpr,
    PADDED: gl.constexpr,
    PACKED: gl.constexpr,
    RAGGED: gl.constexpr,
):
    """Compute dK and dV of BLOCK_N keys of one (batch, kv head), from the queries of all heads of its group."""
    WARPGROUPS: gl.constexpr = BLOCK_N // ROWS
    first_key = gl.program_id(0) * BLOCK_N
    kv_head, batch = gl.program_id(1).to(gl.int64), gl.program_id(2).to(gl.int64)
    kv_heads = gl.num_programs(1)
    _, q_len, q_operand_start = sequence_range(q_ranges, batch, q_len, RAGGED)
    kv_start, kv_len, kv_operand_start = sequence_range(kv_ranges, batch, kv_len, RAGGED)
    kv_first = operand_row(batch, kv_head, kv_heads, kv_rows, kv_operand_start, PACKED) + first_key
    key_gradient += batch * key_stride_batch + kv_head * key_stride_head
    value_gradient += batch * value_stride_batch + kv_head * value_stride_head
    if PADDED:
        valid += batch * valid_stride

    key_memory = gl.allocate_shared_memory(key.dtype, [WARPGROUPS, ROWS, CHANNELS], key.layout)
    value_memory = gl.allocate_shared_memory(value.dtype, [WARPGROUPS, ROWS, CHANNELS], value.layout)
    # Queries from tile `begin` on see some of the keys.
    begin = 0
    end = gl.where(first_key < kv_len, gl.cdiv(q_len, BLOCK_M), 0)
    if PADDED:
        spans += batch * spans_stride
        end = gl.where((first_key + BLOCK_N > gl.load(spans)) & (first_key < gl.load(spans + 2)), end, 0)
    if CAUSAL:
        begin = gl.minimum(gl.maximum(first_key - causal_offset, 0) // BLOCK_M, end)
    stages = (
        gl.allocate_shared_memory(query.dtype, [STAGES, BLOCK_M, CHANNELS], query.layout),
        gl.allocate_shared_memory(gradient.dtype, [STAGES, BLOCK_M, CHANNELS], gradient.layout),
        gl.allocate_shared_memory(gradient.dtype, [STAGES, BLOCK_M, CHANNELS], gradient.layout),
        gl.allocate_shared_memory(lse.dtype, [3 * STAGES, BLOCK_M], lse.layout),
        new_barriers(STAGES, 1),
        new_barriers(STAGES, WARPGROUPS),
    )
    held_barrier = new_barriers(1, 1).index(0)
    fence_async_shared()
    value_first = batch * value_rows_of_batch + kv_head * value_rows_of_head + kv_operand_start + first_key
    value_column = (kv_head * value_columns_of_head).to(gl.int32)
    held = (key, value, kv_first, value_first, value_column, key_memory, value_memory, held_barrier)
    keys = (key_memory, value_memory, held_barrier, key_scale, valid, kv_first, kv_start, kv_len, first_key)
    gradients = (key_gradient, value_gradient, key_stride_token, value_stride_token, head_dim, v_head_dim)
    operands = (query, query_scale, query_operand, gradient, lse, delta)
    gradient_place = (gradient_rows_of_batch, gradient_rows_of_head, gradient_columns_of_head)
    heads = (batch, kv_head, kv_heads, q_rows, q_operand_start, gradient_place)
    queries = (group, q_len, causal_offset, begin, end)
    work = (keys, queries, gradients, stages, softmax_scale)
    loads = (operands, heads, queries, stages, held)
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (walk_over_queries, (work, 0, CHANNELS, BLOCK_M, STAGES, AHEAD, CAUSAL, PADDED)),
                (walk_over_queries, (work, 1, CHANNELS, BLOCK_M, STAGES, AHEAD, CAUSAL, PADDED)),
                (load_queries, (loads, WARPGROUPS, BLOCK_M, STAGES, PACKED)),
            ],
            [4, 1],
            [REGISTERS, LOADING_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (walk_over_queries, (work, 0, CHANNELS, BLOCK_M, STAGES, AHEAD, CAUSAL, PADDED)),
                (walk_over_queries, (work, 1, CHANNELS, BLOCK_M, STAGES, AHEAD, CAUSAL, PADDED)),
                (walk_over_queries, (work, 2, CHANNELS, BLOCK_M, STAGES, AHEAD, CAUSAL, PADDED)),
                (load_queries, (loads, WARPGROUPS, BLOCK_M, STAGES, PACKED)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, LOADING_REGISTERS],
        )
