"""Exact attention of tensors that lie anywhere in memory: as right as of contiguous ones, and linear in memory.

PyTorch's memory-efficient kernel reads 16 bytes at once. Of what is misaligned it computes nonsense, finds no kernel,
or kills the process's CUDA context, which fails every test that follows.
"""

import itertools

import pytest
import torch

from sage_hf import record, sage_attention
from sage_kernels.exact import sdpa
from sage_kernels.exact.gradients import exact_gradients

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
LENGTHS = [1, 15, 17, 63, 100]
BATCH, HEADS = 2, 4


@pytest.fixture(autouse=True)
def full_precision():
    """Products of float32 in float32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def draw(device, dtype, heads, tokens, head_dim, row_stride=None, offset=0, seed=0):
    """(BATCH, heads, tokens, head_dim), whose rows lie `row_stride` elements apart, from `offset` of its storage on."""
    generator = torch.Generator(device).manual_seed(seed)
    row_stride = row_stride or head_dim + offset
    stored = torch.randn(BATCH, heads, tokens, row_stride, device=device, generator=generator)
    return stored.to(dtype)[..., offset : offset + head_dim]


def masks(device, dtype, q_len, kv_len):
    """Name -> (mask, is_causal); each row has a key."""
    generator = torch.Generator(device).manual_seed(9)

    def bias(*shape, dtype=dtype):
        return torch.randn(shape, device=device, generator=generator).to(dtype)

    allowed = torch.rand(q_len, kv_len + 3, device=device, generator=generator) < 0.6
    allowed[:, [0, 1, 3]] = True
    keys = allowed[:BATCH, :kv_len].clone() if q_len >= BATCH else allowed[:1, :kv_len].clone()
    return {
        "none": (None, False),
        "causal": (None, True),
        "keys": (keys[:, None, None], False),
        "bool": (allowed[:, :kv_len], False),
        "sliced bool": (allowed[:, 1 : kv_len + 1], False),
        "expanded bool": (allowed[:, :kv_len].expand(BATCH, HEADS, q_len, kv_len), False),
        "additive": (bias(q_len, kv_len), False),
        "additive float32": (bias(BATCH, 1, q_len, kv_len, dtype=torch.float32), False),
        "additive by head": (bias(1, HEADS, q_len, kv_len), False),
        "additive of keys": (bias(BATCH, 1, 1, kv_len), False),
        "additive of rows": (bias(BATCH, 1, q_len, 1), False),
        "expanded": (bias(1, 1, q_len, kv_len).expand(BATCH, HEADS, q_len, kv_len), False),
        "sliced by 1": (bias(1, HEADS, q_len, kv_len + 1)[..., 1:], False),
        "sliced by 3": (bias(BATCH, 1, q_len, kv_len + 3)[..., 3:], False),
        "sliced, rows aligned": (bias(1, 1, q_len, (kv_len + 10) // 8 * 8)[..., 1 : kv_len + 1], False),
        "transposed": (bias(BATCH, 1, kv_len, q_len).transpose(2, 3), False),
    }


def tolerance(dtype, magnitude):
    """Bound errors of exact attention: P, the scores and the output rounded to dtype, sums in float32.

    Scores of up to 64 channels and 8 in magnitude move a weight by their rounding; a mean of V by weights that are off
    by a share e is off by 2·e of V's largest magnitude.
    """
    eps = torch.finfo(dtype).eps
    return (2 * 8 * eps + 2 * eps + 2**-16) * magnitude


def assert_right(inputs, mask, is_causal, recipe, grad, scale=None):
    query, key, value = (x.detach().requires_grad_(grad) for x in inputs)
    layer = torch.nn.Identity()
    output = record.run_in_layer(
        layer, sage_attention, query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale,
        enable_gqa=True, recipe=recipe,
    )  # fmt: skip
    (plan,) = record.last_plans(layer)
    assert plan.kernel == "sdpa"
    doubles = [x.detach().double().requires_grad_(grad) for x in inputs]
    truth, _ = sdpa.attention(*doubles, mask=mask, is_causal=is_causal, scale=scale)
    assert output.dtype == query.dtype
    assert output.shape == truth.shape
    largest = inputs[2].abs().max().item()
    assert (output.double() - truth).abs().max().item() <= tolerance(query.dtype, largest)
    if grad:
        weights = torch.randn(truth.shape, device=truth.device, generator=torch.Generator(truth.device).manual_seed(8))
        weights = weights.to(query.dtype)
        actual = torch.autograd.grad((output * weights).sum(), (query, key, value))
        expected = torch.autograd.grad((truth * weights).sum(), doubles)
        for gradient, true, name in zip(actual, expected, ("query", "key", "value"), strict=True):
            # Sums over as many terms as there are rows, keys and channels, each rounded to the tensors' dtype.
            error = (gradient.double() - true).norm().item()
            size = max(true.norm().item(), weights.double().norm().item())
            assert error <= 16 * torch.finfo(query.dtype).eps * size, name


SLICES = [(65, 0), (65, 1), (66, 0), (66, 1), (68, 0), (68, 3), (72, 0), (72, 1), (72, 8), (64, 0)]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("recipe", ["exact", "sage2"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [20, 36, 64, 72])
def test_slices_of_channels_are_attended_to_rightly(device, head_dim, dtype, recipe, grad):
    """Each of Q, K and V misaligned in turn, and all of them, with a mask and without."""
    for (row_stride, offset), which in itertools.product(SLICES, ["query", "key", "value", "all"]):
        row_stride += head_dim - 64
        inputs = []
        for seed, name in enumerate(("query", "key", "value")):
            sliced = which in (name, "all")
            memory = {"row_stride": row_stride, "offset": min(offset, row_stride - head_dim)} if sliced else {}
            tokens = 15 if name == "query" and not grad else 17
            inputs.append(draw(device, dtype, HEADS, tokens, head_dim, **memory, seed=seed))
        allowed = masks(device, dtype, inputs[0].shape[2], 17)
        for kind in ("none", "keys", "additive"):
            assert_right(inputs, *allowed[kind], recipe, grad)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("recipe", ["exact", "sage2"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_heads", [1, 2, HEADS])
def test_masks_of_every_kind_and_length_are_honoured(device, kv_heads, dtype, recipe, grad):
    """A head_dim of 64 and one that has to be padded; Q, K and V where they would be in a fused projection."""
    for q_len, kv_len in itertools.product(LENGTHS, LENGTHS):
        if recipe == "sage2" and not grad and q_len >= 16 and kv_len >= 64:
            continue  # low-bit
        for head_dim, offset in ((64, 0), (64, 1), (36, 0)):
            query = draw(device, dtype, HEADS, q_len, head_dim, offset=offset, seed=1)
            key, value = (draw(device, dtype, kv_heads, kv_len, head_dim, offset=offset, seed=s) for s in (2, 3))
            for mask, is_causal in masks(device, dtype, q_len, kv_len).values():
                if is_causal or mask is None or mask.dtype == torch.bool or recipe == "exact" or offset:
                    assert_right((query, key, value), mask, is_causal, recipe, grad)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.3, 0.0, -0.3])
def test_scales_of_either_sign_are_honoured(device, scale, dtype):
    inputs = [draw(device, dtype, HEADS, 33, 64, seed=seed) for seed in range(3)]
    for mask, is_causal in masks(device, dtype, 33, 33).values():
        assert_right(inputs, mask, is_causal, "exact", True, scale=scale)


@pytest.mark.parametrize("v_head_dim", [64, 128])
def test_heads_that_repeat_one_are_attended_to_rightly(device, v_head_dim):
    query, value = (
        draw(device, torch.bfloat16, 1, tokens, size).expand(BATCH, HEADS, -1, -1)
        for tokens, size in ((5, 128), (129, v_head_dim))
    )
    key = draw(device, torch.bfloat16, HEADS, 129, 128, seed=1)
    for mask in (None, torch.ones(5, 129, dtype=torch.bool, device=device).tril(100)):
        output = sdpa.sdpa(query, key, value, mask=mask, scale=0.3)
        expected = sdpa.attention(query, key, value, mask=mask, scale=0.3)[0]
        assert (output - expected).abs().max() <= tolerance(torch.bfloat16, value.abs().max().item())


@pytest.mark.parametrize("mask_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", ["exact", "sage1"])
@pytest.mark.parametrize("kv_len", [17, 1100])
def test_rows_biased_alike_by_the_lowest_number_are_uniform(device, kv_len, recipe, dtype, mask_dtype):
    query, key, value = (draw(device, dtype, HEADS, tokens, 64, seed=tokens) for tokens in (20, kv_len, kv_len))
    mask = torch.zeros(20, kv_len, dtype=mask_dtype, device=device)
    largest = torch.finfo(mask_dtype).max
    if dtype == mask_dtype:  # a mask that PyTorch reads as it is
        largest = min(largest, sdpa.LARGEST_BIAS)
    mask[2], mask[3], mask[4, 5] = largest, -largest, largest
    output = sage_attention(query, key, value, attn_mask=mask, recipe=recipe).double()
    assert output.isfinite().all()
    assert (output[:, :, 2:4] != 0).all()
    assert (output[:, :, 4] - value[:, :, 5]).abs().max() < 0.1  # INT8 next to the largest of V
    if torch.float16 not in (dtype, mask_dtype):  # whose largest number leaves some of the scores
        assert (output[:, :, 2:4] - value.double().mean(2, keepdim=True)).abs().max() < 0.05


@pytest.mark.parametrize("head_dim", [20, 36, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_stays_linear_with_a_broadcast_mask(device, dtype, head_dim):
    """The mask of one row per batch element; scores of all rows would take 32 times as much as Q, K and V."""
    tokens = 8192
    query, key, value = (draw(device, dtype, HEADS, tokens, head_dim, offset=1, seed=seed) for seed in range(3))
    keys = torch.ones(BATCH, 1, 1, tokens, dtype=torch.bool, device=device)
    keys[:, ..., tokens // 2 :] = False
    sage_attention(query, key, value, attn_mask=keys, recipe="exact")
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    sage_attention(query, key, value, attn_mask=keys, recipe="exact")
    scores = BATCH * HEADS * tokens**2 * query.element_size()
    assert torch.cuda.max_memory_allocated(device) - before < scores / 8


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_calls_are_aligned_too(device, dynamic, grad):
    torch.compiler.reset()

    def attend(query, key, value, mask):
        return sage_attention(
            query[..., 3:67], key[..., 3:67], value[..., 3:67], attn_mask=mask[..., 1:], recipe="exact"
        )

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic)
    for tokens in (15, 17, 100):
        inputs = [draw(device, torch.float16, HEADS, tokens, 72, seed=seed).requires_grad_(grad) for seed in range(3)]
        mask = draw(device, torch.float16, 1, tokens, tokens + 1, seed=4)
        actual, expected = compiled(*inputs, mask), attend(*inputs, mask)
        assert (actual - expected).abs().max() <= tolerance(torch.float16, inputs[2].abs().max().item())
        if grad:
            for x, y in zip(*(torch.autograd.grad(output.sum(), inputs) for output in (actual, expected)), strict=True):
                assert (x - y).norm() <= 16 * torch.finfo(torch.float16).eps * max(y.norm().item(), tokens**0.5 * 64)


@pytest.mark.parametrize("mask", ["none", "bool"])
@pytest.mark.parametrize("query_layout", ["heads first", "tokens first"])
def test_gradients_are_right_for_every_layout_of_the_outputs_gradient_in_turn(device, query_layout, mask):
    def lay_out(x, layout):
        return x if layout == "heads first" else x.transpose(1, 2).contiguous().transpose(1, 2)

    inputs = [draw(device, torch.float16, HEADS, 136, 64, seed=seed) for seed in range(3)]
    allowed = torch.ones(136, 136, dtype=torch.bool, device=device).tril() if mask == "bool" else None
    for layout in ("heads first", "tokens first", "heads first"):
        weights = lay_out(draw(device, torch.float16, HEADS, 136, 64, seed=4), layout)
        query, key, value = (lay_out(x, query_layout).requires_grad_() for x in inputs)
        output = sdpa.sdpa(query, key, value, mask=allowed)
        found = torch.autograd.grad(output, (query, key, value), weights)
        _, *truth = exact_gradients(weights, query, key, value, mask=None if allowed is None else allowed[None, None])
        for x, y in zip(found, truth, strict=True):
            assert (x - y).abs().max() < 8 * torch.finfo(torch.float16).eps * y.abs().max()
