"""The cache of replayed calls: which calls it tells apart, and that a replay gives what the ordinary call gives."""

import contextlib
import random
from functools import partial
from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from sage_hf import record, sage_attention
from sage_hf.attention import attend_observed
from sage_kernels.dispatch import execution, registry
from sage_kernels.dispatch.plan import exact_plan
from sage_kernels.exact import sdpa as exact
from sage_kernels.replay import cache
from sage_kernels.runtime import torch_private
from sage_kernels.spec.options import Options
from tests.helpers.blocks import draw_blocks

SHAPE = (1, 2, 192, 64)


@pytest.fixture(autouse=True)
def replayed(monkeypatch):
    """The replays that ran, of a cache that is empty at first."""
    ran, call = [], cache.Replay.__call__
    monkeypatch.setattr(cache.Replay, "__call__", lambda self, *tensors: ran.append(self) or call(self, *tensors))
    cache.forget()
    yield ran
    cache.forget()


def draw(*shape, count=3):
    return [torch.randn(shape or SHAPE, dtype=torch.bfloat16) for _ in range(count)]


def find(query, key, value, options=(), grad=False):
    return cache.find("attention", (query, key, value, None), options, grad)


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
            torch.vmap(lambda x: found.append(find(x, x, x)) or x)(query)
        else:
            found.append(find(query, key, value))
    assert found == [None]


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
def test_a_replayed_exact_call_equals_the_first_call(replayed, mask, recipe, grad, around):
    """Recipe sage2 runs exactly here: too few keys, or no gradients."""
    query, key, value = (torch.randn(2, tokens, 2, 16).transpose(1, 2) for tokens in (40, 48, 48))
    for x in (query, key, value):
        x.requires_grad_(grad)
    options = {"recipe": recipe, "enable_gqa": around == "grouped heads allowed"}
    call = partial(sage_attention, query, key, value, MASKS[mask], **options)
    with torch.autocast("cpu", enabled=around == "autocast"):
        outputs = [call() for _ in range(4)]
    assert len(replayed) == 2
    assert all(torch.equal(outputs[0], x) and x.stride() == outputs[0].stride() for x in outputs[1:])
    if grad:
        first, *others = [torch.autograd.grad(x.sum(), (query, key, value)) for x in outputs]
        for one in others:
            assert all(torch.equal(x, y) and x.stride() == y.stride() for x, y in zip(one, first, strict=True))


@pytest.mark.parametrize("batch, heads, queries", [(1, 2, 40), (2, 1, 40), (1, 1, 1)])
@pytest.mark.parametrize("recipe", ["exact", "sage2"])
def test_replayed_sizes_of_one_have_the_strides_of_the_first_time(replayed, recipe, batch, heads, queries):
    """Compiled code is guarded by strides of sizes of one as well."""
    query, key, value = (torch.randn(batch, tokens, heads, 16).transpose(1, 2) for tokens in (queries, 48, 48))
    outputs = [sage_attention(query, key, value, recipe=recipe) for _ in range(4)]
    assert len(replayed) == 2
    assert len({x.stride() for x in outputs}) == 1


@pytest.mark.parametrize(
    ("options", "alone"),
    [
        ({}, True),
        ({"scale": 0.3}, True),
        ({"scale": -0.3}, False),
        ({"return_lse": True}, False),
        ({"mask": True}, False),
    ],
)
def test_an_exact_call_without_a_mask_is_replayed_by_pytorchs_function_alone(monkeypatch, replayed, options, alone):
    query, key, value = (torch.randn(2, 4, tokens, 16) for tokens in (40, 48, 48))
    mask = MASKS["keys"] if options.pop("mask", False) else None
    call = partial(sage_attention, query, key, value, mask, recipe="sage2", **options)
    outputs = [call() for _ in range(3)]
    computed = mock.Mock(wraps=execution.compute)
    monkeypatch.setattr(execution, "compute", computed)
    outputs.append(call())
    assert computed.called != alone
    first, *_, last = [x if options.get("return_lse") else (x,) for x in outputs]
    assert all(torch.equal(x, y) for x, y in zip(first, last, strict=True))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("mask", ["none", "keys"])
