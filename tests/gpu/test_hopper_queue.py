"""The queue from which blocks of Hopper's forward kernel take causal items as they get free."""

from dataclasses import replace

import pytest
import torch

from sage_kernels import attention
from sage_kernels.cuda import int8_forward, quantize
from sage_kernels.spec.operands import KeyPadding
from tests.helpers.calls import new_call

pytestmark = pytest.mark.usefixtures("needs_hopper")

# batch, q_heads, kv_heads, q_len, kv_len, causal_offset: fewer items than blocks, about as many, and many more.
SIZES = {
    "one item": (1, 1, 1, 60, 200, 140),
    "few pairs": (1, 2, 1, 2100, 2100, 0),
    "132 items": (1, 44, 44, 300, 300, 0),
    "133 items": (1, 133, 7, 100, 500, 400),
    "many pairs": (3, 40, 8, 1100, 1300, 200),
    "rows without a key": (2, 12, 4, 1500, 900, -600),
    "groups of heads": (1, 6, 6, 24_000, 24_000, 0),
}
# Recipe, head_dim and dtype, whether the LSE is wanted, and whether keys may not exist.
KERNELS = (
    ("sage2", 128, torch.bfloat16, False, False),
    ("sage2", 64, torch.bfloat16, False, False),
    ("sage2", 80, torch.float16, True, False),
    ("sage2", 128, torch.bfloat16, False, True),
    ("sage1", 128, torch.bfloat16, False, False),
    ("sage1", 64, torch.float16, True, True),
    ("sage_bwd", 128, torch.bfloat16, True, False),
)


def draw(sizes, head_dim, dtype):
    batch, q_heads, kv_heads, q_len, kv_len, _ = SIZES[sizes]
    generator = torch.Generator("cuda").manual_seed(q_len)
    query, key, value = (
        torch.randn(batch, heads, tokens, head_dim, generator=generator, device="cuda", dtype=dtype)
        for heads, tokens in ((q_heads, q_len), (kv_heads, kv_len), (kv_heads, kv_len))
    )
    return query + 0.3, key, value + 0.2


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("recipe", "head_dim", "dtype", "return_lse", "padded"), KERNELS)
def test_rows_do_not_depend_on_the_blocks_that_take_them(recipe, head_dim, dtype, return_lse, padded, sizes):
    """The queue is left as it was, so that operands may be attended to again."""
    inputs = draw(sizes, head_dim, dtype)
    batch, _, kv_len, _ = inputs[1].shape
    lengths = torch.tensor([max(1, kv_len >> number) for number in range(batch)], device="cuda")
    key_mask = torch.arange(kv_len, device="cuda") < lengths[:, None] if padded else None
    options = {"is_causal": True, "causal_offset": SIZES[sizes][5], "key_mask": key_mask, "return_lse": return_lse}
    call = new_call(*inputs, recipe, **options).for_kernel()
    padding = None if key_mask is None else KeyPadding.of(call.mask.key_mask)
    config = int8_forward.Int8ForwardConfig.of_call(call, may_leave_query=not return_lse)
    operands = quantize.quantize_operands(call, padding, leaves_query=config.quantizes_query)

    def attend(operands):
        output, lse = call.new_outputs()
        int8_forward.forward(operands, output, lse, call, config, padding)
        return output if lse is None else torch.cat([output, lse[..., None].to(dtype)], -1)

    dealt_out = attend(replace(operands, queue=None))
    assert not dealt_out.isnan().any()
    for _ in range(4):
        assert torch.equal(attend(operands), dealt_out)
        assert operands.queue.tolist() == [0]


@pytest.mark.parametrize("sizes", ["few pairs", "many pairs"])
def test_streams_and_graphs_that_run_at_once_have_queues_of_their_own(sizes):
    inputs = draw(sizes, 128, torch.bfloat16)
    options = {"recipe": "sage2", "is_causal": True, "causal_offset": SIZES[sizes][5]}
    expected, _ = attention(*inputs, **options)
    streams = [torch.cuda.Stream() for _ in range(3)]
    graphs, outputs = [torch.cuda.CUDAGraph() for _ in streams], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            outputs.append(attention(*inputs, **options)[0])
    for _ in range(5):
        for output in outputs:
            output.fill_(torch.nan)
        torch.cuda.synchronize()
        repeated = []
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                repeated.append(attention(*inputs, **options)[0])
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(x, expected) for x in (*outputs, *repeated))
