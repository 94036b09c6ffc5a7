"""The KV cache's kernels on a GPU: the reference's bits, float64 attention to them, and `generate` from them."""

import copy

import pytest
import torch

from sage_kernels import kv_cache
from sage_kernels.reference import kv_cache as reference
from sage_kernels.spec.kv_cache import KVCache, get_format

pytestmark = pytest.mark.gpu


def draw(batch: int, head_dim: int, group: int, tokens: int, dtype: torch.dtype):
    torch.manual_seed(tokens + head_dim)
    loud = torch.where(torch.arange(head_dim) % 16 == 3, 6.0, 1.0)
    query = torch.randn(batch, 2 * group, tokens, head_dim) / loud.sqrt()
    key = torch.randn(batch, 2, tokens, head_dim) * loud + 3 * torch.randn(1, 2, 1, head_dim)
    return [x.cuda().to(dtype) for x in (query, key, torch.randn(batch, 2, tokens, head_dim) * 40)]


def assert_same(one: KVCache, two: KVCache) -> None:
    end = one.coded
    for name in ("key_codes", "key_scales", "value_scales"):
        assert torch.equal(getattr(one, name)[:, :, :end], getattr(two, name)[:, :, :end]), name
    assert torch.equal(*(x.value_codes.transpose(3, 4).flatten(2, 3)[:, :, :end] for x in (one, two)))
    assert torch.equal(one.recent_key, two.recent_key) and torch.equal(one.recent_value, two.recent_value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [3, 100, 129, 1000, 5003])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_the_kernels_store_the_references_bits_and_attend_to_them(format, head_dim, group, tokens, dtype):
    query, key, value = draw(3, head_dim, group, tokens + 10, dtype)
    valid = torch.ones(3, tokens + 10, dtype=torch.bool, device="cuda")
    valid[0, : tokens // 3] = False
    first = [x[:, :, :tokens] for x in (query, key, value)]
    cache = KVCache(get_format(format), key)
    kv_cache.store(cache, *first, valid[:, :tokens])
    other = KVCache(get_format(format), key)
    reference.freeze(other, *first, valid[:, :tokens])
    reference.append(other, *first[1:])
    assert_same(cache, other)
    length = tokens
    for step in (1, 1, 7, 1):
        part = slice(length, length + step)
        length += step
        new = [x[:, :, part] for x in (query, key, value)]
        output, kernel, reason = kv_cache.decode(cache, *new, valid[:, :length], head_dim**-0.5)
        assert (kernel, reason) == ("kv_decode", "")
        reference.append(other, *new[1:])
        assert_same(cache, other)
        expected = reference.attend_to_cache(other, new[0].double(), valid[:, :length], head_dim**-0.5)
        # As in the interpreter's test: Q and P in 11 bits, and the output's own rounding.
        assert (output.double() - expected).norm() <= 0.01 * expected.norm()


def test_a_graph_of_a_step_gives_what_the_step_gives():
    query, key, value = draw(1, 128, 4, 2001, torch.bfloat16)
    cache = KVCache(get_format("int4"), key)
    kv_cache.store(cache, *(x[:, :, :2000] for x in (query, key, value)))
    new, again = [x[:, :, 2000:] for x in (query, key, value)], copy.deepcopy(cache)
    expected, _, _ = kv_cache.decode(again, *new, None, 128**-0.5)
    cache.reserve(2001)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, _, _ = kv_cache.decode(cache, *new, None, 128**-0.5)
    graph.replay()
    assert torch.equal(output, expected)