@pytest.mark.parametrize("recipe", ["exact", "sage2"])
def test_calls_with_tokens_before_heads_equal_transposed_calls(replayed, recipe, mask, grad):
    inputs = [torch.randn(2, tokens, 2, 16, requires_grad=grad) for tokens in (40, 48, 48)]
    transposed, seen = [x.transpose(1, 2) for x in inputs], []
    expected = sage_attention(*transposed, MASKS[mask], recipe=recipe)
    for _ in range(4):
        with record.observe(seen.append):
            output, _ = attend_observed(
                *inputs, MASKS[mask], None, Options(recipe=recipe, enable_gqa=False, tokens_first=True)
            )
        assert torch.equal(output.transpose(1, 2), expected)
    for call in seen:
        assert torch.equal(call.output, expected) and torch.equal(call.query, transposed[0])
    assert len(replayed) == 3  # that with heads before tokens is the same call


def test_an_entry_is_of_calls_that_agree_in_all_but_values():
    tensors = draw()
    entry = find(*tensors, ("options", 1))
    assert entry is not None and find(*draw(), ("options", 1)) is entry
    for options, grad in ((("others", 1), False), (("options", 1.0), False), (("options", 1), True)):
        assert find(*tensors, options, grad) is not entry
    unaligned = torch.randn(tensors[0].numel() + 1, dtype=torch.bfloat16)[1:].view(SHAPE)
    for query in (unaligned, tensors[0]._neg_view(), torch._efficientzerotensor(SHAPE, dtype=torch.bfloat16)):
        assert find(query, *tensors[1:], ("options", 1)) is None
    for other in (draw(1, 2, 193, 64), [x.half() for x in tensors], [x.transpose(2, 3).contiguous() for x in tensors]):
        assert find(*other, ("options", 1)) is not entry
    assert cache.find("another", (*tensors, None), ("options", 1)) is not entry
    registry.forget_choices()
    assert find(*tensors, ("options", 1)) is not entry


def test_no_call_is_found_with_a_pytorch_that_hides_a_setting(monkeypatch):
    tensors = draw()
    assert find(*tensors) is find(*tensors)
    monkeypatch.setattr(torch_private, "_priority_order", torch_private._find("_of_no_pytorch", object))
    assert find(*tensors) is not find(*tensors)


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
    """By PyTorch's newer setting, with which reading the older one raises."""
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
    slot = find(*tensors)
    with SETTINGS[name]():
        other = find(*tensors)
        assert other is not slot
        assert find(*tensors) is other
    assert find(*tensors) is slot


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


def test_a_replay_that_gives_another_output_is_dropped_with_one_warning(caplog):
    cache._warn.cache_clear()
    (x, *_) = draw()
    for kind in ("attention", "backward"):
        entry = cache.find(kind, [x], ())
        for _ in range(3):
            entry.prepare_when_repeated(lambda: cache.replay_of_function("plan", lambda x: [x + 1], [x], [x]))
        assert entry.replay is None
    assert [record.getMessage() for record in caplog.records] == [
        "a call is not replayed but run anew each time: NotReplayableError: its replay gives a different output"
    ]


def test_a_call_whose_results_are_large_runs_anew_each_time(monkeypatch):
    """To compare them would take the memory that it needs."""
    x = torch.randn(8)
    assert cache.replay_of_function("plan", lambda x: [x], [x], [x]).plan == "plan"
    monkeypatch.setattr(cache, "MOST_BYTES", 4 * 7)
    assert cache.replay_of_function("plan", lambda x: [x], [x], [x]) is None


