"""Heavy keys in Triton's interpreter: both forward kernels and quantisers, against the reference."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.spec import transforms
from sage_kernels.spec.layout import Lengths, heavy_order
from sage_kernels.spec.recipe import get_recipe
from sage_kernels.triton import nvfp4_forward
from tests.helpers.calls import draw_tensors, new_call, pack
from tests.helpers.sinks import sink, uniform_but_where_sampled
from tests.helpers.triton_calls import attend, quantize

KEYS = 64
CAPABILITY = {"int8": (8, 9), "nvfp4": (9, 0)}
# Without the search for scales, which the interpreter is slow at.
RECIPES = {
    name: replace(get_recipe(name), heavy_keys=KEYS, scale_steps=(), key_scale_steps=())
    for name in ("sage1", "sage2", "sage3", "sage3_paper")
}

SIZES = {
    "grouped": {"batch": 2, "q_heads": 4, "kv_heads": 2, "head_dim": 80, "v_head_dim": 40, "q_len": 20},
    "small": {"head_dim": 24, "v_head_dim": 16, "kv_len": KEYS + 1, "dtype": torch.bfloat16},
    "large": {"head_dim": 256, "v_head_dim": 144, "q_len": 9, "kv_len": 70, "dtype": torch.float16},
    "none is left": {"kv_len": KEYS},
}


draw = partial(draw_tensors, batch=1, q_heads=2, kv_heads=1, kv_len=150, v_head_dim=64, means=True)


def run(inputs, recipe, **options):
    return attend(new_call(*inputs, recipe, return_lse=True, **options), CAPABILITY[recipe.qk])


def distance(output, truth):
    return (output.double() - truth).abs().sum()


def check(inputs, name, **options):
    """The error is the reference's, and so is the LSE, -inf where there is no key; return the output."""
    recipe = RECIPES[name] if isinstance(name, str) else name
    output, lse = run(inputs, recipe, **options)
    expected, expected_lse = reference.attention(*inputs, recipe, block_n=64, **options)
    truth, _ = sdpa.attention(*inputs, **options)
    assert output.shape == truth.shape and output.dtype == inputs[0].dtype
    assert distance(output, truth) <= 1.05 * distance(expected, truth) + 2**-20 * truth.abs().sum()
    assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
    assert torch.allclose(lse, expected_lse, atol=1e-4)
    assert not output[lse == -torch.inf].any()
    return output


def masks(q_len=70, kv_len=150):
    generator = torch.Generator().manual_seed(2)
    allowed = torch.rand(1, 2, q_len, kv_len, generator=generator) < 0.5
    allowed[:, :, 5] = False
    allowed[:, :, 6, :KEYS] = False
    allowed[:, :, 7, KEYS:] = False
    return {
        "none": None,
        "keys": torch.rand(1, 1, 1, kv_len, generator=generator) < 0.7,
        "bool": allowed,
        "additive": torch.randn(1, 1, q_len, kv_len, generator=generator).masked_fill(~allowed[:, :1], -torch.inf),
    }


OFFSETS = {"sage2": (0, None, -3, 40, 80), "sage3": (-3, None, 0, 40), "sage1": (None, 0, -3), "sage3_paper": (None, 0)}
QUICK = {("sage2", 0, "keys"), ("sage2", 0, "additive"), ("sage3", -3, "none"), ("sage3", -3, "bool")}


@pytest.mark.parametrize(
    ("recipe", "causal_offset", "mask"),
    [
        pytest.param(recipe, offset, mask, marks=() if (recipe, offset, mask) in QUICK else pytest.mark.audit)
        for recipe, offsets in OFFSETS.items()
        for offset, mask in product(offsets, masks())
    ],
)
def test_the_kernels_error_is_the_references(recipe, causal_offset, mask):
    check(draw(), recipe, mask=masks()[mask], is_causal=causal_offset is not None, causal_offset=causal_offset or 0)


@pytest.mark.parametrize(
    ("recipe", "sizes"),
    [
        *(("sage1", "grouped"), ("sage3", "small")),
        *(pytest.param(*case, marks=pytest.mark.audit) for case in (("sage3", "grouped"), ("sage1", "small"))),
        *(pytest.param(recipe, "large", marks=pytest.mark.audit) for recipe in ("sage1", "sage3")),
        *(pytest.param(recipe, "none is left", marks=pytest.mark.audit) for recipe in ("sage1", "sage3")),
    ],
)
def test_any_size_and_dtype_has_the_references_error(recipe, sizes):
    query, key, value = draw(**SIZES[sizes])
    query, key = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key))
    check((query, key, value.mT.contiguous().mT), recipe)


