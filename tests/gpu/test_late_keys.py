"""Heavy keys of causal calls, which may be anywhere: every kernel and quantiser that a GPU runs, or emulates."""

from dataclasses import replace

import pytest
import torch

from sage_kernels import attention
from sage_kernels.cuda import compiler, nvfp4_forward
from sage_kernels.cuda.registration import CudaInt8Quantizer, CudaNVFP4Quantizer
from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.spec.operands import KeyPadding
from sage_kernels.spec.recipe import RECIPES
from sage_kernels.spec.transforms import NO_KEY, late_keys
from tests.helpers import calls, triton_calls
from tests.helpers.judge import lse_tolerance
from tests.helpers.pairwise import pairwise
from tests.helpers.sinks import uniform_but_where_sampled

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
compiles = pytest.mark.skipif(bool(compiler.unavailable()), reason=compiler.unavailable())
# Without the search for scales, which Triton compiles for long.
UNSEARCHED = replace(RECIPES["sage3"], scale_steps=(), key_scale_steps=())
# Of sinks whose number modulo 16 is 6 to 9 or 12 to 14, the first keys that give way exist in every kind of padding.
SIZES = {  # batch, q_heads, kv_heads, q_len, kv_len, causal_offset, head_dim, keys that are sinks
    "square": (1, 4, 4, 1024, 1024, 0, 128, (0, 505)),
    "grouped": (2, 8, 2, 777, 777, 0, 64, (294, 295, 296, 297)),
    "head_dim 72": (1, 4, 2, 1000, 1000, 0, 72, (71, 998)),
    "lower right": (1, 4, 2, 300, 1500, 1200, 128, (700,)),
    "a chunk of a prompt": (1, 4, 4, 512, 1024, 512, 64, (200, 601)),
    "upper left": (1, 2, 2, 200, 900, 0, 128, (102, 505)),
    "rows without a key": (1, 2, 2, 600, 400, -100, 64, (249,)),
    "last queries": (1, 2, 2, 5, 4000, 3995, 128, (54, 2008, 3998)),
    "few keys": (2, 2, 2, 129, 129, 0, 128, (54, 56, 94)),
    "one query": (1, 4, 1, 1, 3000, 2999, 64, (1500,)),
    "no sink": (1, 2, 2, 900, 900, 0, 128, ()),
    "many sinks": (1, 2, 2, 1300, 1300, 0, 64, tuple(range(100, 1300, 37))),
}


def draw(sizes, dtype=torch.bfloat16):
    """Q has a mean, to which sinks point: each of their scores is about 7, and their V is small."""
    batch, q_heads, kv_heads, q_len, kv_len, offset, head_dim, sinks = SIZES[sizes]
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(batch, *shape, device="cuda", generator=generator)

    key, value = normal(kv_heads, kv_len, head_dim), normal(kv_heads, kv_len, head_dim) + normal(kv_heads, 1, head_dim)
    key[:, :, sinks], value[:, :, sinks] = 7 * head_dim**-0.5, 0.05 * value[:, :, sinks]
    inputs = normal(q_heads, q_len, head_dim) + 1, key, value
    return [x.to(dtype) for x in inputs], {"is_causal": True, "causal_offset": offset}


def keys_that_exist(kind, sizes):
    if kind == "all":
        return None
    batch, kv_len = SIZES[sizes][0], SIZES[sizes][4]
    key = torch.arange(kv_len, device="cuda")
    exist = {"left": key >= 37, "right": key < kv_len - 29, "holes": key % 5 != 2}[kind]
    return torch.cat((exist[None], (key >= 0).expand(batch - 1, -1)))


def check(inputs, recipe, result, key_mask, options):
    mask = None if key_mask is None else key_mask[:, None, None]
    expected, expected_lse = reference.attention(*inputs, recipe, mask=mask, **options)
    truth, _ = sdpa.attention(*inputs, mask=mask, **options)
    output, lse = result
    size = truth.double().abs().sum()
    rounding = torch.finfo(output.dtype).eps / 2 * size
    assert (output - truth).double().abs().sum() <= 1.05 * (expected - truth).double().abs().sum() + rounding
    assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
    finite = expected_lse > -torch.inf
    assert ((lse - expected_lse)[finite].abs() <= lse_tolerance(*inputs[:2], mask)).all()
    assert not output[lse == -torch.inf].any()


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("recipe", "kind", "sizes"), pairwise(["sage1", "sage2"], ["all", "left", "right", "holes"], list(SIZES))
)
def test_the_chosen_int8_kernel_has_the_references_error(recipe, kind, sizes):
    inputs, options = draw(sizes)
    key_mask = keys_that_exist(kind, sizes)
    mask = None if key_mask is None else key_mask[:, None, None]
    for return_lse in (False, True):
        output, lse = attention(*inputs, recipe=recipe, mask=mask, return_lse=return_lse, **options)
        if not return_lse:
            _, lse = reference.attention(*inputs, RECIPES[recipe], mask=mask, **options)
        check(inputs, RECIPES[recipe], (output, lse), key_mask, options)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("recipe", "kind", "sizes"), pairwise(["sage2", "sage3"], ["all", "left"], list(SIZES)))
