"""The Hub kernel: its folder, its functions with FlashAttention's semantics, and transformers that loads it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from torch._dynamo.testing import CompileCounterWithBackend
from transformers.integrations import hub_kernels

import sage_hf
from sage_hf import build_hub_kernel
from sage_kernels import flash_attention
from sage_kernels.exact import sdpa
from tests.helpers.tiny_transformers import MODELS, of_real_tokens, run

REPOSITORY = "org/sage-hf"
LOADER = """
import importlib.util, json, sys
from pathlib import Path

def load(repository, backend="cpu"):
    '''Import a variant as the package `kernels` does: by its metadata's id, from where it lies.'''
    variant = Path(repository) / "build" / f"torch-{backend}"
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("hub") / "kernel"
    assert build_hub_kernel.main([str(target)]) == 0
    return target


@pytest.fixture(scope="module")
def kernel(repository: Path) -> ModuleType:
    names: dict = {}
    exec(LOADER, names)
    return names["load"](repository)


def test_every_variant_says_what_the_loader_reads(repository):
    variants = {path.name: path for path in (repository / "build").iterdir()}
    assert set(variants) == {"torch-cuda", "torch-rocm", "torch-xpu", "torch-cpu"}
    identities = set()
    for name, path in variants.items():
        metadata = json.loads((path / "metadata.json").read_text())
        assert metadata["backend"] == {"type": name.removeprefix("torch-")}
        assert (metadata["name"], metadata["version"], metadata["python-depends"]) == ("sage-hf", 1, [])
        files = {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}
        del files["metadata.json"]
        expected = {name: base64.b64encode(hashlib.sha256(file).digest()).decode() for name, file in files.items()}
        assert metadata["digest"] == {"algorithm": "sha256", "files": expected}
        assert {"sage_kernels/cuda/src/int8_forward.cu", "sage_kernels/attend.py"} <= set(files)
        identities.add(metadata["id"])
    assert len(identities) == 4
    assert "[torch-noarch]" in (repository / "build.toml").read_text()
    with pytest.raises(FileExistsError, match="not empty"):
        build_hub_kernel.build(repository)


def test_it_runs_alone_and_with_sage_hf(repository, forks):
    """Without sage-hf on the path; and with it, whose operators have another name."""
    alone = f"import sys, torch\nsys.path[:] = [p for p in sys.path if 'kernels' not in p]\n{LOADER}"
    call = f"""
kernel = load({str(repository)!r})
q = torch.randn(1, 70, 2, 64, requires_grad=True)
kernel.flash_attn_func(q, q, q, causal=True).sum().backward()
assert q.grad.isfinite().all()
"""
    forks.run(alone + call + 'assert not {"sage_kernels", "sage_hf"} & set(sys.modules)')
    forks.run(LOADER + "import torch, sage_kernels.training" + call)


def draw(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def judge(q, k, v, causal, window, scale):
    """Attention in float64 with FlashAttention's meaning of causality and windows, (batch, tokens, heads, channels)."""
    own = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    keys = torch.arange(k.shape[1])
    allowed = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    left, right = window
    allowed &= (keys >= own - left) | torch.tensor(left < 0)
    allowed &= (keys <= own + right) | torch.tensor(right < 0)
    allowed &= (keys <= own) | torch.tensor(not causal)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    output, lse = sdpa.attention(q, k, v, mask=allowed[None, None], scale=scale)
    return output.transpose(1, 2), lse.transpose(1, 2)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (7, 7), (5, -1), (-1, 9)])
@pytest.mark.parametrize("lengths", [(70, 70), (30, 90), (90, 30), (1, 80)])
def test_causality_and_windows_are_aligned_lower_right(causal, window, lengths):
    q, k, v = draw((2, lengths[0], 4, 40), (2, lengths[1], 2, 40), (2, lengths[1], 2, 24))
    output = flash_attention.flash_attn_func(q, k, v, 0.0, 0.2, causal, window)
    torch.testing.assert_close(output, judge(q, k, v, causal, window, 0.2)[0])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (7, 7)])
