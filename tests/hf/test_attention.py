"""`sage_attention` honours every argument, or refuses it with a message that says what to do."""

import functools
import logging
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import sage_hf
from sage_hf import attention, sage_attention
from sage_kernels.dispatch import select
from sage_kernels.dispatch.plan import KernelUnavailableError
from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.spec.block_list import BlockList
from sage_kernels.spec.recipe import RECIPES
from tests.helpers.calls import draw_tensors

draw = partial(draw_tensors, kv_heads=4, v_head_dim=64)

MASKS = {
    "none": {},
    "causal": {"is_causal": True},
    "bool": {"attn_mask": torch.rand(2, 1, 70, 90, generator=torch.Generator().manual_seed(1)) < 0.5},
    "additive": {"attn_mask": torch.randn(4, 1, 90, generator=torch.Generator().manual_seed(2))},
    "2d": {"attn_mask": torch.ones(70, 90, dtype=torch.bool).tril()},
}


@pytest.mark.parametrize("arguments", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_is_pytorchs_attention_to_the_bit(arguments, dtype):
    inputs = draw(kv_heads=2, dtype=dtype)
    if "attn_mask" in arguments and arguments["attn_mask"].is_floating_point():
        arguments = {"attn_mask": arguments["attn_mask"].to(dtype)}
    output = sage_attention(*inputs, **arguments, scale=0.3, enable_gqa=True, recipe="exact")
    query, key, value = inputs
    if "attn_mask" in arguments:
        key, value = key.repeat_interleave(2, 1), value.repeat_interleave(2, 1)
    assert torch.equal(
        output, F.scaled_dot_product_attention(query, key, value, **arguments, scale=0.3, enable_gqa=True)
    )


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name != "exact"])
@pytest.mark.parametrize("arguments", MASKS.values(), ids=MASKS)
def test_every_argument_reaches_the_recipe(recipe, arguments):
    inputs = draw(kv_heads=2, v_head_dim=32)
    output, lse = sage_attention(*inputs, **arguments, scale=0.2, enable_gqa=True, recipe=recipe, return_lse=True)
    mask = arguments.get("attn_mask")
    options = {"mask": mask, "is_causal": arguments.get("is_causal", False), "scale": 0.2}
    expected, expected_lse = reference.attention(*inputs, RECIPES[recipe], **options)
    assert torch.equal(output, expected)
    assert torch.equal(lse, expected_lse)


@pytest.mark.parametrize("arguments", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("path", ["exact", "float64", "gradient"])
def test_exact_attention_returns_the_exact_lse_whatever_led_to_it(arguments, path):
    inputs = draw(kv_heads=2, q_len=70)
    if path == "float64":
        inputs = [x.double() for x in inputs]
    inputs[0].requires_grad_(path == "gradient")
    recipe = "exact" if path == "exact" else "sage3"
    output, lse = sage_attention(*inputs, **arguments, scale=0.2, enable_gqa=True, recipe=recipe, return_lse=True)
    options = {"mask": arguments.get("attn_mask"), "is_causal": arguments.get("is_causal", False), "scale": 0.2}
    truth, true_lse = sdpa.attention(*inputs, **options)
    assert torch.allclose(lse.double(), true_lse, atol=1e-5)
    assert torch.allclose(output.double(), truth, atol=1e-5)
    assert not lse.requires_grad


@pytest.mark.parametrize("grad", [False, True])
def test_rows_that_may_attend_to_nothing_are_zero_whatever_pytorch_makes_of_them(grad, monkeypatch):
    monkeypatch.setattr(sdpa, "sdpa", lambda query, key, value, **options: query + 7.0)  # as CUDA kernels may
    inputs = [x.requires_grad_(grad) for x in draw(q_len=8 if not grad else 70)]
    mask = torch.ones(1, 1, inputs[0].shape[2], 90, dtype=torch.bool)
    mask[:, :, 3] = False
    output = sage_attention(*inputs, attn_mask=mask)
    assert not output[:, :, 3].any()
    assert output[:, :, 4].all()


@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if recipe.backward is None])
@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_gradient_is_never_cut(recipe, position, caplog):
    inputs = draw()
    expected = F.scaled_dot_product_attention(*(x.clone().requires_grad_(i == position) for i, x in enumerate(inputs)))
    inputs[position].requires_grad_()
    with caplog.at_level(logging.WARNING):
        output = sage_attention(*inputs, recipe=recipe)
    assert output.requires_grad
    assert torch.equal(output, expected)
    assert ("gradients are wanted" in caplog.text) == (recipe != "exact")
    output.sum().backward()
    assert inputs[position].grad.abs().sum() > 0


