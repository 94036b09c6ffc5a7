"""`sage_hf.drop_in`: SageAttention's documented functions, found by name, checked against attention in float64."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

import sage_hf
from sage_hf import record
from sage_kernels.exact import sdpa

# The documented signatures, by position, of SageAttention 2.2 and SageAttention3.
SIGNATURES = {
    "sageattn": "q k v tensor_layout is_causal sm_scale return_lse",
    "sageattn_varlen": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k is_causal sm_scale smooth_k",
    "sageattn_qk_int8_pv_fp16_triton": "q k v tensor_layout quantization_backend is_causal sm_scale smooth_k "
    "return_lse",
    "sageattn_qk_int8_pv_fp16_cuda": "q k v tensor_layout is_causal qk_quant_gran sm_scale pv_accum_dtype smooth_k "
    "smooth_v return_lse",
    "sageattn_qk_int8_pv_fp8_cuda": "q k v tensor_layout is_causal qk_quant_gran sm_scale pv_accum_dtype smooth_k "
    "smooth_v return_lse",
    "sageattn_qk_int8_pv_fp8_cuda_sm90": "q k v tensor_layout is_causal qk_quant_gran sm_scale pv_accum_dtype "
    "smooth_k return_lse",
}
DENSE = [name for name in SIGNATURES if name != "sageattn_varlen"]
RECIPES = {name: "sage1" if "fp16" in name else "sage2" for name in DENSE}
MASKS = {
    "none": None,
    "keys": torch.rand(2, 1, 1, 90, generator=torch.Generator().manual_seed(1)) < 0.7,
    "scores": torch.rand(2, 4, 70, 90, generator=torch.Generator().manual_seed(2)) < 0.5,
    "additive": torch.randn(70, 90, generator=torch.Generator().manual_seed(3)),
}


@pytest.fixture
def sageattention() -> Iterator[ModuleType]:
    with sage_hf.drop_in():
        import sageattention

        yield sageattention


def draw(head_dim: int = 64, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 70, head_dim), (2, 2, 90, head_dim), (2, 2, 90, head_dim))
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


def in_layout(layout: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.transpose(1, 2) if layout == "NHD" else x for x in tensors]


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_stand_where_the_documentation_has_them(sageattention, name):
    parameters = inspect.signature(getattr(sageattention, name)).parameters.values()
    positional = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert positional == SIGNATURES[name].split()
    assert name == "sageattn_varlen" or "attn_mask" in inspect.signature(getattr(sageattention, name)).parameters


@pytest.mark.parametrize("shape", [(70, 4, 64), (1, 2, 70, 4, 64)], ids=["3d", "5d"])
def test_tokens_before_heads_are_refused_in_other_dimensions(sageattention, shape):
    x = torch.randn(shape)
    with pytest.raises(ValueError, match=r"expected \(batch, tokens, heads, channels\)"):
        sageattention.sageattn(x, x, x, tensor_layout="NHD")


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_every_argument_means_what_is_documented(sageattention, name, layout, is_causal, mask):
    """float64 runs exactly, so that only the meaning of the arguments can differ."""
    inputs = draw()
    output, lse = getattr(sageattention, name)(
        *in_layout(layout, *inputs),
        tensor_layout=layout,
        is_causal=is_causal,
        sm_scale=0.2,
        attn_mask=MASKS[mask],
        return_lse=True,
    )
    truth, true_lse = sdpa.attention(*inputs, mask=MASKS[mask], is_causal=is_causal, scale=0.2)
    torch.testing.assert_close(*in_layout(layout, output), truth)
    torch.testing.assert_close(lse.double(), true_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("head_dim", [40, 64, 128, 192])
def test_a_function_runs_its_recipe(sageattention, name, head_dim):
    inputs = draw(head_dim, torch.bfloat16)
    expected = sage_hf.sage_attention(*inputs, enable_gqa=True, recipe=RECIPES[name])
    output = getattr(sageattention, name)(*in_layout("NHD", *inputs), tensor_layout="NHD")
    assert torch.equal(output.transpose(1, 2), expected)


@pytest.mark.parametrize("head_dim", [8, 320])
def test_any_head_dim_runs(sageattention, head_dim):
    inputs = draw(head_dim, torch.float32)
    torch.testing.assert_close(sageattention.sageattn(*inputs).double(), sdpa.attention(*inputs)[0], atol=1e-5, rtol=0)


def gradients(outputs: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    seed = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(5)).to(outputs.dtype)
    return list(torch.autograd.grad(outputs, inputs, seed))


@pytest.mark.parametrize("mask", ["none", "keys", "scores"])
def test_trainers_get_gradients_by_sage_bwd_or_exactly(sageattention, mask):
    inputs = [x.requires_grad_() for x in draw(dtype=torch.float32)]
    output = sageattention.sageattn(*inputs, attn_mask=MASKS[mask])
    expected = sage_hf.sage_attention(*inputs, attn_mask=MASKS[mask], enable_gqa=True, recipe="sage_bwd")
    assert torch.equal(output, expected)
    assert all(map(torch.equal, gradients(output, inputs), gradients(expected, inputs)))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("head_dim", [8, 64])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_sequences_are_each_attended_to_alone(sageattention, is_causal, head_dim, grad, dtype):
    lengths_q, lengths_k = [30, 0, 45, 17], [40, 3, 45, 29]
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(sum(lengths), heads, head_dim, generator=generator, dtype=dtype).requires_grad_(grad)
        for lengths, heads in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2))
    ]
    starts = [torch.tensor([0, *torch.tensor(lengths).cumsum(0)]) for lengths in (lengths_q, lengths_k)]
    output = sageattention.sageattn_varlen(
        *inputs, *starts, max(lengths_q), max(lengths_k), is_causal=is_causal, sm_scale=0.3, tensor_layout="NHD"
    )
    parts = zip(
        *(x.split(lengths) for x, lengths in zip(inputs, (lengths_q, lengths_k, lengths_k), strict=True)), strict=True
    )
    recipe = "exact" if dtype == torch.float64 or head_dim == 8 else "sage_bwd" if grad else "sage2"
    expected = torch.cat(
        [
            sage_hf.sage_attention(
                *(x.transpose(0, 1) for x in part), is_causal=is_causal, scale=0.3, enable_gqa=True, recipe=recipe
            ).transpose(0, 1)
            for part in parts
        ]
    )
    torch.testing.assert_close(output, expected)
    if grad:
        for found, wanted in zip(gradients(output, inputs), gradients(expected, inputs), strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("mask", MASKS)
def test_sageattn3_means_what_is_documented_and_changes_no_input(sageattention, is_causal, mask):
    from sageattn3 import sageattn3_blackwell

    inputs = draw()
    before = [x.clone() for x in inputs]
    output = sageattn3_blackwell(*inputs, MASKS[mask], is_causal, per_block_mean=False)
    torch.testing.assert_close(output, sdpa.attention(*inputs, mask=MASKS[mask], is_causal=is_causal)[0])
    assert all(map(torch.equal, inputs, before))
    low = [x.bfloat16() for x in inputs]
    if not is_causal:
        expected = sage_hf.sage_attention(*low, attn_mask=MASKS[mask], enable_gqa=True, recipe="sage3")
        assert torch.equal(sageattn3_blackwell(*low, attn_mask=MASKS[mask]), expected)
    wanting = [x.requires_grad_() for x in low]
    assert all(x.isfinite().all() for x in gradients(sageattn3_blackwell(*wanting), wanting))


def test_keywords_are_honoured_known_or_refused(sageattention):
    inputs = draw()
    plain = sageattention.sageattn(*inputs, sm_scale=0.3)
    same = sageattention.sageattn(*inputs, scale=0.3, enable_gqa=True, dropout_p=0.0, smooth_k=False)
    assert torch.equal(same, plain)
    with pytest.raises(TypeError, match="window_size"):
        sageattention.sageattn(*inputs, window_size=3)
    with pytest.raises(ValueError, match="not both"):
        sageattention.sageattn(*inputs, sm_scale=0.3, scale=0.3)
    with pytest.raises(ValueError, match="attn_mask=mask"):
        sageattention.sageattn(*inputs, MASKS["keys"])
    with pytest.raises(ValueError, match="packed sequences"):
        sageattention.sageattn_varlen(*inputs, None, None, 1, 1, tensor_layout="HND")


def test_programs_that_put_it_in_place_of_pytorchs_attention_do_not_recurse(sageattention, monkeypatch):
    inputs = draw(8, torch.float32)  # a head_dim that runs exactly
    expected = sageattention.sageattn(*inputs)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sageattention.sageattn)
    assert torch.equal(torch.nn.functional.scaled_dot_product_attention(*inputs, enable_gqa=True), expected)


def test_calls_inside_a_compiled_graph_run(sageattention):
    inputs = draw(dtype=torch.bfloat16)
    compiled = torch.compile(sageattention.sageattn, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*inputs), sageattention.sageattn(*inputs))


def test_the_modules_go_with_the_handle_and_come_once(forks):
    forks.run(
        """
