"""Statistics of K in Triton where a key is much louder than others, or numbers so large that their squares overflow."""

from itertools import product

import pytest
import torch

from sage_kernels.spec import transforms
from sage_kernels.spec.recipe import RECIPES
from sage_kernels.triton.quantize.statistics import token_statistics
from tests.helpers.calls import new_call
from tests.helpers.loud import loud_key

QUICK = {(1, 1e-22), (129, 1e8), (200, 1e18), (200, 1e37)}


@pytest.mark.parametrize(
    ("recipe", "place", "padded", "times"),
    [
        *(("sage2", 3, True, 1e3), ("sage1", 300, False, 1e20)),
        *(
            pytest.param(*case, marks=pytest.mark.audit)
            for case in (("sage2", 700, False, 1e3), ("sage3", 1023, True, 1e3))
        ),
    ],
)
def test_the_statistics_are_the_references_bit_for_bit(recipe, place, padded, times):
    query, key, value = loud_key(1030, place, 32, times=times, heads=2)
    key_mask = None
    if padded:
        key_mask = torch.rand(1, 1030, generator=torch.Generator().manual_seed(1)) < 0.8
        key_mask[:, [place, place % 64]] = True  # a key that does not exist keeps its place
    call = new_call(query, key, value, RECIPES[recipe], key_mask=key_mask)
    found = token_statistics(call, None if key_mask is None else key_mask.to(torch.uint8))
    exists = None if key_mask is None else key_mask[:, None, :, None]
    counted = transforms.quiet_keys(key, exists)
    assert not counted[..., place, 0].any()
    assert torch.equal(found.key_mean, transforms.mean_of_tokens(key, counted)[:, :, 0])
    assert torch.equal(
        found.equalizer, transforms.equalize(query, key, counted, None, RECIPES[recipe].smooth_q)[:, :, 0]
    )
    assert torch.equal(found.chosen, transforms.heavy_places(query, key, 64, 32**-0.5, exists).int())
    assert (found.chosen == place).any(-1).all()


@pytest.mark.parametrize(
    ("kv_len", "size"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.audit)
        for case in product((1, 129, 200, 1100), (1e-22, 1.0, 1e8, 1e18, 1e37))
    ],
)
def test_groups_of_keys_are_loud_where_the_specification_says(kv_len, size):
    """Take heads of which no key, the first, or the last one is louder, or the last one more quiet; squares of some of
    these sizes are subnormal, or have sums beyond float32, or are beyond it themselves.
    """
    query, key, value = loud_key(kv_len, 0, 32, times=1.0)
    query, key = query * size, key * size
    key[:, 1, 0] *= 10.0
    key[:, 2, -1] *= 10.0
    key[:, 3, -1] *= 0.1
    found = token_statistics(new_call(query, key, value, RECIPES["sage1"]))
    counted = transforms.quiet_keys(key)
    assert torch.equal(found.key_mean, transforms.mean_of_tokens(key, counted)[:, :, 0])
    if kv_len == 129 and size in (1.0, 1e8):  # a last group of one key is louder than the first, or the first than it
        assert [counted[0, head].sum().item() for head in range(4)] == [129, 129, 128, 1]
