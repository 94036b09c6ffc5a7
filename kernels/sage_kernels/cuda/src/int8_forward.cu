// The forward kernel of the INT8 recipes for Hopper: Q·Kᵀ in INT8, softmax, P·V in e4m3 (`sage2`) or float16 (`sage1`,
// `sage_bwd`), of operands from `quantize.cu` or the Triton quantisers; Q may also come in 16 bits.
//
// A block of the grid works through items: 64 · WARPGROUPS rows of one (batch, head). One of its warpgroups lets the
// TMA load tiles of Q, K and V. Each other warpgroup holds 64 rows, with scores, P and sums of P·V in registers. If
// Q comes in 16 bits, it rotates and quantises its rows. It starts a tile's scores and the previous tile's P·V
// together; while P·V runs, the scores become the next P.
//
// With LISTS, an item's rows attend to the tiles of the list that `sort_lists.cu` wrote; tiles without a mask come
// first.
//
// Heavy keys, which may hold much of each row's weight, are not part of K and V: after all other keys, a warpgroup
// attends to them in 16 bits, with unrotated Q in 16 bits, and rescales the sums.
//
// Sums of e4m3 products have few bits: a product loses its bits below 2⁻¹³ of the sum. So after SUMMED_TILES the sums
// move to float32 sums in shared memory. Products in float16 are always summed in float32.
//
// The host, `int8_forward.py`, provides the parameters, with `Int8ForwardArguments`, and all compile-time constants not
// defined here.
#include "forward_producers.cuh"
#include "heavy_keys.cuh"

// Works through items.
struct Consumer : HeavyRows {
  // Write the outputs through shared memory, in the TMA's order: a row's channels lie in lines of LINE_BYTES, with
  // 16-byte parts swizzled by row.
  DEVICE void store() {
    int first_line = row % WARPGROUP_ROWS;
    // Compute addresses here, to keep no registers in the main loop; if it has none to spare, they are spilled anyway.
    if (PV_FLOAT16 || SUMS_BY_PRODUCT) asm volatile("" : "+r"(first_line));
    float inverse[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float total = row_sum[r];
      inverse[r] = total == 0.0f ? 0.0f : 1.0f / total;
      const int at = item.first_row + row + 8 * r;
      if (LSE && quad == 0 && at < a.q_len) {
        const int64 pair = item.pair(a);
        float natural = (__log2f(total) - row_shift[r]) * LN2;
        if (a.mean_score != nullptr) natural += a.softmax_scale * a.mean_score[pair * a.q_rows + at];
        a.lse[pair * a.q_len + at] = total == 0.0f ? -INFINITE : natural;
      }
    }
    reclaim_shared_sums();
#pragma unroll
    for (int i = 0; i < CHANNELS / 8; i++) {
      const int channel = i * 8 + quad * 2;
      float2 gain = make_float2(1.0f, 1.0f), mean = make_float2(0.0f, 0.0f);
      if (!HEAVY) {
        gain = *reinterpret_cast<const float2*>(value_scales.scale + channel);
        mean = *reinterpret_cast<const float2*>(value_scales.mean + channel);
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float x = inverse[r] == 0.0f ? 0.0f : acc[4 * i + 2 * r] * inverse[r] * gain.x + mean.x;
        const float y = inverse[r] == 0.0f ? 0.0f : acc[4 * i + 2 * r + 1] * inverse[r] * gain.y + mean.y;
        const int line = first_line + 8 * r, part = i % 8 ^ line % 8;
        *reinterpret_cast<uint32*>(shared_sums + i / 8 * (WARPGROUP_ROWS * LINE_BYTES) + line * LINE_BYTES + part * 16 +
                                   quad * 4) = FLOAT16 ? to_float16(x, y) : to_bfloat16(x, y);
      }
    }
    fence_shared();
    sync_warpgroup();
    if (thread == 0) {
#pragma unroll
      for (int i = 0; i < CHANNELS / LINE_CHANNELS; i++)
        store_box(output, shared_sums + i * (WARPGROUP_ROWS * LINE_BYTES), item.batch, item.head,
                  item.first_row + warpgroup * WARPGROUP_ROWS, i * LINE_CHANNELS);
    }
  }

  template <bool MASKED>
  DEVICE void weigh_first_tile() {
    find_row_max<0, MASKED>(0);
    exponentiate_scores<0, MASKED>([&] {
      if (tiles > 1) wait(barriers.k_full[1], parity);
      wait(barriers.v_full[0], parity);
    });
  }

