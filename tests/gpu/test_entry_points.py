"""Other libraries' functions on a GPU: the same bits as `sage_attention`; packed sequences, as near to float64."""

import pytest
import torch

import sage_hf
from sage_kernels import flash_attention
from sage_kernels.exact import sdpa

pytestmark = pytest.mark.gpu
LENGTHS = [300, 77, 1024]


@pytest.fixture
def sageattention():
    with sage_hf.drop_in():
        import sageattention

        yield sageattention


def draw(*shapes, grad=False):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).bfloat16().cuda().requires_grad_(grad) for s in shapes]


@pytest.mark.parametrize("name", ["sageattn", "sageattn_qk_int8_pv_fp16_cuda", "sageattn_qk_int8_pv_fp8_cuda"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_dense_functions_run_the_kernels_of_their_recipe(sageattention, name, is_causal):
    inputs = draw((2, 1024, 8, 128), (2, 1024, 4, 128), (2, 1024, 4, 128))
    output = getattr(sageattention, name)(*inputs, tensor_layout="NHD", is_causal=is_causal)
    heads_first = [x.transpose(1, 2) for x in inputs]
    recipe = "sage1" if "fp16" in name else "sage2"
    expected = sage_hf.sage_attention(*heads_first, is_causal=is_causal, enable_gqa=True, recipe=recipe)
    assert torch.equal(output, expected.transpose(1, 2))


def split(x):
    return [part.transpose(0, 1)[None] for part in x.split(LENGTHS)]


def error(outputs, truths):
    return sum((one.double() - truth).abs().sum() for one, truth in zip(outputs, truths, strict=True)).item()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("entry_point", ["sageattn_varlen", "flash_attn_varlen_func"])
def test_packed_sequences_are_as_near_to_float64_as_the_emulated_recipe(sageattention, entry_point, is_causal):
    inputs = draw(*[(sum(LENGTHS), heads, 64) for heads in (8, 4, 4)])
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int().cuda()
    function = getattr(sageattention, entry_point, None) or getattr(flash_attention, entry_point)
    causality = {"is_causal" if entry_point == "sageattn_varlen" else "causal": is_causal}
    output = function(*inputs, starts, starts, max(LENGTHS), max(LENGTHS), **causality)
    parts = list(zip(*map(split, inputs), strict=True))
    truths = [sdpa.attention(*part, is_causal=is_causal)[0] for part in parts]
    options = {"is_causal": is_causal, "enable_gqa": True, "recipe": "sage2", "fallback": "emulate"}
    emulated = [sage_hf.sage_attention(*(x.cpu() for x in part), **options).cuda() for part in parts]
    assert error(split(output), truths) <= 2 * error(emulated, truths)


def test_gradients_of_packed_sequences_are_as_near_to_float64_as_the_emulated_recipes(sageattention):
    inputs = draw(*[(sum(LENGTHS), heads, 64) for heads in (8, 4, 4)], grad=True)

    def gradients(device, dtype):
        query, key, value = tensors = [x.detach().to(device, dtype).requires_grad_() for x in inputs]
        starts = torch.tensor([0, *LENGTHS], device=device).cumsum(0).int()
        lengths = starts, starts, max(LENGTHS), max(LENGTHS)
        output = sageattention.sageattn_varlen(query, key, value, *lengths, is_causal=True)
        return [x.double().cpu() for x in torch.autograd.grad(output.double().square().sum(), tensors)]

    truths = gradients("cpu", torch.float64)  # which runs exactly
    assert error(gradients("cuda", torch.bfloat16), truths) <= 2 * error(gradients("cpu", torch.bfloat16), truths)