@pytest.mark.parametrize(
    ("recipe", "kind", "hidden"),
    [
        ("sage1", "padding", 100),
        ("sage3", "keys", 1),
        *(
            pytest.param(recipe, kind, hidden, marks=pytest.mark.audit)
            for recipe, kind, hidden in product(("sage1", "sage3"), ("keys", "padding", "bool", "additive"), (1, 100))
            if (recipe, kind, hidden) not in (("sage1", "padding", 100), ("sage3", "keys", 1))
        ),
    ],
)
def test_what_is_in_keys_that_no_row_sees_changes_nothing(recipe, kind, hidden):
    """NaN among the first keys, as padding on the left has."""
    query, key, value = draw(q_len=20, q_heads=1)
    allowed = (torch.arange(150) >= hidden).expand(1, 1, 1 if kind == "keys" else 20, 150)
    least = -torch.inf if kind == "additive" else -1e9
    mask = allowed if kind in ("keys", "bool") else torch.zeros(allowed.shape).masked_fill(~allowed, least)
    expected = check((query, key, value), recipe, mask=mask)
    key[:, :, :hidden], value[:, :, :hidden] = torch.nan, torch.inf
    output, _ = run((query, key, value), RECIPES[recipe], mask=mask)
    assert torch.equal(output, expected)


@pytest.mark.parametrize(
    ("mask", "heavy_keys"),
    [
        ("bool", KEYS),
        *(
            pytest.param(*case, marks=pytest.mark.audit)
            for case in (("none", 0), ("none", KEYS), ("bool", 0), ("additive", 0), ("additive", KEYS))
        ),
    ],
)
def test_causal_rows_of_recent_and_heavy_keys_alone_are_exact(mask, heavy_keys):
    recipe = replace(RECIPES["sage3"], heavy_keys=heavy_keys, recent_keys=150)
    query, key, value = draw(head_dim=40, v_head_dim=24)
    query, key = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key))
    inputs = query, key, value.mT.contiguous().mT
    options = {"mask": masks()[mask], "is_causal": True, "causal_offset": 20}
    output, lse = run(inputs, recipe, **options)
    truth, true_lse = sdpa.attention(*inputs, **options)
    assert torch.allclose(output.double(), truth, atol=1e-5)
    assert torch.allclose(lse.double(), true_lse.double(), atol=1e-5)


@pytest.mark.parametrize(
    ("mask", "heavy_keys"),
    [
        ("bool", KEYS),
        *(
            pytest.param(*case, marks=pytest.mark.audit)
            for case in (("none", KEYS), ("additive", KEYS), ("keys", KEYS), ("none", 0))
        ),
    ],
)
@pytest.mark.parametrize("offset", [260, pytest.param(300, marks=pytest.mark.audit)])
def test_causal_rows_have_the_references_error_before_and_behind_the_first_recent_key(mask, heavy_keys, offset):
    """The first block of rows has a tile in low bits, the second one two."""
    recipe = replace(RECIPES["sage3"], heavy_keys=heavy_keys)
    inputs = draw(q_len=140, kv_len=400, head_dim=32, v_head_dim=48, dtype=torch.bfloat16)
    check(inputs, recipe, mask=masks(140, 400)[mask], is_causal=True, causal_offset=offset)


@pytest.mark.parametrize("kind", ["padding", *(pytest.param(one, marks=pytest.mark.audit) for one in ("keys", "bool"))])
def test_what_is_in_recent_keys_that_no_row_sees_changes_nothing(kind):
    query, key, value = draw(q_len=20, q_heads=1)
    allowed = ((torch.arange(150) < 100) | (torch.arange(150) >= 140)).expand(1, 1, 1 if kind == "keys" else 20, 150)
    mask = torch.zeros(allowed.shape).masked_fill(~allowed, -1e9) if kind == "padding" else allowed
    options = {"mask": mask, "is_causal": True, "causal_offset": 130}
    expected = check((query, key, value), "sage3", **options)
    key[:, :, 100:140], value[:, :, 100:140] = torch.nan, torch.inf
    output, _ = run((query, key, value), RECIPES["sage3"], **options)
    assert torch.equal(output, expected)


