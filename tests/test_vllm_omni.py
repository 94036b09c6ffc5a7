"""The plugin of vLLM-Omni, in an imitation of its registry and base classes; SGLang's way of naming a backend."""

from __future__ import annotations

import enum
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

import sage_hf
from sage_kernels.exact import sdpa
from tests.helpers.families import family

ROOT = Path(__file__).parents[1]
PACKAGE = "vllm_omni.diffusion.attention.backends"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict]:
    """The class paths that were registered, by the member of the enumeration."""
    found: dict = {}
    for name in ("vllm_omni", "vllm_omni.diffusion", "vllm_omni.diffusion.attention", PACKAGE):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    registry, abstract = ModuleType(f"{PACKAGE}.registry"), ModuleType(f"{PACKAGE}.abstract")
    registry.DiffusionAttentionBackendEnum = enum.Enum("DiffusionAttentionBackendEnum", "SAGE_ATTN SAGE_ATTN_3 FLASH")
    registry.register_diffusion_backend = lambda member, path: found.update({member.name: path})
    for name in ("AttentionBackend", "AttentionImpl", "AttentionMetadata"):
        setattr(abstract, name, type(name, (), {}))
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    monkeypatch.setitem(sys.modules, abstract.__name__, abstract)
    monkeypatch.delitem(sys.modules, "sage_hf.vllm_omni.backend", raising=False)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    yield found
    sage_hf.drop_in().restore()
    sys.modules.pop("sage_hf.vllm_omni.backend", None)


def register() -> None:
    """Load the plugin by the entry point of pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text()
    (entry,) = re.findall(r'\[project\.entry-points\."vllm_omni\.general_plugins"\]\nsage_hf = "(.+)"', text)
    module, function = entry.split(":")
    getattr(importlib.import_module(module), function)()


def load(path: str) -> type:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("mask", ["none", "keys", "scores"])
@pytest.mark.parametrize("causal", [False, True])
def test_its_backends_attend_with_masks_and_grouped_queries(registered, mask, causal):
    register()
    registered.clear()
    register()  # as a process may whose path has the replacement modules already
    importlib.import_module("sageattention")  # what vLLM-Omni asks for
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, n, h, 40, generator=generator, dtype=torch.float64) for n, h in ((70, 4), (90, 2), (90, 2))
    )
    keys = torch.rand(2, 90, generator=generator) < 0.7
    given, meant = {
        "none": (None, None),
        "keys": (keys.int(), keys[:, None, None]),
        "scores": (keys[:, None, None].expand(2, 1, 70, 90), keys[:, None, None]),
    }[mask]
    truth, _ = sdpa.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=meant, is_causal=causal, scale=0.2)
    assert set(registered) == {"SAGE_ATTN", "SAGE_ATTN_3"}
    for name, path in registered.items():
        backend = load(path)
        assert backend.get_name() == name and backend.supports_attention_mask()
        attention = backend.get_impl_cls()(4, 40, 0.2, causal, num_kv_heads=2, prefix="blocks.0")
        output = attention.forward_cuda(q, k, v, SimpleNamespace(attn_mask=given))
        torch.testing.assert_close(output.transpose(1, 2), truth)
        recipe = {"SAGE_ATTN": "sage2", "SAGE_ATTN_3": "sage3"}[name]
        low = [x.bfloat16() for x in (q, k, v)]
        expected = sage_hf.sage_attention(
            *(x.transpose(1, 2) for x in low), scale=0.2, enable_gqa=True, is_causal=causal, recipe=recipe
        )
        assert torch.equal(attention.forward_cuda(*low), expected.transpose(1, 2))
    with pytest.raises(ValueError, match="no settings"):
        backend.get_impl_cls()(4, 40, 0.2, backend_kwargs={"window": 3})


def test_an_installed_sageattention_keeps_its_backends_unless_the_plugin_is_named(registered, monkeypatch, tmp_path):
    (tmp_path / "sageattention.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    register()
    assert not registered
    monkeypatch.setenv("VLLM_PLUGINS", "other,sage_hf")
    register()
    assert set(registered) == {"SAGE_ATTN", "SAGE_ATTN_3"}


def test_a_server_that_hands_names_to_diffusers_can_name_our_recipes():
    """Do what SGLang's diffusers backend does with the name on its command line."""
    model = family("flux").build()
    model.set_attention_backend("sage2")
    assert {row.asked for row in sage_hf.explain(model).rows} == {"sage2"}
    model.reset_attention_backend()
