"""The kernels of recipes with gradients in Triton's interpreter.

What the forward keeps is the reference's to the bit; gradients are compared with the reference's and with float64.
"""

from itertools import pairwise

import pytest
import torch

from sage_kernels.exact import sdpa
from sage_kernels.reference import backward as reference_backward
from sage_kernels.spec.layout import Lengths
from sage_kernels.spec.recipe import RECIPES
from tests.helpers.calls import new_backward_call, new_call, pack
from tests.helpers.codes import codes_agree, scales_agree
from tests.helpers.triton_calls import attend_and_save, backward

ADA, HOPPER = (8, 9), (9, 0)
NAMES = ("sage_bwd", "sage_bwd_int8")
# For promises that both recipes' kernels keep by the same code, but for how they round P and dS.
layout_recipes = pytest.mark.parametrize(
    "recipe", [RECIPES[NAMES[0]], pytest.param(RECIPES[NAMES[1]], marks=pytest.mark.audit)], ids=NAMES
)


def draw(
    *, batch=1, q_heads=4, kv_heads=2, q_len=70, kv_len=150, head_dim=64, v_head_dim=64, dtype=torch.float16, seed=0
):
    """Q, K, V, dO; all but dO have means."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    query, key, value = (
        normal(batch, heads, tokens, channels) + normal(channels)
        for heads, tokens, channels in (
            (q_heads, q_len, head_dim),
            (kv_heads, kv_len, head_dim),
            (kv_heads, kv_len, v_head_dim),
        )
    )
    return [x.to(dtype) for x in (query, key, value, normal(batch, q_heads, q_len, v_head_dim))]


def options_of(*, lengths=None, key_mask=None, is_causal=False, causal_offset=0, scale=None):
    return {
        "lengths": lengths,
        "key_mask": key_mask,
        "is_causal": is_causal,
        "causal_offset": causal_offset,
        "scale": scale,
    }


def kernel_forward(query, key, value, recipe, options):
    """(output, what is saved) of the kernel."""
    return attend_and_save(new_call(query, key, value, recipe, **options), ADA)


def kernel_gradients(gradient, value, output, saved, recipe, options, head_dim, capability=ADA):
    return backward(new_backward_call(gradient, value, output, saved, recipe, head_dim, **options), capability)


def gradients(inputs, recipe, options, capability=ADA):
    """(dQ, dK, dV) of the kernel and of the reference, from what the reference's forward kept."""
    *tensors, gradient = inputs
    output, saved = reference_backward.forward(new_call(*tensors, recipe, **options))
    head_dim = tensors[0].shape[-1]
    call = new_backward_call(gradient, tensors[2], output, saved, recipe, head_dim, **options)
    expected = reference_backward.backward(call)
    return kernel_gradients(gradient, tensors[2], output, saved, recipe, options, head_dim, capability), expected


def exact_gradients(inputs, options):
    leaves = [x.double().requires_grad_() for x in inputs[:3]]
    mask = None if options["key_mask"] is None else options["key_mask"][:, None, None]
    some = {name: options[name] for name in ("is_causal", "causal_offset", "scale")}
    output, _ = sdpa.attention(*leaves, mask=mask, **some)
    return torch.autograd.grad(output, leaves, inputs[3].double())


def exist(*counts, tokens, left=False):
    """Batch elements with that many keys that exist, padded right or left."""
    position = torch.arange(tokens).expand(len(counts), -1)
    count = torch.tensor(counts)[:, None]
    return position >= tokens - count if left else position < count


