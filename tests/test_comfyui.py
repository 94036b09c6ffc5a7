"""The ComfyUI node pack, in an imitation of ComfyUI's models, which take an attention override."""

from __future__ import annotations

import copy
import functools
import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import sage_hf
from sage_hf.sparse.config import Sparse
from sage_kernels.exact import sdpa

PACK = Path(__file__).parents[1] / "integrations/comfyui"


@pytest.fixture(scope="module")
def pack() -> ModuleType:
    """The pack, imported from its folder as ComfyUI imports it."""
    name = str(PACK).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, PACK / "__init__.py", submodule_search_locations=[str(PACK)])
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def with_override(func):
    """Call the override of a call's `transformer_options` in place of `func`, once, as ComfyUI's attention does."""

    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        if "_inside_attn_wrapper" not in kwargs:
            kwargs["_inside_attn_wrapper"] = True
            override = (kwargs.get("transformer_options") or {}).get("optimized_attention_override")
            if override is not None:
                return override(func, *args, **kwargs)
        return func(*args, **kwargs)

    return wrapper


@with_override
def attention(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
    """The meaning of the arguments, in float64."""
    if not skip_reshape:
        head_dim = q.shape[-1] // heads
        q, k, v = (x.reshape(*x.shape[:2], -1, head_dim).transpose(1, 2) for x in (q, k, v))
    if mask is not None:
        mask = mask.reshape(*(1,) * (3 - mask.ndim), *mask.shape)
        mask = mask if mask.ndim == 4 else mask[:, None]
    output, _ = sdpa.attention(q, k, v, mask=mask, scale=kwargs.get("scale"))
    output = output.to(q.dtype)
    return output if skip_output_reshape else output.transpose(1, 2).flatten(2)


class Patcher:
    """A model in ComfyUI's graph: `clone` copies what a node may change."""

    def __init__(self, model_options: dict[str, Any] | None = None) -> None:
        self.model_options = model_options or {"transformer_options": {}}

    def clone(self) -> Patcher:
        return Patcher(copy.copy(self.model_options))

    def sample(self, x: torch.Tensor, steps: int = 4, **kwargs: Any) -> list[torch.Tensor]:
        """Run two blocks in every step; returns the output of each step."""
        schedule = torch.linspace(1.0, 0.0, steps + 1)
        outputs = []
        for step in range(steps):
            options = dict(self.model_options["transformer_options"])
            options |= {"sample_sigmas": schedule, "sigmas": schedule[step : step + 1].clone(), "block_type": "double"}
            hidden = x
            for block in range(2):
                options["block_index"] = block
                hidden = hidden + attention(hidden, hidden, hidden, 4, transformer_options=options, **kwargs)
            outputs.append(hidden)
        return outputs


def patch(pack, model=None, recipe="sage2", keep=1.0, start_step=0, end_step=-1, kept_blocks=""):
    node = pack.NODE_CLASS_MAPPINGS["SageHfAttention"]()
    assert set(node.INPUT_TYPES()["required"]) == set(node.apply.__code__.co_varnames[1:7])
    (patched,) = getattr(node, node.FUNCTION)(model or Patcher(), recipe, keep, start_step, end_step, kept_blocks)
    return patched


def report(pack, model) -> str:
    node = pack.NODE_CLASS_MAPPINGS["SageHfReport"]()
    latent = object()
    made = getattr(node, node.FUNCTION)(model, latent)
    assert made["result"][0] is latent and made["ui"]["text"] == [made["result"][1]]
    assert node.IS_CHANGED(model=model) != node.IS_CHANGED(model=model)
    return made["result"][1]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


MASKS = {
    "none": None,
    "bool": torch.rand(70, 90, generator=torch.Generator().manual_seed(1)) < 0.7,
    "additive": draw(2, 70, 90, dtype=torch.float64),
    "heads": draw(2, 4, 70, 90, dtype=torch.float64),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_every_argument_means_what_it_means_to_comfyui(pack, mask, skip_reshape, skip_output_reshape, kv_heads):
    """float64 runs exactly, so that only the meaning of the arguments can differ."""
    q, k, v = (draw(2, n, heads * 40, dtype=torch.float64) for n, heads in ((70, 4), (90, kv_heads), (90, kv_heads)))
    if skip_reshape:
        q, k, v = (x.unflatten(2, (-1, 40)).transpose(1, 2) for x in (q, k, v))
    arguments = {"mask": MASKS[mask], "skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    arguments |= {"scale": 0.2, "enable_gqa": kv_heads != 4}
    override = patch(pack).model_options["transformer_options"]["optimized_attention_override"]
    output = attention(q, k, v, 4, **arguments, transformer_options={"optimized_attention_override": override})
    torch.testing.assert_close(output, attention(q, k, v, 4, **arguments))
    assert "attention" in override.explain()


@pytest.mark.parametrize("recipe", ["sage3", "sage2", "sage1", "exact"])
def test_the_recipe_runs_in_every_block_and_the_report_says_so(pack, recipe):
    model = patch(pack, recipe=recipe)
    assert "no attention call" in report(pack, model)
    x = draw(1, 80, 160)
    output = model.sample(x, steps=1)[0]
    expected = x
    for _ in range(2):
        q = expected.unflatten(2, (4, 40)).transpose(1, 2)
        expected = expected + sage_hf.sage_attention(q, q, q, recipe=recipe).transpose(1, 2).flatten(2)
    assert torch.equal(output, expected)
    assert re.search(rf"double\.0-1 +{recipe} +{recipe} ", report(pack, model))


def test_kept_steps_and_blocks_run_comfyuis_attention(pack):
    original = Patcher()
    x = draw(1, 80, 160)
    plain = original.sample(x)
    in_steps = patch(pack, original, start_step=1, end_step=2)
    same = [torch.equal(one, other) for one, other in zip(in_steps.sample(x), plain, strict=True)]
    assert same == [True, False, False, True]
    assert "another step, in 2 calls" in report(pack, in_steps)
    kept = patch(pack, original, kept_blocks="0-1, 29")
    assert all(map(torch.equal, kept.sample(x), plain))
    assert "a kept block, in 4 calls" in report(pack, kept)
    assert all(map(torch.equal, original.sample(x), plain))
    assert original.model_options == {"transformer_options": {}}
    for text in ("first", "5-2", "3-"):
        with pytest.raises(ValueError, match=f"kept_blocks: '{text}' is no block number"):
            patch(pack, kept_blocks=text)


def test_an_override_that_was_there_is_called_around_it(pack):
    seen = []

    def counting(func, *args, **kwargs):
        seen.append(kwargs["transformer_options"]["block_index"])
        return func(*args, **kwargs)

    model = Patcher({"transformer_options": {"optimized_attention_override": counting}})
    x = draw(1, 80, 160)
    chained = patch(pack, model, kept_blocks="1")
    outputs = chained.sample(x, steps=1)
    assert seen == [0, 1]
    assert torch.equal(outputs[0], patch(pack, kept_blocks="1").sample(x, steps=1)[0])
    assert "a kept block, in 1 calls" in report(pack, chained)


def test_unsupported_comfyui_calls_run_comfyuis_attention(pack):
    x = draw(1, 80, 160)
    plain = Patcher().sample(x, steps=1)[0]
    for arguments in ({"attn_precision": torch.float32}, {"low_precision_attention": False}, {"window": 7}):
        model = patch(pack)
        assert torch.equal(model.sample(x, steps=1, **arguments)[0], plain), arguments
    assert "window is not known" in report(pack, model)


def test_long_self_attention_is_sparse_below_one(pack, monkeypatch):
    x = draw(1, 4096, 64)
    override = patch(pack, keep=0.25).model_options["transformer_options"]["optimized_attention_override"]
    options = {"optimized_attention_override": override}
    output = attention(x, x, x, 1, transformer_options=options)
    q = x[:, None]
    blocks = Sparse(keep=0.25).make_router().route(q, q)
    assert torch.equal(output, sage_hf.sage_attention(q, q, q, recipe="sage2", blocks=blocks)[:, 0])
    short = x[:, :256]
    dense = sage_hf.sage_attention(*(short[:, None],) * 3, recipe="sage2")[:, 0]
    assert torch.equal(attention(short, short, short, 1, transformer_options=options), dense)


def test_a_unets_blocks_have_their_names(pack):
    override = patch(pack).model_options["transformer_options"]["optimized_attention_override"]
    x = draw(1, 80, 160)
    options = {"optimized_attention_override": override, "block": ("input", 4), "block_index": 0}
    attention(x, x, x, 4, transformer_options=options)
    assert "input.4" in override.explain()


def test_the_packs_metadata_is_what_the_registry_reads(pack):
    text = (PACK / "pyproject.toml").read_text()
    assert re.search(r'\[tool\.comfy\]\nPublisherId = "\S+"\nDisplayName = ".+"\nrequires-comfyui = ">=0\.33\.2"', text)
    assert f'version = "{sage_hf.__version__}"' in text
    assert set(pack.NODE_CLASS_MAPPINGS) == set(pack.NODE_DISPLAY_NAME_MAPPINGS)
    assert "Sage attention (sage-hf)" in pack.NODE_DISPLAY_NAME_MAPPINGS.values()


def test_a_compiled_model_computes_the_same(pack):
    model, x = patch(pack), draw(1, 80, 160)
    options = dict(model.model_options["transformer_options"], block_index=0)

    def block(x):
        return x + attention(x, x, x, 4, transformer_options=options)

    assert torch.equal(torch.compile(block, backend="eager")(x), block(x))
