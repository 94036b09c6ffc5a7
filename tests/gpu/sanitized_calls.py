"""Call every kernel in every variant on small shapes, for a memory checker: of all low-bit recipes, or of the named
ones, with gradients where a recipe has them.

compute-sanitizer --tool memcheck --report-api-errors no python -m tests.gpu.sanitized_calls sage2 sage_bwd

API errors must not be reported: the number of a kernel's parameters is found by asking the driver's
`cuFuncGetParamInfo` for one parameter after another until it fails.

By the name nvfp4_forward_cuda that kernel is called with emulated products, by int8-cache and int4-cache those of a KV
cache.

Racecheck sees no order through the arrival of one thread for its warp, and reports what the CUDA kernels' other threads
did before. With --every-thread-arrives they are compiled such that all do, and it must find nothing.
"""

import sys
from dataclasses import replace
from itertools import pairwise, product

import torch

from sage_hf.sparse import MeanRouter, ShareRouter, SubBlockRouter
from sage_kernels import kv_cache, kv_step, ops
from sage_kernels.cuda import compiler, nvfp4_forward
from sage_kernels.cuda.registration import CudaInt8Backward, CudaNVFP4Quantizer
from sage_kernels.dispatch import registry
from sage_kernels.spec.kv_cache import STRIP, KVCache
from sage_kernels.spec.kv_format import get_format
from sage_kernels.spec.recipe import get_recipe
from sage_kernels.triton.registration import TritonNVFP4Quantizer
from tests.helpers.blocks import draw_blocks
from tests.helpers.calls import new_call
from tests.helpers.judge import LOW_BIT, attend
from tests.helpers.judge_training import TRAINING, Draw, of_kernel

EVERY_THREAD_ARRIVES = "--every-thread-arrives"
CACHES = {"int8-cache": "int8", "int4-cache": "int4"}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def masks(batch: int, q_heads: int, q_len: int, kv_len: int) -> list[torch.Tensor | None]:
    allowed = torch.rand(batch, q_heads, q_len, kv_len, device="cuda") < 0.5
    bias = torch.zeros(allowed.shape, device="cuda").masked_fill(~allowed, -torch.inf)
    return [None, allowed, allowed[:1, :1, :, :1], allowed[:, :1, :1], bias, bias[:, :1]]


def attend_packed(recipe: str) -> None:
    """Three sequences, of 1, 129 and 203 tokens, one after the other."""
    lengths = torch.tensor([0, 1, 130, 333], dtype=torch.int32, device="cuda")
    inputs = draw(333, 4, 64), draw(333, 2, 64), draw(333, 2, 64)
    options = {"is_causal": True, "recipe": recipe, "fallback": "emulate", "return_lse": True}
    ops.packed_attention(*inputs, lengths, lengths, 203, 203, **options)


def attend_to_many(recipe: str) -> None:
    """More rows than a GPU's blocks hold at once, and so many keys that a kernel may quantise Q itself."""
    for head_dim in (64, 128):
        inputs = draw(2, 4, 3300, head_dim), draw(2, 2, 2049, head_dim), draw(2, 2, 2049, head_dim)
        attend(*inputs, recipe, return_lse=False)
        torch.cuda.synchronize()
        print(f"{recipe}: 3300 queries, 2049 keys, head_dim {head_dim}")


def attend_emulated() -> None:
    """Every variant of `cuda.nvfp4_forward`, of fewer items than multiprocessors and of more."""
    # Without the search for scales, which Triton's quantiser compiles for long.
    unsearched = replace(get_recipe("sage3"), scale_steps=(), key_scale_steps=())
    for batch, q_heads, q_len, kv_len, head_dim, v_head_dim in (
        (2, 4, 129, 333, 128, 128),
        (5, 16, 400, 460, 40, 64),
        (2, 4, 1, 65, 72, 80),
    ):
        inputs = (
            draw(batch, q_heads, q_len, head_dim),
            draw(batch, 2, kv_len, head_dim),
            draw(batch, 2, kv_len, v_head_dim),
        )
        for is_causal in (False, True):
            for key_mask in (None, torch.rand(batch, kv_len, device="cuda") < 0.5):
                options = {"is_causal": is_causal, "causal_offset": 30, "key_mask": key_mask, "return_lse": is_causal}
                quantizer = CudaNVFP4Quantizer() if key_mask is None else TritonNVFP4Quantizer()
                for recipe in (get_recipe("sage3_paper"), unsearched):
                    nvfp4_forward.attend(new_call(*inputs, recipe, **options), quantizer, native=False)
        torch.cuda.synchronize()
        print(f"nvfp4_forward_cuda: {q_len} queries, {kv_len} keys, head_dim {head_dim}, {v_head_dim}")


def train(recipe: str) -> None:
    """Every variant of forward and backward: plain, causal, with padding, packed."""
    draw = Draw(torch.device("cuda"))
    for q_len, kv_len, head_dim, v_head_dim in (
        (1, 1, 64, 64),
        (128, 333, 64, 64),
        (129, 333, 128, 128),
        (300, 65, 40, 24),
    ):
        for is_causal in (False, True):
            for key_mask in (None, draw.uniform(2, kv_len) < 0.5):
                options = {"is_causal": is_causal, "causal_offset": 30, "key_mask": key_mask}
                of_kernel(draw.call(recipe, 2, 4, 2, q_len, kv_len, head_dim, v_head_dim, **options))
            lengths = draw.lengths([1, q_len, 0], [kv_len, 70, 5], [kv_len, 69, 0])
            options = {"is_causal": is_causal, "lengths": lengths}
            of_kernel(draw.call(recipe, 1, 4, 2, 1 + q_len, kv_len + 75, head_dim, v_head_dim, **options))
        torch.cuda.synchronize()
        print(f"{recipe}: gradients, {q_len} queries, {kv_len} keys, head_dim {head_dim}, {v_head_dim}")


