"""Which training calls run exact attention because a recipe would be slower."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from sage_kernels.attend import attend
from sage_kernels.dispatch import cost_model, registry
from sage_kernels.dispatch.cost_model import CostTable
from sage_kernels.dispatch.curves import CostCurve, CostWeights, ItemSchedule
from sage_kernels.dispatch.decide import why_training_slower
from sage_kernels.dispatch.plan import Plan
from sage_kernels.dispatch.request import Request
from sage_kernels.dispatch.select import set_routing
from sage_kernels.packed import attend_packed
from sage_kernels.runtime import torch_private
from sage_kernels.spec.layout import Lengths
from sage_kernels.spec.options import Options
from tests.helpers.calls import pack
from tests.helpers.kernels import FakeBackward, FakeTraining, preferred

KERNELS = ("sage_bwd", "forward", "quantizer", "backward")
REQUEST = Request(
    *("sage_bwd", "cuda", (9, 0), torch.bfloat16, 1, 32, 32, 8192, 8192, 128, 128, "none", False, False, True)
)


def curve(provider, launch, tile):
    schedule = ItemSchedule(rows=128, keys=64, slots=132, order="queue", packs=False, widths=(128,))
    return CostCurve(provider, "none", False, (1, 128), schedule, CostWeights(launch=launch, tile=tile))


@pytest.fixture(autouse=True)
def table(routed, monkeypatch):
    """32 heads of n tokens are n / 4 items of n / 64 tiles: the recipe is faster from about 5,000 tokens on."""
    curves = curve(cost_model.training_provider(*KERNELS), 600.0, 0.4), curve(f"cudnn{cost_model.TRAINING}", 0.0, 0.6)
    monkeypatch.setattr(cost_model, "table_of", lambda capability: CostTable("a GPU", (9, 0), {}, curves))


def why(tokens=8192, numerics="native", **facts):
    request = replace(REQUEST, q_len=tokens, kv_len=tokens, **facts)
    recipe, kernel, quantizer, backward = KERNELS
    return why_training_slower(Plan(request, kernel, recipe, numerics, (), quantizer, backward))


def test_each_call_is_judged_by_its_own_size_whatever_ran_before():
    for tokens, exact in ((512, True), (16384, False), (128, True), (16384, False)):
        assert ("exact attention trains faster here" in why(tokens)) == exact


@pytest.mark.parametrize("facts", [{"is_causal": True}, {"dtype": torch.float32}, {"mask": "keys"}])
def test_what_was_not_measured_runs_the_recipe_where_it_is_long(facts):
    assert "no costs were measured" in why(512, **facts)
    assert not why(8192, **facts)


def test_without_a_table_long_calls_run_the_recipe(monkeypatch):
    monkeypatch.setattr(cost_model, "table_of", lambda capability: None)
    assert "no costs were measured" in why(512)
    assert not why(8192)


def measure_forwards(monkeypatch, low_bit, exact):
    """Have the table say how long forward passes take, in µs a round and tile."""
    before = cost_model.table_of(None).curves
    provider = cost_model.low_bit_provider(*KERNELS[:3])
    curves = (*before, curve(provider, 0.0, low_bit), curve("cudnn", 0.0, exact))
    monkeypatch.setattr(cost_model, "table_of", lambda capability: CostTable("a GPU", (9, 0), {}, curves))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_counts_the_forward_pass_twice(monkeypatch, reentrant):
    """At 8,192 tokens forward and backward pass are slower, and with another forward pass faster."""
    measure_forwards(monkeypatch, 0.05, 0.4)
    reasons = []

    def layer(x):
        if torch.is_grad_enabled():
            reasons.append(why(8192))
        return x.sin()

    x = torch.ones(1, requires_grad=True)
    checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert set(reasons) == {""}
    assert why(8192)


def test_a_forward_pass_that_was_not_measured_counts_as_without_a_checkpoint():
    reasons = []
    checkpoint(lambda x: reasons.append(why(512)) or x.sin(), torch.ones(1, requires_grad=True), use_reentrant=False)
    assert "exact attention trains faster here" in reasons[0]


def test_tensors_that_are_kept_elsewhere_are_no_checkpoint():
    with torch.autograd.graph.save_on_cpu():
        assert not torch_private.is_checkpointed()
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.cpu, torch.Tensor.cpu):
        assert not torch_private.is_checkpointed()
    assert not torch_private.is_checkpointed()


def test_emulation_and_calls_without_routing_run_the_recipe():
    assert not why(512, numerics="emulated")
    set_routing(False)
    assert not why(512)


@pytest.mark.parametrize("kind", ["batch", "lse", "packed"])
def test_calls_that_exact_attention_serves_badly_are_trained_by_the_recipe(kind):
    """Exact attention would run packed sequences one by one, and compute the LSE apart."""
    ran = []
    query = torch.randn(1, 2, 64, 64, requires_grad=True)
    options = Options(recipe="sage_bwd", return_lse=kind == "lse")
    forward, backward = FakeTraining("fast", "sage_bwd", ran=ran.append), FakeBackward("gradients", "sage_bwd")
    with preferred(forward), preferred(backward, registry.backwards):
        if kind == "packed":
            tokens = query[0].transpose(0, 1)
            attend_packed(tokens, tokens, tokens, Lengths(*[pack([32, 32])] * 2, 32, 32), options)
        else:
            attend(query, query, query, None, None, options)
    assert ran == ([] if kind == "batch" else ["fast"])