import importlib.util, sys
from importlib.metadata import PackageNotFoundError, version
import sage_hf
before = list(sys.path)
with sage_hf.drop_in() as handle:
    assert sage_hf.drop_in() is not handle  # asked for twice, put there once
    import sageattention, sageattn3
    assert version("sageattention") == sageattention.__version__ == "2.2.0"
    assert len(sys.path) == len(before) + 1
assert sys.path == before and not {"sageattention", "sageattn3"} & set(sys.modules)
for name in ("sageattention", "sageattn3"):
    assert importlib.util.find_spec(name) is None
handle.restore()
"""
    )


def test_it_refuses_where_the_real_package_is_loaded_and_leaves_it_alone(forks, tmp_path):
    (tmp_path / "sageattention.py").write_text("sageattn = 'theirs'\n")
    forks.run(
        f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
import sage_hf, sageattention
path = list(sys.path)
try:
    sage_hf.drop_in()
except RuntimeError as error:
    assert "sageattention is loaded already" in str(error)
else:
    raise AssertionError
assert sys.path == path and sys.modules["sageattention"].sageattn == "theirs"
del sys.modules["sageattention"]
with sage_hf.drop_in():  # installed only: the one that was asked for comes
    import sageattention
    assert callable(sageattention.sageattn)
import sageattention
assert sageattention.sageattn == "theirs"
"""
    )


