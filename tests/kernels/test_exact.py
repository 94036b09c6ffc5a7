"""A call reaches PyTorch's exact attention aligned on a GPU, and elsewhere as it was given."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_kernels.exact import sdpa as exact
from sage_kernels.runtime import torch_private
from sage_kernels.spec.masks import mask_in_dtype

FLOATING = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize(("source", "target"), itertools.product(FLOATING, FLOATING))
def test_a_mask_keeps_what_is_finite_finite_in_every_dtype(source, target):
    largest = torch.finfo(source).max
    mask = torch.tensor([largest, -largest, torch.inf, -torch.inf, torch.nan, -1e4, 0.5, 0.0], dtype=source)
    converted = mask_in_dtype(mask, target)
    assert converted.dtype == target
    assert converted[:2].isfinite().all()
    assert converted[0] == -converted[1] == min(largest, torch.finfo(target).max)
    assert converted[2:4].tolist() == [torch.inf, -torch.inf]
    assert converted[4].isnan()
    assert torch.equal(converted[5:], mask[5:].to(target))


def test_a_bool_mask_stays_bool():
    mask = torch.tensor([True, False])
    assert mask_in_dtype(mask, torch.float16) is mask


def test_a_converted_mask_keeps_its_gradient():
    mask = torch.tensor([-2.0, 3.0, -torch.inf], requires_grad=True)
    mask_in_dtype(mask, torch.float16).float()[:2].sum().backward()
    assert torch.equal(mask.grad, torch.tensor([1.0, 1.0, 0.0]))


@pytest.fixture
def handed_over(monkeypatch):
    """Record what PyTorch's attention is called with: tensors by name, of a GPU that need not exist."""
    calls = []

    def sdpa(query, key, value, *, attn_mask, **options):
        calls.append({"query": query, "key": key, "value": value, "mask": attn_mask, **options})
        return query.new_empty(*query.shape[:3], value.shape[3])

    monkeypatch.setattr(exact, "pytorch_sdpa", sdpa)
    with FakeTensorMode():
        yield calls


def cuda(*shape, dtype, row_stride=None, offset=0):
    """A fake (…, tokens, channels) whose rows lie `row_stride` elements apart, from `offset` of its storage on."""
    row_stride = row_stride or shape[-1] + offset
    return torch.empty(*shape[:-1], row_stride, dtype=dtype, device="cuda").narrow(-1, offset, shape[-1])


def assert_aligned(x):
    """Rows begin at multiples of 16 bytes, and their elements lie one after the other."""
    assert x.stride(-1) == 1
    assert all(stride * x.element_size() % 16 == 0 for stride in x.stride()[:-1])
    assert x.storage_offset() * x.element_size() % 16 == 0


@pytest.mark.parametrize(
    ("facts", "alone"),
    [
        ({}, True),
        ({"is_causal": True, "scale": 0.3}, True),
        ({"heads": 6}, True),
        ({"scale": -0.3}, False),
        ({"scale": 0.0}, False),
        ({"tokens": 0}, False),
        ({"head_dim": 20}, False),
        ({"row_stride": 65}, False),
        ({"offset": 1, "row_stride": 72}, False),
    ],
)
def test_pytorchs_function_alone_replays_what_it_is_handed_over_as_it_is(handed_over, facts, alone):
    given = {"is_causal": False, "scale": 0.2, "heads": 3, "tokens": 17, "head_dim": 64} | facts
    options = {name: given.pop(name) for name in ("is_causal", "scale")}
    size = given.pop("tokens"), given.pop("head_dim")
    query = cuda(2, given.pop("heads"), *size, dtype=torch.bfloat16, **given)
    key = cuda(2, 3, *size, dtype=torch.bfloat16, **given)
    replay = exact.replay_function(query, key, key, **options)
    assert (replay is not None) == alone
    if replay is not None:
        exact.sdpa(query, key, key, **options, enable_gqa=True)
        assert replay.keywords == {name: handed_over[0][name] for name in replay.keywords}
        assert handed_over[0]["mask"] is None and handed_over[0]["dropout_p"] == 0
        assert [handed_over[0][name] for name in ("query", "key", "value")] == [query, key, key]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [20, 36, 64, 72])
