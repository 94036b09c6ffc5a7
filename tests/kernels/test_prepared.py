"""Prepared calls on a GPU that runs nothing: what a repeated call does on its host, and when a call is repeated."""

import contextlib
import struct
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from sage_hf import record, sage_attention
from sage_hf.attention import attend
from sage_kernels import dispatch, exact, prepared, registry, rehearsal, tape
from sage_kernels.call import Call, Mask
from sage_kernels.cuda import quantize, quantize_nvfp4
from sage_kernels.prepared import Slot
from sage_kernels.prepared_calls import TapedCall
from sage_kernels.recipe import get_recipe
from tests.helpers.host_cost import python_calls
from tests.helpers.kernels import registrations_undone

SHAPE = (1, 2, 192, 64)
pytestmark = pytest.mark.usefixtures("nothing_prepared")


def draw(*shape, count=3):
    return [torch.randn(shape or SHAPE, dtype=torch.bfloat16) for _ in range(count)]


def is_prepared(*tensors, **options) -> bool:
    """Return whether a call is repeated from its third time on."""
    for _ in range(2):
        sage_attention(*tensors, **options)
    return "TapedCall.__call__" in python_calls(partial(sage_attention, *tensors, **options))


def test_calls_of_one_layout_are_prepared_together_and_others_apart(gpu):
    assert is_prepared(*draw(), recipe="sage2")
    names = python_calls(partial(sage_attention, *draw(), recipe="sage2"))
    assert "TapedCall.__call__" in names
    for tensors, options in (
        (draw(1, 2, 193, 64), {}),
        ([x.transpose(1, 2).contiguous().transpose(1, 2) for x in draw()], {}),
        ([x.half() for x in draw()], {}),
        (draw(), {"scale": 0.25}),
        (draw(), {"scale": 1}),
        (draw(), {"is_causal": True}),
        (draw(), {"return_lse": True}),
        (draw(), {"fallback": "emulate"}),
    ):
        call = partial(sage_attention, *tensors, **{"recipe": "sage2", **options})
        assert "TapedCall.__call__" not in python_calls(call)


def test_the_launches_of_each_call_get_its_addresses_and_its_stream(gpu, monkeypatch):
    assert is_prepared(*draw(), recipe="sage2")
    for stream in (7, 11, 7):
        monkeypatch.setattr(tape, "current_stream", lambda index, stream=stream: stream)
        query, key, value = draw()
        gpu.launched.clear()
        output = sage_attention(query, key, value, recipe="sage2")
        statistics, quantize, attend = gpu.launched
        assert {launched.stream for launched in gpu.launched} == {stream}
        behind_heavy_keys = [x.data_ptr() + 64 * 64 * x.element_size() for x in (key, value)]
        assert [statistics.word(i) for i in (0, 1, 3)] == [x.data_ptr() for x in (key, value, query)]
        assert [quantize.word(0), quantize.word(1), quantize.word(2)] == [query.data_ptr(), *behind_heavy_keys]
        assert attend.word(3) == output.data_ptr()  # the head of a tensor map


@pytest.mark.parametrize("quantizer", [quantize, quantize_nvfp4])
@pytest.mark.usefixtures("gpu")
def test_a_rehearsal_sees_every_buffer_of_a_quantiser(quantizer, monkeypatch):
    """Others would be freed behind it, and read and written by every call."""
    recipe = get_recipe("sage3" if quantizer is quantize_nvfp4 else "sage2")
    with rehearsal.rehearsing() as rehearsed:
        table = rehearsed.stand_in(torch.zeros(1))
        monkeypatch.setattr(quantize_nvfp4, "search_table", lambda steps, device: table)
        tensors = [rehearsed.stand_in(x) for x in draw()]
        operands = quantizer.quantize_operands(Call(*tensors, recipe, scale=0.125))
    assert operands.heavy is not None
    launches = [launch for launch, _ in rehearsed.steps]
    addresses = [
        struct.unpack_from("<Q", launch.parameters, place)[0] for launch in launches for place in launch.addresses
    ]
    assert len(launches) == (3 if quantizer is quantize_nvfp4 else 2)
    assert all(address == 0 or rehearsal.is_stand_in(address) for address in addresses)


def test_each_call_allocates_its_output_and_its_buffers_anew(gpu):
    assert is_prepared(*draw(), recipe="sage2")
    tensors = draw()
    with mock.patch.object(torch, "empty", wraps=torch.empty) as allocate:
        outputs = [sage_attention(*tensors, recipe="sage2") for _ in range(3)]
    assert allocate.call_count == 3
    assert len({x.data_ptr() for x in outputs}) == 3


