"""The kernels of the low-bit KV cache: the reference's bits are stored, and float64 attention to them is computed."""

import copy
import ctypes
from functools import partial

import pytest
import torch

from sage_kernels.reference import kv_cache as reference
from sage_kernels.replay import cache as replay
from sage_kernels.spec.kv_cache import KVCache
from sage_kernels.spec.kv_format import get_format
from sage_kernels.triton import kv_append, kv_decode
from sage_kernels.triton.common import launch, replayed_launches
from tests.helpers.calls import draw_for_cache

decode = partial(kv_decode.decode, capability=(9, 0))
CASES = [
    # format, head_dim, group, prompt, steps of tokens, padding
    ("int4", 64, 4, 300, (1, 1, 1), True),
    ("int4", 128, 4, 200, (1, 5), False),
    ("int8", 128, 1, 200, (1, 1), False),
    pytest.param("int8", 96, 2, 260, (1, 16), True, marks=pytest.mark.audit),
    pytest.param("int4", 64, 8, 3, (1, 4, 1), False, marks=pytest.mark.audit),
    pytest.param("int4", 64, 1, 100, (16, 16, 16), True, marks=pytest.mark.audit),
]


def draw(head_dim: int, group: int, tokens: int):
    return [x.half() for x in draw_for_cache(tokens, head_dim, group=group)]


def assert_same(one: KVCache, two: KVCache) -> None:
    assert (one.length, one.coded_columns, one.capacity) == (two.length, two.coded_columns, two.capacity)
    codes = [x.transpose(3, 4).flatten(2, 3)[:, :, : one.coded_columns] for x in (one.value_codes, two.value_codes)]
    assert torch.equal(*codes)
    for name in ("key_codes", "key_scales", "value_scales"):
        found, expected = (getattr(cache, name)[:, :, : one.coded_columns] for cache in (one, two))
        assert torch.equal(found, expected), name
    for name in ("exact_key", "exact_value"):
        assert torch.equal(getattr(one, name), getattr(two, name)), name


def bounds(cache: KVCache, query, key_mask, scale: float):
    """Return float64 attention, and how far the kernel may be from it.

    Q's rows are rounded to float16 relative to their maximum, 2^-12 of which an element may be off at most (and 2^-20
    where a quarter of it becomes subnormal after the division by 16), so a score is off by `delta`: that times the sum
    of |K|, and sums in float32 of terms up to 1264. P in float16 is off by 2^-11 of itself, or 2^-25 of the largest,
    times codes that are up to the range of V. The reference's 16-bit keys have no bias and the same bound.
    """
    group = query.shape[1] // cache.kv_heads
    key, value = (x.repeat_interleave(group, 1) for x in reference.read_all(cache, torch.float64))
    expected = reference.attend_to_cache(cache, query.double(), key_mask, scale)
    q = query.double() * cache.equalizer.double()[:, :, None, : cache.head_dim].repeat_interleave(group, 1)
    # Norms are the rotated vectors' too; a maximum is at most the norm.
    centred = (key - cache.key_mean.double()[:, :, None, : cache.head_dim].repeat_interleave(group, 1)) / (
        cache.equalizer.double()[:, :, None, : cache.head_dim].repeat_interleave(group, 1)
    )
    sums = centred.norm(dim=-1).amax(-1)[..., None, None] * cache.channels**0.5
    largest = q.norm(dim=-1, keepdim=True)
    delta = scale * largest * sums * (2.0**-12 + 2.0**-20 + cache.channels * 1264 * 2.0**-24 / 16)
    spread = value.norm(dim=-1).amax(-1)[..., None, None]
    assert delta.max() < 0.3
    return expected, ((2 * delta).expm1() + 2.0**-9) * spread + expected.abs() * 2.0**-10


