"""Prepared calls on a GPU that runs nothing: what a repeated call does on its host, and when a call is repeated."""

import contextlib
import ctypes
import random
import struct
from functools import partial
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from sage_hf import record, sage_attention
from sage_hf.attention import attend
from sage_kernels.cuda import quantize, quantize_nvfp4
from sage_kernels.dispatch import registry
from sage_kernels.dispatch import run as dispatch
from sage_kernels.exact import sdpa as exact
from sage_kernels.replay import driver, launch_plan, prepared, trace
from sage_kernels.replay.prepared_calls import TapedCall
from sage_kernels.spec.call import Call, Mask
from sage_kernels.spec.recipe import get_recipe
from tests.helpers.host_cost import python_calls
from tests.helpers.kernels import registrations_undone

SHAPE = (1, 2, 192, 64)
ARE_SAME = prepared.are_same  # which the fake GPU takes out
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
        monkeypatch.setattr(launch_plan, "current_stream", lambda index, stream=stream: stream)
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
    with trace.rehearsing() as rehearsed:
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
    assert all(address == 0 or trace.is_stand_in(address) for address in addresses)


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
@pytest.mark.parametrize("around", ["nothing", "grouped heads allowed", "autocast"])
def test_a_prepared_exact_call_is_that_of_the_first_time(mask, recipe, grad, around):
    """Call recipe sage2 with few keys, or for gradients, which it has none of."""
    query, key, value = (torch.randn(2, tokens, 2, 16).transpose(1, 2) for tokens in (40, 48, 48))
    for x in (query, key, value):
        x.requires_grad_(grad)
    options = {"recipe": recipe, "enable_gqa": around == "grouped heads allowed"}
    call = partial(sage_attention, query, key, value, MASKS[mask], **options)
    with torch.autocast("cpu", enabled=around == "autocast"):
        outputs = [call() for _ in range(4)]
        assert "_attend" not in python_calls(call)
    assert all(torch.equal(outputs[0], x) and x.stride() == outputs[0].stride() for x in outputs[1:])
    if grad:
        first, *others = [torch.autograd.grad(x.sum(), (query, key, value)) for x in outputs]
        for one in others:
            assert all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(one, first, strict=True))


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
    assert "_attend" not in python_calls(partial(attend, *inputs, MASKS[mask], recipe=recipe, tokens_first=True))


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


def test_a_slot_is_of_tensors_like_its_own_only():
    tensors = draw()
    slot = prepared.look_up(*tensors, None, ("options",))
    assert slot is not None and prepared.look_up(*draw(), None, ("options",)) is slot
    assert prepared.look_up(*tensors, None, ("others",)) is not slot
    assert prepared.look_up(*tensors, None, ("options",), grad=True) is not slot
    unaligned = torch.randn(tensors[0].numel() + 1, dtype=torch.bfloat16)[1:].view(SHAPE)
    for query in (unaligned, tensors[0]._neg_view(), None, torch._efficientzerotensor(SHAPE, dtype=torch.bfloat16)):
        assert prepared.look_up(query, *tensors[1:], None, ("options",)) is None
    for other in (draw(1, 2, 193, 64), [x.half() for x in tensors], [x.transpose(2, 3).contiguous() for x in tensors]):
        assert prepared.look_up(*other, None, ("options",)) is not slot
    prepared.forget()
    assert prepared.look_up(*tensors, None, ("options",)) is not slot


def test_no_call_is_found_beside_a_pytorch_that_hides_a_setting(monkeypatch):
    tensors = draw(1, 2, 192, 64)
    slot = prepared.look_up(*tensors, None, ("options",))
    assert prepared.look_up(*tensors, None, ("options",)) is slot
    monkeypatch.setattr(prepared, "_priority_order", prepared._private("_of_no_pytorch"))
    assert prepared.look_up(*tensors, None, ("options",)) is not prepared.look_up(*tensors, None, ("options",))


@contextlib.contextmanager
def switched(read, write, value):
    """Another value of one of PyTorch's settings."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


@contextlib.contextmanager
def float32_products_in(precision):
    """By PyTorch's newer setting, beside which reading the older one raises."""
    matmul = torch.backends.cuda.matmul
    if not hasattr(torch._C, "_get_fp32_precision_getter"):
        pytest.skip("PyTorch 2.9 brought this setting")
    matmul.fp32_precision = precision
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


