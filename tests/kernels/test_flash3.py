"""Which calls FlashAttention 3 takes over from PyTorch, and how it is called."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sage_kernels import backends  # noqa: F401 - `backends` registers the kernels
from sage_kernels.dispatch import execution, replays
from sage_kernels.dispatch.plan import exact_plan
from sage_kernels.dispatch.registry import get_exact
from sage_kernels.dispatch.request import Request
from sage_kernels.exact import sdpa
from sage_kernels.external import flash_attention3
from sage_kernels.replay.trace import tracing
from sage_kernels.spec.call import Call
from sage_kernels.spec.recipe import get_recipe
from sage_kernels.triton import registration

REQUEST = Request(
    *("sage2", "cuda", (9, 0), torch.bfloat16, 2, 8, 2, 64, 64, 128, 128, "none", False, False), aligned=True
)


@pytest.fixture
def operator(monkeypatch):
    """Fake operator: it keeps its options, and attends as the real one does."""
    calls = []

    def attend(query, key, value, softmax_scale, is_causal, num_splits):
        calls.append((softmax_scale, is_causal, num_splits))
        tensors = (x.transpose(1, 2) for x in (query, key, value))
        options = {"is_causal": is_causal, "causal_offset": key.shape[1] - query.shape[1], "scale": softmax_scale}
        output, lse = sdpa.attention(*tensors, **options)
        return output.transpose(1, 2).to(query.dtype), lse

    monkeypatch.setattr(flash_attention3, "_operator", lambda: attend)
    return calls


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        ({"capability": (8, 0)}, "Hopper"),
        ({"dtype": torch.float32}, "float16"),
        ({"aligned": False}, "aligned"),
        ({"v_head_dim": 64}, "head_dim"),
        ({"head_dim": 264, "v_head_dim": 264}, "head_dim"),
        ({"mask": "keys"}, "masks"),
        ({"return_lse": True}, "LSE"),
        ({"packed": True}, "packed"),
        ({"is_causal": True, "kv_len": 128}, "lower right"),
        ({"is_causal": True, "shifted": True}, "lower right"),
        ({"is_causal": True, "lower_right": True, "q_len": 128}, "lower right"),
    ],
)
def test_it_is_asked_for_nothing_that_it_cannot_do(operator, facts, part):
    assert part in get_exact("fa3").unsupported(replace(REQUEST, **facts))


@pytest.mark.parametrize(
    ("facts", "part"),
    [
        ({"mask": "none"}, "key-padding mask"),
        ({"is_causal": True}, "without causality"),
        ({"head_dim": 264, "v_head_dim": 264}, "head_dim"),
        ({"return_lse": True}, "LSE"),
        ({}, ""),
    ],
)
def test_with_masks_it_serves_key_padding(operator, monkeypatch, facts, part):
    monkeypatch.setattr(registration, "triton_version", lambda: (3, 6))
    reason = get_exact("fa3_padded").unsupported(replace(REQUEST, **{"mask": "keys", **facts}))
    assert part in reason and bool(part) == bool(reason)


def test_a_build_without_float16_serves_none(operator, monkeypatch):
    config = SimpleNamespace(CONFIG={"build_flags": {flash_attention3.WITHOUT_FLOAT16: True}})
    monkeypatch.setattr(flash_attention3, "find_spec", lambda module: module == "fa3_fwd_config")
    monkeypatch.setattr(flash_attention3, "import_module", lambda module: config)
    flash_attention3._takes_float16.cache_clear()
    assert "float16" in get_exact("fa3").unsupported(replace(REQUEST, dtype=torch.float16))
    assert get_exact("fa3").unsupported(REQUEST) == ""
    flash_attention3._takes_float16.cache_clear()


@pytest.mark.parametrize(
    "facts", [{}, {"is_causal": True}, {"is_causal": True, "lower_right": True, "kv_len": 128}, {"kv_len": 77}]
)
def test_it_serves_calls_without_a_mask(operator, facts):
    assert get_exact("fa3").unsupported(replace(REQUEST, **facts)) == ""


@pytest.mark.parametrize("installed", [False, True])
def test_without_a_package_or_with_one_for_another_pytorch_it_serves_nothing(installed, monkeypatch):
    def fail(module):
        raise ImportError("undefined symbol")

    monkeypatch.setattr(flash_attention3, "find_spec", lambda package: package if installed else None)
    monkeypatch.setattr(flash_attention3, "import_module", fail)
    flash_attention3._operators.cache_clear()
    assert "not installed" in get_exact("fa3").unsupported(REQUEST)
    flash_attention3._operators.cache_clear()


@pytest.mark.parametrize("scale", [0.3, -0.3])
@pytest.mark.parametrize("causal", [False, True])
def test_its_output_equals_the_calls_output(operator, causal, scale):
    query, key = torch.randn(2, 8, 100, 64), torch.randn(2, 2, 130, 64)
    options = {"is_causal": causal, "causal_offset": 30 if causal else 0, "scale": scale}
    call = Call(query, key, key, get_recipe("exact"), **options)
    plan = exact_plan(execution.request_of(call), kernel="fa3")
    expected, _ = sdpa.attention(query, key, key, **options)
    output, _ = execution.compute(call, plan)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    replayed, _ = replays.replay_of_call(call, plan, None, (output, None))(query, key, key, None)
    assert torch.equal(replayed, output)
    assert operator == [(abs(scale), causal, 0)] * 3


@pytest.mark.parametrize(("heads", "queries", "splits"), [(4, 1, 0), (4, 200, 0), (132, 1, 1), (66, 200, 1)])
def test_keys_may_be_divided_where_programs_would_leave_multiprocessors_idle(operator, heads, queries, splits):
    query, key = torch.randn(1, heads, queries, 16), torch.randn(1, heads, 130, 16)
    get_exact("fa3").attend(Call(query, key, key, get_recipe("exact")))
    assert operator == [(1.0, False, splits)]


class NonprefixKernel:
    """Fake of the kernel that counts keys: it has the operator attend in the first element alone."""

    def attend_nonprefix(self, call, attend_to_prefix, row_blocks):
        self.row_blocks, output = row_blocks, torch.zeros_like(call.query)
        lengths = torch.tensor([5, 0], dtype=torch.int32)
        which = (None, torch.tensor([1])) if row_blocks else (torch.tensor([3, 0]), None)
        attend_to_prefix(call, which[0], lengths, which[1], output)
        return output


def scheduler(split=1, counter=0):
    def schedule(batch, q_len, kv_len, q_heads, kv_heads, *others, seqused_q=None, num_splits):
        assert num_splits == 1
        size, blocks = -(-batch // 4) * 4, q_heads // kv_heads * -(-q_len // 128)
        numbers = torch.full((3 * size + 1,), 77, dtype=torch.int32)
        numbers[:batch], numbers[size : size + batch] = split, blocks if seqused_q is None else seqused_q
        numbers[2 * size : 2 * size + batch], numbers[-1] = torch.arange(batch).flip(0), counter
        return numbers

    return schedule


@pytest.mark.parametrize(
    ("scheduled_by", "ignores", "row_blocks"),
    [
        (None, False, 0),
        (scheduler(), False, 4),
        (scheduler(), True, 0),
        (scheduler(split=2), False, 0),
        (scheduler(counter=9), False, 0),
        (lambda *sizes: sizes, False, 0),
    ],
    ids=["no scheduler", "scheduler", "it ignores schedules", "it splits", "another layout", "other arguments"],
)
def test_with_padding_it_takes_a_schedule_where_it_follows_schedules(monkeypatch, scheduled_by, ignores, row_blocks):
    options = {}

    def attend(query, key, value, out, **kwargs):
        options.clear()
        options.update(kwargs)
        out[0] = 1.0
        if ignores and "scheduler_metadata" in kwargs:
            out[1] = 1.0
        return out, torch.zeros(4)

    operators = SimpleNamespace(fwd=attend)
    if scheduled_by is not None:
        operators.get_scheduler_metadata = scheduled_by
    monkeypatch.setattr(flash_attention3, "_operators", lambda: operators)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(flash_attention3, "_row_blocks_by_size", {})
    flash_attention3._takes_schedules.cache_clear()
    query, key = torch.randn(2, 128, 200, 64), torch.randn(2, 64, 10, 64)
    nonprefix_kernel = NonprefixKernel()
    output = flash_attention3.PaddedFlashAttention3(nonprefix_kernel).attend(
        Call(query, key, key, get_recipe("exact"), scale=0.1)
    )
    assert nonprefix_kernel.row_blocks == row_blocks
    assert options["seqused_k"].tolist() == [5, 0] and options["num_splits"] == 1
    assert ("scheduler_metadata" in options) == bool(row_blocks) != ("seqused_q" in options)
    assert output[0].any() and not output[1].any()
    flash_attention3._takes_schedules.cache_clear()


def test_with_padding_a_traced_call_notes_the_operator(monkeypatch):
    written = []
    monkeypatch.setattr(
        flash_attention3, "_operator", lambda: lambda *tensors, out, **options: written.append((out, options))
    )
    call = Call(*[torch.zeros(1, 1, 5, 16)] * 3, get_recipe("exact"), scale=0.1)
    with tracing() as trace:
        traced_call = replace(
            call,
            query=trace.placeholder(call.query),
            key=trace.placeholder(call.key),
            value=trace.placeholder(call.value),
        )
        lengths, output = traced_call.query.new_empty(1, dtype=torch.int32), traced_call.query.new_empty(1, 1, 5, 16)
        flash_attention3._attend_to_prefix(traced_call, lengths, lengths, None, output)
    (operator,) = trace.steps
    assert not written
    tensors = [torch.zeros(x.shape) for x in operator.arguments]
    operator.run(*tensors)
    ((out, options),) = written
    assert out.data_ptr() == tensors[3].data_ptr() and options["softmax_scale"] == 0.1 and options["num_splits"] == 1
    assert options["seqused_q"] is tensors[4] and options["seqused_k"] is tensors[5]