@pytest.mark.parametrize("recipe", [pytest.param("sage1", marks=pytest.mark.audit), "sage3"])
@pytest.mark.parametrize("is_causal", [pytest.param(False, marks=pytest.mark.audit), True])
def test_packed_sequences_may_be_shorter_than_the_heavy_keys(monkeypatch, recipe, is_causal):
    monkeypatch.setattr(nvfp4_forward, "DELTA_SHARE", 1e-9)
    q_lengths, kv_lengths, used = (3, 20, 140, 5, 6), (10, 100, 300, 30, 9), (10, 64, 290, 0, 9)
    starts = pack(q_lengths), pack(kv_lengths)
    lengths = Lengths(*starts, 140, 300, torch.tensor(used, dtype=torch.int32))
    inputs = draw(q_len=sum(q_lengths), kv_len=sum(kv_lengths))
    inputs[1][:, :, 74:110] = torch.nan  # not used
    # Rows of short sequences see no key behind the first ones, or only recent ones; long ones have some in low bits.
    options = {"is_causal": is_causal, "causal_offset": {"sage1": 2, "sage3": 150}[recipe]}
    output, lse = run(inputs, RECIPES[recipe], lengths=lengths, **options)
    for index, count in enumerate(used):
        rows = slice(starts[0][index], starts[0][index + 1])
        columns = slice(starts[1][index], starts[1][index] + count)
        alone = (inputs[0][:, :, rows], inputs[1][:, :, columns], inputs[2][:, :, columns])
        if count > KEYS:
            assert torch.equal(check(alone, recipe, **options), output[:, :, rows])
            continue
        # All its keys are heavy.
        truth, true_lse = sdpa.attention(*alone, **options)
        assert torch.allclose(output[:, :, rows].double(), truth.double(), atol=1e-5)
        assert torch.allclose(lse[:, :, rows].double(), true_lse.double(), atol=1e-5)


@pytest.mark.parametrize("recipe", ["sage2", "sage3"])
def test_the_operands_are_the_references_bit_for_bit(recipe):
    query, key, value = draw(dtype=torch.bfloat16, head_dim=48)
    recipe = RECIPES[recipe]
    key_mask = torch.rand(1, 150, generator=torch.Generator().manual_seed(1)) < 0.7
    heavy = quantize(new_call(query, key, value, recipe), key_mask).heavy
    expected = reference.quantize_operands(query, key, value, recipe, key_mask[:, None, :, None]).heavy
    exists = key_mask[:, None, :KEYS, None]
    expected_key = expected.key
    if recipe.qk == "int8":  # the mean's scores are subtracted, not the mean
        places = transforms.heavy_places(query.float(), key.float(), KEYS, 48**-0.5, key_mask[:, None, :, None])
        expected_key = transforms.exchange(key, places)[:, :, :KEYS].float()
    found = torch.empty_like(heavy.key)
    found[..., heavy_order(found.shape[-1])] = heavy.key
    assert torch.equal(found[..., :48].float(), torch.where(exists, expected_key, 0.0))
    assert torch.equal(heavy.value.float(), expected.value)
    assert not found[..., 48:].any()


