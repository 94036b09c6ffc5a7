"""Statistics of K in Triton where a key is much louder than others, or numbers so large that their squares overflow."""

import pytest
import torch

from sage_kernels.spec import transforms
from sage_kernels.spec.recipe import RECIPES
from sage_kernels.triton.quantize.statistics import token_statistics
from tests.helpers.calls import new_call
from tests.helpers.loud import loud_key


@pytest.mark.parametrize(
    ("recipe", "place", "padded", "times"),
    [("sage2", 700, False, 1e3), ("sage2", 3, True, 1e3), ("sage3", 1023, True, 1e3), ("sage1", 300, False, 1e20)],
)
def test_the_statistics_are_the_references_bit_for_bit(recipe, place, padded, times):
    query, key, value = loud_key(1030, place, 32, times=times, heads=2)
    valid = None
    if padded:
        valid = torch.rand(1, 1030, generator=torch.Generator().manual_seed(1)) < 0.8
        valid[:, [place, place % 64]] = True  # a key that does not exist keeps its place
    call = new_call(query, key, value, RECIPES[recipe], valid=valid)
    found = token_statistics(call, None if valid is None else valid.int())
    exists = None if valid is None else valid[:, None, :, None]
    counted = transforms.quiet_keys(key, exists)
    assert not counted[..., place, 0].any()
    assert torch.equal(found.key_mean, transforms.mean_of_tokens(key, counted)[:, :, 0])
    assert torch.equal(
        found.equalizer, transforms.equalize(query, key, counted, None, RECIPES[recipe].smooth_q)[:, :, 0]
    )
    assert torch.equal(found.chosen, transforms.heavy_places(query, key, 64, 32**-0.5, exists).int())
    assert (found.chosen == place).any(-1).all()