@pytest.mark.parametrize("lengths_k", [[30, 45, 17], [40, 45, 29]])
def test_packed_sequences_are_each_attended_to_alone(causal, window, lengths_k):
    lengths_q = [30, 45, 17]
    q, k, v = draw((92, 4, 40), (sum(lengths_k), 2, 40), (sum(lengths_k), 2, 40))
    starts = [torch.tensor([0, *lengths]).cumsum(0) for lengths in (lengths_q, lengths_k)]
    output = flash_attention.flash_attn_varlen_func(q, k, v, *starts, 45, 45, 0.0, 0.2, causal, window)
    parts = zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k), strict=True)
    expected = [judge(*(x[None] for x in part), causal, window, 0.2)[0][0] for part in parts]
    torch.testing.assert_close(output, torch.cat(expected))


@pytest.mark.parametrize("window", [(-1, -1), (7, 7)])
def test_packed_lengths_that_do_not_fit_are_refused_and_the_tail_is_zero(window):
    (x,) = draw((100, 2, 40))
    for starts in ([0, 40, 120], [0, 60, 40], [10, 40, 100]):
        with pytest.raises(ValueError, match="cu_seqlens_q"):
            flash_attention.flash_attn_varlen_func(x, x, x, *[torch.tensor(starts)] * 2, 120, 120, window_size=window)
    starts = torch.tensor([0, 40, 90])
    with pytest.raises(ValueError, match="cu_seqlens_q must hold integers"):
        flash_attention.flash_attn_varlen_func(x, x, x, *[starts.float()] * 2, 50, 50, window_size=window)
    with pytest.raises(ValueError, match="sequences"):
        flash_attention.flash_attn_varlen_func(x, x, x, starts, starts[:2], 50, 50, window_size=window)
    output = flash_attention.flash_attn_varlen_func(x, x, x, starts, starts, 50, 50, window_size=window)
    assert output.shape == x.shape and not output[90:].any() and output[:90].any(-1).all()
    none = flash_attention.flash_attn_varlen_func(
        *[x.requires_grad_()] * 3, *[starts[:1]] * 2, 0, 0, window_size=window
    )
    assert not torch.autograd.grad(none.sum(), x)[0].any()  # no sequence at all
    assert none.shape == x.shape and not none.any()


def test_compiled_windows_of_other_lengths_need_no_other_graph():
    """The first graph is for its sizes alone, the second for all sizes."""
    graphs = CompileCounterWithBackend("eager")
    attend = partial(flash_attention.flash_attn_varlen_func, causal=True, window_size=(7, 7))
    compiled = torch.compile(attend, backend=graphs)
    for lengths in ([70, 3, 20], [40, 95], [31, 0, 77, 64]):
        (tokens,), starts = draw((sum(lengths), 2, 40)), torch.tensor([0, *lengths]).cumsum(0)
        call = tokens, tokens, tokens, starts, starts, max(lengths), max(lengths)
        assert torch.equal(compiled(*call), attend(*call))
    assert graphs.frame_count <= 2


def test_sinks_take_their_share_and_have_no_gradient():
    q, k, v = draw((2, 70, 4, 40), (2, 70, 2, 40), (2, 70, 2, 40))
    sinks = torch.tensor([-1.0, 0.0, 1.0, 3.0])
    expected, lse = judge(q, k, v, True, (-1, -1), None)
    expected = expected * (lse.exp() / (lse.exp() + sinks.double().exp())).unsqueeze(-1)
    output = flash_attention.flash_attn_func(q, k, v, causal=True, s_aux=sinks)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)  # the LSE is in float32
    starts = torch.tensor([0, 70, 140])
    flat = flash_attention.flash_attn_varlen_func(
        *(x.flatten(0, 1) for x in (q, k, v)), starts, starts, 70, 70, causal=True, s_aux=sinks
    )
    torch.testing.assert_close(flat.unflatten(0, (2, 70)), output)
    with pytest.raises(NotImplementedError, match="sinks"):
        flash_attention.flash_attn_func(q.requires_grad_(), k, v, s_aux=sinks)


def test_low_bits_run_with_their_recipes():
    inputs = draw((2, 70, 4, 64), (2, 70, 2, 64), (2, 70, 2, 64), dtype=torch.float32)
    as_ours = [x.transpose(1, 2) for x in inputs]
    for grad, recipe in ((False, "sage2"), (True, "sage_bwd")):
        output = flash_attention.flash_attn_func(*(x.requires_grad_(grad) for x in inputs), causal=True)
        expected = sage_hf.sage_attention(*as_ours, is_causal=True, enable_gqa=True, recipe=recipe)
        assert torch.equal(output, expected.transpose(1, 2))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("window", [(-1, -1), (7, 7)])