def test_a_kernel_registered_later_is_considered(gpu):
    assert is_prepared(*draw(), recipe="sage2")
    with registrations_undone():
        registry.register_forward(SimpleNamespace(name="new", native=False, serves=lambda recipe: False))
        names = python_calls(partial(sage_attention, *draw(), recipe="sage2"))
    assert "TapedCall.__call__" not in names


class Subclass(torch.Tensor):
    """A tensor whose operators someone may want to see."""


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["subclass", "mode", "function mode", "unaligned", "negated", "dual", "mapped"])
def test_only_plain_calls_are_found(kind):
    query, key, value = draw()
    with contextlib.ExitStack() as stack:
        if kind == "subclass":
            query = query.as_subclass(Subclass)
        elif kind == "mode":
            stack.enter_context(Watch())
        elif kind == "function mode":
            stack.enter_context(torch.device("cpu"))
        elif kind == "unaligned":
            query = torch.randn(query.numel() + 1, dtype=query.dtype)[1:].view(SHAPE)
        elif kind == "negated":
            query = query._neg_view()
        elif kind == "dual":
            stack.enter_context(torch.autograd.forward_ad.dual_level())
        found = []
        if kind == "mapped":
            torch.vmap(lambda x: found.append(prepared.look_up(x, x, x, None, ())) or x)(query)
        else:
            found.append(prepared.look_up(query, key, value, None, ()))
    assert found == [None]


def test_a_prepared_call_is_recorded_and_observed(gpu):
    layer, seen = torch.nn.Identity(), []
    tensors = draw()
    assert is_prepared(*tensors, recipe="sage2")
    with record.layer_scope(layer), record.observe(seen.append):
        output = sage_attention(*tensors, recipe="sage2")
    assert [plan.kernel for plan in record.last_plans(layer)] == ["int8_forward_hopper"]
    assert seen[0].layer is layer and seen[0].output is output and seen[0].query is tensors[0]


def test_a_call_that_does_more_than_launch_runs_as_before(gpu):
    assert not is_prepared(*draw(), recipe="sage2", scale=-0.5)  # which negates Q


