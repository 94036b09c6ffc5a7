"""PyTorch's memory-efficient kernel, called by name: which calls it serves, and with what."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_kernels import backends  # noqa: F401 - `backends` registers the kernels
from sage_kernels.dispatch.registry import Request, get_exact
from sage_kernels.exact import efficient, sdpa
from sage_kernels.spec.call import Call
from sage_kernels.spec.recipe import get_recipe

REQUEST = Request(
    *("sage2", "cuda", (9, 0), torch.bfloat16, 2, 8, 8, 64, 64, 128, 128, "none", False, False), aligned=True
)


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        ({"device_type": "cpu"}, "NVIDIA"),
        ({"dtype": torch.float32}, "float16"),
        ({"aligned": False}, "aligned"),
        ({"mask": "keys"}, "masks"),
        ({"return_lse": True}, "LSE"),
        ({"kv_heads": 2}, "grouped"),
        ({"is_causal": True, "lower_right": True}, "upper left"),
    ],
)
def test_it_is_asked_for_nothing_that_it_cannot_do(facts, part):
    assert part in get_exact("efficient").unsupported(replace(REQUEST, **facts))
    assert get_exact("efficient").unsupported(REQUEST) == ""


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
@pytest.mark.parametrize("causal", [False, True])
def test_its_output_is_that_of_the_call(monkeypatch, scale, causal):
    def attend(query, key, value, bias, with_lse, dropout, is_causal, *, scale):
        assert bias is None and not with_lse and dropout == 0.0 and scale > 0
        return sdpa.attention(query, key, value, is_causal=is_causal, scale=scale)

    monkeypatch.setattr(efficient, "_operator", attend)
    query, key, value = torch.randn(3, 2, 4, 20, 32, dtype=torch.float64)
    output = get_exact("efficient").attend(Call(query, key, value, get_recipe("exact"), is_causal=causal, scale=scale))
    truth, _ = sdpa.attention(query, key, value, is_causal=causal, scale=scale)
    torch.testing.assert_close(output, truth)


def test_a_caller_who_switches_it_off_gets_pytorchs_choice(monkeypatch):
    monkeypatch.setattr(efficient, "_operator", None)
    query, key, value = torch.randn(3, 2, 4, 20, 32)
    with sdpa_kernel(SDPBackend.MATH):
        output = get_exact("efficient").attend(Call(query, key, value, get_recipe("exact"), scale=0.2))
        assert torch.equal(output, sdpa.pytorch_sdpa(query, key, value, scale=0.2))