@pytest.mark.parametrize(("extra", "offset"), [(0, 0), (1, 0), (1, 1), (2, 1), (4, 0), (8, 0), (8, 8), (9, 3)])
def test_what_a_gpu_gets_is_aligned(handed_over, dtype, head_dim, extra, offset):
    x = cuda(2, 3, 17, head_dim, dtype=dtype, row_stride=head_dim + extra, offset=min(offset, extra))
    assert exact.sdpa(x, x, x, scale=None).shape == x.shape
    (call,) = handed_over
    for name in ("query", "key", "value"):
        assert_aligned(call[name])
    assert call["scale"] == head_dim**-0.5
    padded = (head_dim * x.element_size() + 15) // 16 * 16 // x.element_size()
    assert call["key"].shape == (2, 3, 17, padded)


def test_repeated_heads_of_queries_are_stored_with_another_width_of_values(handed_over):
    query, key = cuda(2, 1, 5, 128, dtype=torch.bfloat16).expand(2, 4, 5, 128), cuda(2, 4, 9, 128, dtype=torch.bfloat16)
    for width in (64, 128):
        exact.sdpa(query, key, cuda(2, 4, 9, width, dtype=torch.bfloat16))
    assert [call["query"].stride(1) for call in handed_over] == [5 * 128, 0]


def test_what_is_aligned_is_handed_over_as_it_is(handed_over):
    tensors = [cuda(2, 3, 17, 64, dtype=torch.float16, row_stride=80, offset=8) for _ in range(3)]
    mask = cuda(2, 1, 17, 17, dtype=torch.float16, row_stride=24)
    exact.sdpa(*tensors, mask=mask)
    (call,) = handed_over
    assert [call[name].stride() for name in ("query", "key", "value")] == [x.stride() for x in tensors]
    assert [call[name].untyped_storage()._cdata for name in ("query", "key", "value", "mask")] == [
        x.untyped_storage()._cdata for x in (*tensors, mask)
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mask_dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("kv_len", [1, 15, 17, 63, 64, 100])
@pytest.mark.parametrize(("row_stride", "offset"), [(None, 0), (None, 1), (101, 0), (104, 3), (128, 0)])
def test_the_mask_a_gpu_gets_is_aligned(handed_over, dtype, mask_dtype, kv_len, row_stride, offset):
    query, key = cuda(2, 3, 17, 64, dtype=dtype), cuda(2, 3, kv_len, 64, dtype=dtype)
    mask = cuda(2, 1, 17, kv_len, dtype=mask_dtype, row_stride=row_stride, offset=offset)
    exact.sdpa(query, key, key, mask=mask)
    (call,) = handed_over
    assert_aligned(call["mask"])
    assert call["mask"].dtype == dtype
    assert call["mask"].shape == (2, 1, 17, kv_len)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
def test_broadcast_dimensions_are_not_stored_for_a_gpu(handed_over, dtype):
    query = cuda(4, 8, 17, 64, dtype=torch.float16)
    key = cuda(1, 1, 33, 64, dtype=torch.float16, row_stride=65).expand(4, 8, 33, 64)
    mask = cuda(17, 33, dtype=dtype).expand(4, 8, 17, 33)
    exact.sdpa(query, key, key, mask=mask)
    (call,) = handed_over
    assert call["key"].shape == key.shape
    assert call["key"].stride()[:2] == (0, 0)
    assert call["mask"].shape == (1, 1, 17, 33)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float16])
@pytest.mark.parametrize("shape", [(), (17, 1), (1, 1, 17, 1), (3, 1, 33)])
def test_a_mask_of_any_rank_has_four_dimensions_and_all_keys_on_a_gpu(handed_over, dtype, shape):
    query, key = (cuda(2, 3, tokens, 64, dtype=torch.float16) for tokens in (17, 33))
    exact.sdpa(query, key, key, mask=torch.empty(shape, dtype=dtype, device="cuda"))
    (call,) = handed_over
    assert call["mask"].dim() == 4
    assert call["mask"].shape[3] == 33
    assert call["mask"].stride(3) == 1