@pytest.mark.audit
def test_diffusers_own_sage_backends_run_on_it(forks):
    forks.run(
        """
import torch, sage_hf
sage_hf.drop_in()
from diffusers.models.attention_dispatch import dispatch_attention_fn
q = torch.randn(1, 70, 2, 64)
expected = sage_hf.sage_attention(*(q.transpose(1, 2),) * 3, recipe="sage2").transpose(1, 2)
for name in ("sage", "sage_varlen"):
    torch.testing.assert_close(dispatch_attention_fn(q, q, q, backend=name), expected)
"""
    )


@pytest.mark.audit
def test_a_command_and_the_processes_it_starts_have_the_modules(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import subprocess, sys, sageattention\nprint(sageattention.__version__, flush=True)\n"
        "sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))\n"
    )
    command = [sys.executable, "-m", "sage_hf.drop_in", sys.executable, script, "-c", "import sageattn3; exit(3)"]
    result = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
    assert (result.returncode, result.stdout) == (3, "2.2.0\n"), result.stderr
    usage = subprocess.run(command[:3], capture_output=True, text=True)
    assert usage.returncode == 2 and "COMMAND" in usage.stdout


def test_what_ran_is_recorded(sageattention):
    layer = torch.nn.Identity()
    record.run_in_layer(layer, sageattention.sageattn, *draw(dtype=torch.float32))
    (plan,) = record.last_plans(layer)
    assert plan.recipe == "sage2"
