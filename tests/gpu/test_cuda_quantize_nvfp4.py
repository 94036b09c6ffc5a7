"""The operands of quantize_nvfp4.cu are those of the Triton quantisers, bit for bit."""

from dataclasses import replace

import pytest
import torch

from sage_kernels import backends  # noqa: F401 - registers the kernels
from sage_kernels.cuda import compiler
from sage_kernels.cuda.registration import CudaNVFP4Quantizer
from sage_kernels.dispatch.execution import request_of
from sage_kernels.dispatch.select import select
from sage_kernels.spec.layout import Lengths
from sage_kernels.spec.operands import KeyPadding
from sage_kernels.spec.recipe import get_recipe
from sage_kernels.triton.mask_entries import mask_entries
from sage_kernels.triton.quantize.nvfp4 import quantize_operands as quantize_nvfp4_operands
from tests.helpers import calls
from tests.helpers.layouts import lay_out

pytestmark = [
    pytest.mark.skipif(bool(compiler.unavailable()), reason=compiler.unavailable()),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SAGE3, PAPER = get_recipe("sage3"), get_recipe("sage3_paper")
RECIPES = {
    "sage3": SAGE3,
    "sage3_paper": PAPER,
    "no heavy keys": replace(SAGE3, heavy_keys=0),
    "no rotation": replace(SAGE3, rotate=False, equalize=False),
    "Q not smoothed": replace(SAGE3, smooth_q=False),
    "K and V not smoothed": replace(SAGE3, smooth_k=False, smooth_v=False),
    "three scales": replace(SAGE3, scale_steps=(-1, 4), key_scale_steps=(1, 2)),
    "no search": replace(SAGE3, scale_steps=(), key_scale_steps=()),
    "K searched": replace(SAGE3, scale_steps=()),
}
SIZES = [  # batch, q_heads, kv_heads, q_len, kv_len, head_dim, v_head_dim
    (1, 4, 4, 1024, 1088, 128, 128),
    (2, 4, 2, 300, 500, 64, 64),
    (1, 3, 1, 16500, 1000, 128, 128),  # more than 128 blocks
    (2, 2, 2, 130, 16520, 128, 128),
    (1, 4, 2, 257, 333, 80, 96),
    (1, 2, 2, 200, 64, 40, 48),
    (1, 2, 2, 1, 129, 112, 72),
]


def draw(batch, q_heads, kv_heads, q_len, kv_len, head_dim, v_head_dim, dtype=torch.bfloat16):
    """Q, K and V with means and channels of different magnitudes."""
    generator = torch.Generator("cuda").manual_seed(head_dim + q_len)

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=generator)

    tensors = []
    for heads, tokens, channels in (
        (q_heads, q_len, head_dim),
        (kv_heads, kv_len, head_dim),
        (kv_heads, kv_len, v_head_dim),
    ):
        x = normal(batch, heads, tokens, channels) + normal(heads, 1, channels)
        tensors.append((x * normal(channels).exp()).to(dtype))
    return tensors


def parts(operands):
    """The operands' tensors by name; mean_score, which is summed in another order, is left out."""
    found = {name: x for name, x in vars(operands).items() if isinstance(x, torch.Tensor) and name != "mean_score"}
    found |= {f"statistics.{name}": x for name, x in vars(operands.statistics).items() if isinstance(x, torch.Tensor)}
    if operands.heavy is not None:
        found |= {"heavy.key": operands.heavy.key, "heavy.value": operands.heavy.value}
    return found


