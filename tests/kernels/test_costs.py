"""Which calls take exact attention because low bits would be slower, and what is said about it."""

import itertools
import os
import re
from dataclasses import replace

import pytest
import torch

from sage_kernels import backends, ops  # noqa: F401 - `backends` registers the kernels
from sage_kernels.cuda import compiler
from sage_kernels.dispatch import cost_model, execution, registry
from sage_kernels.dispatch.cost_model import CostTable
from sage_kernels.dispatch.curves import CallSizes, CostCurve, CostWeights, ItemSchedule
from sage_kernels.dispatch.decide import why_training_slower
from sage_kernels.dispatch.plan import exact_plan
from sage_kernels.dispatch.registry import forget_choices
from sage_kernels.dispatch.request import Request
from sage_kernels.dispatch.select import routing, select, set_routing
from sage_kernels.dispatch.support import NVIDIA_CAPABILITIES
from sage_kernels.exact import sdpa as exact
from sage_kernels.spec.call import Call
from sage_kernels.spec.recipe import get_recipe
from sage_kernels.triton import registration
from tests.helpers.kernels import FakeForward, only_the_reference

H200 = (9, 0)
REQUEST = Request("sage2", "cuda", H200, torch.bfloat16, 1, 32, 32, 8192, 8192, 128, 128, "none", False, False)
PROVIDER = cost_model.low_bit_provider("sage2", "low_bit", "")


def curve(provider, launch=0.0, tile=0.0, mask="none", causal=False, head_dims=(65, 128), regime=""):
    schedule = ItemSchedule(rows=128, keys=64, slots=132, order="queue", packs=False, widths=(128, 256))
    return CostCurve(provider, mask, causal, head_dims, schedule, CostWeights(launch=launch, tile=tile), regime=regime)


# 32 heads of n tokens are n / 4 items, of n / 64 tiles each: both need 62 µs with 1,848 tokens.
LOW_BIT, CUDNN = curve(PROVIDER, launch=50.0, tile=0.12), curve("cudnn", tile=0.62)


@pytest.fixture
def use_table(routed, monkeypatch):
    """One low-bit kernel, and a table of these curves; None: no table."""

    def use(*curves):
        table = CostTable("a GPU", H200, {}, curves, "here") if curves else None
        monkeypatch.setattr(cost_model, "table_of", lambda capability: table)
        forget_choices()

    with only_the_reference():
        registry.register_forward(FakeForward("low_bit", "sage2"))
        yield use
    forget_choices()


def with_tokens(tokens, **facts):
    return replace(REQUEST, q_len=tokens, kv_len=tokens, **facts)


def test_low_bits_run_where_the_table_says_that_they_are_faster(use_table):
    use_table(LOW_BIT, CUDNN)
    assert select(with_tokens(8192)).recipe == "sage2"
    plan = select(with_tokens(1024))
    assert (plan.kernel, plan.recipe, plan.numerics) == ("sdpa", "exact", "exact")
    limit = "exact attention is faster here below about 2,000 tokens of 32 heads at head_dim 128"
    reasons = {select(with_tokens(n, batch=b)).reason for n in (256, 300, 1000) for b in (1, 2)}  # one for all sizes
    assert reasons == {plan.reason} == {f"sage2 by low_bit: {limit}"}


def test_reasons_name_kinds_of_calls_that_never_gain(use_table):
    facts = {"mask": "keys", "causal": True}
    use_table(curve(PROVIDER, tile=0.7, **facts), curve("cudnn", tile=0.62, **facts))
    reason = select(with_tokens(32768, mask="keys", is_causal=True)).reason
    assert reason.endswith("exact attention is faster here at head_dim 128, causal, with a key-padding mask")


@pytest.mark.parametrize("fallback", ["error", "emulate"])
def test_the_other_fallbacks_force_the_recipe(use_table, fallback):
    use_table(LOW_BIT, CUDNN)
    assert select(with_tokens(1024), fallback).recipe == "sage2"


