"""The native NVFP4 forward without FP4 hardware: portable functions stand for the instructions that need it.

All else is what runs on compute capability 12.x: its tiles and masks, scales loaded in words, the vote before the
accumulator is rescaled, logarithms of the special function unit.
"""

from dataclasses import replace

import pytest
import torch

from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.spec.recipe import get_recipe
from sage_kernels.triton import nvfp4_forward
from sage_kernels.triton.configs import TileConfig
from tests.gpu.test_cuda_nvfp4_forward import RATIO, error, random_inputs
from tests.helpers.calls import new_call
from tests.helpers.portable_fp4 import without_fp4_instructions
from tests.helpers.triton_calls import attend

BLACKWELL = (12, 0)
# Without the search for scales, which the forward kernel knows nothing of, and which compiles for long.
RECIPES = {name: replace(get_recipe(name), scale_steps=(), key_scale_steps=()) for name in ("sage3", "sage3_paper")}


@pytest.fixture(scope="module")
def cache(run_folder):
    """Return a folder for these kernels' machine code, which nothing else may find."""
    return run_folder / "portable_fp4"


@pytest.fixture(autouse=True)
def portable_instructions(monkeypatch, cache):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    without_fp4_instructions(monkeypatch)
    # A decoded tile of K and V in addition to what the native kernel holds: of two more tiles there is no room.
    monkeypatch.setattr(nvfp4_forward, "nvfp4_forward_config", lambda *_: TileConfig(128, 128, 8, 2))
    caches = nvfp4_forward.nvfp4_forward.device_caches
    kept = dict(caches)
    caches.clear()
    yield
    caches.clear()
    caches.update(kept)


def bool_mask(*shape):
    return torch.rand(shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda") > 0.4


def additive_mask(*shape):
    generator = torch.Generator("cuda").manual_seed(2)
    mask = torch.randn(shape, generator=generator, device="cuda") * 3
    return mask.masked_fill(torch.rand(shape, generator=generator, device="cuda") > 0.8, -torch.inf)


CALLS = (
    ("sage3", {}),
    ("sage3", {"return_lse": True}),
    ("sage3", {"is_causal": True}),
    ("sage3", {"is_causal": True, "causal_offset": 37, "return_lse": True}),
    ("sage3", {"mask": (1, 1, 300, 700)}),
    ("sage3", {"mask": (2, 1, 1, 700), "return_lse": True}),
    ("sage3", {"mask": (2, 4, 300, 700), "is_causal": True}),
    ("sage3", {"bias": (1, 4, 300, 700)}),
    ("sage3", {"bias": (2, 1, 300, 700), "is_causal": True, "return_lse": True}),
    ("sage3_paper", {"return_lse": True}),
    ("sage3_paper", {"is_causal": True}),
)
# Each at one of two head dimensions: a kernel compiles for many seconds.
CASES = [
    pytest.param(*call, head_dim, marks=() if (head_dim == 64) == (place % 2 == 0) else pytest.mark.audit)
    for place, call in enumerate(CALLS)
    for head_dim in (64, 128)
]


@pytest.mark.parametrize(("recipe", "options", "head_dim"), CASES, ids=str)
def test_the_native_kernel_has_the_recipe_s_error(recipe, options, head_dim):
    options = dict(options)
    return_lse = options.pop("return_lse", False)
    if shape := options.get("mask"):
        options["mask"] = bool_mask(*shape)
    if shape := options.pop("bias", None):
        options["mask"] = additive_mask(*shape)
    inputs = random_inputs(300, 700, 4, 2, head_dim)
    call = new_call(*inputs, RECIPES[recipe], return_lse=return_lse, **options)
    output, lse = attend(call, BLACKWELL, native=True)
    expected, expected_lse = reference.attention(*inputs, RECIPES[recipe], block_n=128, **options)
    true, _ = sdpa.attention(*inputs, **options)
    assert error(output, true) <= RATIO * error(expected, true)
    if return_lse:
        torch.testing.assert_close(lse, expected_lse, rtol=2e-6, atol=2e-5)


def test_rows_without_a_key_are_zero():
    inputs = random_inputs(140, 260, 2, 2, 64)
    mask = torch.ones(1, 1, 140, 260, dtype=torch.bool, device="cuda")
    mask[..., 7, :] = False
    mask[..., 128:, :] = False
    output, lse = attend(new_call(*inputs, RECIPES["sage3"], mask=mask, return_lse=True), BLACKWELL, native=True)
    nothing = ~mask[0, 0].any(-1)
    assert output[:, :, nothing].count_nonzero() == 0 and (lse[:, :, nothing] == -torch.inf).all()
    assert output[:, :, ~nothing].isfinite().all() and lse[:, :, ~nothing].isfinite().all()


def test_a_key_that_is_not_finite_spoils_the_rows_that_see_it():
    query, key, value = random_inputs(140, 300, 2, 2, 64)
    key[0, 0, 100, 5] = torch.nan
    output, _ = attend(new_call(query, key, value, RECIPES["sage3"], is_causal=True), BLACKWELL, native=True)
    expected, _ = reference.attention(query, key, value, RECIPES["sage3"], is_causal=True, block_n=128)
    assert torch.equal(output.isnan(), expected.isnan())