@pytest.mark.parametrize(
    ("recipe", "times"), [pytest.param("sage1", 2, marks=pytest.mark.audit), ("sage2", 5), ("sage3", 5)]
)
def test_with_a_sink_the_error_is_much_smaller_than_without_heavy_keys(recipe, times):
    inputs, recipe = sink(32, 512, 64), RECIPES[recipe]
    truth, _ = sdpa.attention(*inputs)
    with_heavy, without = (
        distance(run(inputs, one)[0], truth).item() for one in (recipe, replace(recipe, heavy_keys=0))
    )
    assert without >= times * with_heavy


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        ("sage3", "keys"),
        *(
            pytest.param(*one, marks=pytest.mark.audit)
            for one in (("sage2", "none"), ("sage2", "keys"), ("sage3", "none"))
        ),
    ],
)
def test_keys_with_much_larger_scores_take_the_first_places(recipe, kind):
    """Grouped queries, a partial tile, sinks in the middle and at the end, some of which do not exist."""
    query, key, value = draw(q_len=40, kv_len=203, batch=2, head_dim=48)
    query += 1.0
    for place, size in ((70, 3.0), (130, 4.0), (202, 2.0)):
        key[:, :, place] = size
    mask = None if kind == "none" else (torch.arange(203) % 130 > 2).expand(2, 1, 1, 203)
    key_mask = None if mask is None else mask.mT
    operands = quantize(new_call(query, key, value, RECIPES[recipe]), None if mask is None else mask[:, 0, 0])
    chosen = transforms.heavy_places(query, key, KEYS, 48**-0.5, key_mask)
    assert set(chosen.unique().tolist()) >= ({70, 130, 202} if mask is None else {70, 202})
    assert mask is None or not (chosen == 130).any()
    of_head = chosen[..., None]
    expected = key.gather(2, of_head.expand(-1, -1, -1, 48))
    if RECIPES[recipe].qk != "int8":
        expected -= transforms.mean_of_tokens(key, key_mask)
    found = torch.empty_like(operands.heavy.key)
    found[..., heavy_order(found.shape[-1])] = operands.heavy.key
    exists = torch.tensor(True) if key_mask is None else key_mask[:, :, :KEYS]
    assert torch.equal(found[..., :48], torch.where(exists, expected, 0.0))
    values = value.gather(2, of_head.expand(-1, -1, -1, value.shape[3]))
    assert torch.equal(operands.heavy.value, torch.where(exists, values, 0.0))
    check((query, key, value), recipe, mask=mask)


@pytest.mark.parametrize("recipe", ["sage2", "sage3"])
def test_equal_keys_keep_their_places(recipe):
    query, key, value = draw(q_len=20)
    key = key[:, :, :1].expand_as(key)
    operands = quantize(new_call(query, key, value, RECIPES[recipe]))
    assert torch.equal(operands.heavy.value, value[:, :, :KEYS])


@pytest.mark.parametrize("late", [pytest.param((48,), marks=pytest.mark.audit), (150, 167, 255, 53)])
@pytest.mark.parametrize("padded", [pytest.param(False, marks=pytest.mark.audit), True])
def test_with_late_keys_each_row_attends_once_to_each_key_that_it_sees(late, padded):
    inputs, rows = uniform_but_where_sampled(256, 32, late)
    exists = torch.arange(256) % 50 != 7 if padded else torch.ones(256, dtype=torch.bool)
    call = new_call(
        *inputs, RECIPES["sage1"], key_mask=exists[None] if padded else None, is_causal=True, return_lse=True
    )
    assert set(late) <= set(quantize(call, call.mask.key_mask).heavy.late.flatten().tolist())
    output, lse = attend(call, CAPABILITY["int8"])
    seen = exists & torch.ones(256, 256, dtype=torch.bool).tril()
    count = seen.sum(1).float()
    torch.testing.assert_close(output[0, 0, rows], (seen / count[:, None])[rows])
    torch.testing.assert_close(lse[0, 0, rows], count.log()[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("recipe", "offset", "kind"),
    [
        pytest.param(*case, marks=() if case == ("sage2", -20, "keys") else pytest.mark.audit)
        for case in product(("sage2", "sage3"), (0, 60, -20), ("none", "keys"))
    ],
)
def test_sinks_behind_the_first_keys_are_late_keys_and_the_error_is_the_references(recipe, offset, kind):
    query, key, value = draw(q_len=140, kv_len=203, batch=2, head_dim=48)
    query += 1.0
    for place, size in ((70, 3.0), (130, 4.0), (183, 2.0)):
        key[:, :, place] = size
    mask = None if kind == "none" else (torch.arange(203) % 130 > 2).expand(2, 1, 1, 203)
    key_mask = None if mask is None else mask.mT
    call = new_call(query, key, value, RECIPES[recipe], mask=mask, is_causal=True, causal_offset=offset)
    heavy = quantize(call, None if mask is None else mask[:, 0, 0]).heavy
    late = transforms.late_keys(query, key, KEYS - 16, 16, 48**-0.5, key_mask)
    assert torch.equal(heavy.late.long(), late)
    assert set(late.unique().tolist()) >= ({70, 130, 183} if mask is None else {70, 183})
    found = late.clamp(max=202)[..., None].expand(-1, -1, -1, value.shape[3])
    chosen = torch.where((late == transforms.NO_KEY)[..., None], 0.0, value.gather(2, found))
    assert torch.equal(heavy.value[:, :, KEYS - 16 :], chosen)
    check((query, key, value), recipe, mask=mask, is_causal=True, causal_offset=offset)
