"""The NVFP4 forward kernel in Triton's interpreter, emulated, against its recipe and float64."""

from dataclasses import replace

import pytest
import torch

from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.spec.layout import Lengths
from sage_kernels.spec.recipe import get_recipe
from sage_kernels.triton import nvfp4_forward
from sage_kernels.triton.common.launch import recording
from sage_kernels.triton.configs import TileConfig
from sage_kernels.triton.smooth_q_scores import smooth_q_scores
from tests.helpers.calls import new_call
from tests.helpers.triton_calls import attend, quantize

HOPPER = (9, 0)
# Without the search for scales, which the forward kernel knows nothing of, and which the interpreter is slow at.
RECIPES = {name: replace(get_recipe(name), scale_steps=(), key_scale_steps=()) for name in ("sage3", "sage3_paper")}
RECIPES["first keys"] = replace(RECIPES["sage3"], heavy_choice="first")
# Rounding of float32 and of the output aside, kernel and reference differ by sums in another order, which move single
# elements of P across a rounding boundary: their errors against float64 agree to a few percent.
RATIO = 1.05


def random_inputs(
    q_len, kv_len, *, batch=1, q_heads=1, kv_heads=1, head_dim=64, v_head_dim=None, dtype=torch.float16, seed=0
):
    generator = torch.Generator().manual_seed(seed)

    def random(heads, tokens, channels, bias):
        mean = torch.randn(batch, heads, 1, channels, generator=generator) * bias
        return (torch.randn(batch, heads, tokens, channels, generator=generator) + mean).to(dtype)

    return (
        random(q_heads, q_len, head_dim, 1),
        random(kv_heads, kv_len, head_dim, 2),
        random(kv_heads, kv_len, v_head_dim or head_dim, 1),
    )


def run(query, key, value, recipe="sage3", capability=HOPPER, **options):
    return attend(new_call(query, key, value, RECIPES[recipe], return_lse=True, **options), capability)


def relative_error(output, expected):
    return ((output.double() - expected).abs().sum() / expected.abs().sum()).item()


def check(query, key, value, recipe="sage3", capability=HOPPER, **options):
    """Error ≤ RATIO × the recipe's own against float64, and the same LSE."""
    output, lse = run(query, key, value, recipe, capability, **options)
    assert output.shape == (*query.shape[:3], value.shape[3]) and output.dtype == query.dtype
    block_n = nvfp4_forward.nvfp4_forward_config(capability, 64, False).block_n
    expected, expected_lse = reference.attention(query, key, value, RECIPES[recipe], block_n=block_n, **options)
    true, _ = sdpa.attention(query, key, value, **options)
    assert relative_error(output, true) <= RATIO * relative_error(expected, true)
    # float32 exp2 and log2 of sums of up to 2^10 terms.
    torch.testing.assert_close(lse, expected_lse, rtol=2e-6, atol=2e-5)
    return output


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"q_len": 200, "kv_len": 300, "head_dim": 128}, {}),
        ({"q_len": 1, "kv_len": 131, "head_dim": 40, "v_head_dim": 96}, {}),
        ({"q_len": 70, "kv_len": 1, "head_dim": 96, "v_head_dim": 16}, {}),
        ({"q_len": 130, "kv_len": 260, "dtype": torch.bfloat16}, {}),
        ({"q_len": 130, "kv_len": 260, "kv_heads": 2}, {"recipe": "sage3_paper"}),
        ({"q_len": 40, "kv_len": 140, "q_heads": 4, "kv_heads": 2}, {}),
        ({"q_len": 60, "kv_len": 100, "q_heads": 1}, {"scale": -0.2}),
        *(
            pytest.param(*case, marks=pytest.mark.audit)
            for case in (
                ({"q_len": 128, "kv_len": 256}, {}),
                ({"q_len": 130, "kv_len": 260, "dtype": torch.float32}, {}),
                ({"q_len": 130, "kv_len": 260, "kv_heads": 2}, {"recipe": "sage3_paper", "capability": (8, 0)}),
            )
        ),
    ],
    ids=str,
)
def test_a_call_has_the_recipes_error(sizes, options):
    """At any length, head_dim, dtype and scale, with grouped queries too."""
    check(*random_inputs(**{"q_heads": 2} | sizes), **options)


@pytest.mark.parametrize(
    "q_len, kv_len", [*(pytest.param(*s, marks=pytest.mark.audit) for s in ((150, 290), (290, 150))), (300, 300)]
)
def test_causal_rows_see_the_keys_up_to_theirs(q_len, kv_len):
    query, key, value = random_inputs(q_len, kv_len, q_heads=2)
    value[:, :, 100:] *= 3
    check(query, key, value, is_causal=True)


