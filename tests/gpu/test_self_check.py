"""The self-check on a GPU: every kernel is right, a wrong one is found, and a first call is checked in a moment."""

import time
from dataclasses import replace

import pytest
import torch

import sage_hf
from sage_hf import record
from sage_hf.bench import check
from sage_kernels.dispatch import registry, self_check


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    """No verdict is known, and no GPU is known to be tested."""
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(self_check, "TESTED", ())
    self_check.forget()
    yield
    self_check.forget()


def test_every_kernel_is_right(device):
    result = check.run(device, seconds=300)
    assert not check.failed(result), check.text(result)
    assert result["left_out"] == 0
    kernels = {row["kernel"] for row in result["rows"]}
    assert {"qk_norm_rope", "masked_forward"} <= kernels and any("backward" in name for name in kernels)


def attend(recipe, device):
    """Return the plan of a call, and the seconds that it took."""
    layer = torch.nn.Identity()
    inputs = torch.randn(3, 1, 4, 1024, 64, device=device, dtype=torch.bfloat16).unbind()
    torch.cuda.synchronize()
    start = time.perf_counter()
    record.run_in_layer(layer, sage_hf.sage_attention, *inputs, recipe=recipe)
    torch.cuda.synchronize()
    (plan,) = record.last_plans(layer)
    return plan, time.perf_counter() - start


def test_a_first_call_is_checked_in_a_moment(device, monkeypatch):
    monkeypatch.setattr(self_check, "TESTED", (torch.cuda.get_device_capability(device),))
    plan, _ = attend("sage2", device)  # compiled
    assert plan.numerics == "native"
    monkeypatch.setattr(self_check, "TESTED", ())
    self_check.forget()
    found, seconds = attend("sage2", device)
    assert found == plan
    assert seconds < 2


def test_a_wrong_kernel_gives_way(device, monkeypatch):
    plan, _ = attend("sage2", device)
    kernel = registry.get_forward(plan.kernel)
    right = kernel.attend
    monkeypatch.setattr(
        kernel, "attend", lambda call, quantizer: right(replace(call, scale=2 * call.scale), quantizer), raising=False
    )
    (self_check.verdicts._path(plan.request.capability)).unlink()
    self_check.forget()
    found, _ = attend("sage2", device)
    assert found.kernel != plan.kernel
    assert "failed its self-check" in found.reason