MASKS = {
    "none": None,
    "keys": torch.arange(48) < 40,
    "rows": (torch.arange(40)[:, None] > torch.arange(48)) & (torch.arange(40)[:, None] != 3),
    "additive": torch.randn(40, 48),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("recipe", ["exact", "sage2"])
@pytest.mark.parametrize("grad", [False, True])
def test_a_prepared_exact_call_is_that_of_the_first_time(mask, recipe, grad):
    """Call recipe sage2 with few keys, or for gradients, which it has none of."""
    query, key, value = (torch.randn(2, 2, tokens, 16, requires_grad=grad) for tokens in (40, 48, 48))
    call = partial(sage_attention, query, key, value, MASKS[mask], recipe=recipe)
    outputs = [call() for _ in range(4)]
    assert all(torch.equal(outputs[0], x) and x.stride() == outputs[0].stride() for x in outputs[1:])
    assert "look_up" not in python_calls(call)
    if grad:
        gradients = [torch.autograd.grad(x.sum(), (query, key, value)) for x in outputs]
        assert all(torch.equal(x, y) for one in gradients for x, y in zip(one, gradients[0], strict=True))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("mask", ["none", "keys"])
@pytest.mark.parametrize("recipe", ["exact", "sage2"])
def test_calls_with_tokens_before_heads_are_those_of_their_transposes(recipe, mask, grad):
    inputs = [torch.randn(2, tokens, 2, 16, requires_grad=grad) for tokens in (40, 48, 48)]
    transposed, seen = [x.transpose(1, 2) for x in inputs], []
    expected = sage_attention(*transposed, MASKS[mask], recipe=recipe)
    for _ in range(4):
        with record.observe(seen.append):
            output, _ = attend(*inputs, MASKS[mask], recipe=recipe, tokens_first=True)
        assert torch.equal(output.transpose(1, 2), expected)
    for call in seen:
        assert torch.equal(call.output, expected) and torch.equal(call.query, transposed[0])
    assert "look_up" not in python_calls(partial(attend, *inputs, MASKS[mask], recipe=recipe, tokens_first=True))


def test_launches_with_tokens_before_heads_cost_no_views(gpu):
    query, key, value = draw(1, 192, 2, 64)
    for _ in range(3):
        output, _ = attend(query, key, value, recipe="sage2", tokens_first=True)
    assert output.shape == query.shape and output.is_contiguous()
    gpu.launched.clear()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        attend(query, key, value, recipe="sage2", tokens_first=True)
    assert sum(event.count for event in profile.key_averages() if event.key == "aten::transpose") == 1
    assert len(gpu.launched) == 3 and gpu.launched[0].word(3) == query.data_ptr()


def test_a_call_at_hand_serves_tensors_like_its_own_only(gpu):
    """Others, of another alignment or kind, are looked up by their facts."""
    tensors = draw()
    assert is_prepared(*tensors, recipe="sage2") and is_prepared(*tensors, recipe="sage2")
    ((facts, ((_, slot),)),) = prepared._at_hand.items()
    assert slot.prepared is not None
    for found in (tensors, draw()):
        assert prepared.repeat(*found, None, facts) is not None
    unaligned = torch.randn(tensors[0].numel() + 1, dtype=torch.bfloat16)[1:].view(SHAPE)
    assert prepared.repeat(unaligned, *tensors[1:], None, facts) is None
    assert prepared.repeat(tensors[0]._neg_view(), *tensors[1:], None, facts) is None
    assert prepared.repeat(None, *tensors[1:], None, facts) is None
    for other in (draw(1, 2, 193, 64), [x.half() for x in tensors], [x.transpose(2, 3).contiguous() for x in tensors]):
        assert prepared.repeat(*other, None, facts) is None
    with torch.autocast("cpu"):
        assert prepared.repeat(*tensors, None, facts) is None
    assert prepared.repeat(*(x.requires_grad_() for x in draw()), None, facts) is None
    prepared.forget()
    assert prepared.repeat(*tensors, None, facts) is None


@pytest.mark.parametrize("first", [False, True])
def test_a_call_at_hand_has_gradients_where_they_are_wanted(first):
    inputs = [torch.randn(1, 2, 32, 16, requires_grad=True) for _ in range(3)]
    for enabled in (first, not first, first):
        with torch.set_grad_enabled(enabled):
            assert all(sage_attention(*inputs, recipe="exact").requires_grad == enabled for _ in range(5))


def test_more_kinds_of_calls_than_are_at_hand_are_found(gpu):
    kinds = [draw(1, 2, 192 + tokens, 64) for tokens in range(2 * prepared.AT_HAND)]
    for tensors in kinds:
        assert is_prepared(*tensors, recipe="sage2")
    for tensors in kinds + kinds:
        names = python_calls(partial(sage_attention, *tensors, recipe="sage2"))
        assert "TapedCall.__call__" in names


def test_a_launch_may_prefer_shared_memory(gpu, gluon):
    """So does the one before FlashAttention 3, which runs with what it leaves."""
    from sage_kernels.triton import scattered_forward

    mask = torch.ones(1, 1, 1, SHAPE[2], dtype=torch.bool)
    with rehearsal.rehearsing() as rehearsed:
        query, key, value, mask = (rehearsed.stand_in(x) for x in (*draw(), mask))
        call = Call(query, key, value, get_recipe("exact"), Mask.of(mask, SHAPE[2]))
        scattered_forward.attend(call, lambda *arguments: None)
    assert list(gpu.attributes.values()) == [scattered_forward.SHARED_PERCENT]


def test_one_tensor_as_query_key_and_value_is_found_without_a_comparison_made_each_time(gpu):
    tensors = draw()[:1] * 3
    assert is_prepared(*tensors, recipe="sage2")
    names = python_calls(partial(sage_attention, *tensors, recipe="sage2"))
    assert "TapedCall.__call__" in names and "guards_of" not in names


def test_a_prepared_exact_call_under_autocast_has_its_dtype():
    tensors = [torch.randn(1, 2, 32, 16) for _ in range(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert [sage_attention(*tensors, recipe="exact").dtype for _ in range(4)] == [torch.bfloat16] * 4
    assert [sage_attention(*tensors, recipe="exact").dtype for _ in range(5)] == [torch.float32] * 5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert sage_attention(*tensors, recipe="exact").dtype == torch.bfloat16


def test_the_tensors_of_gradients_may_be_saved_elsewhere(gpu, gluon):
    """Compare what a prepared call saves with what the operator saves: recomputation must find the same."""
    inputs, kept = [x.requires_grad_() for x in draw()], []
    for _ in range(3):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.append(x) or x, lambda x: x):
            sage_attention(*inputs, recipe="sage_bwd")
        kept.append([(x.shape, x.dtype) for x in saved])
    assert kept[0] == kept[1] == kept[2]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_prepared_step_of_decoding_with_padding_does_without_cudnn(monkeypatch, enabled):
    """And reads grouped keys as rows of one head, as the first time."""
    monkeypatch.setattr(
        dispatch, "select", lambda request, fallback: registry.exact_plan(request, kernel="sdpa_without_cudnn")
    )
    query, key, value = (torch.randn(2, heads, tokens, 32) for heads, tokens in ((8, 1), (2, 40), (2, 40)))
    mask = (torch.arange(40) >= torch.tensor([[3], [40]]))[:, None, None]
    call = partial(sage_attention, query, key, value, mask, enable_gqa=True, recipe="sage2")
    seen, sdpa = [], exact.sdpa

    def watched(query, *others, **options):
        seen.append((query.shape[1:3], torch.backends.cuda.cudnn_sdp_enabled()))
        return sdpa(query, *others, **options)

    monkeypatch.setattr(exact, "sdpa", watched)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(enabled)
    try:
        outputs = [call() for _ in range(4)]
        assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
    assert seen == [((2, 4), False)] * 4
    assert all(torch.equal(outputs[0], x) for x in outputs) and not outputs[0][1].any()
    assert "look_up" not in python_calls(call)


class StepKernel:
    """Exact kernel whose host code can be rehearsed, with PyTorch's attention in its place."""

    name, repeats = "step", True

    def unsupported(self, request):
        return ""

    def attend(self, call):
        return exact.sdpa(call.query, call.key, call.value, scale=call.scale, enable_gqa=True)


@pytest.mark.parametrize(("queries", "kernel", "calls"), [(1, "step", 1), (64, "step", 2), (1, "sdpa", 1)])
def test_steps_of_decoding_are_prepared_at_their_first_call(monkeypatch, queries, kernel, calls):
    """Each layer calls with the same number of keys, and the next step with one more."""
    made = []
    monkeypatch.setattr(registry, "_exacts", {"step": StepKernel()})
    monkeypatch.setattr(dispatch, "select", lambda request, fallback: registry.exact_plan(request, kernel=kernel))
    monkeypatch.setattr(prepared, "prepare", lambda call, *_, **__: made.append(call))
    query, (key, value) = draw(1, 4, queries, 64, count=1)[0], draw(1, 2, 70, 64, count=2)
    for count in range(1, 3):
        sage_attention(query, key, value, enable_gqa=True, recipe="sage2")
        assert len(made) == (count >= calls) + (count == 2 and calls == 1)


def test_an_operator_among_launches_gets_the_tensors_of_each_call(gpu):
    def attend(x, y, lengths):
        lengths.fill_(3)
        y.copy_(x * lengths[4])

    with rehearsal.rehearsing() as rehearsed:
        x = rehearsed.stand_in(torch.empty(2, 8, 4).transpose(0, 1))
        y, lengths = x.new_empty(8, 2, 4), x.new_empty(5, dtype=torch.int32)
        rehearsed.ran(attend, x, y, lengths)
        repeated = tape.Tape(rehearsed, [x], [y], torch.device("cpu"))
    for _ in range(2):
        given = torch.randn(2, 8, 4).transpose(0, 1)
        (found,) = repeated.run(given.data_ptr(), arguments=(given, None))
        assert torch.equal(found, 3 * given)


@pytest.mark.parametrize("tokens_first", [False, True])
def test_an_operator_among_launches_gets_tensors_laid_out_as_they_were_rehearsed(gpu, tokens_first):
    drawn = torch.randn(1, 5, 2, 16)  # tokens before heads

    def attend(query, key, value, output):
        output.copy_(query * key.sum(2, keepdim=True) + value)

    with rehearsal.rehearsing() as rehearsed:
        inputs = [rehearsed.stand_in(drawn.transpose(1, 2)) for _ in range(3)]
        output = inputs[0].new_empty(1, 2, 5, 16)
        rehearsed.ran(attend, *inputs, output)
        recorded = tape.Tape(rehearsed, inputs, [output], torch.device("cpu"))
    run = TapedCall(None, recorded, return_lse=False).shortcut(tokens_first)
    given = drawn if tokens_first else drawn.transpose(1, 2)
    expected = drawn * drawn.sum(1, keepdim=True) + drawn
    torch.testing.assert_close(run(given, given, given, None), expected if tokens_first else expected.transpose(1, 2))


@pytest.mark.parametrize("argument", [lambda x: x[1:], lambda x: x.transpose(0, 1), lambda x: torch.empty(2)])
def test_an_operator_gets_no_part_of_an_argument_and_no_other_tensor(gpu, argument):
    with rehearsal.rehearsing() as rehearsed, pytest.raises(rehearsal.NotRepeatableError):
        x = rehearsed.stand_in(torch.empty(8, 4))
        rehearsed.ran(lambda x: None, argument(x))
        tape.Tape(rehearsed, [x], [], torch.device("cpu"))


class Repeated:
    """Prepared call that attends to nothing."""

    def __init__(self, plan):
        self.plan = plan

    def __call__(self, query, key, value, mask):
        return query, None

    def shortcut(self, tokens_first):
        return lambda query, key, value, mask: query


@pytest.fixture
def steps(monkeypatch):
    """Return what calls with each of some keys, (kernel of its plan) -> it; another kernel serves keys that recur."""

    def plan(request, fallback):
        on_gpu = replace(request, device_type="cuda")
        return registry.exact_plan(on_gpu, kernel="step" if request.recurs else "sdpa")

    monkeypatch.setattr(registry, "_exacts", {"step": StepKernel()})
    monkeypatch.setattr(dispatch, "select", plan)
    monkeypatch.setattr(prepared, "prepare", lambda call, plan, mask: Repeated(plan))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    prepared.forget()
    query, *keys = draw(1, 4, 1, 64, count=1) + draw(1, 2, 70, 64, count=3)

    def step(key):
        announced = []
        monkeypatch.setattr(dispatch, "plan_listeners", [announced.append])
        with record.observe(lambda call: announced.append(call.plan)):
            sage_attention(query, key, key, enable_gqa=True, recipe="sage2")
        return announced[-1].kernel

    return step, keys


def test_keys_that_lie_where_they_lay_are_no_growing_caches(steps):
    """Layers differ in addresses, and a cache that grows never has the same length again."""
    step, layers = steps
    assert [step(key) for key in layers] == ["sdpa"] * 3
    assert [step(key) for key in layers] == ["sdpa", "step", "step"]  # the first of them is still what was prepared
    assert [step(key) for key in layers] == ["step"] * 3


def test_a_second_call_with_the_same_keys_says_that_their_length_is_fixed(steps):
    step, (key, *_) = steps
    assert [step(key) for _ in range(4)] == ["sdpa", "sdpa", "step", "step"]  # the second is what was prepared


def test_steps_behind_a_cache_that_grows_are_planned_once_for_many_lengths(monkeypatch):
    planned, seen, select = [], [], dispatch.select
    monkeypatch.setattr(
        dispatch, "select", lambda request, fallback: planned.append(request) or select(request, fallback)
    )
    prepared.forget()
    lengths = range(prepared.STEP_KEYS - 4, prepared.STEP_KEYS + 4)
    for tokens in lengths:
        query, (key, value) = draw(1, 4, 1, 64, count=1)[0], draw(1, 2, tokens, 64, count=2)
        with record.observe(seen.append):
            output = sage_attention(query, key, value, enable_gqa=True, recipe="sage2")
        assert torch.equal(output, F.scaled_dot_product_attention(query, key, value, enable_gqa=True))
    assert [request.kv_len for request in planned] == [lengths[0], prepared.STEP_KEYS]
    assert [call.plan.request.kv_len for call in seen] == list(lengths)
    for other in ((1, 3, lengths[1], 64), (2, 2, lengths[1], 64), (1, 2, lengths[1], 32)):
        with pytest.raises(ValueError, match=r"heads|batch|head_dim"):
            sage_attention(query, *draw(*other, count=2), enable_gqa=True, recipe="sage2")
    with pytest.raises(ValueError, match="tokens of key and value"):
        sage_attention(
            query, *draw(1, 2, lengths[1], 64, count=1), *draw(1, 2, lengths[2], 64, count=1), recipe="sage2"
        )


def test_steps_of_a_fixed_number_of_keys_are_no_model_for_those_that_grow(monkeypatch):
    """A kernel that makes a plan for each number is the best for one, and the worst for many."""
    planned = []

    def select(request, fallback):
        planned.append(request)
        return registry.exact_plan(request, kernel="sdpa" if request.recurs else "sdpa_without_cudnn")

    monkeypatch.setattr(dispatch, "select", select)
    monkeypatch.setattr(Slot, "recurs", lambda self, query, key: key.shape[2] == 40)
    for tokens in (40, 41, 42):
        query, (key, value) = draw(1, 4, 1, 64, count=1)[0], draw(1, 2, tokens, 64, count=2)
        sage_attention(query, key, value, enable_gqa=True, recipe="sage2")
    assert [(request.kv_len, request.recurs) for request in planned] == [(40, True), (41, False)]