@pytest.mark.parametrize("offset", [-40, pytest.param(130, marks=pytest.mark.audit)])
def test_a_causal_offset_is_a_mask(offset):
    query, key, value = random_inputs(200, 270)
    row, column = torch.arange(200)[:, None], torch.arange(270)
    mask = (column <= row + offset)[None, None]
    output, lse = run(query, key, value, "first keys", is_causal=True, causal_offset=offset)
    masked, masked_lse = run(query, key, value, "first keys", mask=mask)
    # The keys that no row sees count in the means of one and not of the other: not the same bits.
    expected, _ = sdpa.attention(query, key, value, mask=mask)
    assert relative_error(output, expected) <= 1.1 * relative_error(masked, expected)
    assert torch.equal(lse == -torch.inf, masked_lse == -torch.inf)
    if offset < 0:
        assert output[:, :, :-offset].count_nonzero() == 0


@pytest.mark.parametrize("width", [50, pytest.param(200, marks=pytest.mark.audit)])
def test_causality_with_the_mask_of_a_window_keeps_latest_keys_in_16_bits(width):
    """A window of at most the least number of recent keys is attended to in 16 bits alone."""
    query, key, value = random_inputs(150, 330, q_heads=2)
    row, column = torch.arange(150)[:, None] + 180, torch.arange(330)
    mask = ((column <= row) & (column > row - width))[None, None]
    options = {"mask": mask, "is_causal": True, "causal_offset": 180}
    output = check(query, key, value, **options)
    if width <= get_recipe("sage3").recent_keys:
        expected, _ = sdpa.attention(query, key, value, **options)
        assert (output - expected).abs().max() <= 2.0**-10 * value.abs().max()


@pytest.mark.parametrize(
    "shape",
    [
        (1, 2, 140, 1),
        *(pytest.param(s, marks=pytest.mark.audit) for s in [(2, 1, 1, 150), (1, 1, 140, 150), (2, 2, 140, 150)]),
    ],
)
def test_boolean_masks_of_every_broadcast_shape(shape):
    query, key, value = random_inputs(140, 150, batch=2, q_heads=shape[1])
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.4
    check(query, key, value, mask=mask)


@pytest.mark.parametrize("dtype", [torch.float16, pytest.param(torch.float32, marks=pytest.mark.audit)])
@pytest.mark.parametrize("is_causal", [pytest.param(False, marks=pytest.mark.audit), True])
def test_additive_masks_are_added(dtype, is_causal):
    query, key, value = random_inputs(140, 150, batch=1, q_heads=2, dtype=dtype)
    generator = torch.Generator().manual_seed(2)
    mask = torch.randn(1, 1, 140, 150, generator=generator, dtype=torch.float32) * 3
    mask = mask.masked_fill(torch.rand(mask.shape, generator=generator) > 0.8, -torch.inf).to(dtype)
    check(query, key, value, mask=mask, is_causal=is_causal)


def test_padding_in_the_middle_hides_what_is_there():
    query, key, value = random_inputs(60, 400, q_heads=2)
    mask = torch.ones(1, 1, 1, 400, dtype=torch.bool)
    mask[..., 100:300] = False
    key[:, :, 100:300], value[:, :, 100:300] = torch.inf, torch.nan
    output = run(query, key, value, mask=mask)[0]
    kept = mask.flatten()
    expected, _ = sdpa.attention(query, key[:, :, kept], value[:, :, kept])
    emulated, _ = reference.attention(query, key, value, RECIPES["sage3"], mask=mask)
    assert relative_error(output, expected) <= RATIO * relative_error(emulated, expected)


def test_rows_without_a_key_are_zero():
    query, key, value = random_inputs(140, 260, q_heads=2)
    mask = torch.ones(1, 1, 140, 260, dtype=torch.bool)
    mask[..., 7, :] = False
    mask[..., 128:, :] = False
    output, lse = run(query, key, value, mask=mask)
    nothing = ~mask[0, 0].any(-1)
    assert output[:, :, nothing].count_nonzero() == 0 and (lse[:, :, nothing] == -torch.inf).all()
    assert output[:, :, ~nothing].isfinite().all() and lse[:, :, ~nothing].isfinite().all()


def test_constant_values_come_out_unchanged_and_uniform_scores_give_log_n():
    query, key, value = random_inputs(130, 300, head_dim=64)
    output, lse = run(torch.zeros_like(query), key, torch.ones_like(value))
    assert torch.equal(output, torch.ones_like(output))
    torch.testing.assert_close(lse, torch.full_like(lse, 300.0).log())


def test_the_mean_of_a_block_of_q_comes_back_in_that_block():
    query, key, value = random_inputs(384, 200, head_dim=64)
    query[:, :, 128:256] += 4
    query[:, :, 256:] -= 4
    check(query, key, value)