def test_under_autocast_packed_sequences_have_its_dtype_as_batches_have(window, grad):
    """Autocast makes one dtype of several, as models with float32 norms give them; tokens of no sequence are 0."""
    inputs = draw((2, 70, 4, 64), (2, 70, 2, 64), (2, 70, 2, 64), dtype=torch.float32)
    inputs[2] = inputs[2].bfloat16()
    inputs = [x.requires_grad_(grad) for x in inputs]
    starts = torch.tensor([0, 70])
    with torch.autocast("cpu", torch.bfloat16):
        batch = flash_attention.flash_attn_func(*(x[:1] for x in inputs), window_size=window)
        packed = flash_attention.flash_attn_varlen_func(
            *(x.flatten(0, 1) for x in inputs), starts, starts, 70, 70, window_size=window
        )
    assert batch.dtype == packed.dtype == torch.bfloat16
    assert torch.equal(packed[:70], batch[0]) and not packed[70:].any()


@pytest.fixture(params=["flash", "sdpa"])
def loaded(request, kernel, monkeypatch) -> Iterator[str]:
    """transformers that finds the kernel: all of it, or only what it calls with the masks of `sdpa`."""
    if not hasattr(hub_kernels, "load_and_register_attn_kernel"):
        pytest.skip(f"transformers {transformers.__version__} loads no attention kernels by these names")
    module = kernel
    if request.param == "sdpa":
        module = ModuleType("kernel")
        module.flash_attn_forward, module.supports_flash_attn = kernel.flash_attn_forward, kernel.supports_flash_attn
    repository = f"{REPOSITORY}-{request.param}"
    monkeypatch.setattr(hub_kernels, "is_kernels_available", lambda: True)
    monkeypatch.setattr(hub_kernels, "get_kernel", lambda *_, **__: module)
    monkeypatch.setattr(transformers.modeling_flash_attention_utils, "_loaded_implementation", None)
    yield repository
    for interface in (
        transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS,
        transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS,
    ):
        interface._global_mapping.pop(repository, None)


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "gpt_oss"])
def test_models_load_it_by_name_and_compute_what_they_did(loaded, name, padding, float64_softmax):
    """float64 runs exactly, so that only the meaning of masks, windows, sinks and groups can differ."""
    tiny = MODELS[name]
    inputs = tiny.inputs(padding)
    expected, output = (
        of_real_tokens(run(tiny.build(implementation, torch.float64), **inputs), inputs)
        for implementation in ("eager", loaded)
    )
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)  # norms and LSE are in float32


def test_they_generate_with_a_cache_and_padding_and_train(loaded):
    tiny = MODELS["llama"]
    tokens = [
        tiny.build(implementation, torch.float64).generate(**tiny.inputs("left"), max_new_tokens=5, do_sample=False)
        for implementation in ("sdpa", loaded)
    ]
    assert torch.equal(*tokens)
    model = tiny.build(loaded).train()
    model(**tiny.inputs("right")).logits.square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_what_it_cannot_compute_is_refused(loaded):
    with pytest.raises((TypeError, ValueError), match="softcap"):
        run(MODELS["gemma2"].build(loaded), **MODELS["gemma2"].inputs())


@pytest.mark.audit
def test_the_package_kernels_loads_it_and_finds_its_digest_right(repository, tmp_path):
    """Version 0.17.2 from PyPI, without its dependencies, in a folder of its own."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path, "kernels==0.17.2"]
    subprocess.run(command, check=True)
    code = f"""
import torch, kernels
from kernels._rust import Digest, DigestAlgorithm, Metadata
kernel = kernels.get_kernel({REPOSITORY!r}, version=1)
q = torch.randn(1, 70, 2, 64)
assert kernel.flash_attn_func(q, q, q).isfinite().all() and kernel.supports_flash_attn
for variant in {[str(path) for path in (repository / "build").iterdir()]}:
    digest = Metadata.read_from_file(variant + "/metadata.json").digest
    digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))
"""
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {"LOCAL_KERNELS": f"{REPOSITORY}={repository}", "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