GAPS = torch.rand(2, 150, generator=torch.Generator().manual_seed(1)) < 0.7
# Arguments of `draw` and of `options_of`.
CASES = {
    "plain": ({}, {}),
    "bfloat16": ({"dtype": torch.bfloat16}, {}),
    "causal": ({"q_len": 150}, {"is_causal": True}),
    "causal, rows without a key": ({"q_len": 130}, {"is_causal": True, "causal_offset": -5}),
    "causal, keys that no row sees": ({}, {"is_causal": True, "causal_offset": 5}),
    "causal, lower right": ({"dtype": torch.bfloat16}, {"is_causal": True, "causal_offset": 80}),
    "padded right, one without a key": ({"batch": 2}, {"key_mask": exist(100, 0, tokens=150)}),
    "padded left": ({"batch": 2, "q_len": 150}, {"key_mask": exist(64, 149, tokens=150, left=True), "is_causal": True}),
    "gaps": ({"batch": 2}, {"key_mask": GAPS}),
    "gaps, shared, causal": ({"batch": 2}, {"key_mask": GAPS[:1], "is_causal": True, "causal_offset": 30}),
    "head_dim 32, 128": ({"head_dim": 32, "v_head_dim": 128, "q_len": 63}, {}),
    "head_dim 40, 80": ({"head_dim": 40, "v_head_dim": 80, "kv_len": 63}, {"is_causal": True}),
    "head_dim 128, one query head": ({"head_dim": 128, "v_head_dim": 20, "q_heads": 1, "kv_heads": 1}, {}),
    "head_dim 256": ({"head_dim": 256, "v_head_dim": 256, "q_len": 40, "kv_len": 70}, {"is_causal": True}),
    "negative scale": ({"q_heads": 3, "kv_heads": 3}, {"scale": -0.1}),
    "one key": ({"kv_len": 1}, {}),
    "one row": ({"q_len": 1}, {}),
}
# Cases that others cover in part; the audit runs them.
SELDOM = (
    "gaps",
    "gaps, shared, causal",
    "padded left",
    "negative scale",
    "causal",
    "causal, rows without a key",
    "head_dim 40, 80",
    "plain",
)
cases = pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.audit if name in SELDOM else (), id=name) for name, case in CASES.items()],
)


@cases
def test_the_forward_keeps_what_the_references_keeps(case):
    sizes, options = case
    *tensors, _ = draw(**sizes)
    recipe, options = RECIPES["sage_bwd_int8"], options_of(**options)
    expected, expected_saved = reference_backward.forward(new_call(*tensors, recipe, **options))
    output, saved = kernel_forward(*tensors, recipe, options)
    agreements = {"query": codes_agree, "query_scale": scales_agree, "key": codes_agree, "key_scale": scales_agree}
    for name, agree in {**agreements, "equalizer": torch.equal}.items():
        assert agree(getattr(saved, name), getattr(expected_saved, name)), name
    without_key = expected_saved.lse == -torch.inf
    assert torch.equal(saved.lse == -torch.inf, without_key)
    assert torch.allclose(saved.lse, expected_saved.lse, atol=1e-4)
    assert not output[without_key].any()
    mask = None if options["key_mask"] is None else options["key_mask"][:, None, None]
    some = {name: options[name] for name in ("is_causal", "causal_offset", "scale")}
    truth, _ = sdpa.attention(*(x.double() for x in tensors), mask=mask, **some)
    # Tiles of other sizes round P relative to other maxima; both round the output.
    error, reference_error = ((x - truth).abs().sum() for x in (output, expected))
    assert error <= 1.1 * reference_error + torch.finfo(output.dtype).eps * truth.abs().sum()


@layout_recipes
@cases
def test_the_gradients_error_is_the_references(recipe, case):
    sizes, options = case
    inputs, options = draw(**sizes), options_of(**options)
    actual, expected = gradients(inputs, recipe, options)
    for gradient, wanted, truth in zip(actual, expected, exact_gradients(inputs, options), strict=True):
        assert gradient.dtype == wanted.dtype
        assert gradient.transpose(1, 2).is_contiguous()
        error, reference_error = (gradient - truth).abs().sum(), (wanted - truth).abs().sum()
        # Where the exact gradient is 0, as of a softmax of one key, rounding is all there is.
        rounding = torch.finfo(gradient.dtype).eps * max(truth.abs().sum(), 1)
        assert error <= 1.05 * reference_error + rounding
        # In 16 bit both compute the same. In INT8 an element that is almost a tie may become another integer: one in 16
        # at most, which is 1/4 in the mean square, where rounding itself is 0.29.
        tolerance = rounding if recipe.backward == "16bit" else 0.25 / 0.29 * reference_error + rounding
        assert (gradient - wanted).abs().sum() <= tolerance