def test_routing_can_be_switched_off(use_table):
    use_table(LOW_BIT, CUDNN)
    set_routing(False)
    assert select(with_tokens(1024)).recipe == "sage2"
    assert not routing()


def test_a_cpu_emulates_at_any_length(use_table):
    use_table(LOW_BIT, CUDNN)
    assert select(with_tokens(128, recipe="sage1", device_type="cpu", capability=None)).kernel == "reference"


@pytest.mark.parametrize("facts", [{"packed": True}, {"return_lse": True}])
def test_what_exact_attention_serves_badly_is_not_routed(use_table, facts):
    """Packed sequences would run one by one, and the LSE would be computed apart."""
    use_table(LOW_BIT, CUDNN)
    assert select(with_tokens(1024, **facts)).recipe == "sage2"


def test_host_time_counts_where_the_gpu_has_less_to_do(use_table):
    use_table(curve(PROVIDER, launch=5.0), curve("cudnn", launch=30.0))
    assert select(with_tokens(512)).recipe == "exact"


def test_without_a_table_only_long_calls_run_in_low_bits(use_table):
    use_table()
    assert select(with_tokens(8192)).recipe == "sage2"
    assert select(with_tokens(8192, mask="keys", is_causal=True)).recipe == "sage2"
    for short in (
        {"q_len": 1023},
        {"kv_len": 4095},
        {"q_heads": 1, "kv_heads": 1},
        {"mask": "bool"},
        {"mask": "additive"},
        {"head_dim": 256, "v_head_dim": 256},
        {"head_dim": 32, "v_head_dim": 32},
    ):
        reason = select(replace(with_tokens(8192), **short)).reason
        assert "sage-hf tune" in reason, short


def test_a_kind_of_call_that_the_table_lacks_follows_the_rules_without_a_table(use_table):
    use_table(LOW_BIT, CUDNN)
    assert "sage-hf tune" in select(with_tokens(1024, mask="keys")).reason
    assert select(with_tokens(8192, mask="keys")).recipe == "sage2"
    assert "sage-hf tune" in select(with_tokens(1024, dtype=torch.float32)).reason


def test_a_head_dim_takes_the_narrowest_curve_that_covers_it():
    wide, narrow = curve("flash", launch=1.0, head_dims=(33, 256)), curve("flash", launch=2.0, head_dims=(65, 128))
    table = CostTable("a GPU", H200, {}, (wide, narrow))
    found = [table.curve("flash", "none", False, head_dim) for head_dim in (32, 40, 72, 128, 136, 264)]
    assert found == [None, wide, narrow, narrow, wide, None]


@pytest.mark.parametrize("order", ["waves", "queue", "split"])
@pytest.mark.parametrize("causal", [False, True])
def test_calls_without_queries_or_keys_have_a_cost(order, causal):
    schedule = ItemSchedule(rows=128, keys=64, slots=132, order=order, packs=False, widths=(128,))
    weights = CostWeights(launch=1.0, tile=1.0)
    for sizes in itertools.product((0, 63), repeat=2):
        us = CostCurve(PROVIDER, "none", causal, (1, 128), schedule, weights).us(CallSizes(2, 4, 2, *sizes, 64))
        assert 1.0 <= us < 10.0


def test_a_table_reads_back_as_written(tmp_path):
    table = CostTable("a GPU", H200, {"torch": "2.11"}, (LOW_BIT, CUDNN))
    path = tmp_path / "new" / "table.json"
    table.write(path)
    assert cost_model.read_table(path) == replace(table, origin=str(path))


