"""Calls that the table of costs routes take no longer than the faster of low bits and PyTorch's choice."""

import pytest
import torch

from sage_hf.bench.cases import BenchCase, draw
from sage_hf.bench.timing import TimingStream
from sage_hf.tune.tune import REPLAYS, TIMED_MS
from sage_kernels import ops
from sage_kernels.dispatch import cost_model
from sage_kernels.exact import sdpa
from sage_kernels.spec.masks import with_causality

SLOWER = 1.1  # two runs of one call differ by less, and a wrong choice costs more where it matters
CASES = [
    BenchCase("", 1, 24, 24, 512, 512, 128),
    BenchCase("", 1, 24, 24, 1536, 1536, 128),
    BenchCase("", 1, 24, 24, 8192, 8192, 128),
    BenchCase("", 1, 32, 8, 16384, 16384, 128, "causal"),
    BenchCase("", 2, 24, 24, 4096, 77, 64),
    BenchCase("", 16, 12, 12, 512, 512, 64, "lengths"),
    BenchCase("", 1, 24, 24, 8192, 8192, 128, "lengths"),
    BenchCase("", 2, 16, 16, 2048, 2048, 64, "bias"),
    BenchCase("", 1, 8, 8, 4096, 4096, 256),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_routed_call_is_as_fast_as_the_faster_choice(case, routed, device):
    if cost_model.table_of(torch.cuda.get_device_capability(device)) is None:
        pytest.skip("no table of costs for this GPU")
    inputs = draw(case, device)

    def us(recipe, fallback):
        options = {"mask": inputs.mask, "is_causal": inputs.case.upper_left, "recipe": recipe, "fallback": fallback}
        with TimingStream(device).entered() as stream:
            return stream.gpu_us(lambda: ops.attention(*inputs.tensors, **options), TIMED_MS, REPLAYS)

    with torch.no_grad():
        fastest = min(us("sage2", "error"), us("exact", "native"))
        # Below the host's time for a call, the GPU's does not count.
        assert max(us("sage2", "native"), cost_model.EXACT_HOST_US) <= SLOWER * max(fastest, cost_model.EXACT_HOST_US)


@pytest.mark.parametrize("mask", ["lengths", "none"])
def test_steps_of_decoding_are_exact_and_switch_no_backend_off_for_others(mask, routed, device):
    inputs = draw(BenchCase("", 2, 16, 4, 1, 300, 128, mask), device)
    with torch.no_grad():
        found, _ = ops.attention(*inputs.tensors, mask=inputs.mask, recipe="sage2")
        expected, _ = ops.attention(*inputs.tensors, mask=inputs.mask, recipe="exact")
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.01)  # both round P and the output to bfloat16
    assert torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize("scale", [None, -0.2])
def test_exact_attention_behind_a_cache_equals_attention_with_a_mask(heads, scale, device):
    query = torch.randn(2, heads[0], 70, 64, device=device, dtype=torch.bfloat16)
    key, value = torch.randn(2, 2, heads[1], 333, 64, device=device, dtype=torch.bfloat16)
    grouped = heads[0] != heads[1]
    assert sdpa.has_lower_right(query, key, value, grouped)
    output = sdpa.sdpa(query, key, value, scale=scale, enable_gqa=grouped, lower_right=True)
    options = {"is_causal": True, "causal_offset": 263, "scale": scale}
    truth, _ = sdpa.attention(query, key, value, **options)
    mask = with_causality(None, query, key, 263)
    masked = sdpa.sdpa(query, key, value, mask=mask, scale=scale, enable_gqa=grouped)
    assert (output - truth).abs().max() <= 2 * (masked - truth).abs().max()