@pytest.mark.parametrize("scale", [0.0, -0.3])
def test_a_gpu_gets_a_positive_scale(handed_over, scale):
    query = cuda(2, 3, 17, 64, dtype=torch.float16)
    exact.sdpa(query, query, query, scale=scale)
    assert handed_over[0]["scale"] > 0


def test_a_gpu_gets_no_call_without_elements(handed_over):
    for batch, heads, q_len, kv_len in ((0, 3, 17, 33), (2, 0, 17, 33), (2, 3, 0, 33), (2, 3, 17, 0)):
        query, key = (cuda(batch, heads, tokens, 64, dtype=torch.float16) for tokens in (q_len, kv_len))
        output = exact.sdpa(query, key, key)
        assert (output.shape, output.dtype) == (query.shape, torch.float16)
    assert not handed_over


def on_a_gpu(monkeypatch, aligned):
    """Take the GPU's road with a CPU's tensors."""
    monkeypatch.setattr(exact, "_on_gpu", lambda x: aligned)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("head_dim", [20, 37, 64])
@pytest.mark.parametrize("kind", ["none", "bool", "additive", "broadcast", "one for all keys", "causal"])
@pytest.mark.parametrize("scale", [None, 0.3, 0.0, -0.3])
def test_alignment_changes_neither_output_nor_gradients(monkeypatch, dtype, head_dim, kind, scale):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, heads, tokens, head_dim + 3, generator=generator, dtype=dtype)[..., 1:-2].requires_grad_()
        for heads, tokens in ((4, 17), (2, 15), (2, 15))
    )
    mask = {
        "bool": torch.rand(2, 1, 17, 15, generator=generator) < 0.7,
        "additive": torch.randn(1, 4, 17, 16, generator=generator, dtype=dtype)[..., 1:].requires_grad_(),
        "broadcast": torch.randn(17, 15, generator=generator, dtype=dtype).expand(2, 4, 17, 15).requires_grad_(),
        "one for all keys": torch.randn(2, 1, 17, 1, generator=generator, dtype=dtype),
    }.get(kind)
    results = []
    for gpu in (False, True):
        on_a_gpu(monkeypatch, gpu)
        output = exact.sdpa(query, key, value, mask=mask, is_causal=kind == "causal", scale=scale, enable_gqa=True)
        leaves = [x for x in (query, key, value, mask) if x is not None and x.requires_grad]
        results.append((output, *torch.autograd.grad(output.square().sum(), leaves)))
    tolerance = 64 * torch.finfo(dtype).eps * 15  # of sums of at most 15 keys and 64 channels
    for actual, expected in zip(*results, strict=True):
        assert torch.allclose(actual, expected, atol=tolerance * (1 + expected.abs().max().item()), rtol=0)


@pytest.mark.parametrize("backend", list(SDPBackend.__members__.values()), ids=str)
def test_only_cudnn_gets_rows_of_a_mask_at_any_address(monkeypatch, backend):
    on_a_gpu(monkeypatch, True)
    monkeypatch.setattr(torch_private, "fused_sdp_choice", lambda *arguments: backend.value)
    given = []
    monkeypatch.setattr(exact, "pytorch_sdpa", lambda query, *_, attn_mask, **__: given.append(attn_mask) or query)
    query, key, mask = torch.randn(1, 2, 7, 64), torch.randn(1, 2, 15, 64), torch.randn(1, 2, 7, 15)
    exact.sdpa(query, key, key, mask=mask)
    assert (given[0] is mask) == (backend == SDPBackend.CUDNN_ATTENTION)
    exact.sdpa(query.requires_grad_(), key, key, mask=mask)
    assert_aligned(given[1])


