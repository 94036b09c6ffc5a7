"""The low-bit KV cache's specification: what it stores, how far from K and V, and what it attends to."""

import copy
import pickle

import pytest
import torch

from sage_kernels import kv_cache
from sage_kernels.reference import kv_cache as reference
from sage_kernels.spec.kv_cache import FIRST_TOKENS, WINDOW, KVCache
from sage_kernels.spec.kv_format import FORMATS, get_format
from tests.helpers.calls import draw_for_cache


def fill(format: str, query, key, value, key_mask=None, step: int | None = None) -> KVCache:
    cache = KVCache(get_format(format), key)
    step = key.shape[2] if step is None else step
    for start in range(0, key.shape[2], step):
        part = slice(start, start + step)
        kv_cache.store(cache, query[:, :, part], key[:, :, part], value[:, :, part], key_mask)
        key_mask = None
    return cache


def exact(query, key, value, key_mask=None):
    """Attention of the last queries, causal, in float64."""
    key, value = (x.double().repeat_interleave(2, 1) for x in (key, value))
    column = torch.arange(key.shape[2])
    allowed = column <= column[-query.shape[2] :, None]
    if key_mask is not None:
        allowed = allowed & key_mask[:, None, None]
    scores = (query.double() @ key.mT * query.shape[3] ** -0.5).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("format", FORMATS)
def test_first_and_newest_tokens_are_in_16_bits_and_the_others_within_half_a_step(format, head_dim):
    query, key, value = draw_for_cache(head_dim=head_dim)
    cache = fill(format, query, key, value)
    for which, found, x in zip(("key", "value"), reference.read_all(cache, torch.float64), (key, value), strict=True):
        rows = reference.transform_key(cache, x) if which == "key" else reference.transform_value(cache, x)
        error = (found - x.double()).norm(dim=-1)
        factor = cache.equalizer.amax(-1) if which == "key" else cache.value_unit
        largest = rows.abs().amax(-1).double() * factor[:, :, None]
        in_16_bits = [*range(FIRST_TOKENS), *range(300 - WINDOW, 300)]
        few = [*range(FIRST_TOKENS, 300 - WINDOW)]
        # A rotation keeps norms: each of the channels is off by half a unit in the last of 11 bits of the largest, ...
        assert (error[..., in_16_bits] <= largest[..., in_16_bits] * 2**-11 * cache.channels**0.5).all()
        # ... or by half a step: of 2^bits - 1 from -largest to largest; e2m1's largest step is a third of its range.
        step = 1 / 3 if format == "nvfp4" else 2 / (2 ** FORMATS[format].bits - 1)
        bound = (step / 2 * 1.07 + 2**-10) * cache.channels**0.5  # 1.07: a scale in e4m3 has 4 bits
        assert (error[..., few] <= largest[..., few] * bound).all()
        assert (error[..., few] > 0).any()


