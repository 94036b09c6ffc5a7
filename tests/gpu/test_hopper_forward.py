"""The CUDA kernel of the INT8 recipes for Hopper, on the operands that the Triton kernel gets too."""

import random

import pytest
import torch

from sage_hf import record, sage_attention
from sage_kernels.cuda import int8_forward as hopper
from sage_kernels.exact import sdpa
from sage_kernels.spec.recipe import RECIPES
from sage_kernels.triton import int8_forward
from sage_kernels.triton.common.padding import key_padding
from sage_kernels.triton.forward_mask import ForwardMask
from tests.helpers import calls, triton_calls
from tests.helpers.judge import Error, judge, lse_tolerance
from tests.helpers.layouts import lay_out
from tests.helpers.pairwise import pairwise
from tests.helpers.random_calls import HEADS as HEAD_COUNTS
from tests.helpers.random_calls import LENGTHS, draw_layouts, spread

# (batch, q_heads, kv_heads, q_len, kv_len)
SIZES = (
    (1, 1, 1, 64, 96),
    (1, 1, 1, 1, 1),
    (1, 2, 1, 63, 65),
    (2, 4, 2, 300, 500),
    (1, 2, 2, 193, 97),
    (2, 2, 2, 1000, 1000),
    (1, 6, 2, 700, 64),
    (1, 3, 1, 129, 4113),
    (1, 2, 2, 2000, 9000),
    (2, 24, 8, 1500, 700),  # several items a multiprocessor, even and odd numbers of tiles
    (2, 24, 8, 1500, 800),
)
CAUSAL = ((False, 0), (True, 0), (True, 37), (True, -100), (True, -5000))
# What exists of 1 … kv_len keys: left, right and both of it, holes, one for each batch element, nothing.
VALID = (
    lambda index, draw: index >= len(index) // 3,
    lambda index, draw: index < len(index) * 2 // 3,
    lambda index, draw: (index > 130) & (index < 400),
    lambda index, draw: draw(len(index)) < 0.5,
    lambda index, draw: torch.stack([index >= len(index) // 2, index < 70 if len(index) > 70 else index < 0]),
    lambda index, draw: index < 0,
)
HEADS = ((128, 128, torch.bfloat16), (64, 64, torch.float16), (80, 120, torch.float16))
SAGE1, SAGE2 = RECIPES["sage1"], RECIPES["sage2"]
OF_CALL = hopper.Int8ForwardConfig.of_call


pytestmark = pytest.mark.usefixtures("needs_hopper")


class Operands:
    """Q, K and V, both with means, and what the quantisers make of them."""

    def __init__(self, sizes, head_dim, v_head_dim, dtype, recipe=SAGE2, return_lse=True):
        self.recipe = recipe
        batch, q_heads, kv_heads, self.q_len, self.kv_len = sizes
        generator = torch.Generator("cuda").manual_seed(sum(sizes))

        def draw(heads, tokens, channels):
            x = torch.randn(batch, heads, tokens, channels, generator=generator, device="cuda")
            return x + torch.randn(1, heads, 1, channels, generator=generator, device="cuda")

        self.key_mask = self.padding = None
        self.query = draw(q_heads, self.q_len, head_dim).to(dtype)
        self.key = draw(kv_heads, self.kv_len, head_dim).to(dtype)
        self.value = draw(kv_heads, self.kv_len, v_head_dim).to(dtype)
        self.return_lse = return_lse

    def call(self, **options):
        inputs = self.query, self.key, self.value
        return calls.new_call(*inputs, self.recipe, key_mask=self.key_mask, return_lse=self.return_lse, **options)

    def quantize(self, key_mask=None):
        """Quantise for calls without and with causality, because their heavy keys differ."""
        self.key_mask, self.padding = key_mask, None if key_mask is None else key_padding(key_mask)
        made = [self.call(is_causal=is_causal) for is_causal in (False, True)]
        self.quantized = [triton_calls.quantize(call, key_mask) for call in made]
        return self

    def attend(self, kernel, is_causal=False, causal_offset=0):
        """(output, lse), in memory that held NaN."""
        shape = (self.query.shape[0], self.q_len, self.query.shape[1], self.value.shape[3])
        output = self.query.new_full(shape, torch.nan).transpose(1, 2)
        lse = self.query.new_full(output.shape[:3], torch.nan, dtype=torch.float32) if self.return_lse else None
        call = self.call(is_causal=is_causal, causal_offset=causal_offset).for_kernel()
        operands = self.quantized[is_causal]
        if kernel is hopper:
            hopper.forward(operands, output, lse, call, hopper.Int8ForwardConfig.of_call(call), self.padding)
        else:
            mask = ForwardMask() if self.padding is None else ForwardMask.of_padding(self.padding)
            int8_forward.forward(operands, output, lse, call, (9, 0), mask)
        return output, lse


def error(x, truth):
    return (x.double() - truth).abs().sum().item()


@pytest.mark.parametrize(("recipe", "sizes", "heads"), pairwise(("sage1", "sage2"), SIZES, HEADS))
def test_it_is_as_accurate_as_the_portable_kernel(recipe, sizes, heads):
    operands = Operands(sizes, *heads, RECIPES[recipe]).quantize()
    for is_causal, offset in CAUSAL:
        assert_as_accurate(operands, is_causal, offset)


@pytest.mark.parametrize(
    ("recipe", "sizes", "heads"),
    pairwise(("sage1", "sage2"), [size for size in SIZES if size[0] <= 2 and size[4] > 1], HEADS),
)
def test_it_is_as_accurate_where_keys_do_not_exist(recipe, sizes, heads):
    operands = Operands(sizes, *heads, RECIPES[recipe])
    index = torch.arange(operands.kv_len, device="cuda")
    generator = torch.Generator("cuda").manual_seed(0)
    for which in VALID:
        key_mask = which(index, lambda size: torch.rand(size, generator=generator, device="cuda"))
        key_mask = (key_mask if key_mask.dim() == 2 else key_mask[None])[: sizes[0]]
        operands.quantize(key_mask)
        for is_causal, offset in CAUSAL:
            assert_as_accurate(operands, is_causal, offset, key_mask[:, None, None])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("recipe", (SAGE1, SAGE2), ids=lambda recipe: recipe.name)
def test_warpgroups_leave_any_number_of_an_items_tiles(recipe, head_dim):
    operands = Operands((1, 2, 1, 200, 700), head_dim, head_dim, torch.bfloat16, recipe).quantize()
    for offset in range(-200, 700, 24):
        assert_as_accurate(operands, True, offset)


def assert_as_accurate(operands, is_causal, offset, mask=None):
    output, lse = operands.attend(hopper, is_causal, offset)
    expected, expected_lse = operands.attend(int8_forward, is_causal, offset)
    inputs = operands.query, operands.key, operands.value
    truth, _ = sdpa.attention(*inputs, mask=mask, is_causal=is_causal, causal_offset=offset)
    assert output.isfinite().all()
    # Weights are relative to another power of two, so that they round otherwise; as far, on average.
    rounding = torch.finfo(output.dtype).eps * truth.abs().sum().item()
    assert error(output, truth) <= 1.05 * error(expected, truth) + rounding
    assert error(output, expected.double()) <= 2**0.5 * error(expected, truth) + rounding
    assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
    assert torch.equal((output == 0).all(-1), (expected == 0).all(-1))
    finite = expected_lse > -torch.inf
    assert ((lse - expected_lse)[finite].abs() <= lse_tolerance(*inputs[:2])).all()


@pytest.mark.parametrize("head_dim", (64, 128))
def test_a_mean_of_v_does_not_add_up_in_the_matrix_units(head_dim):
    """Their sums keep few bits, so sums of many keys move to float32."""
    operands = Operands((1, 2, 2, 384, 60_000), head_dim, head_dim, torch.bfloat16)
    # As much of a mean as smoothing leaves.
    operands.value = torch.randn_like(operands.value) + 0.05
    truth, _ = sdpa.attention(operands.query, operands.key, operands.value)
    operands.quantize()
    found, expected = (error(operands.attend(kernel)[0], truth) for kernel in (hopper, int8_forward))
    assert found <= 1.05 * expected


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("recipe", (SAGE1, SAGE2), ids=lambda recipe: recipe.name)
def test_a_nan_spoils_the_rows_that_see_it_and_no_others(recipe, head_dim):
    """Nor those of the blocks' later items, of which there are several here, with sums that move to float32."""
    operands = Operands((4, 16, 4, 1000, 5000), head_dim, head_dim, torch.bfloat16, recipe)
    operands.query[:, ::3, 50:800:7] = torch.nan
    operands.key[1, 0, 333, 7] = torch.nan
    operands.quantize()
    for is_causal in (False, True):
        (output, lse), (expected, expected_lse) = (operands.attend(x, is_causal) for x in (hopper, int8_forward))
        assert torch.equal(output.isnan(), expected.isnan())
        assert torch.equal(lse.isnan(), expected_lse.isnan())


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("recipe", (SAGE1, SAGE2), ids=lambda recipe: recipe.name)
def test_what_shared_memory_held_does_not_matter(recipe, head_dim):
    """Rows behind the last query are attended for with what scales happen to be there."""
    operands = Operands((2, 16, 4, 5000, 5000), head_dim, head_dim, torch.bfloat16, recipe, return_lse=False).quantize()
    expected, _ = operands.attend(int8_forward, True)
    for _ in range(10):
        inputs = operands.query, operands.key, operands.value
        with_nan_left = [torch.full_like(x, torch.nan) for x in inputs]
        sage_attention(*with_nan_left, recipe=recipe.name, enable_gqa=True)
        output = sage_attention(*inputs, is_causal=True, recipe=recipe.name, enable_gqa=True)
        assert output.isfinite().all()
        assert error(output, expected.double()) <= 0.05 * expected.double().abs().sum().item()


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("heads", (3, 17, 24))
@pytest.mark.parametrize("recipe", (SAGE1, SAGE2), ids=lambda recipe: recipe.name)
def test_rows_do_not_depend_on_the_parts_of_the_last_items(monkeypatch, recipe, heads, head_dim):
    """Take a round that is not full, or the only one; a head's last item has fewer rows."""
    operands = Operands((1, heads, 1, 1000, 700), head_dim, head_dim, torch.bfloat16, recipe, return_lse=False)
    operands.quantize()
    output, _ = operands.attend(hopper)
    monkeypatch.setattr(hopper, "last_parts", lambda *_: 1)
    whole, _ = operands.attend(hopper)
    assert torch.equal(output, whole)


@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("recipe", (SAGE1, SAGE2), ids=lambda recipe: recipe.name)
def test_rows_do_not_depend_on_how_many_heads_are_worked_through_together(monkeypatch, recipe, head_dim):
    """Take groups of one head, groups of which the last has fewer, and all heads at once."""
    operands = Operands((2, 12, 3, 2500, 2300), head_dim, head_dim, torch.bfloat16, recipe, return_lse=False)
    operands.quantize()
    expected, _ = operands.attend(hopper, True)
    for heads in (1, 5, 24, 100):
        monkeypatch.setattr(hopper, "heads_at_once", lambda *_, heads=heads: heads)
        output, _ = operands.attend(hopper, True)
        assert torch.equal(output, expected)


@pytest.mark.parametrize("recipe", (SAGE1, SAGE2), ids=lambda recipe: recipe.name)
def test_reruns_streams_and_graphs_give_the_same_bits(recipe):
    operands = Operands((2, 4, 2, 1000, 3000), 128, 128, torch.bfloat16, recipe, return_lse=False).quantize()
    expected, _ = operands.attend(hopper)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    outputs = []
    for stream in streams * 8:
        with torch.cuda.stream(stream):
            outputs.append(operands.attend(hopper)[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured, _ = operands.attend(hopper)
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(x, expected) for x in (*outputs, captured))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_it_quantises_queries_as_the_quantiser_does(dtype, monkeypatch):
    """Also those that have just been written, with the same bits in each rerun."""
    choose = random.Random(0)
    for index, (batch, q_heads, kv_heads, q_len, kv_len) in enumerate((*SIZES, (2, 40, 8, 3000, 3000))):
        for head_dim, v_head_dim in ((64, 64), (128, 128), (40, 56), (80, 128)):
            generator = torch.Generator("cuda").manual_seed(index)

            def draw(heads, tokens, channels, batch=batch, generator=generator):
                x = torch.randn(batch, heads, tokens, channels, generator=generator, device="cuda", dtype=dtype)
                return lay_out(x, choose.choice(("contiguous", "tokens first", "packed")))

            query = draw(q_heads, q_len, head_dim)
            key, value = draw(kv_heads, kv_len, head_dim), draw(kv_heads, kv_len, v_head_dim)
            changed = query * torch.logspace(-3, 2, head_dim, device="cuda", dtype=dtype)
            changed[:, 0, q_len // 2, 3], changed[:, -1, 0] = torch.nan, 0.0
            queries = query.clone(), changed
            with monkeypatch.context() as patched:
                patched.setattr(hopper.Int8ForwardConfig, "of_call", lambda call, _: OF_CALL(call))
                expected = [attend(x, key, value) for x in queries]
            outputs = []
            for x, output in zip(3 * queries, 3 * expected, strict=True):
                query.copy_(x)
                outputs.append(attend(query, key, value).nan_to_num(9.0))
                # The heavy keys' scores are summed in another order: each of head_dim additions in float32 may lose
                # 2⁻²³ of the sum of magnitudes. An output moves by twice as much of V, and then is rounded.
                magnitudes = (x.abs().amax((0, 1, 2)).nan_to_num(0.0) * key.abs().amax((0, 1, 2))).sum().item()
                moved = 2 * head_dim**0.5 * 2**-23 * magnitudes * value.abs().max().item()
                rounding = torch.finfo(dtype).eps
                torch.testing.assert_close(outputs[-1], output.nan_to_num(9.0), rtol=rounding, atol=moved)
            assert all(torch.equal(x, y) for x, y in zip(outputs[:2] * 2, outputs[2:], strict=True))


def attend(query, key, value):
    return sage_attention(query, key, value, recipe="sage2", enable_gqa=True)


def test_queries_quantised_by_the_kernel_follow_each_replay_and_stream():
    inputs = [torch.randn(2, 8, 3000, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    draws = [torch.randn_like(inputs[0]) for _ in range(4)]
    expected = [attend(x, *inputs[1:]) for x in draws]
    streams = [torch.cuda.Stream() for _ in draws]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(*inputs)
    for _ in range(5):
        outputs = []
        for stream, x in zip(streams, draws, strict=True):
            with torch.cuda.stream(stream):
                outputs.append(attend(x, *inputs[1:]))
        torch.cuda.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(outputs, expected, strict=True))
        for x, output in zip(draws, expected, strict=True):
            inputs[0].copy_(x)
            graph.replay()
            assert torch.equal(captured, output)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("group", range(20))
@pytest.mark.parametrize("forms", [3, pytest.param(500, marks=pytest.mark.audit)])
def test_ten_thousand_random_requests(group, forms, monkeypatch):
    """Calls of a form share layouts, heads, head dimensions, recipe and whether the LSE is wanted."""
    choose = random.Random(group)
    ways = OF_CALL, lambda call, _: OF_CALL(call)
    dtype = choose.choice((torch.float16, torch.bfloat16))
    errors = {(recipe, return_lse): Error() for recipe in ("sage1", "sage2") for return_lse in (False, True)}
    all_dims = ((64, 64), (128, 128), (40, 56), (80, 128), (96, 96))
    shared = [spread(choose, values, forms) for values in (HEAD_COUNTS, all_dims, list(errors))]
    drawn = list(zip(draw_layouts(choose, 3, forms), *shared, strict=True))
    for index in range(500):
        generator = torch.Generator("cuda").manual_seed(500 * group + index)
        layouts, (batch, q_heads, kv_heads), (head_dim, v_head_dim), (recipe, return_lse) = drawn[index % forms]
        q_len, kv_len = (choose.choice((choose.choice(LENGTHS), choose.randint(1, 900))) for _ in range(2))
        sizes = (q_heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, v_head_dim)
        inputs = []
        for (heads, tokens, channels), layout in zip(sizes, layouts, strict=True):
            x = torch.randn(batch, heads, tokens, channels, generator=generator, device="cuda")
            mean = torch.randn(channels, generator=generator, device="cuda")
            inputs.append(lay_out((x + mean).to(dtype), layout))
        call = {"is_causal": choose.random() < 0.5, "scale": choose.choice((None, None, 0.2, -0.1))}
        if not call["is_causal"] and choose.random() < 0.5:
            sparse = torch.rand(batch, 1, 1, kv_len, generator=generator, device="cuda") < choose.random()
            first = (torch.arange(kv_len, device="cuda") < choose.randint(0, kv_len)).view(1, 1, 1, -1)
            call["mask"] = choose.choice((sparse, first))
        monkeypatch.setattr(hopper.Int8ForwardConfig, "of_call", choose.choice(ways))
        try:
            errors[recipe, return_lse] += judge(*inputs, recipe, return_lse=return_lse, **call)
        except AssertionError as failure:
            sizes = (batch, q_heads, kv_heads, q_len, kv_len, head_dim, v_head_dim)
            raise AssertionError(f"{group}, {index}: {sizes}, {call}, {recipe}, {return_lse}") from failure
    for found in errors.values():
        found.assert_as_small_as_the_references()


@pytest.mark.parametrize("recipe", ("sage1", "sage2", "sage_bwd"))
def test_a_call_selects_it(recipe):
    draw = torch.randn(3, 1, 2, 9000, 64, device="cuda", dtype=torch.float16, requires_grad=recipe == "sage_bwd")
    layer = torch.nn.Identity()
    output = record.run_in_layer(layer, sage_attention, *draw, recipe=recipe)
    assert [plan.kernel for plan in record.last_plans(layer)] == ["int8_forward_hopper"]
    truth, _ = sdpa.attention(*draw)
    assert error(output, truth) <= 0.045 * truth.abs().sum().item()