def test_alignment_is_traced_with_dynamic_sizes_and_mapped(monkeypatch):
    on_a_gpu(monkeypatch, True)

    def attend(query, key, value, mask):
        return exact.sdpa(query[..., 1:], key[..., 1:], value[..., 1:], mask=mask[..., 1:])

    def draw(q_len, kv_len):
        sizes = ((2, 3, q_len, 21), (2, 3, kv_len, 21), (2, 3, kv_len, 21), (2, 1, q_len, kv_len + 1))
        return [torch.randn(size, generator=torch.Generator().manual_seed(q_len)) for size in sizes]

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for q_len, kv_len in ((17, 15), (33, 64)):
        inputs = draw(q_len, kv_len)
        assert torch.allclose(compiled(*inputs), attend(*inputs), atol=1e-6)
    inputs = draw(17, 15)
    mapped = torch.vmap(attend)(*(torch.stack([x, 2 * x]) for x in inputs))
    assert torch.allclose(mapped[1], attend(*(2 * x for x in inputs)), atol=1e-5)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("scale", [None, -0.3, 0.0])
def test_causality_may_be_aligned_lower_right(monkeypatch, kv_heads, scale):
    """PyTorch's flash kernel, for which another function stands here, aligns it so."""

    def flash(query, key, value, is_causal, scale):
        offset = key.shape[2] - query.shape[2]
        return exact.attention(query, key, value, is_causal=is_causal, causal_offset=offset, scale=scale)[0]

    monkeypatch.setattr(exact, "_flash", flash)
    query, (key, value) = torch.randn(2, 4, 7, 40), torch.randn(2, 2, kv_heads, 19, 40)
    output = exact.sdpa(query, key, value, scale=scale, enable_gqa=kv_heads != 4, lower_right=True)
    truth, _ = exact.attention(query, key, value, is_causal=True, causal_offset=12, scale=scale)
    torch.testing.assert_close(output.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("transform", [False, True], ids=["autograd", "torch.func"])
def test_the_outputs_gradient_reaches_a_gpus_kernel_in_the_outputs_layout(monkeypatch, transform):
    monkeypatch.setattr(exact, "_on_gpu", lambda x: True)
    monkeypatch.setattr(exact, "_is_read_in_place", lambda *call: True)
    strides = []

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(query, key, value):
            return (query + value).transpose(1, 2).contiguous().transpose(1, 2)

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, gradient):
            strides.append(gradient.stride())
            return gradient, None, gradient

    query, key, value = (torch.randn(2, 3, 5, 16, dtype=torch.float16) for _ in range(3))

    def total(query):
        output = exact.sdpa(
            query, key, value, backend=lambda query, key, value, **options: Kernel.apply(query, key, value)
        )
        return output.float().sum() if transform else output

    if transform:
        torch.func.grad(total)(query)
    else:
        output = total(query.requires_grad_())
        for weights in (torch.ones(2, 3, 5, 16).half(), torch.ones(2, 5, 3, 16).half().transpose(1, 2)):
            torch.autograd.grad(output, query, weights, retain_graph=True)
    assert set(strides) == {(240, 16, 48, 1)}


def test_exact_attention_on_a_gpu_has_second_and_nested_derivatives(monkeypatch):
    monkeypatch.setattr(exact, "_on_gpu", lambda x: True)
    monkeypatch.setattr(exact, "_may_be_cudnn", lambda *call: True)
    inputs = [torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def attend(*one):
        return exact.sdpa(*(x[None] for x in one))

    with sdpa_kernel(SDPBackend.MATH):
        assert torch.autograd.gradcheck(exact.sdpa, inputs) and torch.autograd.gradgradcheck(exact.sdpa, inputs)
        (expected,) = torch.autograd.grad(exact.sdpa(*inputs).sum(), inputs[:1])
        outside = torch.func.vmap(torch.func.grad(lambda *one: attend(*one).sum()))(*inputs)
        inside = torch.func.grad(lambda *batch: torch.func.vmap(attend)(*batch).sum())(*inputs)
    torch.testing.assert_close(outside, expected)
    torch.testing.assert_close(inside, expected)