@pytest.mark.parametrize("text", ["", "{}", '{"gpu": "x", "capability": [9, 0], "versions": {}, "curves": [{}]}'])
def test_a_file_that_is_no_table_is_refused(tmp_path, text):
    path = tmp_path / "table.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="no table of costs"):
        cost_model.read_table(path)


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """Path of the table tuned for a GPU that is made believe."""
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA RTX 4090")
    cost_model.table_of.cache_clear()
    yield cost_model.tuned_path("NVIDIA RTX 4090")
    cost_model.table_of.cache_clear()


def test_a_tuned_table_is_found_and_a_broken_one_is_ignored_with_a_warning(tuned, caplog):
    assert tuned.name.startswith("nvidia-rtx-4090-torch2.")
    assert cost_model.table_of((8, 9)) is None
    tuned.parent.mkdir()
    tuned.write_text("{")
    cost_model.table_of.cache_clear()
    assert cost_model.table_of((8, 9)) is None and "ignored" in caplog.text
    CostTable("NVIDIA RTX 4090", (8, 9), {}, (CUDNN,)).write(tuned)
    cost_model.table_of.cache_clear()
    assert cost_model.table_of((8, 9)).origin == str(tuned)


def test_steps_of_decoding_do_without_cudnn_which_makes_a_plan_for_each_length(use_table):
    use_table(LOW_BIT, CUDNN)
    assert select(replace(REQUEST, q_len=1)).kernel == "sdpa_without_cudnn"
    assert select(replace(REQUEST, q_len=1, device_type="cpu", capability=None)).kernel == "sdpa"
    assert select(replace(REQUEST, q_len=1, dtype=torch.float32)).kernel == "sdpa"
    assert select(replace(REQUEST, q_len=1, recipe="exact")).kernel == "sdpa"  # asked for: PyTorch's own choice
    grouped = replace(REQUEST, q_len=1, kv_heads=8, v_head_dim=64)
    assert select(grouped).kernel == "sdpa"  # else PyTorch would have its unfused attention only


@pytest.mark.parametrize(
    ("us", "other", "other_us", "runs"),
    [
        (50.0, cost_model.SPLIT_KV, 10.0, cost_model.SPLIT_KV),
        (40.0, cost_model.SPLIT_KV, 10.0, "sdpa_without_cudnn"),  # preparing each length outweighs the gain
        (50.0, "fa3", 40.0, "fa3"),  # which takes any length
    ],
)
def test_steps_behind_a_growing_cache_run_by_what_is_faster_with_its_preparation(use_table, us, other, other_us, runs):
    few = {"regime": "few queries"}
    use_table(LOW_BIT, curve("flash", launch=us, **few), curve(other, launch=other_us, **few))
    assert cost_model.fastest_exact(replace(REQUEST, q_len=1), [other]) == runs


@pytest.mark.parametrize(("pytorch_us", "fa3_us", "runs"), [(80, 60, "fa3"), (50, 30, "fa3"), (40, 20, "sdpa")])
def test_flash_attention3_takes_no_less_than_its_host_time(use_table, pytorch_us, fa3_us, runs):
    use_table(LOW_BIT, curve("cudnn", launch=float(pytorch_us)), curve("fa3", launch=float(fa3_us)))
    assert cost_model.fastest_exact(REQUEST, ["fa3"]) == runs


def test_without_costs_steps_behind_a_growing_cache_share_the_keys_of_large_ones(use_table):
    use_table()
    step = replace(REQUEST, q_len=1, kv_heads=8, kv_len=8192, batch=1)
    assert cost_model.fastest_exact(step, [cost_model.SPLIT_KV]) == "sdpa_without_cudnn"
    assert cost_model.fastest_exact(replace(step, batch=16), [cost_model.SPLIT_KV]) == cost_model.SPLIT_KV
    assert cost_model.fastest_exact(replace(step, mask="keys"), [cost_model.SPLIT_KV]) == cost_model.SPLIT_KV
    assert cost_model.fastest_exact(replace(step, q_len=64), [cost_model.SPLIT_KV]) == cost_model.SPLIT_KV
    assert cost_model.fastest_exact(replace(step, q_len=64, kv_len=64), [cost_model.SPLIT_KV]) != cost_model.SPLIT_KV