def test_chunks_of_rows_change_nothing(monkeypatch):
    inputs = random_inputs(200, 130)
    together = run(*inputs, is_causal=True)
    monkeypatch.setattr(nvfp4_forward, "DELTA_SHARE", 1e-9)
    apart = run(*inputs, is_causal=True)
    assert torch.equal(together[0], apart[0]) and torch.equal(together[1], apart[1])


@pytest.mark.parametrize("bad", [torch.nan, pytest.param(torch.inf, marks=pytest.mark.audit)])
@pytest.mark.parametrize("operand", [0, 1, 2])
def test_what_is_not_finite_spoils_the_rows_that_use_it(operand, bad):
    inputs = random_inputs(140, 150)
    inputs[operand][0, 0, 3, 5] = bad
    output, _ = run(*inputs, is_causal=True)
    expected, _ = reference.attention(*inputs, RECIPES["sage3"], is_causal=True)
    assert torch.equal(output.isnan(), expected.isnan())


@pytest.mark.parametrize(
    ("dtype", "accuracy"),
    # Sums in float32; a mean in two parts, of which the second is rounded to half of 2⁻⁸, or of 2⁻¹¹, of half of that.
    [
        (torch.bfloat16, 2.0**-17 + 1e-5),
        *(pytest.param(dtype, 1e-5, marks=pytest.mark.audit) for dtype in (torch.float32, torch.float16)),
    ],
)
def test_the_scores_of_the_means_are_accurate_to_their_two_parts(dtype, accuracy):
    query, key, value = random_inputs(300, 200, q_heads=2, head_dim=128, dtype=dtype)
    key[:, :, :, 5] += 50
    call = new_call(query, key, value, replace(RECIPES["sage3"], heavy_keys=0))
    operands = quantize(call)
    delta = torch.full((1, 2, 3, 256), torch.nan)
    smooth_q_scores(operands, call, None, 0, 0, delta, (12, 0))
    p = torch.arange(256)
    keys = p // 32 * 32 + p % 32 // 8 * 2 + p % 8 // 2 * 8 + p % 2
    smooth_key = torch.nn.functional.pad(key.double() - key.double().mean(2, keepdim=True), (0, 0, 0, 56))[:, :, keys]
    mean = operands.query_mean.double()
    factor = operands.query_tensor_scale[..., None] * operands.key_tensor_scale.repeat_interleave(128, -1)[:, :, None]
    bound = accuracy * mean.norm(dim=-1, keepdim=True) * smooth_key.norm(dim=-1).unsqueeze(-2)
    assert ((delta * factor - mean @ smooth_key.mT).abs() <= bound).all()


@pytest.mark.parametrize("delta_share", [pytest.param(nvfp4_forward.DELTA_SHARE, marks=pytest.mark.audit), 1e-9])
def test_packed_sequences_are_attended_as_if_alone(monkeypatch, delta_share):
    monkeypatch.setattr(nvfp4_forward, "DELTA_SHARE", delta_share)
    query, key, value = random_inputs(300, 280)
    q_starts, k_starts = [0, 130, 130, 300], [0, 90, 100, 280]
    lengths = Lengths(*(torch.tensor(starts, dtype=torch.int32) for starts in (q_starts, k_starts)), 170, 180)
    output, lse = run(query, key, value, lengths=lengths)
    for sequence in (0, 2):
        rows = slice(q_starts[sequence], q_starts[sequence + 1])
        columns = slice(k_starts[sequence], k_starts[sequence + 1])
        alone = run(query[:, :, rows], key[:, :, columns], value[:, :, columns])
        assert torch.equal(output[:, :, rows], alone[0]) and torch.equal(lse[:, :, rows], alone[1])


@pytest.mark.parametrize("block_n", [pytest.param(64, marks=pytest.mark.audit), 128])
def test_every_tile_gives_the_error_of_its_reference(monkeypatch, block_n):
    monkeypatch.setattr(nvfp4_forward, "nvfp4_forward_config", lambda *_: TileConfig(64, block_n, 4, 2))
    check(*random_inputs(70, 300))


def test_the_workspace_of_means_stays_small_for_uneven_lengths():
    lengths = torch.tensor([32768] + [16] * 1000)
    total = int(lengths.sum())
    query, key, value = (torch.empty(1, heads, total, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8, 8))
    cu_seqlens = torch.empty(1002, dtype=torch.int32, device="meta")
    lengths = Lengths(cu_seqlens, cu_seqlens, 32768, 32768)
    with recording() as launches:
        attend(new_call(query, key, value, RECIPES["sage3"], is_causal=True, lengths=lengths), HOPPER)
    (workspace,) = {one.arguments["delta"] for one in launches if one.kernel.__name__ == "smooth_q_scores_of_means"}
    assert workspace.nbytes <= sum(x.nbytes for x in (query, key, value))
