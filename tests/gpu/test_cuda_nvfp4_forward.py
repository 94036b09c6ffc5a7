"""The CUDA NVFP4 forward without FP4 hardware: emulated products stand for the instructions that need it.

All else is what runs on compute capability 12.x: copies, barriers, fragments, masks, the softmax, the heavy and recent
keys.
"""

from dataclasses import replace

import pytest
import torch

from sage_hf import sage_attention
from sage_kernels.cuda import nvfp4_forward, padding, smooth_q_scores
from sage_kernels.cuda.registration import CudaNVFP4Forward, CudaNVFP4Quantizer
from sage_kernels.dispatch.registry import forget_choices
from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.replay import cache
from sage_kernels.spec.call import recent_start
from sage_kernels.spec.layout import BLOCK
from sage_kernels.spec.recipe import get_recipe
from sage_kernels.triton.common import padding as in_triton
from sage_kernels.triton.registration import TritonNVFP4Quantizer
from tests.helpers.calls import new_call

# Kernel and reference differ by sums in another order and by approximate logarithms, which move single elements of P
# across a rounding boundary: their errors against float64 agree to a few percent.
RATIO = 1.05
SAGE3 = get_recipe("sage3")


def random_inputs(q_len, kv_len, q_heads, kv_heads, head_dim, batch=2, v_head_dim=None, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)

    def random(heads, tokens, bias, channels=head_dim):
        mean = torch.randn(batch, heads, 1, channels, generator=generator, device="cuda") * bias
        return (torch.randn(batch, heads, tokens, channels, generator=generator, device="cuda") + mean).to(dtype)

    # Keys grow, so that maxima do until late in a row.
    key = random(kv_heads, kv_len, 2) * torch.linspace(0.3, 1, kv_len, device="cuda")[:, None]
    return random(q_heads, q_len, 1), key.to(dtype), random(kv_heads, kv_len, 1, v_head_dim or head_dim)


def error(x, true):
    return ((x.double() - true).abs().sum() / true.abs().sum()).item()


def check(inputs, recipe, return_lse=False, key_mask=None, **options):
    call = new_call(*inputs, recipe, return_lse=return_lse, key_mask=key_mask, **options)
    quantizer = CudaNVFP4Quantizer() if key_mask is None else TritonNVFP4Quantizer()
    output, lse = nvfp4_forward.attend(call, quantizer, native=False)
    mask = None if key_mask is None else key_mask[:, None, None]
    expected, expected_lse = reference.attention(*inputs, recipe, block_n=128, mask=mask, **options)
    true, _ = sdpa.attention(*inputs, mask=mask, **options)
    # A row of heavy and recent keys alone has the rounding of 16 bits, which differs where parts are merged in turn.
    rounding = torch.finfo(output.dtype).eps / 2
    assert error(output, true) <= max(RATIO * error(expected, true), rounding)
    if return_lse:
        torch.testing.assert_close(lse, expected_lse, rtol=2e-6, atol=2e-5)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    "recipe, options",
    [
        ("plain", {}),
        ("plain", {"is_causal": True, "causal_offset": 500, "return_lse": True}),
        ("sage3", {}),
        ("sage3", {"return_lse": True}),
        ("sage3", {"is_causal": True}),
        ("sage3", {"is_causal": True, "causal_offset": 37, "return_lse": True}),
        ("sage3_paper", {"return_lse": True}),
        ("sage3_paper", {"is_causal": True}),
    ],
    ids=str,
)
def test_the_kernel_has_the_recipe_s_error(recipe, options, head_dim):
    recipes = {"plain": replace(SAGE3, smooth_q=False, heavy_keys=0), "sage3": SAGE3}
    recipe = recipes.get(recipe) or get_recipe(recipe)
    check(random_inputs(300, 700, 4, 2, head_dim), recipe, **options)


@pytest.mark.parametrize(
    "q_len, kv_len, head_dim, v_head_dim, dtype",
    [
        (1, 65, 128, 128, torch.bfloat16),
        (128, 192, 128, 128, torch.float16),
        (129, 1100, 80, 72, torch.bfloat16),
        (700, 700, 40, 64, torch.float16),
        (257, 64, 64, 64, torch.bfloat16),
    ],
)
def test_any_length_and_head_dim(q_len, kv_len, head_dim, v_head_dim, dtype):
    inputs = random_inputs(q_len, kv_len, 6, 2, head_dim, v_head_dim=v_head_dim, dtype=dtype)
    for options in ({"return_lse": True}, {"is_causal": True, "causal_offset": kv_len - q_len}):
        check(inputs, SAGE3, **options)