@pytest.mark.parametrize(("us", "recipe"), [(400.0, "exact"), (600.0, "sage2")])
def test_at_equal_cost_long_calls_run_in_low_bits_and_shorter_ones_exactly(use_table, us, recipe):
    use_table(curve(PROVIDER, launch=us), curve("cudnn", launch=us))
    assert select(with_tokens(4096)).recipe == recipe


@pytest.mark.parametrize(
    ("regime", "facts"),
    [
        ("few queries", {"q_len": 1, "mask": "keys"}),
        ("behind a cache", {"q_len": 512, "is_causal": True, "lower_right": True}),
    ],
)
def test_calls_behind_a_cache_have_curves_of_their_own(use_table, regime, facts):
    times = (("flash", 0.1), ("own", 0.05))
    request = replace(REQUEST, **facts)
    kind = {"mask": request.mask, "causal": request.is_causal}
    use_table(LOW_BIT, CUDNN, *(curve(name, tile=tile, regime=regime, **kind) for name, tile in times))
    assert cost_model.fastest_exact(request, ["own"]) == "own"
    use_table(LOW_BIT, CUDNN, *(curve(name, tile=tile, **kind) for name, tile in times))
    assert cost_model.fastest_exact(request, ["own"]) in ("sdpa", "sdpa_without_cudnn")


def test_exact_calls_do_without_cudnn_where_another_backend_was_faster(use_table):
    use_table(LOW_BIT, CUDNN, curve("flash", launch=20.0, tile=0.2))
    assert select(with_tokens(512)).kernel == "sdpa"
    assert select(with_tokens(1536)).kernel == "sdpa_without_cudnn"


def test_a_step_of_decoding_with_padding_reads_grouped_keys_without_repeating_them(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, n, 32, generator=generator) for heads, n in ((8, 1), (2, 40), (2, 40)))
    mask = (torch.arange(40) >= torch.tensor([[3], [7]]))[:, None, None]
    expected, expected_lse = ops.attention(query, key, value, mask=mask, recipe="exact", return_lse=True)
    monkeypatch.setattr(execution, "select", lambda request, fallback: exact_plan(request, kernel="sdpa_without_cudnn"))
    given, sdpa = [], exact.sdpa
    monkeypatch.setattr(
        exact, "sdpa", lambda query, key, value, **options: given.append(key) or sdpa(query, key, value, **options)
    )
    found, lse = ops.attention(query, key, value, mask=mask, return_lse=True)
    assert given[0].shape == key.shape and found.shape == expected.shape
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(lse, expected_lse)


@pytest.mark.parametrize(("value", "routed"), [("0", False), ("1", True), (None, True)])
def test_the_environment_can_start_a_process_without_routing(value, routed, forks):
    environment = {name: text for name, text in os.environ.items() if name != "SAGE_KERNELS_ROUTING"}
    environment |= {} if value is None else {"SAGE_KERNELS_ROUTING": value}
    output = forks.run("from sage_kernels.dispatch.select import routing; print(routing())", environment)
    assert output.strip() == str(routed)


# (recipe's kind of call, tokens …): batch, q_heads, kv_heads, q_len, kv_len, head_dim, mask, causal.
LOSERS = {
    "Flux at 512²": (1, 24, 24, 1536, 1536, 128, "none", False),
    "256 tokens": (1, 24, 24, 256, 256, 128, "none", False),
    "77 text keys": (2, 10, 10, 4096, 77, 64, "none", False),
    "512 text keys": (1, 24, 24, 17776, 512, 128, "none", False),
    "padded texts": (16, 12, 12, 512, 512, 64, "keys", False),
    "bias of each head": (2, 16, 16, 4096, 4096, 64, "additive", False),
    "head_dim 256": (2, 16, 16, 4096, 4096, 256, "none", False),
    "4k tokens of 10 heads": (1, 10, 10, 4096, 4096, 64, "none", False),
    "short causal": (1, 32, 8, 512, 512, 128, "none", True),
}
WINNERS = {
    "HunyuanVideo with its mask": (1, 24, 24, 119056, 119056, 128, "keys", False),
    "HunyuanVideo": (1, 24, 24, 119056, 119056, 128, "none", False),
    "CogVideoX-2B": (2, 30, 30, 17776, 17776, 64, "none", False),
    "Wan 1.3B": (1, 12, 12, 32760, 32760, 128, "none", False),
    "Llama's prefill": (1, 32, 8, 32768, 32768, 128, "none", True),
}