def test_outputs_are_compared_bit_by_bit():
    x = torch.tensor([1.0, torch.nan, -0.0])
    assert cache.are_same([x, None], [x.clone(), None])
    for other in (x.nan_to_num(), x.abs(), x.double(), x[:2], x.view(torch.int32), None):
        assert not cache.are_same([x], [other])
    assert not cache.are_same([x], [x, x])
    transposed = torch.randn(3, 4).t()
    assert cache.are_same([transposed], [transposed.contiguous()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_in_any_order_are_compared_to_rounding_in_each_row(dtype):
    x = torch.randn(3, 5, 8).to(dtype)
    x[0] *= 1000
    x[1, 2, 3] = torch.nan
    assert cache.are_equal_to_rounding([x, None], [(x * (1 + torch.finfo(dtype).eps)).to(dtype), None])
    stale = x.clone()
    stale[2, 4] = stale[2, 3]
    for other in (x.nan_to_num(), x.float(), x[:2], stale, None):
        assert not cache.are_equal_to_rounding([x], [other])
    assert not cache.are_equal_to_rounding([x], [x, x])


def test_nothing_is_prepared_while_a_graph_is_captured(monkeypatch, replayed):
    """Captured launches have given nothing yet."""
    tensors = draw()
    for capturing, replays in ((True, 0), (False, 1)):
        monkeypatch.setattr(cache, "is_capturing", lambda capturing=capturing: capturing)
        for _ in range(3):
            sage_attention(*tensors, recipe="exact")
        assert len(replayed) == replays


def freed(x):
    """A tensor without memory, as FSDP leaves parameters."""
    x = torch.stack([x, x])[1]
    x.untyped_storage().resize_(0)
    return x


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("recipe", ["sage2", "exact", "sage_bwd"])
def test_a_tensor_whose_memory_was_freed_is_refused(recipe, autocast, known, number):
    grad = recipe == "sage_bwd"
    tensors = [x.requires_grad_(grad) for x in draw()]
    for _ in range(3 * known):
        sage_attention(*tensors, recipe=recipe)
    tensors[number] = freed(tensors[number].detach()).requires_grad_(grad)
    with pytest.raises(RuntimeError, match="no memory"), torch.autocast("cpu", torch.float16, enabled=autocast):
        sage_attention(*tensors, recipe=recipe)


@pytest.mark.parametrize("field", ["counts", "tiles"])
@pytest.mark.parametrize("known", [False, True])
def test_a_block_list_whose_memory_was_freed_is_refused(known, field):
    tensors, blocks = draw(), draw_blocks(1, 1, SHAPE[2], SHAPE[2])
    for _ in range(3 * known):
        sage_attention(*tensors, recipe="exact", blocks=blocks)
    with pytest.raises(RuntimeError, match="no memory"):
        sage_attention(*tensors, recipe="exact", blocks=blocks._replace(**{field: freed(getattr(blocks, field))}))


@pytest.mark.parametrize("first", [False, True])
def test_a_call_at_hand_has_gradients_where_they_are_wanted(first):
    inputs = [torch.randn(1, 2, 32, 16, requires_grad=True) for _ in range(3)]
    for enabled in (first, not first, first):
        with torch.set_grad_enabled(enabled):
            assert all(sage_attention(*inputs, recipe="exact").requires_grad == enabled for _ in range(5))


@pytest.mark.parametrize("enabled", [True, False])
def test_a_prepared_step_of_decoding_with_padding_does_without_cudnn(monkeypatch, replayed, enabled):
    """It reads grouped keys as rows of one head, as the first time."""
    monkeypatch.setattr(execution, "select", lambda request, fallback: exact_plan(request, kernel="sdpa_without_cudnn"))
    query, key, value = (torch.randn(2, heads, tokens, 32) for heads, tokens in ((8, 1), (2, 40), (2, 40)))
    mask = (torch.arange(40) >= torch.tensor([[3], [40]]))[:, None, None]
    call = partial(sage_attention, query, key, value, mask, enable_gqa=True, recipe="sage2")
    seen, sdpa = [], exact.sdpa

    def watched(query, *others, backend=None, **options):
        seen.append((query.shape[1:3], backend, torch.backends.cuda.cudnn_sdp_enabled()))
        return sdpa(query, *others, backend=backend, **options)

    monkeypatch.setattr(exact, "sdpa", watched)
    with switched(SDP.cudnn_sdp_enabled, SDP.enable_cudnn_sdp, enabled):
        outputs = [call() for _ in range(4)]
        assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
    assert len(replayed) == 2
    assert seen == [((2, 4), exact.without_cudnn, enabled)] * 5
    assert all(torch.equal(outputs[0], x) for x in outputs) and not outputs[0][1].any()


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
        with mock.patch.object(execution, "plan_listeners", [announced.append]):
            sage_attention(*tensors, is_causal=causal, recipe=recipe)
        return announced

    def of_a_fresh_process(kind):
        registry.forget_choices()
        return plan_of(*kind)

    alone = {kind: of_a_fresh_process(kind) for kind in kinds}
    registry.forget_choices()
    for kind in random.Random(0).choices(kinds, k=6 * len(kinds)):
        assert plan_of(*kind) == alone[kind], kind


def test_gradients_are_low_bit_whatever_ran_before(forks):
    """Steps without gradients once made those with gradients exact."""
    output = forks.run(
        "import torch, sage_hf\n"
        "from sage_kernels.dispatch import execution\n"
        "tensors = [torch.randn(1, 2, 12, 16, requires_grad=True) for _ in range(3)]\n"
        "with torch.no_grad():\n"
        "    for _ in range(4): sage_hf.sage_attention(*tensors, recipe='sage_bwd')\n"
        "execution.plan_listeners.append(lambda plan: print(plan.recipe))\n"
        "sage_hf.sage_attention(*tensors, recipe='sage_bwd')\n"
    )
    assert output.split() == ["sage_bwd"]