def keys_that_exist(kind, kv_len):
    key = torch.arange(kv_len, device="cuda")
    if kind == "holes":
        return torch.rand(2, kv_len, generator=torch.Generator("cuda").manual_seed(1), device="cuda") > 0.3
    if kind == "left":
        return torch.stack((key >= 137, key >= 0))
    if kind == "none":
        return torch.stack((key < 0, key < 300))
    return torch.stack((key < 530, key < 40)) if kind == "right" else (key % 7 != 0)[None]


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kind", ["right", "left", "holes", "shared", "none"])
def test_keys_that_do_not_exist(kind, head_dim):
    # Without the search for scales, which Triton's quantiser compiles for long.
    recipe = replace(SAGE3, scale_steps=(), key_scale_steps=())
    inputs = random_inputs(300, 700, 4, 2, head_dim)
    key_mask = keys_that_exist(kind, 700)
    check(inputs, recipe, key_mask=key_mask, return_lse=True)
    check(inputs, recipe, key_mask=key_mask, is_causal=True, causal_offset=390, return_lse=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["all", "left", "holes"])
@pytest.mark.parametrize("offset", [0, 61, -20])
def test_causal_rows_of_recent_keys_alone_are_exact(offset, kind, dtype):
    """Every key of a row is recent, and counts once; what is left is the rounding of P and of the output."""
    q_len, kv_len, head_dim = 150, 199, 80
    recipe = replace(SAGE3, scale_steps=(), key_scale_steps=(), heavy_keys=0, recent_keys=q_len + 61)
    inputs = random_inputs(q_len, kv_len, 4, 2, head_dim, v_head_dim=72, dtype=dtype)
    key_mask = None if kind == "all" else keys_that_exist(kind, kv_len)
    call = new_call(*inputs, recipe, return_lse=True, key_mask=key_mask, is_causal=True, causal_offset=offset)
    quantizer = CudaNVFP4Quantizer() if key_mask is None else TritonNVFP4Quantizer()
    output, lse = nvfp4_forward.attend(call, quantizer, native=False)
    mask = None if key_mask is None else key_mask[:, None, None]
    true, true_lse = sdpa.attention(*(x.double() for x in inputs), mask=mask, is_causal=True, causal_offset=offset)
    # Each of so many parts that are merged, of one key at least, rounds the sums in float32 a few times.
    merged = 4 * recipe.recent_keys * torch.finfo(torch.float32).eps
    largest = inputs[2].abs().max().item()
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(output.double(), true.double(), rtol=rounding, atol=(rounding + 2 * merged) * largest)
    torch.testing.assert_close(lse.double(), true_lse.double(), rtol=merged, atol=merged)


@pytest.mark.parametrize("row", [0, 127, 128, 131])
@pytest.mark.parametrize("heavy_keys", [0, 64])
def test_keys_before_the_recent_ones_are_quantised(heavy_keys, row):
    """A row whose weight is on one key has that key's V, to the bit only if the key is recent."""
    # A key with all the weight would be a late one.
    recipe = replace(SAGE3, heavy_keys=heavy_keys, heavy_choice="first")
    first = heavy_keys + recent_start(300 - heavy_keys, recipe.recent_keys) + row // BLOCK * BLOCK
    for chosen in (first - 20, first - 1, first, 299, row + 300):
        query, key, value = random_inputs(132, 432, 1, 1, 64, batch=1)
        query, key = torch.zeros_like(query), torch.zeros_like(key)
        query[:, :, row, :8], key[:, :, chosen, :8] = 5.0, 50.0
        call = new_call(query, key, value, recipe, is_causal=True, causal_offset=300)
        output, _ = nvfp4_forward.attend(call, CudaNVFP4Quantizer(), native=False)
        assert torch.equal(output[0, 0, row], value[0, 0, chosen]) == (chosen >= first)


def test_spans_match_triton():
    kinds = [*(keys_that_exist(kind, 5000) for kind in ("right", "left", "holes", "shared", "none"))]
    for key_mask in (*kinds, torch.ones(1, 3, dtype=torch.bool, device="cuda")):
        found, expected = padding.key_padding(key_mask), in_triton.key_padding(key_mask)
        assert torch.equal(found.spans, expected.spans) and torch.equal(found.key_mask_u8, expected.key_mask_u8)