@pytest.fixture
def shipped(routed, monkeypatch):
    """Choices by the tables that ship; say whether NVRTC is there, and the version of Triton."""

    def use(compiles, triton):
        monkeypatch.setattr(compiler, "unavailable", lambda *_: "" if compiles else "nothing compiles here")
        monkeypatch.setattr(registration, "triton_version", lambda: triton)
        cost_model.table_of.cache_clear()
        forget_choices()

    yield use
    cost_model.table_of.cache_clear()
    forget_choices()


def call_of(batch, q_heads, kv_heads, q_len, kv_len, head_dim, mask="none", causal=False, **facts):
    sizes = {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "q_len": q_len, "kv_len": kv_len}
    facts |= {"head_dim": head_dim, "v_head_dim": head_dim, "mask": mask, "is_causal": causal, "aligned": True}
    return replace(REQUEST, **sizes, **facts)


@pytest.mark.parametrize("name", [*LOSERS, *WINNERS])
def test_the_table_that_ships_for_hopper_knows_what_was_measured_whole(shipped, name):
    shipped(compiles=True, triton=(3, 6))
    plan = select(call_of(*(LOSERS | WINNERS)[name]))
    assert plan.recipe == ("exact" if name in LOSERS else "sage2"), plan.reason


@pytest.mark.parametrize(
    ("capability", "compiles"),
    [
        *((one, True) for one in NVIDIA_CAPABILITIES),
        *(pytest.param(one, False, marks=() if one == (9, 0) else pytest.mark.audit) for one in NVIDIA_CAPABILITIES),
    ],
    ids=lambda value: {True: "NVRTC", False: "no NVRTC"}.get(value, str(value)),
)
def test_reasons_name_the_head_dim_and_unmeasured_long_calls_run_in_low_bits(shipped, capability, compiles):
    shipped(compiles, triton=(3, 9))
    lengths, masks = ((24, 32768), (4, 512)), ("none", "keys", "bool", "additive")
    for recipe, mask, causal in itertools.product(("sage3", "sage2", "sage1"), masks, (False, True)):
        for head_dim, (heads, n) in itertools.product(range(16, 257, 8), lengths):
            plan = select(call_of(1, heads, heads, n, n, head_dim, mask, causal, recipe=recipe, capability=capability))
            assert set(re.findall(r"at head_dim (\d+)", plan.reason)) <= {str(head_dim)}, plan
            low, high = cost_model.UNMEASURED_HEAD_DIMS
            if n > cost_model.UNMEASURED_KV_LEN and low <= head_dim <= high and mask in ("none", "keys"):
                assert plan.numerics == "native" or "no costs were measured" not in plan.reason, plan


def test_on_hopper_without_a_compiler_long_videos_run_in_low_bits(shipped):
    shipped(compiles=False, triton=(3, 5))
    for batch, heads, n, head_dim in ((1, 24, 119056, 128), (2, 30, 17776, 64)):  # HunyuanVideo, CogVideoX-2B
        plan = select(call_of(batch, heads, heads, n, n, head_dim))
        assert plan.kernel == "int8_forward", plan.reason