@layout_recipes
@pytest.mark.parametrize("is_causal", [pytest.param(False, marks=pytest.mark.audit), True])
def test_tiles_by_tensor_descriptor_match_plain_loads(recipe, is_causal):
    inputs, options = draw(batch=2, q_len=150), options_of(is_causal=is_causal)
    actual, expected = gradients(inputs, recipe, options, HOPPER)
    for gradient, wanted, truth in zip(actual, expected, exact_gradients(inputs, options), strict=True):
        assert (gradient - truth).abs().sum() <= 1.05 * (wanted - truth).abs().sum()


@layout_recipes
@pytest.mark.parametrize("is_causal", [pytest.param(False, marks=pytest.mark.audit), True])
def test_packed_sequences_match_separate_sequences_to_the_bit(recipe, is_causal):
    q_lengths, kv_lengths, used = [130, 1, 0, 70], [100, 70, 30, 300], [200, 0, 20, 250]

    lengths = Lengths(pack(q_lengths), pack(kv_lengths), 130, 300, torch.tensor(used, dtype=torch.int32))
    tokens = {"q_len": sum(q_lengths), "kv_len": sum(kv_lengths)}
    *tensors, gradient = draw(q_heads=2, kv_heads=1, head_dim=32, v_head_dim=32, **tokens)

    def both(query, key, value, gradient, **options):
        options = options_of(is_causal=is_causal, causal_offset=2, **options)
        kept = kernel_forward(query, key, value, recipe, options)
        return [kept[0], *kernel_gradients(gradient, value, *kept, recipe, options, 32)]

    packed = both(*tensors, gradient, lengths=lengths)
    alone = [torch.zeros_like(x) for x in packed]
    ranges = zip(pairwise(lengths.cu_seqlens_q), pairwise(lengths.cu_seqlens_k), used, strict=True)
    for (q_start, q_stop), (kv_start, kv_stop), count in ranges:
        queries, keys = slice(q_start, q_stop), slice(kv_start, min(kv_stop, kv_start + count))
        tokens = (queries, keys, keys)
        some = both(*(x[:, :, part] for x, part in zip(tensors, tokens, strict=True)), gradient[:, :, queries])
        for whole, part, of_sequence in zip(alone, some, (queries, *tokens), strict=True):
            whole[:, :, of_sequence] = part
    for whole, expected in zip(packed, alone, strict=True):
        assert torch.equal(whole, expected)


@layout_recipes
def test_what_does_not_exist_has_no_gradient(recipe):
    key_mask = exist(100, 0, tokens=150)
    inputs = draw(batch=2)
    inputs[2][0, :, 110] = torch.nan  # of a key that does not exist
    options = options_of(key_mask=key_mask, is_causal=True, causal_offset=-8)
    (dq, dk, dv), _ = gradients(inputs, recipe, options)
    assert all(x.isfinite().all() for x in (dq, dk, dv))
    assert not dq[1].any()
    assert not dq[:, :, :8].any()
    assert dq[0, :, 9:].any(-1).all()
    seen = torch.arange(150) < 70 - 8
    for gradient in (dk, dv):
        assert not gradient[1].any()
        assert not gradient[0, :, ~seen].any()
    assert dv[0, :, seen].any(-1).all()


@layout_recipes
def test_a_gradient_of_zeros_gives_zeros(recipe):
    *tensors, gradient = draw()
    for x in gradients([*tensors, torch.zeros_like(gradient)], recipe, options_of())[0]:
        assert not x.any()


