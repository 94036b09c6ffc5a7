"""Heavy keys in Triton's kernels: errors are the reference's, and with a sink much smaller than without them."""

from dataclasses import replace

import pytest
import torch

from sage_kernels import attention
from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.runtime.toolchain import triton_version
from sage_kernels.spec.layout import Lengths
from sage_kernels.spec.recipe import RECIPES
from sage_kernels.triton.registration import nvfp4_unsupported
from tests.helpers.calls import new_call
from tests.helpers.judge import lse_tolerance
from tests.helpers.pairwise import pairwise
from tests.helpers.sinks import sink
from tests.helpers.triton_calls import attend

KEYS = 64
FORWARD_ONLY = ("sage1", "sage2", "sage3", "sage3_paper")
CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def run(inputs, recipe, **options):
    if recipe.pv == "fp8" and CAPABILITY < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9 or newer")
    native = recipe.qk == "nvfp4" and not nvfp4_unsupported(CAPABILITY, triton_version())
    return attend(new_call(*inputs, recipe, return_lse=True, **options), CAPABILITY, native)


def check(inputs, name, result=None, **options):
    """Assert the error of the kernel, or of that (output, lse), to be the reference's; return the relative error.

    `name` may be a recipe.
    """
    query, key, value = inputs
    recipe = replace(RECIPES[name], heavy_keys=KEYS) if isinstance(name, str) else name
    output, lse = run(inputs, recipe, **options) if result is None else result
    expected, expected_lse = reference.attention(*inputs, recipe, **options)
    truth, _ = sdpa.attention(*inputs, **options)

    def per_head(x):
        return x.double().abs().sum((-2, -1))

    size = per_head(truth)
    # Of the output's dtype, and of float32 sums.
    rounding = torch.finfo(query.dtype).eps * size + 2**-18 * truth[0, 0].numel() * value.double().abs().amax()
    assert (per_head(output - expected) <= per_head(expected - truth) + rounding).all()
    assert per_head(output - truth).sum() <= 1.05 * per_head(expected - truth).sum() + 2**-20 * size.sum()
    assert torch.equal(lse == -torch.inf, expected_lse == -torch.inf)
    finite = expected_lse > -torch.inf
    assert ((lse - expected_lse)[finite].abs() <= lse_tolerance(query, key, options.get("mask"))).all()
    assert not output[~finite].any()
    return (per_head(output - truth).sum() / size.sum()).item()


def draw(device, dtype, q_len, kv_len, head_dim=64, v_head_dim=64, batch=2, q_heads=4, kv_heads=2):
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((q_heads, q_len, head_dim), (kv_heads, kv_len, head_dim), (kv_heads, kv_len, v_head_dim))
    return [
        (
            torch.randn(batch, *shape, device=device, generator=generator)
            + torch.randn(shape[-1], device=device, generator=generator)
        ).to(dtype)
        for shape in shapes
    ]


@pytest.mark.parametrize(
    ("recipe", "head_dim", "dtype"), pairwise(FORWARD_ONLY, [64, 128], [torch.bfloat16, torch.float16, torch.float32])
)
def test_with_a_sink_the_error_is_the_references_and_a_fifth_of_that_without(recipe, head_dim, dtype, device):
    inputs = [x.to(device, dtype) for x in sink(256, 8192, head_dim, heads=2)]
    error = check(inputs, recipe)
    truth, _ = sdpa.attention(*inputs)
    without, _ = reference.attention(*inputs, replace(RECIPES[recipe], heavy_keys=0))
    times = 2 if recipe == "sage1" else 5  # P in float16 loses less of the others
    output_rounding = torch.finfo(dtype).eps
    assert times * error <= (without - truth).abs().sum() / truth.abs().sum() + times * output_rounding
    check([x.to(device, dtype) for x in sink(1000, 1000, head_dim, heads=2)], recipe, is_causal=True)


@pytest.mark.parametrize(
    ("recipe", "at", "dtype"), pairwise(FORWARD_ONLY, [64, 4000, 8099], [torch.bfloat16, torch.float32])
)
def test_a_sink_anywhere_is_like_one_at_the_front(recipe, at, dtype, device):
    recipe = replace(RECIPES[recipe], heavy_keys=KEYS, heavy_choice="heaviest")
    inputs = [x.to(device, dtype) for x in sink(256, 8100, 64, heads=2, at=at)]
    error = check(inputs, recipe)
    front = [x.index_select(2, torch.arange(8100, device=device).roll(-at)) for x in inputs[1:]]
    assert error <= 1.1 * check((inputs[0], *front), recipe)
    hidden = torch.ones(1, 1, 1, 8100, dtype=torch.bool, device=device)
    hidden[..., at] = False
    check(inputs, recipe, mask=hidden)


