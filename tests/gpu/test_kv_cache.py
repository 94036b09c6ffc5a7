"""The KV cache's kernels on a GPU: the reference's bits, float64 attention to them, and steps that graphs replay."""

import copy

import pytest
import torch

import sage_hf
from sage_kernels import kv_cache, kv_step
from sage_kernels.reference import kv_cache as reference
from sage_kernels.replay import cache as replay
from sage_kernels.spec.kv_cache import KVCache
from sage_kernels.spec.kv_format import get_format
from sage_kernels.triton import kv_decode
from tests.helpers.cached_models import NEW, build, new_cache, prompt
from tests.helpers.calls import draw_for_cache

pytestmark = pytest.mark.gpu


def draw(batch: int, head_dim: int, group: int, tokens: int, dtype: torch.dtype):
    return [x.cuda().to(dtype) for x in draw_for_cache(tokens, head_dim, batch, group)]


def assert_same(one: KVCache, two: KVCache) -> None:
    end = one.coded_columns
    for name in ("key_codes", "key_scales", "value_scales"):
        assert torch.equal(getattr(one, name)[:, :, :end], getattr(two, name)[:, :, :end]), name
    assert torch.equal(*(x.value_codes.transpose(3, 4).flatten(2, 3)[:, :, :end] for x in (one, two)))
    assert torch.equal(one.exact_key, two.exact_key) and torch.equal(one.exact_value, two.exact_value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [3, 100, 129, 1000, 5003])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_the_kernels_store_the_references_bits_and_attend_to_them(format, head_dim, group, tokens, dtype):
    query, key, value = draw(3, head_dim, group, tokens + 10, dtype)
    key_mask = torch.ones(3, tokens + 10, dtype=torch.bool, device="cuda")
    key_mask[0, : tokens // 3] = False
    first = [x[:, :, :tokens] for x in (query, key, value)]
    cache = KVCache(get_format(format), key)
    kv_cache.store(cache, *first, key_mask[:, :tokens])
    other = KVCache(get_format(format), key)
    reference.freeze(other, *first, key_mask[:, :tokens])
    reference.append(other, *first[1:])
    assert_same(cache, other)
    length = tokens
    for step in (1, 1, 7, 1):
        part = slice(length, length + step)
        length += step
        new = [x[:, :, part] for x in (query, key, value)]
        output, kernel, reason = kv_cache.decode(cache, *new, key_mask[:, :length], head_dim**-0.5)
        assert (kernel, reason) == ("kv_decode", "")
        reference.append(other, *new[1:])
        assert_same(cache, other)
        expected = reference.attend_to_cache(other, new[0].double(), key_mask[:, :length], head_dim**-0.5)
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


class Replayed:
    """A step from a cache of fixed capacity, as a CUDA graph that goes on with each replay."""

    def __init__(self, cache: KVCache, new: list[torch.Tensor], key_mask: torch.Tensor | None) -> None:
        self.cache, self.new, self.key_mask = cache, [x.clone() for x in new], key_mask
        warm = copy.deepcopy(cache)
        for _ in range(2):  # compiles
            self.step(warm)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.output = self.step(cache)

    def step(self, cache: KVCache) -> torch.Tensor:
        scale = self.new[0].shape[3] ** -0.5
        return kv_step.step(cache, *self.new, self.key_mask, scale, emulated=False).transpose(1, 2)

    def __call__(self, new: list[torch.Tensor]) -> torch.Tensor:
        for x, one in zip(self.new, new, strict=True):
            x.copy_(one)
        self.graph.replay()
        return self.output


@pytest.mark.parametrize(("format", "head_dim", "group"), [("int4", 128, 4), ("int8", 64, 1), ("int4", 64, 8)])
@pytest.mark.parametrize("padded", [False, True])
def test_a_replayed_step_goes_on_over_the_borders_of_window_and_tiles(format, head_dim, group, padded):
    """300 steps: the window fills, tokens leave it, and four tiles of codes fill."""
    prompt, steps = 30, 300
    query, key, value = draw(2, head_dim, group, prompt + steps, torch.bfloat16)
    key_mask = torch.ones(2, 512, dtype=torch.bool, device="cuda")
    key_mask[0, :7] = not padded
    first = [x[:, :, :prompt] for x in (query, key, value)]
    cache, other = (KVCache(get_format(format), key) for _ in "ab")
    cache.fix_capacity(512)
    kv_cache.store(cache, *first, key_mask[:, :prompt])
    reference.freeze(other, *first, key_mask[:, :prompt])
    reference.append(other, *first[1:])
    part = [x[:, :, prompt : prompt + 1] for x in (query, key, value)]
    replayed = Replayed(cache, part, key_mask if padded else None)
    for length in range(prompt, prompt + steps):
        new = [x[:, :, length : length + 1] for x in (query, key, value)]
        output = replayed(new)
        reference.append(other, *new[1:])
        seen = key_mask[:, : length + 1] if padded else None
        expected = reference.attend_to_cache(other, new[0].double(), seen, head_dim**-0.5)
        assert (output.double() - expected).norm() <= 0.01 * expected.norm(), length
    cache.read_counts()
    assert (cache.length, cache.coded_columns) == (other.length, other.coded_columns) == (330, 266)
    assert_same(cache, other)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_steps_one_by_one_store_what_replayed_steps_store(format):
    """The first step replays its launches to compare them, and must count once."""
    replay.forget()
    query, key, value = draw(1, 128, 4, 220, torch.bfloat16)
    one = KVCache(get_format(format), key)
    one.fix_capacity(512)
    kv_cache.store(one, *(x[:, :, :200] for x in (query, key, value)))
    two, outputs = copy.deepcopy(one), []
    new = [[x[:, :, length : length + 1] for x in (query, key, value)] for length in range(200, 220)]
    for number, tensors in enumerate(new):
        outputs.append(kv_step.step(one, *tensors, None, 128**-0.5, emulated=False).transpose(1, 2))
        assert one.counts.tolist() == [201 + number, 201 + number - 64]
    replayed = Replayed(two, new[0], None)
    assert all(torch.equal(replayed(tensors), output) for tensors, output in zip(new, outputs, strict=True))
    one.read_counts()
    assert_same(one, two)


def test_a_replay_without_room_stores_nothing_and_gives_nan():
    query, key, value = draw(1, 128, 4, 512, torch.bfloat16)
    cache = KVCache(get_format("int4"), key)
    cache.fix_capacity(512)
    kv_cache.store(cache, *(x[:, :, :510] for x in (query, key, value)))
    new = [x[:, :, 510:511] for x in (query, key, value)]
    replayed = Replayed(cache, new, None)
    assert all(replayed(new).isfinite().all() for _ in range(2))
    before = copy.deepcopy(cache)
    assert all(replayed(new).isnan().all() for _ in range(3))
    assert cache.counts.tolist() == [512, 448]
    assert all(torch.equal(getattr(cache, name), getattr(before, name)) for name in KVCache.FIXED)


@pytest.mark.skipif(not NEW, reason="this transformers does not hand a cache's keywords to attention")
@pytest.mark.parametrize("format", ["int8", "int4", "nvfp4"])
def test_generate_compiled_with_cuda_graphs_gives_the_growing_caches_tokens(format, monkeypatch):
    """Float32 and as many parts in both make attention is equal to the bit and the rest nearly so."""
    monkeypatch.setattr(kv_decode, "_code_parts", lambda *sizes: 3)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    model = build().cuda()
    inputs = {name: x.cuda() for name, x in prompt().items()}
    kwargs = {**inputs, "max_new_tokens": 100, "do_sample": False}
    expected = model.generate(**kwargs, cache=new_cache(model, format))
    for _ in range(2):
        cache = sage_hf.QuantizedKVCache(model.config, format, max_cache_len=512)
        assert torch.equal(model.generate(**kwargs, cache=cache), expected)
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert format == "nvfp4" or not counters["inductor"]["cudagraph_skips"]
    assert str(cache.record).count("decoded by kv_decode") == (format != "nvfp4")