@pytest.mark.parametrize(
    ("head_dim", "backward"), [(64, "int8_backward_fused"), (128, "int8_backward_fused"), (60, "int8_backward")]
)
@pytest.mark.parametrize("mask", ["none", "causal", "keys"])
def test_the_table_that_ships_for_hopper_judges_training_by_the_kernels_that_run(shipped, mask, head_dim, backward):
    shipped(compiles=True, triton=(3, 6))
    kind = {"mask": "none" if mask == "causal" else mask, "causal": mask == "causal", "recipe": "sage_bwd"}
    calls = (call_of(1, 32, 32, n, n, head_dim, **kind) for n in (256, 16384))
    short, long = (select(replace(call, grad=True, aligned=head_dim % 8 == 0)) for call in calls)
    assert short.backward == long.backward == backward
    if (mask, head_dim) == ("keys", 60):
        assert "no costs were measured" in why_training_slower(short)
    else:
        assert "exact attention trains faster here" in why_training_slower(short)
    assert head_dim == 60 or why_training_slower(long) == ""


def test_tables_that_ship_are_read_without_complaint():
    paths = list(cost_model.SHIPPED.glob("*.json"))
    assert paths
    for path in paths:
        table = cost_model.read_table(path)
        assert path.stem == ".".join(map(str, table.capability))
        assert {curve.provider for curve in table.curves} >= set(cost_model.BACKENDS)


def test_calls_behind_a_cache_are_routed_by_the_backend_that_serves_them(use_table):
    causal = [replace(one, causal=True) for one in (LOW_BIT, CUDNN, curve("flash", launch=500.0))]
    use_table(*causal)
    call = with_tokens(1024, is_causal=True)
    assert select(call).recipe == "exact"
    assert select(replace(call, lower_right=True)).recipe == "sage2"
    use_table(*causal[:2])
    assert "no costs were measured" in select(replace(call, lower_right=True)).reason


@pytest.mark.parametrize(("offset", "lower_right", "shifted"), [(0, False, False), (48, True, False), (7, False, True)])
def test_a_call_says_how_its_causality_is_aligned(offset, lower_right, shifted):
    x = torch.zeros(1, 2, 64, 64)
    call = Call(x[:, :, :16], x, x, get_recipe("sage2"), is_causal=True, causal_offset=offset)
    request = execution.request_of(call)
    assert (request.lower_right, request.shifted) == (lower_right, shifted)


class OwnKernel:
    name, traceable = "own", True

    def unsupported(self, request):
        return "head_dim above 128" if request.head_dim > 128 else ""


@pytest.fixture
def own_kernel(monkeypatch):
    monkeypatch.setattr(registry, "exacts", {"own": OwnKernel()})


def test_a_kernel_of_our_own_is_exact_where_it_was_measured_to_be_faster(use_table, own_kernel):
    use_table(curve("cudnn", launch=50.0), curve("own", launch=40.0), curve("cudnn", launch=50.0, head_dims=(129, 256)))
    assert select(replace(REQUEST, recipe="sage_bwd")).kernel == "own"  # which nothing serves in low bits here
    assert select(replace(REQUEST, recipe="sage_bwd", head_dim=256, v_head_dim=256)).kernel == "sdpa"
    use_table(curve("cudnn", launch=50.0), curve("own", launch=60.0))
    assert select(replace(REQUEST, recipe="sage_bwd")).kernel == "sdpa"
    use_table(curve("cudnn", launch=50.0))
    assert select(replace(REQUEST, recipe="sage_bwd")).kernel == "sdpa"


def test_low_bits_have_to_be_faster_than_kernels_of_our_own_too(use_table, own_kernel):
    use_table(LOW_BIT, CUDNN)
    assert select(with_tokens(8192)).recipe == "sage2"
    use_table(LOW_BIT, CUDNN, curve("own", tile=0.01))
    plan = select(with_tokens(8192))
    assert (plan.recipe, plan.kernel) == ("exact", "own")
