"""Fill in the sections of README.md and docs/ that are generated from results and from the code.

    python docs/pages.py    # rewrite the generated sections, and draw the pictures again

A generated section lies between `<!-- generated: NAME -->` and `<!-- end -->`, where NAME is one of SECTIONS.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from sage_hf.bench import grid_tables, measure_host, model_tables, models, plots, tables
from sage_hf.text import markdown_table
from sage_kernels.spec.recipe import RECIPES

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = "benchmarks"
"""The folder of the benchmarks and their results, relative to the repository."""
RESULTS = ROOT / BENCHMARKS / "results"
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md")))
SPARSE_TOKENS = 32768
"""Length at which the page shows the work before sparse attention."""
HOST_BOUND = "flux"
"""Shape at which, in the columns "Triton" of every provider's forward speed, the host took longer than the GPU."""
SHOWN_PEAKED = (
    "a sink holds 0.8 of 8,192",
    "a sink holds 0.95 of 119,056",
    "4 sinks hold 0.8 of 32,768, in the middle",
    "a sink holds 0.8 of 4,096, causal",
    "a sink holds 0.8 of 4,096, in the middle, causal",
    "a sink holds 0.8 of 8,192, 8 heads share 2",
    "a sink holds 0.8 of 8,192, K ×10 in 4 channels",
    "Gaussian, 8,192 keys",
    "K ×40 in 4 channels, 8,192 keys",
    "RoPE'd bias, 8,192 keys",
)
"""Tensors with peaked attention that the page shows."""

sys.path[:0] = [str(ROOT / "studies"), str(ROOT / "examples")]
import finetune_then_fp4_table  # noqa: E402
import gradient_errors as gradients  # noqa: E402
import imports  # noqa: E402
import output_errors  # noqa: E402
import peaked_errors as peaked  # noqa: E402
import peaked_models  # noqa: E402
import sparse_quality_table  # noqa: E402
import trained_models_table  # noqa: E402
import training_report  # noqa: E402

_MARK = re.compile(r"<!-- generated: ([\w-]+) -->")
_MARKED = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def relative(path: Path, page: Path) -> str:
    """Return the path of a file as a page links it."""
    return Path(os.path.relpath(path, page.parent)).as_posix()


@dataclass(frozen=True)
class Section:
    """A generated section of a page.

    Attributes:
        render: returns the section's Markdown, without its sources, from the content of its results.
        results: the files that hold its numbers: patterns of names in RESULTS, or of paths in the repository.
        commands: the commands that measure the results again.
    """

    render: Callable[..., str]
    results: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()

    @property
    def paths(self) -> list[Path]:
        """Return the paths of the results, a CPU's last."""
        patterns = (name if "/" in name else f"{BENCHMARKS}/results/{name}.json" for name in self.results)
        found = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
        return sorted(found, key=lambda path: path.name.startswith("cpu"))

    def links(self, page: Path) -> str:
        """Return links from a page to the results."""
        return ", ".join(f"[{path.name}]({relative(path, page)})" for path in self.paths)

    def markdown(self, page: Path) -> str:
        """Return the section with its sources, as it stands in a page."""
        text = self.render(*(json.loads(path.read_text(encoding="utf-8")) for path in self.paths))
        if not self.results:
            return text
        gap = "\n\n" if text.splitlines()[-1].startswith(("|", "-", "!", " ")) else " "  # behind a caption
        return f"{text}{gap}Source: {self.links(page)}."


def render(page: Path) -> str:
    """Return the text of a page with new generated sections.

    Raises:
        KeyError: a section's name is not in SECTIONS.
    """
    text = page.read_text(encoding="utf-8")
    return _MARKED.sub(lambda match: f"{match[1]}\n{SECTIONS[match[2]].markdown(page)}\n\n{match[3]}", text)


def read_result(name: str) -> dict[str, Any]:
    """Return the JSON of that name in RESULTS."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def gain(result: dict[str, Any]) -> str:
    """Return a table of a user's gain in steps of some models."""
    return model_tables.low_bit_gain(result, most=6)


