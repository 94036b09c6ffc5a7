"""Which form of the backward kernels serves a call."""

import pytest
import triton

from sage_kernels.gluon.registration import HOPPER_TRITON, why_not_hopper
from sage_kernels.triton import int8_backward

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter runs the plain kernels alone")

HOPPER = (9, 0)


@pytest.fixture(autouse=True)
def newest_triton(monkeypatch):
    monkeypatch.setattr(int8_backward, "triton_version", lambda: HOPPER_TRITON[1])


def test_hoppers_kernels_serve_hopper():
    assert why_not_hopper(HOPPER, 128, 128, False) == ""
    assert why_not_hopper(HOPPER, 64, 64, False) == ""


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (((8, 9), 128, 128, False), "compute capability 9.0"),
        (((10, 0), 128, 128, False), "compute capability 9.0"),
        ((HOPPER, 128, 128, True), "in 16 bit"),
        ((HOPPER, 256, 256, False), "channels"),
        ((HOPPER, 32, 32, False), "channels"),
        ((HOPPER, 128, 64, False), "channels"),
        ((HOPPER, 64, 128, False), "channels"),
    ],
)
def test_what_they_do_not_serve_has_a_reason(facts, reason):
    assert reason in why_not_hopper(*facts)


@pytest.mark.parametrize("version", [None, (3, 4), (3, 5), (HOPPER_TRITON[1][0], HOPPER_TRITON[1][1] + 1)])
def test_a_triton_whose_gluon_is_another_runs_the_plain_kernels(version, monkeypatch):
    monkeypatch.setattr(int8_backward, "triton_version", lambda: version)
    assert "needs Triton 3.6 to 3.9" in why_not_hopper(HOPPER, 128, 128, False)