def test_a_forward_mode_gradient_is_never_cut():
    query, key, value = draw()
    tangent = torch.randn(query.shape, generator=torch.Generator().manual_seed(5))
    try:
        _, actual = torch.func.jvp(lambda x: sage_attention(x, key, value), (query,), (tangent,))
    except NotImplementedError as refusal:  # PyTorch's exact attention has no forward mode on every device
        assert "forward AD" in str(refusal)
        return
    expected = [sage_attention(query + step * tangent, key, value, recipe="exact") for step in (1e-3, -1e-3)]
    assert torch.allclose(actual, (expected[0] - expected[1]) / 2e-3, atol=1e-2)


def test_error_refuses_exact_attention_for_gradients_too():
    query, key, value = draw()
    with pytest.raises(KernelUnavailableError, match="forward only"):
        sage_attention(query.requires_grad_(), key, value, fallback="error")


@pytest.mark.parametrize("q_len", [8, 70])
@pytest.mark.parametrize("mask_dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("recipe", ["exact", "sage1"])
def test_a_floating_mask_may_have_another_dtype_and_keeps_finite_values_finite(q_len, mask_dtype, recipe):
    inputs = draw(q_len=q_len)
    mask = torch.zeros(q_len, 90, dtype=mask_dtype)
    mask[3] = torch.finfo(mask_dtype).min  # a row biased alike: it attends to all
    mask[4, 5:] = -torch.inf
    output = sage_attention(*inputs, attn_mask=mask, recipe=recipe)
    truth, _ = sdpa.attention(*inputs, mask=mask.float().clamp(min=torch.finfo(torch.float32).min))
    truth4, _ = sdpa.attention(*(x[:, :, :5] if i else x for i, x in enumerate(inputs)))
    assert output.isfinite().all()
    assert output[:, :, 3].abs().sum() > 0
    others = torch.arange(q_len) != 3
    others[4] = False
    tolerance = 1e-5 if recipe == "exact" or q_len == 8 else 0.05
    assert (output - truth)[:, :, others].abs().max() < tolerance
    assert (output - truth4)[:, :, 4].abs().max() < tolerance


@pytest.mark.parametrize("recipe", ["exact", "sage1", "sage_bwd"])
@pytest.mark.parametrize("q_len", [8, 70])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mask_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("context", ["eager", "autocast", "gradient"])
def test_a_row_biased_alike_is_uniform_whatever_the_dtypes(context, mask_dtype, dtype, q_len, recipe):
    query, key, value = draw(q_len=q_len, dtype=dtype)
    query.requires_grad_(context == "gradient")
    mask = torch.zeros(q_len, 90, dtype=mask_dtype)
    mask[2], mask[3] = torch.finfo(mask_dtype).max, torch.finfo(mask_dtype).min
    mask[4], mask[4, 5] = 0.0, torch.finfo(mask_dtype).max
    mask[5], mask[6, 7] = -torch.inf, torch.nan
    with torch.autocast("cpu", torch.bfloat16, enabled=context == "autocast"):
        output = sage_attention(query, key, value, attn_mask=mask, recipe=recipe).double()
    tolerance = 0.03  # of the mean of 90 values: what INT8, or bfloat16 weights, leave of it
    # The largest numbers swallow the scores; those of float16 round them off by up to 32.
    assert (output[:, :, 4] - value[:, :, 5]).abs().max() < 4 * tolerance
    assert output[:, :, 2:4].isfinite().all()
    assert (output[:, :, 2:4] != 0).all()
    if mask_dtype != torch.float16 and dtype != torch.float16:
        assert (output[:, :, 2:4] - value.double().mean(2, keepdim=True)).abs().max() < tolerance
    assert output[:, :, 6].isnan().all()
    if recipe != "exact":
        assert not output[:, :, 5].any()


@pytest.mark.parametrize("recipe", ["exact", "sage3"])
@pytest.mark.parametrize("shape", [(), (90,), (70, 1), (2, 1, 70, 1)])
def test_masks_of_every_rank_broadcast(recipe, shape):
    inputs = draw()
    output = sage_attention(*inputs, attn_mask=torch.ones(shape, dtype=torch.bool), recipe=recipe)
    assert torch.allclose(output, sage_attention(*inputs, recipe=recipe), atol=1e-5)


@pytest.mark.parametrize("recipe", ["exact", "sage1"])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
def test_pytorchs_causal_bias_is_read_by_what_it_says_and_not_by_its_memory(make, recipe):
    query, key, value = draw()
    bias, offset = make(70, 90), 20 if make is causal_lower_right else 0
    mask = torch.ones(70, 90, dtype=torch.bool).tril(offset)
    expected = sage_attention(query, key, value, attn_mask=mask, recipe="exact")
    output = sage_attention(query, key, value, attn_mask=bias, recipe=recipe)
    assert (output - expected).norm() <= (1e-6 if recipe == "exact" else 0.02) * expected.norm()
    torch.testing.assert_close(sage_attention(query[0], key[0], value[0], bias, recipe=recipe), output[0])
    with pytest.raises(ValueError, match="CausalBias"):
        sage_attention(query, key[:, :, :-1], value[:, :, :-1], attn_mask=bias, recipe=recipe)


@pytest.mark.parametrize("recipe", ["sage3", "sage2", "sage1", "sage_bwd"])
def test_autocast_does_not_reach_into_the_kernels(recipe):
    inputs = draw(dtype=torch.bfloat16)
    expected = sage_attention(*inputs, recipe=recipe, return_lse=True)
    with torch.autocast("cpu", torch.bfloat16):
        actual = sage_attention(*inputs, recipe=recipe, return_lse=True)
        assert sage_attention(*(x.double() for x in inputs), recipe=recipe).dtype == torch.float64
    assert all(torch.equal(x, y) for x, y in zip(actual, expected, strict=True))


@pytest.mark.parametrize("recipe", ["exact", "sage3"])
def test_output_and_lse_compile_once_for_all_lengths_and_batches(recipe):
    counter = CompileCounter()

    def attend(*inputs):
        return sage_attention(*inputs, recipe=recipe, return_lse=True)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for repeats, length in ((1, 70), (1, 65), (2, 83)):  # none is as long as head_dim
        inputs = [x.repeat(repeats, 1, 1, 1) for x in draw(q_len=length, kv_len=length)]
        assert torch.allclose(compiled(*inputs)[1], attend(*inputs)[1], atol=1e-5)
    assert counter.frame_count == 1


def test_a_learned_bias_keeps_its_gradient():
    bias = torch.zeros(1, 4, 70, 90, requires_grad=True)
    sage_attention(*draw(), attn_mask=bias).sum().backward()
    assert bias.grad is not None


def test_without_grad_mode_trainable_inputs_run_low_bit():
    inputs = [x.requires_grad_() for x in draw()]
    with torch.no_grad():
        assert torch.equal(sage_attention(*inputs), reference.attention(*inputs, RECIPES["sage3"])[0])


@pytest.mark.parametrize("grad", [False, True])
def test_fullgraph_compilation_equals_eager(grad):
    inputs = [x.requires_grad_(grad) for x in draw()]
    compiled = torch.compile(lambda *x: sage_attention(*x) * 2, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.allclose(compiled(*inputs), sage_attention(*inputs) * 2, atol=1e-6)
    longer = [x.requires_grad_(grad) for x in draw(q_len=100, kv_len=77)]
    assert torch.allclose(compiled(*longer), sage_attention(*longer) * 2, atol=1e-6)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("recipe", ["exact", "sage3"])
def test_grouped_queries_compile_for_dynamic_sizes(recipe, grad):
    attend = functools.partial(sage_attention, recipe=recipe, enable_gqa=True)
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for heads in (4, 6):
        query, _, _ = draw(q_heads=heads)
        _, key, value = draw(kv_heads=2)
        query.requires_grad_(grad)
        assert torch.equal(compiled(query, key, value), attend(query, key, value))


def test_a_compiled_mask_may_have_dynamic_sizes_in_every_dimension():
    compiled = torch.compile(
        lambda *x: sage_attention(*x[:3], attn_mask=x[3]), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for batch in (2, 1):
        query, key, value = (x[:batch] for x in draw())
        mask = torch.rand(batch, 4, 70, 90, generator=torch.Generator().manual_seed(3)) < 0.5
        assert torch.equal(compiled(query, key, value, mask), sage_attention(query, key, value, attn_mask=mask))


@pytest.mark.parametrize("listed", [False, True], ids=["mask", "block list"])
def test_a_compiled_call_may_have_dynamic_sizes_with_a_mask_or_list_of_fixed_ones(listed):
    """A module's buffers have fixed sizes in a graph whose queries and keys have dynamic ones."""
    query, key, value = draw()
    mask = torch.rand(2, 4, 70, 90, generator=torch.Generator().manual_seed(3)) < 0.5
    counts, tiles = torch.ones(2, 4, 1, dtype=torch.int32), torch.zeros(2, 4, 1, 1, dtype=torch.int32)
    for x in (mask, counts, tiles):
        torch._dynamo.mark_static(x)
    options = {"blocks": BlockList(counts, tiles)} if listed else {"attn_mask": mask}
    attend = functools.partial(sage_attention, recipe="exact", **options)
    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    assert torch.equal(compiled(query, key, value), attend(query, key, value))


def test_autocast_applies_as_it_does_to_pytorchs_attention():
    inputs = draw()
    with torch.autocast("cpu", torch.bfloat16):
        assert sage_attention(*inputs).dtype == torch.bfloat16
        assert torch.equal(sage_attention(*inputs, recipe="exact"), F.scaled_dot_product_attention(*inputs))


def test_each_reason_is_logged_once_through_the_hugging_face_logger(caplog):
    with caplog.at_level(logging.WARNING):
        for q_len in (1, 2, 3):
            sage_attention(*draw(q_len=q_len))
        sage_attention(*(x.double() for x in draw()))
    assert [entry.name for entry in caplog.records] == ["sage_hf.record"] * 2
    assert "too short" in caplog.records[0].message
    assert "dtype must be one of" in caplog.records[1].message


def test_native_recipes_log_nothing(caplog):
    with caplog.at_level(logging.WARNING):
        sage_attention(*draw())
        sage_attention(*draw(), recipe="exact")
    assert not caplog.records


def test_fallback_error_refuses_and_the_default_can_be_set_for_the_process():
    with pytest.raises(KernelUnavailableError):
        sage_attention(*draw(), fallback="error")
    sage_hf.set_default_fallback("error")
    try:
        with pytest.raises(KernelUnavailableError):
            sage_attention(*draw())
    finally:
        sage_hf.set_default_fallback("native")
    with pytest.raises(ValueError, match="choose from: native, emulate, error"):
        sage_hf.set_default_fallback("perhaps")


def test_routing_is_switched_off_and_on():
    sage_hf.set_routing(True)
    assert select.routing()
    sage_hf.set_routing(False)
    assert not select.routing()


@pytest.mark.parametrize(("value", "meaning"), [(None, "native"), ("", "native"), ("emulate", "emulate")])
def test_the_environment_sets_the_default_fallback_unless_it_is_empty(monkeypatch, value, meaning):
    monkeypatch.delenv("SAGE_HF_FALLBACK", raising=False)
    if value is not None:
        monkeypatch.setenv("SAGE_HF_FALLBACK", value)
    assert attention.fallback_of_environment() == meaning


def test_a_wrong_default_fallback_names_the_variable(monkeypatch):
    monkeypatch.setenv("SAGE_HF_FALLBACK", "perhaps")
    with pytest.raises(ValueError, match="variable SAGE_HF_FALLBACK: unknown fallback 'perhaps'"):
        attention.fallback_of_environment()


def test_batches_and_heads_of_one_are_repeated_as_pytorch_repeats_them():
    for batches, heads in product(product((1, 2), repeat=3), product((1, 4), repeat=3)):
        inputs = [torch.randn(*sizes, 32) for sizes in zip(batches, heads, (40, 80, 80), strict=True)]
        output, wanted = sage_attention(*inputs, recipe="exact"), F.scaled_dot_product_attention(*inputs)
        assert torch.allclose(output, wanted, atol=1e-5) and output.shape == wanted.shape


def test_recipes_repeat_a_batch_and_group_queries_with_one_head_of_keys():
    query, key, value = draw()
    repeated = [x[:1].expand(2, -1, -1, -1) for x in (key, value)]
    assert torch.equal(sage_attention(query, key[:1], value[:1]), sage_attention(query, *repeated))
    one = key[:, :1], value[:, :1]
    assert torch.equal(sage_attention(query, *one), sage_attention(query, *one, enable_gqa=True))


def nested(x, layout):
    return torch.nested.nested_tensor([x[0], x[1, :, :50]], layout=layout)


BAD_CALLS = {
    "rank": (lambda q, k, v: ((q[0], k, v), {}), ValueError, "expected .batch, heads, tokens, head_dim."),
    "integers": (lambda q, k, v: ((q.int(), k.int(), v.int()), {}), TypeError, "quantising is done inside"),
    "dtypes": (lambda q, k, v: ((q, k.half(), v), {}), ValueError, "key is torch.float16"),
    "devices": (lambda q, k, v: ((q, k.to("meta"), v), {}), ValueError, "key is .* on meta"),
    "batch": (lambda q, k, v: ((torch.cat([q, q]), k, v), {}), ValueError, "batch sizes differ"),
    "head_dim": (lambda q, k, v: ((q, k[..., :32], v), {}), ValueError, "head_dim of query and key differ"),
    "key and value": (lambda q, k, v: ((q, k, v[:, :, :80]), {}), ValueError, "heads or tokens of key and value"),
    "gqa not enabled": (lambda q, k, v: ((q, k[:, :2], v[:, :2]), {}), ValueError, "pass enable_gqa=True"),
    "heads": (lambda q, k, v: ((q, k[:, :3], v[:, :3]), {"enable_gqa": True}), ValueError, "not a multiple of 3"),
    "mask shape": (
        lambda q, k, v: ((q, k, v), {"attn_mask": torch.ones(2, 3, 70, 90).bool()}),
        ValueError,
        "does not broadcast",
    ),
    "mask rank": (
        lambda q, k, v: ((q, k, v), {"attn_mask": torch.ones(1, 1, 1, 1, 90).bool()}),
        ValueError,
        "does not broadcast",
    ),
    "mask dtype": (lambda q, k, v: ((q, k, v), {"attn_mask": torch.ones(70, 90).long()}), TypeError, "mask.bool"),
    "mask and causal": (
        lambda q, k, v: ((q, k, v), {"attn_mask": torch.ones(70, 90).bool(), "is_causal": True}),
        ValueError,
        "exclude each other",
    ),
    "recipe": (lambda q, k, v: ((q, k, v), {"recipe": "sage9"}), ValueError, "recipes are: exact, sage1"),
    "fallback": (lambda q, k, v: ((q, k, v), {"fallback": "no"}), ValueError, "choose from: native"),
    "float8": (
        lambda q, k, v: (tuple(x.to(torch.float8_e4m3fn) for x in (q, k, v)), {}),
        TypeError,
        "float8_e4m3fn; expected a dense one",
    ),
    "sparse": (lambda q, k, v: ((q.to_sparse(), k, v), {}), TypeError, "sparse_coo"),
    "nested": (lambda q, k, v: ((nested(q, torch.strided), k, v), {}), TypeError, "nested tensor"),
    "jagged": (lambda q, k, v: ((q, nested(k, torch.jagged), v), {}), TypeError, "key is a nested tensor"),
    "nested mask": (
        lambda q, k, v: ((q, k, v), {"attn_mask": nested(q, torch.strided)}),
        TypeError,
        "mask is a nested",
    ),
    "bool tensors": (lambda q, k, v: ((q > 0, k > 0, v > 0), {}), TypeError, "torch.bool; expected a dense one"),
    "scale text": (lambda q, k, v: ((q, k, v), {"scale": "a"}), TypeError, "scale must be a number or None; got str"),
    "scale tensor": (lambda q, k, v: ((q, k, v), {"scale": torch.ones(())}), TypeError, "use float.scale."),
    "scale bool": (lambda q, k, v: ((q, k, v), {"scale": True}), TypeError, "got bool"),
    "scale nan": (lambda q, k, v: ((q, k, v), {"scale": float("nan")}), ValueError, "must be finite; got nan"),
    "scale inf": (lambda q, k, v: ((q, k, v), {"scale": -float("inf")}), ValueError, "must be finite; got -inf"),
    "mask device": (
        lambda q, k, v: ((q, k, v), {"attn_mask": torch.ones(70, 90, device="meta").bool()}),
        ValueError,
        "mask is on meta",
    ),
    "mask type": (lambda q, k, v: ((q, k, v), {"attn_mask": [1.0]}), TypeError, "got list"),
    "no tensor": (lambda q, k, v: ((None, k, v), {}), TypeError, "must be tensors; got NoneType"),
}


@pytest.mark.parametrize(("build", "error", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_bad_input_is_refused_with_what_to_do(build, error, message):
    arguments, options = build(*draw())
    with pytest.raises(error, match=message):
        sage_attention(*arguments, **options)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("grad", [False, True])
def test_a_scale_of_zero_weighs_all_keys_alike_and_a_negative_one_turns_the_order(recipe, grad):
    query, key, value = draw()
    query.requires_grad_(grad)
    uniform = sage_attention(query, key, value, scale=0, recipe=recipe, fallback="emulate")
    assert torch.allclose(uniform, value.mean(2, keepdim=True).expand_as(uniform), atol=0.05)
    negative = sage_attention(query, key, value, scale=-0.1, recipe=recipe, fallback="emulate")
    turned = sage_attention(-query, key, value, scale=0.1, recipe=recipe, fallback="emulate")
    assert torch.allclose(negative, turned, atol=1e-6)


@pytest.mark.parametrize("head_dim", [(8, 8), (12, 64), (64, 12), (257, 64)])
@pytest.mark.parametrize(
    ("recipe", "grad"),
    [
        *(("sage3", False), ("sage_bwd", True)),
        *(pytest.param(*one, marks=pytest.mark.audit) for one in (("sage3", True), ("sage_bwd", False))),
    ],
)
def test_an_unserved_head_dim_runs_exactly_with_gradients_and_a_log_message(recipe, head_dim, grad, caplog):
    inputs = [x.requires_grad_(grad) for x in draw(head_dim=head_dim[0], v_head_dim=head_dim[1])]
    with caplog.at_level(logging.WARNING):
        output = sage_attention(*inputs, recipe=recipe)
    assert torch.equal(output, F.scaled_dot_product_attention(*inputs))
    assert output.requires_grad == grad
    assert ("head_dim outside 16…256" in caplog.text) or (grad and "forward only" in caplog.text)
    torch.compiler.reset()
    compiled = torch.compile(lambda *x: sage_attention(*x, recipe=recipe), fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(*inputs), output, atol=1e-6)
    with pytest.raises(KernelUnavailableError):
        sage_attention(*inputs, recipe=recipe, fallback="error")


@pytest.mark.parametrize("sizes", [(0, 4, 70, 90), (2, 0, 70, 90), (2, 4, 0, 90), (2, 4, 70, 0)])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("grad", [False, True])
def test_calls_without_elements_keep_the_documented_shapes_and_dtypes(recipe, sizes, grad):
    batch, heads, q_len, kv_len = sizes
    query = torch.randn(batch, heads, q_len, 64, dtype=torch.bfloat16, requires_grad=grad)
    key = torch.randn(batch, heads // 2, kv_len, 64, dtype=torch.bfloat16)
    value = torch.randn(batch, heads // 2, kv_len, 32, dtype=torch.bfloat16)
    masks = (None, torch.ones(kv_len, dtype=torch.bool), torch.zeros(q_len, kv_len))
    for mask in masks:
        for fallback in ("native", "emulate"):
            options = {"attn_mask": mask, "enable_gqa": True, "recipe": recipe, "fallback": fallback}
            output, lse = sage_attention(query, key, value, return_lse=True, **options)
            assert (output.shape, output.dtype) == ((batch, heads, q_len, 32), torch.bfloat16)
            assert (lse.shape, lse.dtype) == ((batch, heads, q_len), torch.float32)
            assert not output.any()
            assert (lse == -torch.inf).all()
            assert output.requires_grad == grad
            if grad:
                (gradient,) = torch.autograd.grad(output.sum(), query)
                assert not gradient.any()


def test_exact_takes_every_head_dim_pytorch_takes():
    inputs = draw(head_dim=8, v_head_dim=300)
    assert torch.equal(sage_attention(*inputs, recipe="exact"), F.scaled_dot_product_attention(*inputs))


@pytest.mark.parametrize("recipe", ["exact", "sage2", "sage_bwd"])
@pytest.mark.parametrize("grad", [False, True])
def test_dropout_runs_exactly_with_gradients_and_a_log_message(recipe, grad, caplog):
    inputs = [x.requires_grad_(grad) for x in draw()]
    for _ in range(3):
        torch.manual_seed(3)
        expected = F.scaled_dot_product_attention(*inputs, dropout_p=0.4)
        torch.manual_seed(3)
        with caplog.at_level(logging.WARNING):
            output = sage_attention(*inputs, dropout_p=0.4, recipe=recipe)
        assert torch.equal(output, expected) and output.requires_grad == grad
    assert ("attention dropout" in caplog.text) == (recipe != "exact")
    if recipe != "exact":
        with pytest.raises(KernelUnavailableError, match="attention dropout"):
            sage_attention(*inputs, dropout_p=0.4, recipe=recipe, fallback="error")


LEADING = {
    "none": ((), (), {}),
    "heads": ((4,), (4,), {}),
    "grouped heads": ((4,), (2,), {"enable_gqa": True}),
    "mask of heads": (
        (4,),
        (4,),
        {"attn_mask": torch.rand(4, 1, 90, generator=torch.Generator().manual_seed(1)) < 0.5},
    ),
    "one head of queries": ((1,), (4,), {}),
    "two batches": ((2, 3, 4), (2, 3, 4), {"is_causal": True}),
    "batches of one": ((1, 3, 4), (2, 1, 4), {}),
    "mask of batches": (
        (2, 3, 4),
        (2, 3, 4),
        {"attn_mask": torch.rand(3, 1, 1, 90, generator=torch.Generator().manual_seed(1)) < 0.5},
    ),
    "mask of two batches": (
        (2, 3, 4),
        (2, 3, 4),
        {"attn_mask": torch.randn(2, 1, 4, 70, 90, generator=torch.Generator().manual_seed(1))},
    ),
}


@pytest.mark.parametrize("recipe", ["exact", "sage2"])
@pytest.mark.parametrize("name", LEADING)
def test_tensors_of_any_leading_dimensions_are_served(name, recipe):
    leading, kv_leading, options = LEADING[name]
    generator = torch.Generator().manual_seed(0)
    sizes = (*leading, 70, 64), (*kv_leading, 90, 64), (*kv_leading, 90, 32)
    query, key, value = (torch.randn(size, generator=generator) for size in sizes)
    expected = F.scaled_dot_product_attention(query, key, value, **options)
    output, lse = sage_attention(query, key, value, recipe=recipe, return_lse=True, **options)
    assert output.shape == expected.shape and lse.shape == expected.shape[:-1]
    if recipe == "exact":
        torch.testing.assert_close(output, expected)
    elif len(leading) == 3:  # the same as one batch after the other
        masks = options.pop("attn_mask", torch.ones((), dtype=torch.bool)).expand(2, 3, 4, 70, 90)
        masks = [None] * 2 if name in ("two batches", "batches of one") else masks
        parts = zip(*(x.expand(2, 3, *x.shape[2:]) for x in (query, key, value)), masks, strict=True)
        one_by_one = torch.stack([sage_attention(*part, recipe=recipe, **options) for part in parts])
        torch.testing.assert_close(output, one_by_one)
    else:
        four = (x[(None,) * (4 - x.dim())] for x in (query, key, value))
        assert torch.equal(output, sage_attention(*four, recipe=recipe, **options).view(expected.shape))


def test_it_may_stand_in_the_place_of_pytorchs_function(monkeypatch):
    """Exact calls must neither call it again nor compute another recipe."""
    inputs, mask = draw(), MASKS["bool"]["attn_mask"]
    layer = torch.nn.MultiheadAttention(64, 4, dropout=0.2, batch_first=True)
    x, exactly = torch.randn(2, 70, 64), F.scaled_dot_product_attention
    with torch.no_grad():
        expected = layer.eval()(x, x, x, need_weights=False)[0]
    monkeypatch.setattr(F, "scaled_dot_product_attention", sage_attention)
    for _ in range(3):
        assert torch.equal(F.scaled_dot_product_attention(*inputs, recipe="exact"), exactly(*inputs))
        assert torch.equal(
            F.scaled_dot_product_attention(*inputs, mask, recipe="exact"), exactly(*inputs, attn_mask=mask)
        )
        few = [x[:, :, :8] for x in inputs]
        assert torch.equal(F.scaled_dot_product_attention(*few), exactly(*few))  # too short for low bits
        found = F.scaled_dot_product_attention(query=inputs[0], key=inputs[1], value=inputs[2], scale=0.2)
        assert torch.equal(found, sage_attention(*inputs, scale=0.2, recipe="sage3"))
        assert not torch.equal(found, exactly(*inputs, scale=0.2))
    output = layer.train()(x, x, x, need_weights=False)[0]
    assert output.requires_grad and not torch.equal(output, expected)
    torch.testing.assert_close(layer.eval()(x, x, x, need_weights=False)[0], expected)


IN_A_PROCESS = """
import torch
torch.set_default_device("meta")
torch.set_default_dtype(torch.float64)
import sage_hf
from sage_kernels.formats import nvfp4
from sage_kernels.spec.layout import heavy_order

device = {"device": "cpu"}
generator = torch.Generator("cpu").manual_seed(0)
query, key, value = (torch.randn(1, 1, 140, 32, generator=generator, dtype=torch.float32, **device) for _ in range(3))
blocks = sage_hf.BlockList.of_kept(torch.ones(1, 1, 2, 2, dtype=torch.bool, **device))

def results():
    options = [{"recipe": name, "fallback": "emulate"} for name in ("sage3", "sage2")]
    options += [{"recipe": "sage2", "blocks": blocks}, {"recipe": "exact", "blocks": blocks, "is_causal": True}]
    outputs = [sage_hf.sage_attention(query, key, value, **one) for one in options]
    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    outputs += torch.autograd.grad(sage_hf.sage_attention(*inputs, recipe="sage_bwd").sum(), inputs)
    return [*outputs, heavy_order(64), nvfp4.search_table((-1, 1), torch.device("cpu"))]

first = results()
torch.set_default_device(None)
torch.set_default_dtype(torch.float32)
print(all(torch.equal(x, y) for x, y in zip(first, results(), strict=True)))
"""


def test_the_default_device_and_dtype_decide_nothing(forks):
    assert forks.run(IN_A_PROCESS).strip() == "True"