SDP = torch.backends.cuda
SETTINGS = {
    "no gradients": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast of a GPU": partial(
        switched, lambda: False, lambda enabled: torch.set_autocast_enabled("cuda", enabled), True
    ),
    "autocast's dtype": lambda: torch.autocast("cpu", torch.float16),
    "default dtype": partial(switched, torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic": partial(
        switched, torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "float32 products": partial(
        switched, torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "float32 products of a GPU": lambda: float32_products_in("tf32"),
    "sums in 16 bits": partial(
        switched, SDP.fp16_bf16_reduction_math_sdp_allowed, SDP.allow_fp16_bf16_reduction_math_sdp, True
    ),
    "cuDNN": partial(switched, SDP.cudnn_sdp_enabled, SDP.enable_cudnn_sdp, False),
    "flash": partial(switched, SDP.flash_sdp_enabled, SDP.enable_flash_sdp, False),
    "memory-efficient": partial(switched, SDP.mem_efficient_sdp_enabled, SDP.enable_mem_efficient_sdp, False),
    "math": partial(switched, SDP.math_sdp_enabled, SDP.enable_math_sdp, False),
    "backends": lambda: sdpa_kernel(SDPBackend.MATH),
    "order": lambda: sdpa_kernel(
        [SDPBackend.MATH, *(x for x in ALL_BACKENDS if x != SDPBackend.MATH)], set_priority=True
    ),
}
ALL_BACKENDS = [
    *(SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, SDPBackend.CUDNN_ATTENTION)
]


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_known_of_a_call_is_known_under_its_settings(name):
    torch.set_float32_matmul_precision("highest")  # as it is anyway, but said
    tensors = draw()
    slot = prepared.look_up(*tensors, None, ())
    with SETTINGS[name]():
        other = prepared.look_up(*tensors, None, ())
        assert other is not slot
        assert prepared.look_up(*tensors, None, ()) is other
    assert prepared.look_up(*tensors, None, ()) is slot


@pytest.mark.parametrize("recipe", ["exact", "sage2", "sage_bwd"])
def test_autocast_gives_its_own_dtype_whatever_ran_before(recipe):
    tensors = [torch.randn(1, 2, 80, 16).half() for _ in range(3)]
    for dtype in (torch.float16, torch.bfloat16) * 2:
        with torch.no_grad(), torch.autocast("cpu", dtype):
            assert [sage_attention(*tensors, recipe=recipe).dtype for _ in range(4)] == [dtype] * 4
    assert sage_attention(*tensors, recipe=recipe).dtype == torch.float16


@pytest.mark.parametrize("given", [torch.tensor(True), 1, None], ids=str)
@pytest.mark.parametrize("before", [False, True])
def test_causality_is_a_bool_as_for_pytorchs_attention(given, before):
    tensors = draw()
    for _ in range(3 * before):
        sage_attention(*tensors, is_causal=True, recipe="exact")
    with pytest.raises(TypeError, match="is_causal must be a bool"):
        sage_attention(*tensors, is_causal=given, recipe="exact")


def test_launches_that_give_another_output_are_not_repeated(gpu, monkeypatch, caplog):
    monkeypatch.setattr(prepared, "are_same", ARE_SAME)  # the GPU runs nothing, so its outputs hold anything
    caplog.set_level("INFO", "sage_kernels.replay.prepared")
    assert not is_prepared(*draw(), recipe="sage2")
    assert [record.getMessage() for record in caplog.records] == [
        "a call is not repeated but run anew each time: its repetition gives another output"
    ]


def test_streams_of_any_number_share_those_for_work_beside_them(gpu, monkeypatch):
    made = []
    monkeypatch.setattr(driver, "_side_streams", {})
    monkeypatch.setattr(gpu, "cuStreamCreate", lambda *given: made.append(given) or 0, raising=False)
    for stream in range(1, 40):
        with driver.side_stream(0, stream) as side:
            side.fork(stream)
            side.join(stream)
    assert len(made) == 1
    with driver.side_stream(0, 1) as one, driver.side_stream(0, 2) as other:
        assert one is not other
    assert len(made) == 2


def test_a_stream_that_a_graph_captures_is_lent_to_that_graphs_stream_alone(gpu, monkeypatch):
    graphs = {1: 7, 2: 8}  # by stream

    def info(stream, status, number, *others):
        ctypes.c_int.from_address(status).value = stream in graphs
        ctypes.c_uint64.from_address(number).value = graphs.get(stream, 0)
        return 0

    handles = iter([101, 102, 103])
    monkeypatch.setattr(driver, "_side_streams", {})
    monkeypatch.setattr(driver, "_created", lambda function, flags: next(handles) if "Stream" in function else 5)
    monkeypatch.setattr(gpu, "cuStreamGetCaptureInfo_v2", info, raising=False)

    def lent(stream):
        with driver.side_stream(0, stream) as side:
            graphs.update({side.handle: graphs[stream]} if stream in graphs else {})
            return side.handle

    assert [lent(stream) for stream in (1, 1, 2, 3, 2, 3)] == [101, 101, 102, 103, 102, 103]
    graphs.clear()  # captures have ended
    assert lent(3) == 101


def test_a_call_whose_results_are_large_runs_anew_each_time(gpu, monkeypatch):
    """To compare them would take the memory that it needs."""
    monkeypatch.setattr(prepared, "MOST_BYTES", 2 * 192 * 64 * 2)
    assert is_prepared(*draw(), recipe="sage2")
    assert not is_prepared(*draw(1, 2, 193, 64), recipe="sage2")


def test_outputs_are_compared_bit_by_bit():
    x = torch.tensor([1.0, torch.nan, -0.0])
    assert ARE_SAME([x], [x.clone()])
    for other in (x.nan_to_num(), x.abs(), x.double(), x[:2], x.view(torch.int32)):
        assert not ARE_SAME([x], [other])
    assert not ARE_SAME([x], [x, x])
    transposed = torch.randn(3, 4).t()
    assert ARE_SAME([transposed], [transposed.contiguous()])


def test_nothing_is_prepared_while_a_graph_is_captured(gpu, monkeypatch):
    """Captured launches have given nothing yet."""
    monkeypatch.setattr(prepared, "is_capturing", lambda: True)
    for _ in range(3):
        assert not is_prepared(*draw(), recipe="sage2")
    monkeypatch.setattr(prepared, "is_capturing", lambda: False)
    assert is_prepared(*draw(), recipe="sage2")


def freed(x):
    """A tensor without memory, as FSDP leaves parameters."""
    x = torch.stack([x, x])[1]
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("recipe", ["sage2", "exact", "sage_bwd"])
def test_a_tensor_whose_memory_was_freed_is_refused_before_any_launch(gpu, gluon, recipe, autocast, known, number):
    grad = recipe == "sage_bwd"
    tensors = [x.requires_grad_(grad) for x in draw()]
    for _ in range(3 * known):
        sage_attention(*tensors, recipe=recipe)
    gpu.launched.clear()
    tensors[number] = freed(tensors[number].detach()).requires_grad_(grad)
    with pytest.raises(RuntimeError, match="no memory"), torch.autocast("cpu", torch.float16, enabled=autocast):
        sage_attention(*tensors, recipe=recipe)
    assert not gpu.launched


@pytest.mark.parametrize("first", [False, True])
def test_a_call_at_hand_has_gradients_where_they_are_wanted(first):
    inputs = [torch.randn(1, 2, 32, 16, requires_grad=True) for _ in range(3)]
    for enabled in (first, not first, first):
        with torch.set_grad_enabled(enabled):
            assert all(sage_attention(*inputs, recipe="exact").requires_grad == enabled for _ in range(5))


def test_a_launch_may_prefer_shared_memory(gpu, gluon):
    """So does the one before FlashAttention 3, which runs with what it leaves."""
    from sage_kernels.triton import nonprefix_forward

    mask = torch.ones(1, 1, 1, SHAPE[2], dtype=torch.bool)
    with trace.rehearsing() as rehearsed:
        query, key, value, mask = (rehearsed.stand_in(x) for x in (*draw(), mask))
        call = Call(query, key, value, get_recipe("exact"), Mask.of(mask, SHAPE[2]))
        nonprefix_forward.attend(call, lambda *arguments: None)
    assert list(gpu.attributes.values()) == [nonprefix_forward.SHARED_PERCENT]


def test_one_tensor_as_query_key_and_value_is_found(gpu):
    assert is_prepared(*draw()[:1] * 3, recipe="sage2")


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

    def watched(query, *others, by=None, **options):
        seen.append((query.shape[1:3], by, torch.backends.cuda.cudnn_sdp_enabled()))
        return sdpa(query, *others, by=by, **options)

    monkeypatch.setattr(exact, "sdpa", watched)
    with switched(SDP.cudnn_sdp_enabled, SDP.enable_cudnn_sdp, enabled):
        outputs = [call() for _ in range(4)]
        assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
        assert "_attend" not in python_calls(call)
    assert seen == [((2, 4), exact.without_cudnn, enabled)] * 5
    assert all(torch.equal(outputs[0], x) for x in outputs) and not outputs[0][1].any()


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

    with trace.rehearsing() as rehearsed:
        x = rehearsed.stand_in(torch.empty(2, 8, 4).transpose(0, 1))
        y, lengths = x.new_empty(8, 2, 4), x.new_empty(5, dtype=torch.int32)
        rehearsed.ran(attend, x, y, lengths)
        repeated = launch_plan.Tape(rehearsed, [x], [y], torch.device("cpu"))
    for _ in range(2):
        given = torch.randn(2, 8, 4).transpose(0, 1)
        (found,) = repeated.run(given.data_ptr(), arguments=(given, None))
        assert torch.equal(found, 3 * given)


@pytest.mark.parametrize("tokens_first", [False, True])
def test_an_operator_among_launches_gets_tensors_laid_out_as_they_were_rehearsed(gpu, tokens_first):
    drawn = torch.randn(1, 5, 2, 16)  # tokens before heads

    def attend(query, key, value, output):
        output.copy_(query * key.sum(2, keepdim=True) + value)

    with trace.rehearsing() as rehearsed:
        inputs = [rehearsed.stand_in(drawn.transpose(1, 2)) for _ in range(3)]
        output = inputs[0].new_empty(1, 2, 5, 16)
        rehearsed.ran(attend, *inputs, output)
        recorded = launch_plan.Tape(rehearsed, inputs, [output], torch.device("cpu"))
    run = TapedCall(None, recorded, return_lse=False).shortcut(tokens_first)
    given = drawn if tokens_first else drawn.transpose(1, 2)
    expected = drawn * drawn.sum(1, keepdim=True) + drawn
    torch.testing.assert_close(run(given, given, given, None), expected if tokens_first else expected.transpose(1, 2))


@pytest.mark.parametrize("argument", [lambda x: x[1:], lambda x: x.transpose(0, 1), lambda x: torch.empty(2)])
def test_an_operator_gets_no_part_of_an_argument_and_no_other_tensor(gpu, argument):
    with trace.rehearsing() as rehearsed, pytest.raises(trace.NotRepeatableError):
        x = rehearsed.stand_in(torch.empty(8, 4))
        rehearsed.ran(lambda x: None, argument(x))
        launch_plan.Tape(rehearsed, [x], [], torch.device("cpu"))


def test_a_plan_depends_on_the_call_and_on_settings_alone():
    """Draw orders of calls, among them steps of decoding, and compare each plan with that of a process that begins."""
    kinds = [
        (queries, keys, recipe, grad, causal)
        for queries, keys in ((1, 70), (1, 71), (4, 70), (96, 96))
        for recipe in ("sage2", "sage_bwd", "exact")
        for grad in (False, True)
        for causal in (False, True)
    ]

    def plan_of(queries, keys, recipe, grad, causal):
        announced = []
        tensors = [torch.randn(1, 2, tokens, 16, requires_grad=grad) for tokens in (queries, keys, keys)]
        with mock.patch.object(dispatch, "plan_listeners", [announced.append]):
            sage_attention(*tensors, is_causal=causal, recipe=recipe)
        return announced

    def of_a_fresh_process(kind):
        registry.select.cache_clear()
        return plan_of(*kind)

    alone = {kind: of_a_fresh_process(kind) for kind in kinds}
    registry.select.cache_clear()
    for kind in random.Random(0).choices(kinds, k=6 * len(kinds)):
        assert plan_of(*kind) == alone[kind], kind


def test_gradients_are_low_bit_whatever_ran_before(forks):
    """Steps without gradients once made those with gradients exact."""
    output = forks.run(
        "import torch, sage_hf\n"
        "from sage_kernels.dispatch import run as dispatch\n"
        "tensors = [torch.randn(1, 2, 12, 16, requires_grad=True) for _ in range(3)]\n"
        "with torch.no_grad():\n"
        "    for _ in range(4): sage_hf.sage_attention(*tensors, recipe='sage_bwd')\n"
        "dispatch.plan_listeners.append(lambda plan: print(plan.recipe))\n"
        "sage_hf.sage_attention(*tensors, recipe='sage_bwd')\n"
    )
    assert output.split() == ["sage_bwd"]