@pytest.mark.parametrize("recipe", ["sage1", "sage2", "sage3"])
@pytest.mark.parametrize("at", [0, 64, 1000, 4095])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernels_that_are_chosen_attend_to_a_sink_anywhere(recipe, at, dtype, device):
    """The registry chooses them, with quantisers in CUDA where the GPU has these."""
    query, key, value = (x.to(device, dtype) for x in sink(512, 4096, 128, heads=4, at=at))
    key, value = key[:, ::2].contiguous(), value[:, ::2].contiguous()
    output, _ = attention(query, key, value, recipe=recipe, fallback="emulate")
    expected, _ = reference.attention(query, key, value, RECIPES[recipe])
    truth, _ = sdpa.attention(query, key, value)
    rounding = torch.finfo(dtype).eps * truth.abs().sum()
    assert (output - truth).abs().sum() <= 1.1 * (expected - truth).abs().sum() + rounding


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("recipe", "kind", "size"),
    pairwise(
        FORWARD_ONLY,
        ["none", "causal", "keys", "bool", "additive", "padding"],
        [  # head_dim, V's, dtype
            (64, 64, torch.bfloat16),
            (32, 32, torch.bfloat16),
            (16, 24, torch.float16),
            (80, 40, torch.float32),
            (256, 144, torch.float16),
            (16, 256, torch.float32),
        ],
    ),
)
def test_masks_and_sizes(recipe, kind, size, device):
    head_dim, v_head_dim, dtype = size
    for q_len, kv_len in ((150, 65), (70, 64), (300, 700)):
        query, key, value = draw(device, dtype, q_len, kv_len, head_dim, v_head_dim)
        generator = torch.Generator(device).manual_seed(1)
        mask = None
        if kind == "keys":
            mask = torch.rand(2, 1, 1, kv_len, device=device, generator=generator) < 0.7
        elif kind == "bool":
            mask = torch.rand(2, 4, q_len, kv_len, device=device, generator=generator) < 0.5
            mask[:, :, 3], mask[:, :, 4, :KEYS], mask[:, :, 5, KEYS:] = False, False, False
        elif kind == "additive":
            mask = torch.randn(1, 1, q_len, kv_len, device=device, generator=generator).to(dtype)
            mask = mask.masked_fill(torch.rand(mask.shape, device=device, generator=generator) < 0.5, -torch.inf)
        elif kind == "padding":
            mask = torch.zeros(2, 1, 1, kv_len, device=device, dtype=dtype)
            mask[0, ..., :3], mask[1, ..., -1:] = -2e4, -2e4
            key[0, :, :3], value[0, :, :3] = torch.nan, torch.inf
        if kind != "padding":
            check((query, key, value), recipe, mask=mask, is_causal=kind == "causal")
            continue
        output, lse = run((query, key, value), replace(RECIPES[recipe], heavy_keys=KEYS), mask=mask)
        key[0, :, :3], value[0, :, :3] = 0, 0
        check((query, key, value), recipe, mask=mask)
        clean = run((query, key, value), replace(RECIPES[recipe], heavy_keys=KEYS), mask=mask)
        assert torch.equal(output, clean[0])
        assert torch.equal(lse, clean[1])


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("recipe", "is_causal", "dtype"), pairwise(FORWARD_ONLY, [False, True], [torch.bfloat16, torch.float32])
)
def test_packed_sequences_may_be_shorter_than_the_heavy_keys(recipe, is_causal, dtype, device):
    # Of longer ones the reference of each alone has late keys, as all packed ones do with causality.
    q_lengths, kv_lengths, used = (3, 200, 700, 5, 64, 6), (10, 100, 900, 30, 130, 9), (10, 48, 850, 0, 130, 9)
    starts = [
        torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device) for lengths in (q_lengths, kv_lengths)
    ]
    lengths = Lengths(*starts, 700, 900, torch.tensor(used, dtype=torch.int32, device=device))
    inputs = draw(device, dtype, sum(q_lengths), sum(kv_lengths), batch=1)
    inputs[1][:, :, 74:110] = torch.nan  # not used
    output, lse = run(inputs, replace(RECIPES[recipe], heavy_keys=KEYS), lengths=lengths, is_causal=is_causal)
    for index, count in enumerate(used):
        rows = slice(int(starts[0][index]), int(starts[0][index + 1]))
        columns = slice(int(starts[1][index]), int(starts[1][index]) + count)
        alone = (inputs[0][:, :, rows], inputs[1][:, :, columns], inputs[2][:, :, columns])
        if count > KEYS:
            check(alone, recipe, (output[:, :, rows], lse[:, :, rows]), is_causal=is_causal)
            continue
        # All its keys are heavy: what differs from exact attention are roundings to the inputs' dtype.
        truth, true_lse = sdpa.attention(*alone, is_causal=is_causal)
        eps = 2 * torch.finfo(dtype).eps if dtype != torch.float32 else 1e-5
        assert (output[:, :, rows] - truth).abs().max() <= eps * inputs[2].double().nan_to_num().abs().max()
        # K without its mean, at most twice as long, is rounded by eps/4 of itself; a score is its product with Q.
        query_norm, key_norm = (x.double().norm(dim=-1).amax() if x.numel() else 0.0 for x in alone[:2])
        moved = eps / 2 * query_norm * key_norm * alone[0].shape[-1] ** -0.5
        assert torch.allclose(lse[:, :, rows].double(), true_lse.double(), atol=float(1e-4 + moved))