@pytest.mark.parametrize("format", FORMATS)
def test_tokens_that_come_one_by_one_are_stored_as_a_whole_prompt_is(format):
    query, key, value = draw_for_cache()
    cache = fill(format, query[:, :, :100], key[:, :, :100], value[:, :, :100])
    other = fill(format, query[:, :, :100], key[:, :, :100], value[:, :, :100])
    for start in range(100, 300):
        kv_cache.store(cache, None, key[:, :, start : start + 1], value[:, :, start : start + 1])
    kv_cache.store(other, None, key[:, :, 100:], value[:, :, 100:])
    assert (cache.length, cache.coded_columns) == (other.length, other.coded_columns) == (300, 236)
    for one, two in zip(reference.read_all(cache), reference.read_all(other), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_attention_from_the_cache_is_attention_to_its_k_and_v(format):
    query, key, value = draw_for_cache()
    key_mask = torch.ones(2, 300, dtype=torch.bool)
    key_mask[0, :17] = key_mask[1, 120:130] = False
    cache = fill(format, query[:, :, :290], key[:, :, :290], value[:, :, :290], key_mask[:, :290])
    last = [x[:, :, 290:] for x in (query, key, value)]
    output, kernel, _ = kv_cache.decode(cache, *last, key_mask, 64**-0.5)
    assert kernel == "reference (emulated)"
    assert cache.start.tolist() == [17, 0]
    expected = exact(last[0], *reference.read_all(cache, torch.float64), key_mask)
    assert torch.allclose(output.double(), expected, rtol=1e-4, atol=1e-4 * value.abs().max().item())


def test_values_behind_first_ones_that_are_nearly_zero_are_stored():
    query, key, value = draw_for_cache()
    value[:, :, :1] *= 1e-8
    cache = KVCache(get_format("int8"), key)
    for part in (slice(0, 1), slice(1, 300)):
        kv_cache.store(cache, query[:, :, part], key[:, :, part], value[:, :, part])
    found = reference.read_all(cache, torch.float64)[1][:, :, 1:]
    # 255 steps over a range of about 5 deviations: an error of 5 / 255 / sqrt(12) = .006 of a deviation.
    assert (found - value[:, :, 1:]).norm() <= 0.01 * value[:, :, 1:].norm()


def test_rows_without_a_key_are_zero():
    query, key, value = draw_for_cache(70)
    cache = fill("int4", query[:, :, :69], key[:, :, :69], value[:, :, :69])
    output, _, _ = kv_cache.decode(
        cache, *(x[:, :, 69:] for x in (query, key, value)), torch.zeros(2, 70, dtype=torch.bool), 0.125
    )
    assert (output == 0).all()


@pytest.mark.parametrize("removed", [1, 40, 64, 150, 299])
def test_a_cropped_cache_goes_on_as_if_the_tokens_had_never_been_there(removed):
    query, key, value = draw_for_cache(300)
    cache = fill("int8", query, key, value, step=50)
    cache.crop(300 - removed)
    kept = 300 - removed
    again = [x[:, :, kept : kept + 1] for x in (key, value)]
    kv_cache.store(cache, None, *again)
    for found, x in zip(reference.read_all(cache), (key, value), strict=True):
        error = (found - x[:, :, : kept + 1]).norm(dim=-1) / x[:, :, : kept + 1].norm(dim=-1)
        assert error.max() < 0.02
        assert error[..., -1].max() < 0.002  # in 16 bits
    assert cache.coded_columns >= kept + 1 - WINDOW or removed <= WINDOW


def test_sequences_are_selected_repeated_and_dropped():
    query, key, value = draw_for_cache(200)
    cache = fill("nvfp4", query, key, value)
    before = reference.read_all(cache)
    cache.select(torch.tensor([1, 1, 0]))
    for one, two in zip(before, reference.read_all(cache), strict=True):
        assert torch.equal(one[[1, 1, 0]], two)


def test_few_bits_take_few_bytes():
    query, key, value = draw_for_cache(4096, head_dim=128, batch=1)
    sixteen = 2 * 2 * key.numel()
    for format, ratio in (("int8", 1.7), ("int4", 3.0), ("nvfp4", 2.9)):
        assert fill(format, query, key, value).bytes * ratio < sixteen


def test_more_tokens_than_there_are_cannot_be_kept():
    query, key, value = draw_for_cache(70)
    cache = fill("int8", query, key, value)
    with pytest.raises(ValueError, match="71 of 70 tokens cannot be kept"):
        cache.crop(71)
    assert cache.length == 70


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))], ids=["deepcopy", "pickle"]
)
def test_a_copy_holds_the_same_and_goes_on_by_itself(format, copied):
    query, key, value = draw_for_cache(200)
    cache = fill(format, query, key, value)
    before = reference.read_all(cache)
    other = copied(cache)
    kv_cache.store(other, None, key[:, :, :90], value[:, :, :90])
    assert (cache.length, other.length) == (200, 290)
    for one, two, three in zip(before, reference.read_all(cache), reference.read_all(other), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(one[:, :, :136], three[:, :, :136])  # the others have left the window


def misfits():
    """Return, by name of a fault: query, key, value and key mask of one token after a cache of 100, and the message."""
    good = {name: x[:, :, :1] for name, x in zip(("query", "key", "value"), draw_for_cache(100), strict=True)}
    meta = good["key"].to("meta")
    return {
        "batch": (good | {"key": good["key"][:1]}, r"key and value must be \(2, 2, tokens, 64\).* got \(1, 2, 1, 64\)"),
        "heads": (good | {"value": good["value"].repeat(1, 2, 1, 1)}, r"got \(2, 2, 1, 64\) and \(2, 4, 1, 64\)"),
        "head_dim": (good | {"key": good["key"][..., :32]}, r"got \(2, 2, 1, 32\)"),
        "tokens": (good | {"value": good["value"].repeat(1, 1, 2, 1)}, r"and \(2, 2, 2, 64\)"),
        "none": ({name: x[:, :, :0] for name, x in good.items()}, "with 1 token at least"),
        "dimensions": (good | {"key": good["key"][0]}, r"got \(2, 1, 64\)"),
        "query heads": (good | {"query": good["query"][:, :3]}, r"query must be \(2, a multiple of 2, 1, 64\)"),
        "query batch": (good | {"query": good["query"][:1]}, r"query must be .* got \(1, 4, 1, 64\)"),
        "dtype": (good | {"key": good["key"].int()}, "float16, bfloat16 or float32 on cpu; got torch.int32"),
        "double": (good | {"query": good["query"].double()}, "got torch.float64"),
        "device": (good | {"value": meta}, "on cpu; got torch.float32 on meta"),
        "key_mask": (
            good | {"key_mask": torch.ones(2, 7, dtype=torch.bool)},
            r"key_mask must be \(2 or 1, .*\); got \(2, 7\)",
        ),
    }


@pytest.mark.parametrize("wrong", misfits())
def test_tensors_of_another_size_dtype_or_device_are_refused_and_leave_the_cache(wrong):
    cache = fill("int4", *draw_for_cache(100))
    tensors, message = misfits()[wrong]
    tensors = {"key_mask": None} | tensors
    with pytest.raises(ValueError, match=message):
        kv_cache.store(cache, **tensors)
    with pytest.raises(ValueError, match=message):
        kv_cache.decode(cache, **tensors, scale=0.125)
    assert cache.length == 100


def test_decoding_needs_a_past_few_tokens_a_scale_and_a_mask_of_bools():
    query, key, value = draw_for_cache(100)
    last = [x[:, :, 99:] for x in (query, key, value)]
    cache = fill("int8", query, key, value)
    with pytest.raises(ValueError, match="after at least 1"):
        kv_cache.decode(KVCache(get_format("int8"), key), *last, None, 0.125)
    with pytest.raises(ValueError, match=r"takes 1…16 tokens .* got 17 behind 100"):
        kv_cache.decode(cache, *(x[:, :, :17] for x in (query, key, value)), None, 0.125)
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=f"a scale above 0; got .* {scale}"):
            kv_cache.decode(cache, *last, None, scale)
    with pytest.raises(ValueError, match=r"key_mask must be bool on cpu; got torch\.int64"):
        kv_cache.decode(cache, *last, torch.ones(2, 101, dtype=torch.long), 0.125)


def test_what_is_not_supported_is_refused_with_its_value():
    with pytest.raises(ValueError, match="'int3' is not one of int8, int4, nvfp4"):
        get_format("int3")
    with pytest.raises(ValueError, match=r"head_dim 256 is not supported \(64…128\)"):
        KVCache(get_format("int4"), torch.zeros(1, 1, 1, 256))