def check(inputs, recipe=SAGE3, return_lse=False, key_mask=None):
    call = calls.new_call(*inputs, recipe, key_mask=key_mask, return_lse=return_lse)
    assert CudaNVFP4Quantizer().unsupported(replace(request_of(call), recipe="sage3")) == ""
    padding = None if key_mask is None else KeyPadding.of(key_mask, has_spans=False)
    actual = CudaNVFP4Quantizer().quantize(call, padding)
    expected = quantize_nvfp4_operands(call, None if padding is None else padding.key_mask_u8)
    assert parts(actual).keys() == parts(expected).keys()
    for name, y in parts(expected).items():
        x = parts(actual)[name]
        assert x.shape == y.shape and x.dtype == y.dtype, name
        if x.dtype.is_floating_point:  # a NaN is like any other
            assert torch.equal(x.isnan(), y.isnan()), name
            x, y = x.nan_to_num(), y.nan_to_num()
        assert torch.equal(x, y), name
    if not return_lse:
        return
    scores, query = actual.mean_score, inputs[0]
    group = query.shape[1] // inputs[1].shape[1]
    mean = expected.statistics.key_mean.double().repeat_interleave(group, 1)[..., None, : query.shape[3]]
    products = query.double() * mean
    bound = products.abs().sum(-1) * query.shape[3] * 2.0**-24
    assert ((scores[:, :, : query.shape[2]] - products.sum(-1)).abs() <= bound).all()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_operands_match_triton_at_every_size(sizes, dtype):
    check(draw(*sizes, dtype=dtype), return_lse=True)


@pytest.mark.parametrize("name", RECIPES)
def test_operands_match_triton_for_every_recipe(name):
    check(draw(2, 2, 2, 300, 333, 128, 128), RECIPES[name])
    check(draw(2, 2, 2, 300, 333, 64, 64), RECIPES[name])


@pytest.mark.parametrize("layout", ["tokens first", "packed"])
def test_strides_do_not_matter(layout):
    check([lay_out(x, layout) for x in draw(2, 2, 2, 300, 333, 128, 128)])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["sage3", "sage3_paper", "no rotation"])
def test_non_finite_values_spoil_the_same_elements_as_in_triton(bad, name):
    query, key, value = draw(1, 2, 2, 300, 333, 128, 128)
    query[0, 0, 3, 5], key[0, 0, 70, 2], key[0, 1, 7, 2], value[0, 0, 330, 8], value[0, 1, 100, 3] = [bad] * 5
    check((query, key, value), RECIPES[name])


@pytest.mark.parametrize("exponents", [(-110, -115, -105), (110, 100, 115)])
def test_tiny_and_huge_values_use_the_tensor_scale(exponents):
    check([x * 2.0**exponent for x, exponent in zip(draw(1, 2, 2, 300, 333, 128, 128), exponents, strict=True)])


def test_zeros_stay_zeros():
    query, key, value = draw(1, 2, 2, 300, 333, 128, 128)
    query[:, :, 100:], key[:, :, 200:], value[:, :, 200:] = 0, 0, 0
    check((query, key, value))
    check([torch.zeros_like(x) for x in (query, key, value)])


@pytest.mark.parametrize(
    "sizes", [(2, 4, 2, 500, 500, 128, 128), (2, 2, 2, 130, 520, 64, 64), (1, 2, 1, 70, 300, 80, 96)], ids=str
)
@pytest.mark.parametrize("kind", ["left", "right", "anywhere", "none", "shared"])
def test_keys_that_do_not_count_decide_nothing(sizes, kind):
    query, key, value = draw(*sizes)
    batch, kv_len = sizes[0], sizes[4]
    column, generator = torch.arange(kv_len, device="cuda"), torch.Generator("cuda").manual_seed(0)
    key_mask = {
        "left": (column >= 97).expand(batch, -1).clone(),
        "right": (column < kv_len - 130).expand(batch, -1).clone(),
        "anywhere": torch.rand(batch, kv_len, device="cuda", generator=generator) < 0.7,
        "none": (column < 0).expand(batch, -1).clone(),
        "shared": column[None] % 3 > 0,
    }[kind]
    if kind == "left":
        key_mask[-1] = True  # a batch element without padding
    key = torch.where(key_mask[:, None, :, None], key, 1e4)
    value = torch.where(key_mask[:, None, :, None], value, torch.nan)
    check((query, key, value), key_mask=key_mask)
    check((query, key, value), RECIPES["no rotation"], key_mask=key_mask)


