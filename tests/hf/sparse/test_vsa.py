"""VSA against its independent reference in float64."""

import pytest
import torch

from sage_hf.sparse import vsa_attention
from sage_hf.sparse.reference import vsa_reference

GRIDS = [(4, 8, 8), (5, 6, 7), (1, 9, 3), (2, 2, 2)]


def draw(grid, heads=2, batch=2, head_dim=16, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shape = (batch, heads, grid[0] * grid[1] * grid[2], head_dim)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.7, 0.99])
@pytest.mark.parametrize("gated", [True, False])
def test_the_output_and_its_gradients_are_the_references(grid, sparsity, gated):
    inputs = draw(grid) if gated else draw(grid)[:3]
    leaves = [[x.clone().requires_grad_() for x in inputs] for _ in range(2)]
    outputs = [
        function(*part[:3], part[3] if gated else None, grid, sparsity)
        for function, part in zip((vsa_attention, vsa_reference), leaves, strict=True)
    ]
    assert torch.allclose(*outputs, atol=1e-10)
    weight = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = [
        torch.autograd.grad((output * weight).sum(), part) for output, part in zip(outputs, leaves, strict=True)
    ]
    for found, expected in zip(*gradients, strict=True):
        assert torch.allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("grid", [(4, 8, 8), (5, 6, 7)])
@pytest.mark.parametrize("recipe", ["sage2", "sage3"])
def test_the_fine_stage_runs_in_few_bits(grid, recipe):
    """Errors are those of the recipe: where all tiles are kept and no gate is, those of dense attention."""
    inputs = draw(grid, head_dim=64, dtype=torch.float32)
    with torch.no_grad():
        for sparsity in (0.0, 0.5):
            output = vsa_attention(*inputs, grid, sparsity, recipe=recipe, fallback="emulate")
            truth = vsa_reference(*inputs, grid, sparsity)
            error = (output - truth).norm() / truth.norm()
            assert error < {"sage2": 0.04, "sage3": 0.2}[recipe]


def test_without_a_gate_the_coarse_stage_adds_nothing():
    query, key, value, gate = draw((4, 8, 8))
    without = vsa_attention(query, key, value, None, (4, 8, 8), 0.5)
    assert torch.equal(without, vsa_attention(query, key, value, torch.zeros_like(gate), (4, 8, 8), 0.5))
    full = vsa_attention(query, key, value, None, (4, 8, 8), 0.0)
    truth = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    assert torch.allclose(full, truth, atol=1e-10)


def test_two_shapes_in_one_process_do_not_share_their_tiles():
    for grid in ((4, 8, 8), (8, 8, 4), (4, 8, 8), (8, 4, 8)):
        inputs = draw(grid)
        assert torch.allclose(vsa_attention(*inputs, grid, 0.5), vsa_reference(*inputs, grid, 0.5), atol=1e-10)


def test_the_samples_of_a_batch_choose_their_own_tiles():
    """Use two batch elements, like pairs of classifier-free guidance."""
    inputs, grid = draw((4, 8, 8)), (4, 8, 8)
    both = vsa_attention(*inputs, grid, 0.5)
    for sample in range(2):
        alone = vsa_attention(*(x[sample : sample + 1] for x in inputs), grid, 0.5)
        assert torch.allclose(both[sample : sample + 1], alone, atol=1e-12)


def test_a_wrong_grid_or_sparsity_is_refused():
    inputs = draw((4, 4, 4))
    with pytest.raises(ValueError, match="125 tokens of the grid"):
        vsa_attention(*inputs, (5, 5, 5), 0.5)
    with pytest.raises(ValueError, match="sparsity"):
        vsa_attention(*inputs, (4, 4, 4), 1.0)
