"""More than five hundred random calls with gradients, each judged by its recipe's reference and by exact attention."""

import pytest
import torch

from sage_kernels.cuda.registration import HOPPER
from tests.helpers.judge_training import GradientErrors
from tests.helpers.random_training_calls import GROUPS, KINDS, run

CALLS_PER_GROUP_AND_KIND = 18
FORMS = 2


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("group", GROUPS, ids=lambda g: f"{g.recipe}-{g.head_dim}-{g.v_head_dim}")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("forms", [FORMS, pytest.param(CALLS_PER_GROUP_AND_KIND, marks=pytest.mark.audit)])
def test_random_calls(group, kind, forms, device):
    errors = GradientErrors.none()
    for index in range(CALLS_PER_GROUP_AND_KIND):
        errors += run(group, kind, index, forms, device)
    errors.assert_as_small_as_the_references()


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("group", [x for x in GROUPS if x.recipe == "sage_bwd" and x.head_dim == x.v_head_dim], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_random_calls_whose_gradients_triton_computes_though_another_kernel_would(group, kind, device):
    if torch.cuda.get_device_capability(device) != HOPPER:
        pytest.skip("elsewhere no other kernel computes gradients")
    for index in range(4):
        run(group, kind, index, FORMS, device, "int8_backward")
