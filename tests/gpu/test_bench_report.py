"""The report of `sage-hf bench --report` on a GPU that is there."""

import pytest
import torch

from sage_hf.bench import report


@pytest.mark.parametrize("recipe", ["sage1", "sage2"])
def test_native_kernels_have_the_error_of_their_reference(device, recipe):
    rows = report.errors(device, (recipe,))
    assert len(rows) == 2 * len(report.HEAD_DIMS)
    for row in rows:
        assert row["kernel"] and row["rel_l1"] <= 1.1 * row["reference_rel_l1"], row
        assert not row["causal"] or row["lse_error"] < 0.1, row


def test_recipes_that_are_not_native_here_say_why(device):
    if torch.cuda.get_device_capability(device)[0] >= 10:
        pytest.skip("FP4 is native here")
    assert all("no native kernel" in row["unavailable"] for row in report.errors(device, ("sage3",), (64,)))
