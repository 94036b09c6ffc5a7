"""Every snippet of README and docs runs, on tiny models, as the page claims, and every command's flags parse."""

from __future__ import annotations

import argparse
import ast
import json
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
import transformers
from diffusers import CogVideoXPipeline

import sage_hf
from sage_hf.app import cli
from sage_hf.diffusers.processor import sage_of
from sage_kernels.spec import recipe as spec_recipe
from tests.helpers import tiny_pipelines as tiny
from tests.helpers.cached_models import NEW
from tests.helpers.families import family
from tests.helpers.kernels import preferred

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted(ROOT.glob("examples/*/README.md"))
PROGRAMS = sorted(path for name in ("benchmarks", "docs", "examples", "studies") for path in (ROOT / name).glob("*.py"))

OTHERS_COMMANDS = {
    # Programs whose flags are not ours: what else holds the command.
    "pip": "tests/test_packaging.py installs wheel and source",
    "make": "tests/test_readme.py asserts that each target exists",
    ".venv/bin/python": "flags are pytest's; the paths are asserted to exist",
}

IN_RECIPES = "kernels/sage_kernels/spec/recipe.py, in RECIPES"
claims: list[tuple[str, Callable[..., None]]] = []
"""(a text that only this snippet has, the check that runs it)"""