def test_triton_s_kernels_have_the_references_error(recipe, kind, sizes):
    recipe = UNSEARCHED if recipe == "sage3" else RECIPES[recipe]
    inputs, options = draw(sizes, torch.float16)
    key_mask = keys_that_exist(kind, sizes)
    call = calls.new_call(*inputs, recipe, key_mask=key_mask, return_lse=True, **options)
    check(inputs, recipe, triton_calls.attend(call, CAPABILITY), key_mask, options)


@compiles
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", ["all", "left", "holes"])
def test_the_cuda_nvfp4_kernel_has_the_references_error(kind, sizes):
    inputs, options = draw(sizes)
    key_mask = keys_that_exist(kind, sizes)
    call = calls.new_call(*inputs, UNSEARCHED, key_mask=key_mask, return_lse=True, **options)
    quantizer = CudaNVFP4Quantizer() if key_mask is None else triton_calls.quantizer_of(UNSEARCHED)
    check(inputs, UNSEARCHED, nvfp4_forward.attend(call, quantizer, native=False), key_mask, options)


def assert_same(actual, expected):
    for name, y in vars(expected).items():
        x = getattr(actual, name)
        if isinstance(y, torch.Tensor) and name != "mean_score":  # which is summed in another order
            assert torch.equal(x.float().nan_to_num(7.0), y.float().nan_to_num(7.0)), name


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("name", "kind", "sizes"), pairwise(["sage1", "sage2", "sage3"], ["all", "left", "holes"], list(SIZES))
)
@compiles
def test_operands_in_cuda_match_triton(name, kind, sizes):
    if name != "sage3" and CAPABILITY != (9, 0):
        pytest.skip("needs compute capability 9.0")
    recipe = replace(UNSEARCHED if name == "sage3" else RECIPES[name], rotate=False, equalize=False)
    inputs, options = draw(sizes)
    key_mask = keys_that_exist(kind, sizes)
    call = calls.new_call(*inputs, recipe, key_mask=key_mask, return_lse=True, **options)
    expected = triton_calls.quantize(call, key_mask)
    if name == "sage3":
        padding = None if key_mask is None else KeyPadding.of(key_mask, has_spans=False)
        actual = CudaNVFP4Quantizer().quantize(call, padding)
        assert_same(actual.statistics, expected.statistics)
    else:
        actual = CudaInt8Quantizer().quantize(call, None if key_mask is None else KeyPadding.of(key_mask))
    assert_same(actual, expected)
    assert_same(actual.heavy, expected.heavy)


@pytest.mark.parametrize("recipe", ["sage2", "sage3"])
@pytest.mark.parametrize("sizes", ["square", "grouped", "lower right", "a chunk of a prompt", "few keys"])
def test_sinks_behind_the_first_keys_are_late_keys(sizes, recipe):
    inputs, options = draw(sizes)
    call = calls.new_call(*inputs, recipe, **options)
    late = triton_calls.quantize(call).heavy.late
    expected = late_keys(*(x.float() for x in inputs[:2]), call.first_keys, call.late_keys, call.scale, None)
    assert torch.equal(late.long(), expected)
    sinks = {key for key in SIZES[sizes][-1] if key >= call.first_keys}
    assert all(sinks <= set(of_head.tolist()) for of_head in late.flatten(0, 1))
    assert (late == NO_KEY).any()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("late", [(48,), (550, 167, 1255, 53, 128, 0), tuple(range(1024, 1040))])
@pytest.mark.parametrize("return_lse", [False, True])
def test_each_row_attends_once_to_each_key_that_it_sees(head_dim, late, return_lse, device):
    """Each row's output is the share of keys of even number, of every third and so on, among those that it sees."""
    (query, key, _), rows = uniform_but_where_sampled(1300, head_dim, late)
    number = torch.arange(1300.0)[:, None]
    value = (number % torch.arange(2, 2 + head_dim) == 0).float()
    inputs = [x.to(device, torch.bfloat16) for x in (query, key, value[None, None])]
    output, lse = attention(*inputs, recipe="sage1", is_causal=True, return_lse=return_lse)
    expected = value.double().cumsum(0) / (number + 1)
    difference = (output[0, 0].cpu().double() - expected)[rows].abs()
    # Weights and V are exact in float16, and the output is rounded. Early rows, and columns that are mostly 0, would
    # show a key that counts twice, or not at all: it moves a row by the inverse of its keys' number.
    assert (difference <= (2**-8 + 2**-16) * expected[rows] + 1e-6).all()
    if return_lse:
        assert ((lse[0, 0].cpu() - (number[:, 0] + 1).log())[rows].abs() <= 1e-5).all()
