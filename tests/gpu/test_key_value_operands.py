"""K's and V's operands of one launch: bit for bit those of the separate launches, whatever runs beside it."""

import random

import pytest
import torch
from layouts import LAYOUTS, lay_out

from sage_kernels.recipe import RECIPES
from sage_kernels.triton.int8_forward import quantize_operands
from sage_kernels.triton.quantize_key_value import AHEAD, quantize_key_value
from sage_kernels.triton.sequences import Sequences
from sage_kernels.triton.statistics import token_statistics

SAGE2 = RECIPES["sage2"]
STATISTICS = ("key_mean", "value_mean", "value_amax", "value_tensor_amax")


def draw(*shape, dtype=torch.bfloat16, seed=0):
    """K and V with means."""
    generator = torch.Generator("cuda").manual_seed(seed)
    mean = torch.randn(2, shape[-1], device="cuda", generator=generator)
    return [(torch.randn(shape, device="cuda", generator=generator) + x).to(dtype) for x in mean]


def quantize(key, value, ahead=AHEAD):
    operands, statistics = quantize_key_value(key, value, Sequences.equal(key.shape[2]), ahead)
    return [*operands, *(getattr(statistics, name) for name in STATISTICS)]


def separately(key, value):
    sequences = Sequences.equal(key.shape[2])
    operands = quantize_operands(key[:, :, :1], key, value, SAGE2, Sequences.equal(1), sequences)
    statistics = token_statistics(key, value, SAGE2, sequences)
    return [
        *(operands.key, operands.key_scale, operands.value, operands.value_scale),
        *(getattr(statistics, name) for name in STATISTICS),
    ]


def same_bits(actual, expected):
    return all(
        torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))
        for x, y in zip(actual, expected, strict=True)
    )


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("case", range(40))
def test_operands_are_those_of_separate_launches(case, device):
    choose = random.Random(case)
    head_dim, v_head_dim = choose.choice(((64, 64), (128, 128), (80, 120), (128, 40), (256, 16)))
    batch, heads = choose.choice(((1, 1), (2, 3), (3, 8)))
    tokens = choose.choice((1, 64, 127, 128, 129, 1000, 4096, 17_000))
    dtype = choose.choice((torch.float16, torch.bfloat16, torch.float32))
    key, _ = draw(batch, heads, tokens, head_dim, seed=case)
    _, value = draw(batch, heads, tokens, v_head_dim, seed=case)
    for x in (key, value):
        x[..., 3] = 0.0
        if choose.random() < 0.4:
            x[-1, -1, tokens // 2, 7] = choose.choice((torch.nan, torch.inf, -torch.inf))
    key, value = (lay_out(x.to(dtype), choose.choice(LAYOUTS)) for x in (key, value))
    assert same_bits(quantize(key, value, choose.choice((0, 1, 7, AHEAD, 10**6))), separately(key, value))


@pytest.mark.parametrize("shape", [(4, 32, 4096, 128), (4, 32, 4096, 64), (2, 32, 16_384, 128), (1, 24, 119_056, 128)])
def test_full_size(shape, device):
    key, value = draw(*shape)
    expected = separately(key, value)
    for ahead in (0, AHEAD):
        assert same_bits(quantize(key, value, ahead), expected)


@pytest.mark.parametrize("ahead", [0, AHEAD])
def test_reruns_are_bitwise_equal(ahead, device):
    """With 0 ahead, programs do wait for statistics of others."""
    key, value = draw(4, 32, 4096, 128)
    expected = separately(key, value)
    for _ in range(50):
        assert same_bits(quantize(key, value, ahead), expected)


def test_a_graph_computes_anew_with_each_replay(device):
    key, value = draw(2, 8, 4096, 128)
    quantize(key, value)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantize(key, value)
    for seed in range(1, 6):
        for x, y in zip((key, value), draw(2, 8, 4096, 128, seed=seed), strict=True):
            x.copy_(y)
        graph.replay()
        assert same_bits(captured, separately(key, value))


def test_streams_do_not_meet(device):
    inputs = [draw(2, 16, 4096, 128, seed=seed) for seed in range(2)]
    expected = [separately(*x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for ahead in (0, AHEAD):
        found = []
        for _ in range(10):
            for stream, x in zip(streams, inputs, strict=True):
                with torch.cuda.stream(stream):
                    found.append(quantize(*x, ahead))
        torch.cuda.synchronize()
        assert all(same_bits(x, expected[index % 2]) for index, x in enumerate(found))