def claim(text: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a check for the snippet that holds `text`."""

    def register(check: Callable[..., None]) -> Callable[..., None]:
        claims.append((text, check))
        return check

    return register


def blocks(language: str) -> list[str]:
    return [found for page in PAGES for found in re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)]


SNIPPETS = [*blocks("python"), *blocks("json")]


def run(code: str, scope: dict[str, Any], after: dict[str, Callable[[], object]] | None = None) -> None:
    """Run a snippet statement by statement; `after` are checks to call behind the one that holds their text."""
    checks = dict(after or {})
    for node in ast.parse(code).body:
        exec(compile(ast.Module([node], []), "<snippet>", "exec"), scope)
        source = ast.get_source_segment(code, node)
        for text in [text for text in checks if text in source]:
            checks.pop(text)()
    assert not checks, f"the snippet has no {list(checks)}"


@pytest.fixture
def llama_folder(tmp_path: Path) -> str:
    tiny.llama().save_pretrained(tmp_path / "llama")
    return str(tmp_path / "llama")


def scope(**names: Any) -> dict[str, Any]:
    tokens = torch.arange(80)[None] % 32
    known = {"AutoModel": transformers.AutoModel, "AutoModelForCausalLM": transformers.AutoModelForCausalLM}
    known |= {"sage_hf": sage_hf, "torch": torch, "inputs": {"input_ids": tokens}}
    return known | names


def denoise(pipe: CogVideoXPipeline) -> list[str]:
    """The recipes that each layer of the pipeline's transformer runs in a call of it, in evaluation mode."""
    with torch.no_grad():
        pipe.transformer(**tiny.transformer_inputs())
    return [row.recipe for row in sage_hf.explain(pipe).rows]


def asked(pipe_or_model: object) -> list[str]:
    return [row.asked for row in sage_hf.explain(pipe_or_model).rows]


def processors(pipe: CogVideoXPipeline) -> list[Any]:
    return list(pipe.transformer.attn_processors.values())


def trains(model: torch.nn.Module) -> bool:
    """Return whether the model computes gradients by `sage_bwd` in all layers."""
    model.train()
    model(torch.arange(80)[None] % 32).logits.sum().backward()
    rows = sage_hf.explain(model).rows
    return all(row.recipe == "sage_bwd" and row.backward == "reference_backward" for row in rows)


@claim('sage_hf.apply(pipe, "cogvideox-2b")    # either')
def readme(code: str, llama_folder: str, capsys: pytest.CaptureFixture) -> None:
    pipe = tiny.cogvideox(num_layers=30)
    query, key, value = torch.randn(3, 1, 2, 80, 32)
    names = scope(pipe=pipe, query=query, key=key, value=value)
    before: list[Any] = []

    def remember() -> None:
        before.extend(processors(pipe))
        assert denoise(pipe) == ["sage3"] * 30

    def applied() -> None:
        assert asked(pipe) == ["sage2", *["sage3"] * 28, "sage2"]

    def restored() -> None:
        assert all(one is other for one, other in zip(processors(pipe), before, strict=True))

    run(
        code.replace("…", llama_folder),
        names,
        {
            "SageAttn3Processor())": lambda: denoise(pipe) == ["sage3"] * 30 or pytest.fail(),
            'set_attention_backend("sage3")': remember,
            'attn_implementation="sage3")': lambda: asked(names["model"]) == ["sage3"] * 2 or pytest.fail(),
            "handle = ": applied,
            "handle.restore()": restored,
        },
    )
    assert trains(names["model"])
    assert "transformer_blocks.1-28.attn1  sage3" in capsys.readouterr().out
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert 0 < (names["out"] - exact).abs().sum() / exact.abs().sum() < 0.2


@claim("from sage_hf import SageAttn3Processor")
def usage_processor(code: str) -> None:
    pipe = tiny.cogvideox()
    run(code, scope(pipe=pipe))
    assert denoise(pipe) == ["sage3"] * tiny.LAYERS


@claim("reset_attention_backend")
def usage_backend(code: str) -> None:
    pipe = family("flux").build()
    model = SimpleNamespace(transformer=pipe)
    check = {'("sage3")': lambda: set(asked(model)) == {"sage3"} or pytest.fail()}
    run(code, scope(pipe=model), check)
    assert set(asked(model)) == {""}


@claim('model.set_attn_implementation("sage2")')
def usage_transformers(code: str, llama_folder: str) -> None:
    names = scope()
    check = {"attn_implementation=": lambda: asked(names["model"]) == ["sage3"] * 2 or pytest.fail()}
    run(code.replace("…", llama_folder), names, check)
    assert asked(names["model"]) == ["sage2"] * 2


@claim('with sage_hf.apply(model, "sage2"):\n    model.generate')
def usage_apply(code: str, capsys: pytest.CaptureFixture) -> None:
    pipe, model = tiny.cogvideox(num_layers=30), tiny.llama()
    before = processors(pipe)
    model.generation_config.max_new_tokens = 2
    seen: list[str] = []
    hook = model.register_forward_hook(lambda *_: seen.extend(asked(model)))
    run(code, scope(pipe=pipe, model=model))
    hook.remove()
    assert all(one is other for one, other in zip(processors(pipe), before, strict=True))
    assert set(seen) == {"sage2"} and asked(model) == [""] * 2
    assert "transformer_blocks.1-28.attn1  sage3" in capsys.readouterr().out


@claim('"layers": [{"pattern"')
def usage_configuration(code: str) -> None:
    config = sage_hf.SageConfig.from_json(code)
    resolved = [config.resolve(f"transformer_blocks.{block}.attn1", step, 5) for block in (0, 1) for step in (0, 2, 4)]
    assert resolved == ["exact"] * 3 + ["sage2", "sage3", "sage2"]
    assert config.training_recipe("transformer_blocks.1.attn1") == "sage_bwd"


@claim("calibration = sage_hf.calibrate(")
def usage_calibrate(code: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    pipe = tiny.cogvideox(num_layers=1)
    size = "num_inference_steps=1, height=64, width=64, num_frames=9, guidance_scale=1.0"
    run(code.replace("num_inference_steps=20", size), scope(pipe=pipe))
    assert "transformer_blocks.0.attn1" in capsys.readouterr().out
    assert asked(pipe) == [sage_hf.SageConfig.from_file("calibrated.json").resolve("transformer_blocks.0.attn1", 0, 1)]


@claim("attn_mask=mask, enable_gqa=True")
def usage_call(code: str) -> None:
    query, (key, value) = torch.randn(1, 4, 80, 32), torch.randn(2, 1, 2, 80, 32)
    mask = torch.ones(1, 1, 80, 80, dtype=torch.bool).tril()
    # The second call has as many heads everywhere.
    first, second = code.splitlines()
    names = scope(query=query, key=key, value=value, mask=mask)
    run(first, names)
    exact = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    assert 0 < (names["out"] - exact).abs().sum() / exact.abs().sum() < 0.2
    key, value = torch.randn(2, 1, 4, 80, 32)
    names |= {"key": key, "value": value}
    run(second, names)
    assert torch.allclose(names["lse"], (query @ key.mT * 32**-0.5).logsumexp(-1), atol=0.05)


@claim('sage_hf.apply(model, "train-int8-infer-fp4")')
def training(code: str, llama_folder: str) -> None:
    pipe, names = tiny.cogvideox(), scope()
    names["pipe"] = pipe
    check = {'attn_implementation="sage_bwd"': lambda: trains(names["model"]) or pytest.fail()}
    run(code.replace("…", llama_folder), names, check)
    assert asked(pipe) == ["sage_bwd"] * tiny.LAYERS
    model = names["model"]
    assert trains(model)
    sage_hf.record.clear()
    with torch.no_grad():
        model.eval()(torch.arange(80)[None] % 32)
    assert [row.recipe for row in sage_hf.explain(model).rows] == ["sage3"] * 2


@claim('sparse=Sparse("subblock", keep=0.25, dense_steps=10)')
def sparse_pipeline(code: str, capsys: pytest.CaptureFixture) -> None:
    pipe = tiny.cogvideox()
    settings = {"num_frames": 9, "height": 64, "width": 64, "num_inference_steps": 1, "output_type": "latent"}

    class Pipe:
        transformer, scheduler = pipe.transformer, pipe.scheduler

        def __call__(self, prompt: str) -> Any:
            return pipe(prompt, **settings)

    names = scope(pipe=Pipe(), prompt="a red ball")
    run(code, names)
    assert all(sage_of(layer).sparse is not None for layer in (b.attn1 for b in pipe.transformer.transformer_blocks))
    assert "transformer_blocks.0-2.attn1: " in capsys.readouterr().out


@claim("sage_hf.BlockList(counts, tiles")
def sparse_by_hand(code: str) -> None:
    query, key, value = torch.randn(3, 1, 2, 256, 32)
    counts, tiles = torch.ones(1, 2, 2, dtype=torch.int32), torch.zeros(1, 2, 2, 1, dtype=torch.int32)
    names = scope(query=query, key=key, value=value, counts=counts, tiles=tiles)
    run(code, names)
    exact = torch.nn.functional.scaled_dot_product_attention(query, key[:, :, :128], value[:, :, :128])
    assert 0 < (names["out"] - exact).abs().sum() / exact.abs().sum() < 0.1


@claim("sage_hf.enable_vsa(pipe")
def sparse_vsa(code: str) -> None:
    model = family("wan-t2v").build()
    wan = SimpleNamespace(from_pretrained=lambda *_, **__: SimpleNamespace(transformer=model))
    names = scope(WanPipeline=wan)
    gated: list[bool] = []
    checks = {
        "sage_hf.enable_vsa(": lambda: gated.extend(hasattr(block, "to_gate_compress") for block in model.blocks),
        "sage_hf.apply(": lambda: set(asked(model)) == {"sage2"} or pytest.fail(),
    }
    run(code, names, checks)
    assert gated and all(gated) and names["vsa"].sparsity == 0.8


@claim('sage_hf.apply(model, "sage2", kv_cache="int4")')
def kv_cache_generates(code: str, capsys: pytest.CaptureFixture) -> None:
    model = tiny.llama(head_dim=64)
    if not NEW:
        pytest.skip("this transformers does not hand a cache's keywords to attention")
    names = scope(model=model)
    names["inputs"] |= {"max_new_tokens": 2, "pad_token_id": 0}
    shown = "KV cache: int4 in 2 layers, 81 tokens"

    def explained() -> None:
        assert shown in str(sage_hf.explain(model))

    run(code, names, {"model.generate(**inputs)": explained})
    assert names["cache"].layers[0].cache.length == 81 and shown in capsys.readouterr().out


@claim("max_cache_len=8192")
def static_kv_cache_generates(code: str) -> None:
    model = tiny.llama(head_dim=64)
    if not NEW:
        pytest.skip("this transformers does not hand a cache's keywords to attention")
    sage_hf.apply(model, "sage2", kv_cache="int4")
    names = scope(model=model)
    names["inputs"] |= {"pad_token_id": 0}

    def explained() -> None:
        assert "KV cache: int4 in 2 layers, 95 tokens" in str(sage_hf.explain(model))

    shorter = code.replace("max_new_tokens=256", "max_new_tokens=16")
    run(shorter, names, {'cache_implementation="static"': explained})
    assert names["cache"].get_max_length() == 8192 and names["cache"].get_seq_length() > 80


@claim("enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))")
def parallel_recipe(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, given = tiny.cogvideox(), parallelism_of(monkeypatch)
    run(code, scope(pipe=pipe))
    assert set(asked(pipe)) == {"sage2"} and given["config"].ulysses_degree == 2


@claim("cp_plan = sage_hf.context_parallel_plan(pipe.transformer)")
def context_parallel_plan(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = parallelism_of(monkeypatch)
    run(code, scope(pipe=tiny.cogvideox(), ContextParallelConfig=diffusers.ContextParallelConfig))
    assert given["config"].ring_degree == 2 and "transformer_blocks.0" in given["cp_plan"]


def parallelism_of(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Record the arguments of `enable_parallelism`, which needs several processes to run."""
    if not hasattr(diffusers.ModelMixin, "enable_parallelism"):
        pytest.skip("this diffusers has no context parallelism")
    given: dict[str, Any] = {}
    monkeypatch.setattr(diffusers.ModelMixin, "enable_parallelism", lambda self, **kwargs: given.update(kwargs))
    return given


@claim("print(recorder.layers()[0].errors.rel_l1)")
def accuracy_recorder(code: str, capsys: pytest.CaptureFixture) -> None:
    names = scope(model=tiny.llama())
    run(code, names)
    layers = names["recorder"].layers()
    assert [layer.recipes for layer in layers] == [("sage2",)] * 2 and layers[0].errors.rel_l1 > 1e-3
    printed = capsys.readouterr().out
    assert "keys per sequence stay in 16 bits" in printed and "heaviest key" in printed
    assert f"\n{layers[0].errors.rel_l1}\n" in printed


@claim('from_pretrained("examples/tiny_video")')
def tiny_model(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    steps = code.replace("num_inference_steps=20", "num_inference_steps=1")
    names = scope()
    run(steps, names)
    assert len(names["frames"]) == 17 and names["frames"][0].size == (128, 128)


def adding_block(text: str) -> str:
    (code,) = [code for code in SNIPPETS if text in code]
    return code


@claim('recipe="sage1_v")))')
def adding_recipe(code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    recipe = eval(adding_block(IN_RECIPES).partition("\n")[2].strip().rstrip(","), dict(vars(spec_recipe)))
    monkeypatch.setitem(spec_recipe.RECIPES, recipe.name, recipe)
    exec(code, {})
    assert "kernel='reference', recipe='sage1_v', numerics='emulated'" in capsys.readouterr().out


@claim("def test_the_one_tile")
def adding_kernel(code: str) -> None:
    module = {"__package__": "sage_kernels.reference", "__name__": "sage_kernels.reference.plain"}
    exec(adding_block("class PlainForward"), module)
    names: dict[str, Any] = {}
    exec(code, names)
    with preferred(module["PlainForward"]()):
        names["test_the_one_tile_kernel_computes_what_the_reference_does"]()


@pytest.mark.parametrize(("text", "check"), claims, ids=[check.__name__ for _, check in claims])
def test_a_snippet_does_what_its_page_claims(text: str, check: Callable[..., None], request: Any) -> None:
    (code,) = [code for code in SNIPPETS if text in code]
    wanted = list(check.__annotations__)[1:-1]
    check(code, **{name: request.getfixturevalue(name) for name in wanted})


def test_every_snippet_is_checked_once():
    texts = [*(text for text, _ in claims), IN_RECIPES, "class PlainForward"]
    for code in SNIPPETS:
        assert sum(text in code for text in texts) == 1, f"no check, or several, for the snippet\n{code}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_json_within_lines_is_a_configuration(page):
    for text in re.findall(r"`(\{\"recipe\".*?\})`", page.read_text()):
        sage_hf.SageConfig.from_dict(json.loads(text))


def commands() -> list[str]:
    """Every command of a page (in a block, indented, or within a line if it has arguments) and of a docstring.

    A docstring's command is a line, also if it lost its indentation; backslashes join lines.
    """
    found = [line for block in blocks("bash") for line in block.splitlines()]
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        found += re.findall(r"^ {4}((?:python|sage-hf) .*)$", text, re.MULTILINE)
        found += re.findall(r"`((?:python|sage-hf|make|pip) [^`\n]+|torchrun [^`\n]+\.py)`", text)
    for program in PROGRAMS:
        text = (ast.get_docstring(ast.parse(program.read_text()), clean=False) or "").replace("\\\n", " ")
        found += re.findall(r"^ *((?:python|torchrun|sage-hf) .*)$", text, re.MULTILINE)
    stripped = (line.partition("  #")[0].strip() for line in found)
    return list(dict.fromkeys(line for line in stripped if line and not line.startswith("#")))


class Parsed(Exception):
    """Raised once a program has parsed its arguments."""


@pytest.fixture
def parsing(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: argparse.ArgumentParser, *arguments: Any) -> None:
        parse(self, *arguments)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)


@pytest.mark.parametrize("command", commands())
def test_the_flags_of_a_command_parse(command, parsing, monkeypatch, capsys):
    words = ["1" if re.fullmatch("[A-Z_]{4,}", word) else word for word in shlex.split(command)]  # FILE, SEED, …
    while re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words.pop(0)
    program, *arguments = words
    if program == "torchrun":  # which starts Python in several processes
        assert arguments[0] == "--nproc-per-node"
        program, *arguments = "python", *arguments[2:]
    if program in OTHERS_COMMANDS:
        assert all((ROOT / path).exists() for path in re.findall(r"\btests/[\w./]+", command))
        return
    if program == "sage-hf":
        with pytest.raises((Parsed, SystemExit)) as stop:
            cli.main([word for word in arguments if word != "…"])
        assert isinstance(stop.value, Parsed) or stop.value.code == 0, capsys.readouterr().err  # 0: --version
        return
    assert program == "python", f"{program} is neither ours nor in OTHERS_COMMANDS"
    if arguments[0] == "-m":
        assert (ROOT / f"{arguments[1].replace('.', '/')}.py").is_file() or arguments[1] == "pytest"
        return
    monkeypatch.setattr(sys, "argv", [str(ROOT / arguments[0]), *arguments[1:]])
    with pytest.raises(Parsed):
        runpy.run_path(str(ROOT / arguments[0]), run_name="__main__")