def cost(result: dict[str, Any]) -> str:
    """Return a table of the accuracy that low bits cost trained language models on one GPU in their longest texts."""
    recipes = ("sage1", "sage2", "sage3", "sageattention1", "sageattention2", "fa3_fp8", "sage3_paper")
    rows = result["rows"]
    longest = {row["model"]: row["tokens"] for row in sorted(rows, key=lambda row: row["tokens"])}
    return trained_models_table.cost_markdown([row for row in rows if row["tokens"] == longest[row["model"]]], recipes)


def model_gain(result: dict[str, Any]) -> str:
    """Return a table of the time of a step of the models that were measured with each part of sage-hf left out."""
    drawn = picture("nvidia-h200-models", "Speed of a step of every model, relative to the baseline")
    return f"{drawn}\n\n{model_tables.model_gain(result)}"


def all_models(result: dict[str, Any]) -> str:
    """Return a table of the time of an inference step of more models, with each attention."""
    trained = {row["model"] for row in result["rows"] if row["provider"] == "sage_hf:sage_bwd"}
    # The table of gains shows the times without FlashAttention 3.
    result["rows"] = [
        row for row in result["rows"] if row["model"] not in trained and not row["provider"].endswith(", no fa3")
    ]
    caption = f"ms of a step on {result['gpu']}, torch {result['torch']}, commit {result['commit'][:10]}."
    return f"{model_tables.model_speed(result)}\n\n{caption}"


def folders() -> str:
    """Return a table of the packages' folders, with each folder's contents and imports."""
    rows = []
    for folder, others in imports.arrows().items():
        package, _, rest = folder.partition("/")
        about = first_sentence(imports.FOLDERS[package] / rest / "__init__.py")
        rows.append([f"`{folder}`", about, ", ".join(f"`{other}`" for other in others) or "none"])
    return markdown_table(["folder", "holds", "imports"], rows)


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split())
    return re.split(r"(?<=\.)\s", text)[0]


def test_modules() -> str:
    """Return a table of the test modules of each folder, with the subject of each module."""
    parts = []
    for folder in sorted({path.parent for path in (ROOT / "tests").rglob("test_*.py")}):
        rows = [[f"`{path.name}`", first_sentence(path)] for path in sorted(folder.glob("test_*.py"))]
        parts.append(f"## {folder.relative_to(ROOT)}\n\n{markdown_table(['module', 'what it checks'], rows)}")
    return "\n\n".join(parts)


def clip_scores(scores: dict[str, Any]) -> str:
    """Return a table of the tiny model's clips of held-out captions in which each attribute is as written."""
    attributes = ("colour", "shape", "direction")
    rows = [
        [f"`{recipe}`", f"{score['prompts']} of {what}", *(str(found[name]) for name in attributes)]
        for recipe, score in scores.items()
        for what, found in (("one object", score), ("two objects", score["pairs"]))
    ]
    return markdown_table(["attention", "clips", *attributes], rows)


def calibration(result: dict[str, Any]) -> str:
    """Return a table of clips of the tiny model in its calibrated mix, and sentences about the mix and its errors."""
    rows = [[row["prompt"], f"{row['psnr']:.1f}", f"{row['ssim']:.3f}"] for row in result["clips"]]
    shares = ", ".join(f"{share:.0%} in `{recipe}`" for recipe, share in result["shares"].items() if share)
    errors, held_out, alone = (list(result[name].values()) for name in ("errors", "held_out", "alone"))
    measured = (
        f"Layers × steps: {shares}. With a budget of {result['budget']:g}, the latents' error is {fmean(errors):.3f} "
        f"on average of {len(errors)} prompts and at most {max(errors):.3f}, and on {len(held_out)} other prompts at "
        f"most {max(held_out):.3f}. With `sage3` everywhere it is {fmean(alone):.3f} on average."
    )
    return f"{markdown_table(['clip', 'PSNR, dB', 'SSIM'], rows)}\n\n{measured}"