def attend_to_lists(recipe: str) -> None:
    """Over lists that routers make, and drawn ones that name tiles which do not exist; with gradients too."""
    cuda = torch.device("cuda")
    for size, q_len, kv_len, head_dim in ((64, 300, 333, 64), (128, 1000, 777, 64), (128, 700, 513, 128)):
        inputs = draw(2, 4, q_len, head_dim), draw(2, 2, kv_len, head_dim), draw(2, 2, kv_len, head_dim)
        drawn = draw_blocks(2, 4, q_len, kv_len, size, size)
        tiles = torch.where(torch.rand(drawn.tiles.shape) < 0.1, 99, drawn.tiles)
        blocks = drawn._replace(counts=drawn.counts.to(cuda), tiles=tiles.to(cuda))
        routers = MeanRouter(0.3, size, size), SubBlockRouter(0.3, size, size), ShareRouter(0.5, 0.1, size, size)
        lists = [blocks, *(router.route(*inputs[:2], dense=(slice(-50, None),)) for router in routers)]
        keys = torch.rand(2, 1, 1, kv_len, device=cuda) < 0.5
        for is_causal in (False, True):
            for one in lists:
                for mask in (None, keys):
                    options = {"recipe": recipe, "fallback": "emulate", "is_causal": is_causal}
                    options |= {"return_lse": one is blocks}
                    ops.attention(*inputs, mask=mask, blocks=one, **options)
            if recipe in TRAINING:
                call = Draw(cuda).call(recipe, 2, 4, 2, q_len, kv_len, head_dim, blocks=blocks, is_causal=is_causal)
                of_kernel(call)
        torch.cuda.synchronize()
        print(f"{recipe}: lists of {size} x {size}, {q_len} queries, {kv_len} keys, head_dim {head_dim}")


def decode(format: str) -> None:
    """Fill a cache that grows and one of fixed capacity, with padding and without, and decode to the latter's end."""
    for head_dim, group, tokens in ((64, 1, 3), (96, 4, 129), (128, 4, 500), (128, 8, 1000)):
        key, value = (draw(2, 2, tokens + 9, head_dim) for _ in "kv")
        query, capacity = draw(2, 2 * group, tokens + 9, head_dim), -(-(tokens + 9) // STRIP) * STRIP
        for is_fixed, is_padded in product((False, True), (False, True)):
            cache = KVCache(get_format(format), key)
            key_mask = torch.ones(2, capacity, dtype=torch.bool, device="cuda")
            key_mask[0, : tokens // 3] = not is_padded
            if is_fixed:
                cache.fix_capacity(capacity)
            kv_cache.store(cache, *(x[:, :, :tokens] for x in (query, key, value)), key_mask[:, :tokens])
            ends = range(tokens + 1, tokens + 10) if is_fixed else (tokens + 1, tokens + 8, tokens + 9)
            for first, end in pairwise((tokens, *ends)):
                new = [x[:, :, first:end] for x in (query, key, value)]
                if is_fixed:
                    kv_step.step(cache, *new, key_mask if is_padded else None, head_dim**-0.5, emulated=False)
                else:
                    kv_cache.decode(cache, *new, key_mask[:, :end] if is_padded else None, head_dim**-0.5)
            if is_fixed:
                cache.counts.fill_(capacity)
                kv_step.step(cache, *new, None, head_dim**-0.5, emulated=False)
        torch.cuda.synchronize()
        print(f"{format} cache: {tokens} tokens, {group} heads of Q for one of K, head_dim {head_dim}")


def main() -> None:
    recipes = [x for x in sys.argv[1:] if x != EVERY_THREAD_ARRIVES]
    if len(recipes) < len(sys.argv) - 1:
        compiler.FLAGS = (*compiler.FLAGS, "-DEVERY_THREAD_ARRIVES")
    for recipe in recipes or (*LOW_BIT, *CACHES):
        if recipe in CACHES:
            decode(CACHES[recipe])
            continue
        if recipe == "nvfp4_forward_cuda":
            attend_emulated()
            continue
        attend_packed(recipe)
        if recipe in TRAINING:
            train(recipe)
            with registry.without(CudaInt8Backward.name):  # which serves most of these on Hopper
                train(recipe)
        for q_len, kv_len, head_dim, v_head_dim in ((1, 1, 64, 64), (129, 333, 128, 128), (300, 65, 40, 24)):
            inputs = draw(2, 4, q_len, head_dim), draw(2, 2, kv_len, head_dim), draw(2, 2, kv_len, v_head_dim)
            for mask in masks(2, 4, q_len, kv_len):
                attend(*inputs, recipe, mask=mask)
            attend(*inputs, recipe, is_causal=True)
            every_other_channel = (x.repeat_interleave(2, -1)[..., ::2] for x in inputs)
            attend(*every_other_channel, recipe)
            torch.cuda.synchronize()
            print(f"{recipe}: {q_len} queries, {kv_len} keys, head_dim {head_dim}, {v_head_dim}")
        attend_to_many(recipe)
        attend_to_lists(recipe)


if __name__ == "__main__":
    main()