def test_what_keys_that_do_not_exist_hold_does_not_matter():
    query, key, value = random_inputs(200, 400, 2, 2, 64)
    key_mask = keys_that_exist("holes", 400)
    recipe = replace(SAGE3, scale_steps=(), key_scale_steps=())
    for is_causal in (False, True):
        outputs = []
        for filler in (0.0, torch.nan):
            there = key_mask[:, None, :, None]
            filled = (torch.where(there, x, filler) for x in (key, value))
            call = new_call(query, *filled, recipe, key_mask=key_mask, is_causal=is_causal, causal_offset=100)
            outputs.append(nvfp4_forward.attend(call, TritonNVFP4Quantizer(), native=False)[0])
        assert torch.equal(*outputs)


def test_more_items_than_multiprocessors():
    """A block works through several items, whose tiles its producer brings ahead."""
    inputs = random_inputs(1000, 900, 16, 4, 64, batch=5)
    for options in ({}, {"is_causal": True, "return_lse": True}):
        check(inputs, SAGE3, **options)


def test_a_small_workspace_gives_the_same_bits(monkeypatch):
    inputs = random_inputs(600, 500, 2, 1, 64, batch=3)
    call = new_call(*inputs, SAGE3, is_causal=True)
    whole, _ = nvfp4_forward.attend(call, CudaNVFP4Quantizer(), native=False)
    for share in (0.0, 0.01, 0.02):
        monkeypatch.setattr(nvfp4_forward, "DELTA_SHARE", share)
        assert torch.equal(nvfp4_forward.attend(call, CudaNVFP4Quantizer(), native=False)[0], whole)


def test_rows_without_a_key_are_zero():
    inputs = random_inputs(300, 200, 2, 2, 64)
    call = new_call(*inputs, SAGE3, is_causal=True, causal_offset=-150, return_lse=True)
    output, lse = nvfp4_forward.attend(call, CudaNVFP4Quantizer(), native=False)
    assert output[:, :, :150].count_nonzero() == 0 and (lse[:, :, :150] == -torch.inf).all()
    assert output[:, :, 150:].isfinite().all() and lse[:, :, 150:].isfinite().all()


def test_a_key_that_is_not_finite_spoils_the_rows_that_see_it():
    query, key, value = random_inputs(140, 300, 2, 2, 64)
    key[0, 0, 100, 5] = torch.nan
    call = new_call(query, key, value, SAGE3, is_causal=True)
    output, _ = nvfp4_forward.attend(call, CudaNVFP4Quantizer(), native=False)
    expected, _ = reference.attention(query, key, value, SAGE3, is_causal=True, block_n=128)
    assert torch.equal(output.isnan(), expected.isnan())


def test_equal_calls_give_equal_bits():
    call = new_call(*random_inputs(1000, 1500, 8, 8, 128), "sage3", return_lse=True)
    first = nvfp4_forward.attend(call, CudaNVFP4Quantizer(), native=False)
    for _ in range(5):
        again = nvfp4_forward.attend(call, CudaNVFP4Quantizer(), native=False)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.parametrize("head_dim, tokens", [(64, 300), (128, 700), (72, 129)])
def test_scores_of_means_match_triton(head_dim, tokens):
    from sage_kernels.triton import smooth_q_scores as of_triton

    call = new_call(*random_inputs(2500, tokens, 4, 2, head_dim), "sage3")
    operands = CudaNVFP4Quantizer().quantize(call)
    kv_rows = operands.key.shape[2]
    found, expected = (torch.zeros(1, 4, 17, kv_rows, device="cuda") for _ in range(2))
    smooth_q_scores.smooth_q_scores(operands, call.tail, 1, 1, 3, found)
    of_triton.smooth_q_scores(operands, call.tail, None, 1, 3, expected, torch.cuda.get_device_capability())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "return_lse": True}], ids=str)
def test_replayed_calls_through_the_front_door_have_the_same_bits(monkeypatch, replayed, options):
    def attend(self, call, quantizer):
        return nvfp4_forward.attend(call, quantizer, native=False)

    monkeypatch.setattr(CudaNVFP4Forward, "unsupported", lambda self, request: "")
    monkeypatch.setattr(CudaNVFP4Forward, "attend", attend)
    forget_choices()
    cache.forget()
    try:
        for _ in range(5):
            inputs = [torch.randn(2, 4, 600, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
            found = sage_attention(*inputs, recipe="sage3", fallback="error", **options)
            expected = nvfp4_forward.attend(new_call(*inputs, SAGE3, **options), CudaNVFP4Quantizer(), native=False)
            assert torch.equal(found[0] if "return_lse" in options else found, expected[0])
            if "return_lse" in options:
                torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-5)
    finally:
        forget_choices()
        cache.forget()
    assert len(replayed) >= 2
