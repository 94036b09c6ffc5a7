"""The native NVFP4 forward in Triton's interpreter: portable functions stand for its inline assembly."""

import pytest
import torch

from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from tests.helpers.calls import new_call
from tests.helpers.portable_fp4 import without_inline_assembly
from tests.helpers.triton_calls import attend
from tests.interpreter.test_nvfp4_forward import RATIO, RECIPES, random_inputs, relative_error


@pytest.mark.parametrize(
    "recipe, options",
    [
        pytest.param("sage3", {}, marks=pytest.mark.audit),
        pytest.param("sage3", {"is_causal": True}, marks=pytest.mark.audit),
        ("sage3", {"mask": True, "is_causal": True}),
        pytest.param("sage3", {"bias": True, "is_causal": True}, marks=pytest.mark.audit),
        pytest.param("sage3", {"mask": True}, marks=pytest.mark.audit),
        pytest.param("sage3_paper", {"mask": True}, marks=pytest.mark.audit),
        pytest.param("sage3_paper", {"bias": True}, marks=pytest.mark.audit),
    ],
    ids=str,
)
def test_tiles_masks_and_scales_of_the_native_kernel_have_the_recipe_s_error(monkeypatch, recipe, options):
    without_inline_assembly(monkeypatch)
    inputs = random_inputs(200, 300)
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(1, 1, 200, 300, generator=generator) > 0.4 if "mask" in options else None
    if "bias" in options:
        mask = torch.randn(1, 1, 200, 300, generator=generator) * 3
    options = {"is_causal": options.get("is_causal", False), "mask": mask}
    output, lse = attend(new_call(*inputs, RECIPES[recipe], return_lse=True, **options), (12, 0), native=True)
    expected, expected_lse = reference.attention(*inputs, RECIPES[recipe], block_n=128, **options)
    true, _ = sdpa.attention(*inputs, **options)
    assert relative_error(output, true) <= RATIO * relative_error(expected, true)
    torch.testing.assert_close(lse, expected_lse, rtol=2e-6, atol=2e-5)