def measured_models() -> str:
    """Return the names of the models whose steps are measured; with the number of layers, where only some layers
    run."""
    names = []
    for model in models.MODELS:
        _, layers = model.shortened()
        depth = "" if layers == model.layers_of_model else f" ({layers} of {model.layers_of_model} layers)"
        names.append(f"`{model.name}`{depth}")
    return textwrap.fill(", ".join(names) + ".", 120, break_on_hyphens=False)


def grid(result: dict[str, Any]) -> str:
    """Return the heat map and the tables of every kind of call."""
    message = "Speed of attention by kind of call and tokens, relative to the fastest exact attention"
    return f"{picture('nvidia-h200-grid', message)}\n\n{grid_tables.markdown(result)}"


def host(*results: dict[str, Any]) -> str:
    """Return tables of the host time of calls, a table for each machine."""
    return "\n\n".join(f"On the host of an {one['gpu']}:\n\n{measure_host.markdown(one)}" for one in results)


def speed(result: dict[str, Any]) -> str:
    """Return pictures and a table of every provider's forward speed at every shape."""
    against_length = "Speed against length: sage2, FlashAttention 3, cuDNN, SageAttention2"
    parts = [picture("nvidia-h200-forward", against_length), tables.markdown(result)]
    return "\n\n".join([*parts, picture("nvidia-h200-forward-errors", "Speed against error of every provider")])