def test_it_is_chosen_before_triton_s_for_masks_too():
    inputs = draw(1, 2, 2, 300, 333, 128, 128)
    keys = torch.ones(1, 333, dtype=torch.bool, device="cuda")
    scores = torch.ones(1, 1, 300, 333, dtype=torch.bool, device="cuda").tril()
    for options in ({}, {"key_mask": keys}, {"mask": scores}):
        call = calls.new_call(*inputs, "sage3", **options)
        assert select(request_of(call), "emulate").quantizer == "nvfp4_quantize_cuda"


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_attention_biases_are_served(dtype):
    """Heavy keys are the first ones then; keys that no row may see do not count."""
    inputs = draw(2, 4, 2, 300, 333, 128, 128)
    mask = torch.rand(2, 1, 300, 333, device="cuda", generator=torch.Generator("cuda").manual_seed(0)) < 0.7
    mask[..., 40:50], mask[..., 200:230] = False, False
    mask = mask if dtype == torch.bool else torch.zeros(mask.shape, device="cuda").masked_fill(~mask, -torch.inf)
    call = calls.new_call(*inputs, SAGE3, mask=mask)
    _, _, key_mask_u8 = mask_entries(call, 128, 64)
    assert not key_mask_u8.all() and not call.chooses_heavy_keys
    actual = CudaNVFP4Quantizer().quantize(call, KeyPadding(key_mask_u8))
    expected = quantize_nvfp4_operands(call, key_mask_u8)
    for name, y in parts(expected).items():
        assert torch.equal(parts(actual)[name], y), name


def of_sequences(call, operands):
    """The operands' tensors by name and, where they lie in rows, by sequence: rows of no sequence are undefined."""
    tensors = parts(operands)
    of_query, of_key = call.tail.token_axes
    rows = [(name, 2, of_query) for name in ("query", "query_scale", "query_tensor_scale", "query_mean")]
    rows += [(name, 2, of_key) for name in ("key", "key_scale", "key_tensor_scale")]
    rows += [(name, 3, of_key) for name in ("value", "value_scale")]
    for name, axis, sequences in rows:
        if (x := tensors.pop(name, None)) is None:
            continue
        tokens = sequences.rows // x.shape[axis]
        for number, (_, length, row) in enumerate(sequences.ranges.tolist()):
            tensors[f"{name} of {number}"] = x.narrow(axis, row // tokens, -(-length // 128) * 128 // tokens)
    # Of a sequence whose keys are all heavy, the others' scale belongs to nothing.
    tensors["value_tensor_scale"] = tensors["value_tensor_scale"][of_key.ranges[:, 1] > 0]
    return tensors


@pytest.mark.parametrize("name", ["sage3", "sage3_paper"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("q_lengths", "k_lengths", "used"),
    [((200, 1, 300), (333, 129, 700), None), ((0, 640, 5, 77), (64, 900, 40, 300), (64, 700, 40, 300))],
)
def test_packed_sequences_have_the_operands_that_triton_gives_them(name, is_causal, q_lengths, k_lengths, used):
    query, key, value = draw(1, 4, 2, sum(q_lengths), sum(k_lengths), 128, 128)
    starts = [torch.tensor([0, *x], device="cuda").cumsum(0).int() for x in (q_lengths, k_lengths)]
    counts = None if used is None else torch.tensor(used, dtype=torch.int32, device="cuda")
    lengths = Lengths(*starts, max(q_lengths), max(k_lengths), counts)
    call = calls.new_call(query, key, value, RECIPES[name], lengths=lengths, is_causal=is_causal)
    assert CudaNVFP4Quantizer().unsupported(replace(request_of(call), recipe="sage3")) == ""
    actual, expected = (
        of_sequences(call, quantize(call)) for quantize in (CudaNVFP4Quantizer().quantize, quantize_nvfp4_operands)
    )
    assert actual.keys() == expected.keys()
    for part, y in expected.items():
        assert torch.equal(actual[part], y), part


def test_reruns_are_equal():
    inputs = draw(2, 4, 4, 1000, 1000, 128, 128)
    call = calls.new_call(*inputs, "sage3")
    first, second = (parts(CudaNVFP4Quantizer().quantize(call)) for _ in range(2))
    assert all(torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8)) for name in first)