@pytest.mark.parametrize(("format", "head_dim", "group", "prompt", "steps", "padded"), CASES)
def test_the_kernels_store_the_references_bits_and_attend_to_them(format, head_dim, group, prompt, steps, padded):
    query, key, value = draw(head_dim, group, prompt + sum(steps))
    key_mask = None
    if padded:
        key_mask = torch.ones(2, prompt + sum(steps), dtype=torch.bool)
        key_mask[0, :19] = key_mask[1, prompt // 2 : prompt // 2 + 9] = False
    one, two = (KVCache(get_format(format), key) for _ in "ab")
    first = [x[:, :, :prompt] for x in (query, key, value)]
    for cache in (one, two):
        reference.freeze(cache, *first, None if key_mask is None else key_mask[:, :prompt])
    kv_append.append(one, *first[1:])
    reference.append(two, *first[1:])
    assert_same(one, two)
    length = prompt
    for step in steps:
        part = slice(length, length + step)
        length += step
        seen = None if key_mask is None else key_mask[:, :length]
        output = decode(one, *(x[:, :, part] for x in (query, key, value)), seen, head_dim**-0.5)
        reference.append(two, key[:, :, part], value[:, :, part])
        assert_same(one, two)
        expected, bound = bounds(two, query[:, :, part], seen, head_dim**-0.5)
        assert ((output.double() - expected).abs() <= bound).all()
        assert (output.double() - expected).norm() <= 0.01 * expected.norm()


@pytest.mark.parametrize("tokens", [70, pytest.param(200, marks=pytest.mark.audit)])
def test_a_chunk_as_long_as_the_ring_pushes_the_window_out_first(tokens):
    query, key, value = draw(64, 1, 150 + tokens)
    one = KVCache(get_format("int4"), key)
    reference.freeze(one, *(x[:, :, :150] for x in (query, key, value)))
    two = copy.deepcopy(one)
    for part in (slice(0, 150), slice(150, 150 + tokens)):
        kv_append.append(one, key[:, :, part], value[:, :, part])
        reference.append(two, key[:, :, part], value[:, :, part])
        assert_same(one, two)


def test_after_a_crop_the_kernels_go_on_as_the_reference_does():
    query, key, value = draw(64, 2, 260)
    one = KVCache(get_format("int4"), key)
    reference.freeze(one, query, key, value)
    kv_append.append(one, key, value)
    for length in (230, 130):
        one.crop(length)
        two = copy.deepcopy(one)
        part = slice(length, length + 3)
        output = decode(one, *(x[:, :, part] for x in (query, key, value)), None, 0.125)
        reference.append(two, key[:, :, part], value[:, :, part])
        assert_same(one, two)
        expected = reference.attend_to_cache(two, query[:, :, part].double(), None, 0.125)
        assert (output.double() - expected).norm() <= 0.01 * expected.norm()


def test_a_value_that_is_not_finite_never_becomes_a_finite_number():
    query, key, value = draw(64, 1, 200)
    cache = KVCache(get_format("int8"), key)
    reference.freeze(cache, query, key, value)
    two = copy.deepcopy(cache)
    value[0, :, 198, 5], value[1, :, 198, 5] = torch.inf, torch.nan
    for append, one in ((kv_append.append, cache), (reference.append, two)):
        append(one, key[:, :, :199], value[:, :, :199])
    assert torch.equal(cache.exact_value.isfinite(), two.exact_value.isfinite())
    output = decode(cache, *(x[:, :, 199:] for x in (query, key, value)), None, 0.125)
    assert not output.isfinite().any()
    assert not reference.attend_to_cache(two, query[:, :, 199:], None, 0.125).isfinite().any()


def test_rows_without_a_key_are_zero():
    query, key, value = draw(64, 1, 200)
    cache = KVCache(get_format("int8"), key)
    reference.freeze(cache, query, key, value)
    kv_append.append(cache, key[:, :, :199], value[:, :, :199])
    hidden = torch.zeros(2, 200, dtype=torch.bool)
    output = decode(cache, *(x[:, :, 199:] for x in (query, key, value)), hidden, 0.125)
    assert (output == 0).all()


class WithoutDriver:
    """`ReplayedLaunches` without a driver: tensors at other addresses and other numbers, to the same kernels."""

    error, runs = 0.0, 0

    def __init__(self, launches, changing):
        assert changing.keys() <= {name for _, _, arguments in launches for name in arguments}
        self.launches = launches

    def run(self, index, changing):
        type(self).runs += 1
        for kernel, grid, arguments in self.launches:
            changed = {name: self.changed(name, arguments[name], changing) for name in arguments.keys() & changing}
            launch.launch(kernel, grid, **arguments | changed)
            if "output" in changed:
                changed["output"] += self.error

    def changed(self, name, before, changing):
        if not isinstance(before, torch.Tensor):
            return changing[name]
        size = sum((n - 1) * stride for n, stride in zip(before.shape, before.stride(), strict=True)) + 1
        memory = (ctypes.c_byte * (size * before.element_size())).from_address(changing[name])
        return torch.frombuffer(memory, dtype=before.dtype).as_strided(before.shape, before.stride())


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("error", [0.0, 1.0])
def test_steps_are_replayed_if_the_first_replay_gives_their_output(error, fixed, monkeypatch):
    monkeypatch.setattr(replayed_launches, "can_replay", lambda device: True)
    monkeypatch.setattr(replayed_launches, "ReplayedLaunches", type("One", (WithoutDriver,), {"error": error}))
    monkeypatch.setattr(kv_decode, "_code_parts", lambda *sizes: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    replay.forget()
    query, key, value = draw(64, 2, 205)
    one = KVCache(get_format("int4"), key)
    reference.freeze(one, *(x[:, :, :200] for x in (query, key, value)))
    if fixed:
        one.fix_capacity(512)
    kv_append.append(one, key[:, :, :200], value[:, :, :200])
    two = copy.deepcopy(one)
    for length in range(200, 205):
        new = [x[:, :, length : length + 1].clone() for x in (query, key, value)]
        output = step(one, *new, None, 0.125) if fixed else decode(one, *new, None, 0.125)
        with monkeypatch.context() as patched:
            patched.setattr(replayed_launches, "can_replay", lambda device: False)
            expected = step(two, *new, None, 0.125) if fixed else decode(two, *new, None, 0.125)
        assert torch.equal(output, expected)
    assert replayed_launches.ReplayedLaunches.runs == (1 if error else 5)
    for cache in (one, two):
        cache.read_counts()
    assert_same(one, two)
    replay.forget()


@pytest.mark.parametrize("tokens", [4096, 32768, 131072])
@pytest.mark.parametrize("pairs", [8, 32, 128, 512])
def test_the_codes_are_divided_so_that_multiprocessors_share_them_evenly(pairs, tokens, monkeypatch):
    monkeypatch.setattr(kv_decode, "multiprocessors", lambda index: 132)
    parts = kv_decode._code_parts(pairs, tokens // 64, torch.device("cuda"))
    most = -(-pairs * parts // 132) / parts  # of a pair's codes, in the parts that one multiprocessor gets
    assert pairs / 132 <= most < 1.05 * pairs / 132


def test_few_codes_are_not_divided():
    assert kv_decode._code_parts(8, 1, torch.device("cpu")) == 1


def step(cache: KVCache, query, key, value, key_mask, scale: float) -> torch.Tensor:
    """Decode from a cache of fixed capacity as the operator does, which knows its tensors alone."""
    tensors = [getattr(cache, name) for name in KVCache.FIXED]
    return decode(KVCache.of(cache.format, cache.head_dim, cache.dtype, tensors), query, key, value, key_mask, scale)


@pytest.mark.parametrize(
    ("format", "head_dim", "group", "prompt", "steps", "padded"),
    [
        ("int4", 64, 2, 190, 5, True),  # tokens leave the window, and a tile of codes, 128 tokens, is full
        *(
            pytest.param(*one, marks=pytest.mark.audit)
            for one in (
                ("int4", 64, 4, 100, 3, True),
                ("int8", 128, 1, 61, 5, False),  # the window fills while steps are made
                ("int4", 64, 4, 100, 40, True),
                ("int8", 128, 1, 3, 70, False),
            )
        ),
    ],
)
def test_steps_that_the_device_counts_are_the_steps_that_the_host_counts(
    format, head_dim, group, prompt, steps, padded, monkeypatch
):
    """The parts are as many in both, so outputs are equal to the bit too."""
    monkeypatch.setattr(kv_decode, "_code_parts", lambda *sizes: 2)
    query, key, value = draw(head_dim, group, prompt + steps)
    key_mask = torch.ones(2, 512, dtype=torch.bool)
    key_mask[0, :19] = not padded
    one = KVCache(get_format(format), key)
    reference.freeze(one, *(x[:, :, :prompt] for x in (query, key, value)), key_mask[:, :prompt])
    two = copy.deepcopy(one)
    two.fix_capacity(512)
    pointers = [getattr(two, name).data_ptr() for name in KVCache.FIXED]
    for cache in (one, two):
        kv_append.append(cache, key[:, :, :prompt], value[:, :, :prompt])
    for length in range(prompt, prompt + steps):
        new = [x[:, :, length : length + 1] for x in (query, key, value)]
        seen = key_mask[:, : length + 1].contiguous() if padded else None
        expected = decode(one, *new, seen, head_dim**-0.5)
        assert torch.equal(step(two, *new, key_mask if padded else None, head_dim**-0.5), expected)
        assert two.counts.tolist() == [one.length, one.coded_columns]
    two.read_counts()
    assert_same(one, two)
    assert pointers == [getattr(two, name).data_ptr() for name in KVCache.FIXED]


def test_a_step_without_room_stores_nothing_and_gives_nan():
    query, key, value = draw(64, 2, 513)
    cache = KVCache(get_format("int4"), key)
    reference.freeze(cache, *(x[:, :, :511] for x in (query, key, value)))
    cache.fix_capacity(512)
    kv_append.append(cache, key[:, :, :511], value[:, :, :511])
    new = [x[:, :, 511:512] for x in (query, key, value)]
    assert step(cache, *new, None, 0.125).isfinite().all()
    before = copy.deepcopy(cache)
    for _ in range(2):
        assert step(cache, *(x[:, :, 512:] for x in (query, key, value)), None, 0.125).isnan().all()
    assert cache.counts.tolist() == [512, 448]
    for name in KVCache.FIXED:
        assert torch.equal(getattr(cache, name), getattr(before, name)), name