def speed_summary(result: dict[str, Any]) -> str:
    """Return the ranges of `sage2` in the table of every provider's forward speed, in sentences."""
    shapes: dict[str, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        if "ms" in row and row["scope"] == "end_to_end":
            shapes.setdefault(row["shape"], {})[row["provider"]] = row

    def span(numerator: str, denominator: str, fact: str = "ms") -> tuple[float, float]:
        both = [rows for rows in shapes.values() if numerator in rows and denominator in rows]
        ratios = [rows[numerator][fact] / rows[denominator][fact] for rows in both]
        return min(ratios), max(ratios)

    def faster(than: str) -> str:
        low, high = span(than, "sage_hf:sage2")
        return f"{low:.2f} to {high:.2f} × as fast as"

    gains = {name: rows["sageattention2"]["ms"] / rows["sage_hf:sage2_triton"]["ms"] for name, rows in shapes.items()}
    waiting, by_triton = gains.pop(HOST_BOUND), gains.values()
    low, high = span("sage_hf:sage2", "sageattention2", "peak_extra_bytes")
    name, longest = max(shapes.items(), key=lambda item: next(iter(item[1].values()))["q_len"])
    ours, theirs = longest["sage_hf:sage2"], longest["sageattention2"]
    (fp8,) = (row for row in result["rows"] if (row["shape"], row["provider"]) == (name, "fa3_fp8") and "rel_l1" in row)
    lines = [
        f"End to end, `sage2` is {faster('sageattention2')} SageAttention2, with {low:.2f} to {high:.2f} of its extra "
        f"memory; {faster('fa3')} FlashAttention 3; {faster('cudnn')} cuDNN.",
        f"By the Triton kernel, which other GPUs get, it is {min(by_triton):.2f} to {max(by_triton):.2f} × as fast as "
        f"SageAttention2 on this one; at shape {HOST_BOUND}, where the host took longer than the GPU, {waiting:.2f} ×.",
        f"On standard normal tensors at {ours['q_len']:,} tokens its error is {ours['rel_l1']:.4f}, SageAttention2's "
        f"{theirs['rel_l1']:.4f}, FlashAttention 3's in FP8 {fp8['rel_l1']:.3f}; where K and V have means "
        f"{ours['rel_l1_biased']:.4f}, {theirs['rel_l1_biased']:.4f} and {fp8['rel_l1_biased']:.2f}.",
    ]
    return "\n".join("\n".join(textwrap.wrap(f"- {line}", 120, subsequent_indent="  ")) for line in lines)


def training_routes(result: dict[str, Any]) -> str:
    """Return a table of the choices between recipe and exact attention for the grid's training calls, by kind of
    call."""
    rows = [row for row in result["rows"] if row["direction"] == "forward_backward" and "ours_ms" in row]
    kinds = {
        "causal, with grouped queries": lambda row: row["mask"] == "causal" and row["q_heads"] != row["kv_heads"],
        "causal": lambda row: row["mask"] == "causal" and row["q_heads"] == row["kv_heads"],
        "padded": lambda row: row["mask"] == "lengths",
        "neither": lambda row: row["mask"] == "none",
    }
    lines = []
    for (kind, is_kind), head_dim in itertools.product(kinds.items(), (64, 128)):
        found = [row for row in rows if is_kind(row) and row["head_dim"] == head_dim]
        low_bit = [row for row in found if row["recipe"] != "exact"]
        if not found:
            continue
        ratios = [grid_tables.ratio(row) for row in low_bit]
        gain = f"{min(ratios):.2f} to {max(ratios):.2f} ×" if ratios else "–"
        calls = f"{len(low_bit)} of {len(found)} calls"
        calls += f", of {min(row['q_len'] for row in low_bit):,} tokens and more" if low_bit else ""
        lines.append([f"{kind}, head_dim {head_dim}", calls, gain])
    others = [row for row in rows if row["head_dim"] not in (64, 128)]
    calls = f"{sum(row['recipe'] != 'exact' for row in others)} of {len(others)} calls"
    header = ["attention of the model", "trains by `sage_bwd`", "against the fastest other"]
    table = markdown_table(header, [*lines, ["other head_dims", calls, "–"]])
    return f"{table}\n\nOn {result['gpu']}, {tables.versions(result)}"


def sparse_quality(result: dict[str, Any]) -> str:
    """Return the tables and the picture of the trained proof of sparse attention."""
    message = "The middle frame of clips of eight held-out prompts, a line for each way to run the first seed's models"
    return f"{sparse_quality_table.markdown(result)}\n\n{picture('nvidia-h200-sparse_quality', message)}"


def sparse_speed(result: dict[str, Any]) -> str:
    """Return tables of the speed over block lists at a quarter of the tiles, and of the work before attention."""
    head = f"On one {result['gpu']}, {result['rows'][0]['q_heads']} heads, a quarter of the tiles drawn at random; "
    head += "quantising and sorting of lists included. The JSON also has a tenth of the tiles and lists of routers:"
    training = "Forward and backward pass, with the errors of dQ / dK / dV in one head:"
    shown = [
        [row for row in result[name] if row["lists"] == "drawn" and row["skipped"] <= 0.75]
        for name in ("rows", "training")
    ]
    before = "Work before attention: each router at a quarter of the tiles, and putting tokens into 4×4×4 order:"
    parts = [
        [f"{row['q_len']:,}", row["part"], f"{row['ms']:.3f}", f"{row['share_of_dense']:.1%}"]
        for row in result["routing"]
        if row["q_len"] == SPARSE_TOKENS and row["part"] != "dense"
    ]
    routing = markdown_table(["tokens", "part", "ms", "of the dense `sage2` call"], parts)
    return "\n\n".join((head, sparse_table(shown[0]), training, sparse_table(shown[1]), before, routing))


def sparse_table(rows: list[dict[str, Any]]) -> str:
    """Return a table of providers over block lists."""
    lines = []
    for row in rows:
        sizes = (f"{row['q_len']:,}", str(row["head_dim"]), f"{row['block_m']}×{row['block_n']}")
        speed = (f"{row['ms']:.2f}", f"{row['kept_tflops']:.0f}") if "ms" in row else ("–", "–")
        errors = " / ".join(f"{row[name]:.4f}" for name in row if name.startswith("rel_l1"))
        lines.append([*sizes, f"`{row['provider']}`", *speed, errors or "–"])
    header = ["tokens", "head_dim", "list of", "provider", "ms", "TFLOP/s on kept tiles", "error"]
    return markdown_table(header, lines)


def first_calls(result: dict[str, Any]) -> str:
    """Return a table of the waiting times of first calls."""
    rows = [
        [row["call"], f"{row['recipe']} by {row['kernel']}"]
        + [f"{row[name]:.{digits}f}" for name, digits in (("first_s", 2), ("cached_s", 2), ("second_ms", 1))]
        for row in result["rows"]
    ]
    table = markdown_table(["call", "runs", "empty caches, s", "full caches, s", "second call, ms"], rows)
    return f"{table}\n\nOn {result['gpu']}, {tables.versions(result)}"


def qk_norm_rope(result: dict[str, Any]) -> str:
    """Return a table of the times of norm and RoPE of queries."""
    header = ["queries", "batch × tokens × heads × head_dim", "operators, ms", "compiled, ms", "ours, ms", "a copy, ms"]
    rows = [
        [row["model"], f"{row['batch']}×{row['tokens']}×{row['heads']}×{row['head_dim']}"]
        + [f"{row[f'{name}_ms']:.3f}" for name in ("operators", "compiled", "ours", "copy")]
        for row in result["rows"]
    ]
    caption = (
        f"{result['gpu']}, torch {result['torch']}, commit {result['commit'][:10]}; training with its backward pass."
    )
    return f"{markdown_table(header, rows)}\n\n{caption}"


def training_speed(result: dict[str, Any]) -> str:
    """Return a picture, and tables of every provider's speed, errors and memory in training."""
    drawn = picture("nvidia-h200-forward_backward", "Speed of forward and backward pass by shape")
    return f"{drawn}\n\n{tables.markdown(result)}"


def peaked_errors(result: dict[str, Any], on_cpu: dict[str, Any]) -> str:
    """Return a table of the kernels' errors where attention is peaked, on the tensors of SHOWN_PEAKED."""
    shown = [row for row in result["rows"] if row["tensor"] in SHOWN_PEAKED]
    where = f"On one {result['gpu']}, in bfloat16; the JSON files have more tensors, and errors on a CPU:"
    return f"{where}\n\n{peaked.markdown(shown)}"


def peaked_models_errors(result: dict[str, Any]) -> str:
    """Return tables of trained models: errors, and perplexity."""
    return f"{peaked.markdown(result['rows'])}\n\n{peaked_models.perplexity_markdown(result['perplexity'])}"


def on_each_device(markdown: Callable[[dict[str, Any]], str], *results: dict[str, Any]) -> str:
    """Return the tables of the results of several devices."""
    parts = []
    for result in results:
        where = "On a CPU, in float32, emulated:"
        if result["capability"]:
            where = f"On one {result['gpu']}, in bfloat16:"
        if where not in parts:
            parts.append(where)
        parts.append(markdown(result))
    return "\n\n".join(parts)


def kv_speed(result: dict[str, Any]) -> str:
    """Return a table of append and decode of a layer from a low-bit KV cache, next to attention in 16 bits."""
    shapes: dict[tuple[int, ...], dict[tuple[str, str], float]] = {}
    for row in result["rows"]:
        sizes = tuple(row[name] for name in ("q_heads", "kv_heads", "head_dim", "batch", "tokens"))
        shapes.setdefault(sizes, {})[row["provider"], row["format"]] = 1000 * row["ms"]
    head = (
        f"µs of a layer's step on one {result['gpu']}, commit {result['commit'][:7]}; in brackets × FlashAttention 3:"
    )
    lines = []
    for (q_heads, kv_heads, head_dim, batch, tokens), us in shapes.items():
        exact = us["fa3", "bf16"]
        ours = [f"{us['sage_hf', name]:.1f} ({exact / us['sage_hf', name]:.2f})" for name in ("int8", "int4")]
        cells = [f"{q_heads}/{kv_heads} × {head_dim}", f"{batch} × {tokens:,}", f"{exact:.1f}"]
        lines.append([*cells, f"{us['cudnn', 'bf16']:.1f}", *ours])
    header = ["heads × head_dim", "batch × tokens", "FlashAttention 3", "cuDNN", "`int8`", "`int4`"]
    return f"{head}\n\n{markdown_table(header, lines)}"


def kv_models(result: dict[str, Any]) -> str:
    """Return a table of the time of a token of a whole model, with growing and with static caches."""
    found: dict[tuple[int, int], dict[tuple[str, bool], dict[str, Any]]] = {}
    for row in result["rows"]:
        found.setdefault((row["batch"], row["tokens"]), {})[row["format"], row["static"]] = row
    layers = {row["layers"] for row in result["rows"]}
    assert len(layers) == 1
    commits = dict.fromkeys(row.get("commit", result["commit"])[:7] for row in result["rows"])
    versions = f"transformers {result['packages']['transformers']}, commits {' and '.join(commits)}"
    head = (
        f"ms of a token of {layers.pop()} of Llama-3-8B's 32 layers on one {result['gpu']}, {versions}; with "
        "static caches, decoding is compiled by transformers. Each size is from one run:"
    )
    lines = []
    for (batch, tokens), rows in found.items():
        for name in dict.fromkeys(name for name, _ in rows):
            ours = {"bf16": "16 bits", "int8": "`int8`", "int4": "`int4`"}
            growing, static = rows[name, False], rows.get((name, True))
            cells = [f"{batch} × {tokens:,}", ours.get(name, f"`QuantizedCache`, {name}")]
            cells += [
                f"{growing['cache_bytes'] / 1e6:,.0f}",
                *("–" if row is None else f"{row['ms_per_token']:.1f}" for row in (growing, static)),
            ]
            lines.append(cells)
    table = markdown_table(["batch × tokens", "cache", "MB", "growing", "static"], lines)
    return f"{head}\n\n{table}"


def parallel_speed(*results: dict[str, Any]) -> str:
    """Return tables of whole steps on one GPU and on two."""
    return "\n\n".join(map(parallel_table, results))


def parallel_table(result: dict[str, Any]) -> str:
    """Return a table of whole steps on one GPU and on two of a kind."""
    ms: dict[str, dict[tuple[str, int, str, str], float]] = {}
    layers: dict[str, set[int]] = {}
    for row in result["rows"]:
        provider, *compiled = row["provider"].split("-compiled")
        model = f"{row['model']}, compiled" if compiled else row["model"]
        layers.setdefault(model, set()).add(row["layers"])
        if "ms" in row:
            ms.setdefault(model, {})[provider, row["gpus"], row["mode"], row["p2p"]] = row["ms"]
    commits = ", ".join(dict.fromkeys(row.get("commit", result["commit"])[:7] for row in result["rows"]))
    head = (
        f"ms of a step on {result['gpu']}s, commit {commits}; in brackets × the same recipe on one GPU. A "
        "dash: diffusers has no context-parallel plan, or the mode was not measured."
    )
    lines = []
    for model, times in ms.items():
        (depth,) = layers[model]
        cells = [model, str(depth)]
        for provider, mode in (
            *(("default", ""), ("default", "ulysses"), ("exact", "ulysses")),
            *(("sage2", ""), ("sage2", "ulysses"), ("sage2", "ring")),
        ):
            one, found = times.get((provider, 1, "", "")), times.get((provider, 2, mode, "on"))
            if not mode:
                cells.append("–" if one is None else f"{one:.0f}")
            else:
                cells.append("–" if one is None or found is None else f"{found:.0f} ({one / found:.2f})")
        lines.append(cells)
    header = ["model", "layers", "default", "default, Ulysses", "`exact`, Ulysses"]
    header += ["`sage2`, one", "`sage2`, Ulysses", "`sage2`, ring"]
    return f"{head}\n\n{markdown_table(header, lines)}"


def recipes() -> str:
    """Return a table of every recipe's formats and transforms."""
    header = ["recipe", "Q·Kᵀ", "P·V", "mean subtracted of", "Q and K", "keys in 16 bit"]
    header += ["backward: P·dO, dS·K, dO·Vᵀ"]
    rows = []
    for recipe in RECIPES.values():
        smoothed = [name for name in "qkv" if getattr(recipe, f"smooth_{name}")]
        backward = recipe.backward
        gradients = "exact attention" if backward is None else f"{backward}, {backward}, 16bit"
        cells = [f"`{recipe.name}`", recipe.qk, recipe.pv, ", ".join(smoothed).upper() or "–"]
        rotated = "equalised, rotated" if recipe.equalize else "rotated" if recipe.rotate else "as they are"
        heavy = f"{recipe.heavy_keys} heavy ones" if recipe.heavy_keys else "none"
        heavy += f", at least the latest {recipe.recent_keys} of causal rows" if recipe.recent_keys else ""
        rows.append([*cells, rotated, heavy, gradients])
    return markdown_table(header, rows)


def picture(name: str, message: str) -> str:
    """Return the Markdown that shows a picture in RESULTS on a page of docs/."""
    return f"![{message}](../{BENCHMARKS}/results/{name}.png)"


def measure() -> str:
    """Return a table of the commands that measure the generated sections again, and of the results that they write."""
    here = ROOT / "docs/measuring.md"
    places: dict[tuple[str, str], dict[str, None]] = {}
    for page in PAGES:
        heading = ""
        for line in re.sub("```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL).splitlines():
            heading = line.lstrip("# ") if line.startswith("#") else heading
            section = SECTIONS[marked[1]] if (marked := _MARK.fullmatch(line)) else None
            if section is not None and section.commands:
                anchor = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
                link = f"[{page.stem}: {heading}]({relative(page, here)}#{anchor})"
                commands = ", ".join(f"`{command}`" for command in section.commands)
                places.setdefault((commands, section.links(here)), {})[link] = None
    rows = [[", ".join(links), *commands_and_results] for commands_and_results, links in places.items()]
    return markdown_table(["numbers in", "command", "results"], rows)


VIDEO = "python studies/{}.py --video examples/tiny_video --text FOLDER_OR_ID --output"
RUN = f"python {BENCHMARKS}/run.py"
INTO = f"--output {BENCHMARKS}/results"
SECTIONS = {
    "gain": Section(gain, ("nvidia-h200-models",), (f"{RUN} --model all {INTO}",)),
    "cost": Section(cost, ("nvidia-h200-trained_models",), (f"python studies/trained_models.py MODEL TEXT {INTO}",)),
    "language-models": Section(
        partial(on_each_device, trained_models_table.markdown),
        ("*-trained_models",),
        (f"python studies/trained_models.py MODEL TEXT {INTO}",),
    ),
    "errors": Section(
        lambda result: output_errors.markdown(result["rows"]),
        ("cpu-output_errors",),
        (f"{VIDEO.format('output_errors')} {BENCHMARKS}/results/cpu-output_errors.json",),
    ),
    "peaked-errors": Section(
        peaked_errors,
        ("nvidia-h200-peaked", "cpu-peaked"),
        tuple(f"python studies/peaked_errors.py {device}{INTO}" for device in ("", "--device cpu ")),
    ),
    "peaked-models": Section(
        peaked_models_errors, ("cpu-peaked_models",), (f"python studies/peaked_models.py --text FOLDER_OR_ID {INTO}",)
    ),
    "calibration": Section(
        calibration,
        ("examples/tiny_video/calibration.json",),
        (
            "sage-hf calibrate --pretrained examples/tiny_video --prompts examples/tiny_video/prompts.txt --held-out 4 "
            "--budget 0.07",
        ),
    ),
    "clip-scores": Section(
        clip_scores,
        ("examples/tiny_video/scores.json",),
        tuple(f"python examples/train_tiny_video.py score --recipe {recipe} --save" for recipe in ("exact", "sage3")),
    ),
    "speed": Section(speed, ("nvidia-h200-forward",), (f"{RUN} {INTO}",)),
    "speed-summary": Section(speed_summary, ("nvidia-h200-forward",)),
    "phases": Section(tables.phases_markdown, ("nvidia-h200-phases",), (f"{RUN} --phases {INTO}",)),
    "qk-norm-rope": Section(qk_norm_rope, ("nvidia-h200-qk_norm_rope",), (f"{RUN} qk-norm-rope {INTO}",)),
    "host": Section(host, ("nvidia-h200-host", "nvidia-h100-80gb-hbm3-host"), (f"{RUN} --host {INTO}",)),
    "first-calls": Section(first_calls, ("nvidia-h200-first_calls",), (f"{RUN} first-calls {INTO}",)),
    "kv-accuracy": Section(
        partial(on_each_device, trained_models_table.cache_markdown),
        ("*-kv_cache_perplexity",),
        (f"python studies/kv_cache_perplexity.py MODEL TEXT {INTO}",),
    ),
    "kv-speed": Section(kv_speed, ("nvidia-h200-kv_cache",), (f"{RUN} kv-cache {INTO}",)),
    "kv-models": Section(kv_models, ("nvidia-h200-kv_cache_models",), (f"{RUN} kv-cache --model {INTO}",)),
    "parallel-speed": Section(
        parallel_speed, ("*x2-parallel",), (f"torchrun --nproc-per-node 2 {BENCHMARKS}/run.py parallel {INTO}",)
    ),
    "model-gain": Section(model_gain, ("nvidia-h200-models",), (f"{RUN} --model all {INTO}",)),
    "all-models": Section(all_models, ("nvidia-h200-models",), (f"{RUN} --model all {INTO}",)),
    "grid": Section(grid, ("nvidia-h200-grid",), (f"{RUN} --grid {INTO}",)),
    "models": Section(measured_models),
    "measure": Section(measure),
    "sparse-speed": Section(sparse_speed, ("nvidia-h200-sparse",), (f"{RUN} sparse {INTO}",)),
    "sparse-quality": Section(
        sparse_quality, ("nvidia-h200-sparse_quality",), (f"python studies/sparse_quality.py {INTO}",)
    ),
    "training-routes": Section(training_routes, ("nvidia-h200-grid",), (f"{RUN} --grid {INTO}",)),
    "gradient-errors": Section(
        lambda result: gradients.summary(result["rows"]),
        ("cpu-gradient_errors",),
        (f"{VIDEO.format('gradient_errors')} {BENCHMARKS}/results/cpu-gradient_errors.json",),
    ),
    "trained-models": Section(
        training_report.summary,
        ("examples/results/language_model.json", "examples/results/tiny_video.json"),
        ("python examples/train_language_model.py all", "python examples/finetune_tiny_video.py all"),
    ),
    "finetuned": Section(
        lambda result: finetune_then_fp4_table.markdown(result["rows"]),
        ("nvidia-h200-finetune_then_fp4",),
        (f"python studies/finetune_then_fp4.py MODEL {INTO}",),
    ),
    "training-speed": Section(training_speed, ("nvidia-h200-forward_backward",), (f"{RUN} --training {INTO}",)),
    "unseen": Section(
        lambda *results: grid_tables.unseen_markdown(list(results)), ("*-unseen",), (f"{RUN} --unseen 33 {INTO}",)
    ),
    "recipes": Section(recipes),
    "folders": Section(folders),
    "test-modules": Section(test_modules),
}
"""The generated sections by name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    for name in ("nvidia-h200-forward", "nvidia-h200-forward_backward"):
        plots.plot(read_result(name), RESULTS / f"{name}.png")
    plots.plot_models(read_result("nvidia-h200-models"), RESULTS / "nvidia-h200-models.png")
    plots.plot_grid(read_result("nvidia-h200-grid"), RESULTS / "nvidia-h200-grid.png")
    for page in PAGES:
        page.write_text(render(page), encoding="utf-8")


if __name__ == "__main__":
    main()