@layout_recipes
@pytest.mark.parametrize(
    "poison", [torch.nan, *(pytest.param(x, marks=pytest.mark.audit) for x in (torch.inf, -torch.inf))]
)
def test_a_non_finite_value_spoils_its_row_and_the_keys_it_sees(recipe, poison):
    """No other batch element, group of heads or missing key is spoiled."""
    inputs = draw(batch=2, q_len=140)
    inputs[3][0, 1, 20, 3] = poison
    key_mask = exist(100, 150, tokens=150)
    options = options_of(key_mask=key_mask, is_causal=True)
    found, expected = gradients(inputs, recipe, options)
    (dq, dk, dv), (expected_dq, expected_dk, _) = ([~x.isfinite().all(-1) for x in each] for each in (found, expected))
    assert torch.equal(dq, expected_dq)
    assert dq.sum() == 1
    assert dq[0, 1, 20]
    assert torch.equal(dk, expected_dk)
    assert dk.sum() == 21
    # dO times a weight of 0 spoils other keys of the tile.
    for spoiled in (dk, dv):
        assert spoiled[0, 0, :21].all()
        assert not spoiled[0, 1].any()
        assert not spoiled[1].any()
    for gradient in found[1:]:
        assert not gradient[0, :, 100:].any()


@layout_recipes
def test_strides_change_nothing(recipe):
    inputs = draw(q_heads=2, kv_heads=1)
    inputs[3] = inputs[3][:, :, :1, :1].expand_as(inputs[3])  # as of a sum
    options = options_of()
    *tensors, gradient = inputs
    output, saved = reference_backward.forward(new_call(*tensors, recipe, **options))

    def strided(x):
        return x.transpose(1, 2).repeat_interleave(2, -1).transpose(1, 2)[..., ::2]

    expected = kernel_gradients(gradient.contiguous(), tensors[2], output, saved, recipe, options, 64)
    for inputs in ((gradient, tensors[2], output), [strided(x) for x in (gradient, tensors[2], output)]):
        for actual, wanted in zip(kernel_gradients(*inputs, saved, recipe, options, 64), expected, strict=True):
            assert torch.equal(actual, wanted)
    queries = [strided(x) for x in tensors]
    again, saved_again = kernel_forward(*queries, recipe, options)
    output, saved = kernel_forward(*tensors, recipe, options)
    assert torch.equal(again, output)
    assert all(torch.equal(x, y) for x, y in zip(saved, saved_again, strict=True))


@layout_recipes
def test_inputs_are_not_changed(recipe):
    *tensors, gradient = draw(batch=2, q_heads=2, kv_heads=1)
    options = options_of(key_mask=exist(100, 0, tokens=150), scale=-0.2)
    before = [x.clone() for x in (*tensors, gradient)]
    output, saved = kernel_forward(*tensors, recipe, options)
    kept = [x.clone() for x in (output, *saved)]
    kernel_gradients(gradient, tensors[2], output, saved, recipe, options, 64)
    assert all(torch.equal(x, y) for x, y in zip((*tensors, gradient), before, strict=True))
    assert all(torch.equal(x, y) for x, y in zip((output, *saved), kept, strict=True))


@layout_recipes
@pytest.mark.parametrize("sizes", [{"batch": 0}, {"q_len": 0}, {"kv_len": 0}])
def test_empty_tensors_have_empty_gradients(recipe, sizes):
    *tensors, gradient = draw(**sizes)
    options = options_of()
    kept = kernel_forward(*tensors, recipe, options)
    expected = reference_backward.forward(new_call(*tensors, recipe, **options))
    for actual, wanted in zip((kept[0], *kept[1]), (expected[0], *expected[1]), strict=True):
        assert torch.equal(actual, wanted)
    for x, of in zip(kernel_gradients(gradient, tensors[2], *kept, recipe, options, 64), tensors, strict=True):
        assert x.shape == of.shape
        assert not x.any()


def test_padding_with_packed_sequences_is_refused():
    *tensors, gradient = draw()
    lengths = Lengths(*(torch.tensor([0, 9], dtype=torch.int32),) * 2, 9, 9)
    both = options_of(lengths=lengths, key_mask=exist(9, tokens=150))
    with pytest.raises(ValueError, match="packed sequences take no mask"):
        kernel_forward(*tensors, "sage_bwd", both)
    kept = kernel_forward(*tensors, "sage_bwd", options_of())
    with pytest.raises(ValueError, match="packed sequences take no mask"):
        kernel_gradients(gradient, tensors[2], *kept, "sage_bwd", both, 64)
