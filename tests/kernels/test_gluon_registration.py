"""Which calls Hopper's own backward kernels serve."""

from dataclasses import replace

import pytest
import torch

from sage_kernels.dispatch.request import Request
from sage_kernels.gluon import registration

SERVED = Request(
    *("sage_bwd", "cuda", (9, 0), torch.bfloat16, 2, 8, 4, 1000, 1000, 128, 128, "none", False, False), grad=True
)
OLDEST, NEWEST = registration.VERSIONS


@pytest.fixture(autouse=True)
def newest_triton(monkeypatch):
    monkeypatch.setattr(registration, "triton_version", lambda: NEWEST)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def unsupported(**changes):
    return registration.HopperBackward().unsupported(replace(SERVED, **changes))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": 64, "v_head_dim": 40},
        {"head_dim": 80, "v_head_dim": 120},
        {"mask": "keys", "is_causal": True},
        {"packed": True},
        {"aligned": True},
        {"dtype": torch.float16},
    ],
    ids=str,
)
def test_they_serve_hopper(changes):
    assert unsupported(**changes) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"capability": (8, 9)}, "compute capability 9.0"),
        ({"capability": (10, 0)}, "compute capability 9.0"),
        ({"device_type": "cpu", "capability": None}, "NVIDIA GPU"),
        ({"dtype": torch.float32}, "float16, bfloat16"),
        ({"batch": 65536}, "65535"),
        ({"q_heads": 65536}, "65535"),
        ({"head_dim": 256, "v_head_dim": 256}, "channels"),
        ({"head_dim": 32, "v_head_dim": 32}, "channels"),
        ({"v_head_dim": 64}, "channels"),
        ({"head_dim": 64}, "channels"),
    ],
    ids=str,
)
def test_what_they_do_not_serve_has_a_reason(changes, reason):
    assert reason in unsupported(**changes)


def test_an_amd_gpu_is_none_of_theirs(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert "NVIDIA" in unsupported()


@pytest.mark.parametrize("version", [None, (3, 4), (OLDEST[0], OLDEST[1] - 1), (NEWEST[0], NEWEST[1] + 1)])
def test_another_triton_whose_gluon_is_another_is_refused(version, monkeypatch):
    monkeypatch.setattr(registration, "triton_version", lambda: version)
    assert "needs Triton 3.6 to 3.9" in unsupported()


def test_the_interpreter_is_refused(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "interpreter" in unsupported()