  // Begin an item with its first tile; return how many tiles need no mask.
  DEVICE int begin_item() {
    if (!LISTS) {
      first_key_scale = item.kv_pair(a) * (a.kv_rows / KEYS_PER_SCALE) + quad;
      last_key_scale = first_key_scale + a.kv_rows / KEYS_PER_SCALE - 4;
      load_key_scale(0);
    }
    if constexpr (QUANTIZES_QUERY) quantize_query();
    wait(barriers.k_full[0], parity);
    wgmma_fence();
    begin_scores(0);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if (!QUANTIZES_QUERY) row_scale[r] = factors[q_stage].line[row + 8 * r] * (a.softmax_scale * LOG2E);
      row_sum[r] = 0.0f;
      row_shift[r] = INFINITE;
    }
    has_sums = false;
#pragma unroll
    for (int i = 0; i < ACC_ELEMENTS; i++) acc[i] = 0.0f;
    int whole = ERASES ? tiles : a.kv_len / BLOCK_N;
    if (PADDED) whole = max(a.spans[item.batch * a.spans_stride + 1] - FIRST_KEYS, 0) / BLOCK_N;
    if (CAUSAL) whole = min(whole, max(item.first_row + warpgroup * WARPGROUP_ROWS + a.causal_offset + 1, 0) / BLOCK_N);
    if (PADDED) whole -= item.first;
    if (LISTS) whole = item.in_order;
    if (LISTS) load_listed(0);
    wgmma_wait<0>();
    pin(scores);
    arrive_as_warp(barriers.k_empty[0]);
    if (whole > 0)
      weigh_first_tile<false>();
    else
      weigh_first_tile<true>();
    return whole;
  }

  // Free the item's tiles that the rows do not attend to; the producers load whole rounds.
  DEVICE void leave_tiles() {
#pragma unroll 1
    for (int tile = tiles; tile < item.tiles + item.tiles % STAGES; tile++) {
      const int stage = tile % STAGES;
      if (stage == 0) parity ^= 1;
      wait(barriers.k_full[stage], parity);
      arrive_as_warp(barriers.k_empty[stage]);
      wait(barriers.v_full[stage], parity);
      arrive_as_warp(barriers.v_empty[stage]);
    }
  }

  // Complete an item's `acc` after its last P·V.
  DEVICE void end_pv(const float (&row_shift)[2]) {
    pin(acc);
    arrive_as_warp(barriers.v_empty[(tiles - 1) % STAGES]);
    leave_tiles();
    if (!PV_FLOAT16 && has_sums) move_sums<true>(row_shift);
  }

  // Add the sums of P of a row's threads.
  DEVICE void gather_sums() {
    if constexpr (!SUMS_BY_PRODUCT) {
#pragma unroll
      for (int r = 0; r < 2; r++) {
        row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 1);
        row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 2);
      }
    }
  }

  // End an item with its last P·V and the heavy keys, and write its outputs.
  DEVICE void end_item(int round) {
    const int last = (tiles - 1) % STAGES;
    if (ERASES) {
      erase_p();
      pin(p);
    }
    float x[HEAVY_SCORES], mean[4], mean_score[2], factor[2], others[2];
    uint32 heavy_p[HEAVY_SCORES / 2];
    if constexpr (QUANTIZES_QUERY) {  // P·V runs while the scores of the heavy keys become P
      const float reference[2] = {row_shift[0], row_shift[1]};
      wait(barriers.ending_full, round & 1);
      wgmma_fence();
      begin_sums();
      begin_heavy_scores(x, mean);
      wgmma_fence();
      begin_pv<false>(last);
      wgmma_wait<1>();
      pin(x);
      pin(mean);
      add_tile_sum();
      arrive_as_warp(barriers.q_empty[q_stage]);
      gather_sums();
      add_mean_parts(mean, mean_score);
      exponentiate_heavy_scores(x, mean_score, heavy_p, factor, others);
      wgmma_wait<0>();
      end_pv(reference);
    } else {
      wgmma_fence();
      begin_pv<true>(last);
      arrive_as_warp(barriers.q_empty[q_stage]);
      HeavyWords heavy_query;
      wait(barriers.ending_full, round & 1);
      wgmma_wait<0>();
      add_tile_sum();
      end_pv(row_shift);
      if (HEAVY) load_query(0, heavy_query);
      gather_sums();
      if constexpr (HEAVY) {
        find_heavy_scores(heavy_query, x);
        mean_score[0] = mean_score[1] = 0.0f;
        exponentiate_heavy_scores(x, mean_score, heavy_p, factor, others);
      }
    }
    if constexpr (HEAVY) add_heavy_pv(heavy_p, factor, others);
    store();
    arrive_as_warp(barriers.ending_empty);
  }

  // Skip an item whose rows all belong to other warpgroups.
  DEVICE void pass_item(int round) {
    item.tiles = items[q_stage].tiles;
    arrive_as_warp(barriers.q_empty[q_stage]);
    tiles = 0;
    parity ^= 1;
    leave_tiles();
    parity ^= 1;
    wait(barriers.ending_full, round & 1);
    arrive_as_warp(barriers.ending_empty);
  }

  DEVICE void run() {
    parity = 0;
#pragma unroll 1
    for (int round = 0;; round++) {
      q_stage = round % QUERY_STAGES;
      wait(barriers.q_full[q_stage], round / QUERY_STAGES & 1);
      // Copy the item after this test: with P in float16 three warpgroups lack the registers before it.
      if (items[q_stage].tiles == 0) break;
      if (PASSES && warpgroup >= items[q_stage].warpgroups) {
        pass_item(round);
        continue;
      }
      item = items[q_stage];
      // Else the main loop recomputes the descriptors for each product; key-padding masks need the registers.
      if (!PADDED) asm volatile("" : "+r"(q), "+r"(k), "+r"(v));
      tiles = item.tiles;
      if (SKIPS) {
        const int keys = min(a.kv_len, item.first_row + (warpgroup + 1) * WARPGROUP_ROWS + a.causal_offset);
        tiles = max(1, (max(keys, 0) + BLOCK_N - 1) / BLOCK_N);
      }
      const int whole = begin_item();
      int tile = 1;
      const bool half = HALVES && tiles > 1 && (a.kv_len - 1) % BLOCK_N < BLOCK_N / 2;
      const int end = tiles - half;
#pragma unroll 1
      for (; tile + 1 < (HALVES ? end : whole); tile += 2) {
        step<1, false>(tile);
        parity ^= 1;
        step<0, false>(tile + 1);
      }
      if (LISTS && tile < whole) {
        step<1, false>(tile++);
        if (tile < end) {
          parity ^= 1;
          step<0, true>(tile++);
        }
      }
#pragma unroll 1
      for (; tile < end; tile++) {
        step<1, !ERASES>(tile);
        if (++tile == end) break;
        parity ^= 1;
        step<0, !ERASES>(tile);
      }
      if constexpr (HALVES) {
        if (half) {
          if (tile % 2) {
            step<1, false, true>(tile);
          } else {
            parity ^= 1;
            step<0, false, true>(tile);
          }
        }
      }
      end_item(round);
      parity ^= 1;
    }
    if (thread == 0) wait_until_read();
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) int8_forward(INT8_FORWARD_PARAMETERS) {
  extern __shared__ __align__(1024) uint8 shared[];
  uint8 *q = shared, *k = q + QUERY_STAGES * Q_BYTES, *v = k + STAGES * K_BYTES, *sums = v + STAGES * V_BYTES;
  uint8 *heavy = sums + WARPGROUPS * SUMS_BYTES, *tokens = heavy + HEAVY_KEY_BYTES + HEAVY_BYTES;
  Control& control = *reinterpret_cast<Control*>(shared + SHARED_BYTES - CONTROL_BYTES);
  Barriers& barriers = control.barriers;
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), thread = threadIdx.x % 128;
  if (threadIdx.x == 0) {
    constexpr int WARPS = 4 * WARPGROUPS;
    for (int i = 0; i < STAGES; i++) {
      init(barriers.q_full[i], 1), init(barriers.q_empty[i], WARPS * WARP_ARRIVALS + 2 * LISTS);
      init(barriers.k_full[i], 1), init(barriers.k_empty[i], WARPS * WARP_ARRIVALS);
      init(barriers.v_full[i], 1), init(barriers.v_empty[i], WARPS * WARP_ARRIVALS);
    }
    init(barriers.ending_full, 1), init(barriers.ending_empty, WARPS * WARP_ARRIVALS);
    if (QUEUE) init(control.taken.full, 1), init(control.taken.empty, 2);
  }
  if (threadIdx.x < sizeof(control.ones) / 4) control.ones[threadIdx.x] = PV_FLOAT16 ? 0x3C003C00 : 0x38383838;
  fence_shared();
  __syncthreads();
  // The thread that loads Q in 16 bits does not wait, unless its items depend on the spans of existing keys.
  if (!QUANTIZES_QUERY || PADDED || threadIdx.x != 128 * WARPGROUPS) grid_dependency_wait();
  if (warpgroup == WARPGROUPS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    if constexpr (QUANTIZES_QUERY)
      load_tokens(arguments, query, tokens, control.factors[0], control.items, control.taken, barriers);
    else
      load_queries(arguments, query, q, control.factors, control.items, control.taken, barriers);
    if (thread == 32)
      produce_keys(arguments, key, heavy_key, heavy_value, k, heavy, control.value_scales, control.items,
                   control.listed, control.taken, barriers);
    if (thread == 64) produce_values(arguments, value, v, control.items, control.taken, barriers);
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    Consumer consumer{arguments, query_tokens, output, barriers, control.value_scales, control.factors, control.items};
    consumer.listed = control.listed;
    consumer.shared_sums = sums + warpgroup * SUMS_BYTES;
    consumer.tokens = tokens + warpgroup * TOKENS_BYTES;
    consumer.tokens_descriptor = descriptor(consumer.tokens);
    consumer.codes = q + warpgroup * WARPGROUP_ROWS * CHANNELS;
    consumer.q = descriptor(q + warpgroup * WARPGROUP_ROWS * CHANNELS);
    consumer.k = descriptor(k);
    consumer.v = PV_FLOAT16 ? descriptor(v, BLOCK_N * LINE_BYTES) : descriptor(v);
    // Relative to K: an address of its own would be recomputed for each P·V, which waits for it.
    consumer.ones = consumer.k + (SHARED_BYTES - CONTROL_BYTES - QUERY_STAGES * Q_BYTES) / 16;
    consumer.warpgroup = warpgroup;
    consumer.thread = thread;
    consumer.quad = thread % 4;
    consumer.row = warpgroup * WARPGROUP_ROWS + thread / 32 * 16 + thread % 32 / 4;
    consumer.run();
  }
}
