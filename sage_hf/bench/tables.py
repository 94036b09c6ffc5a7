"""Text tables of a benchmark's JSON, for files, terminals and the README."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sage_hf.bench.model_peers import MODEL_PROVIDERS, TRAINING_MODEL_PROVIDERS
from sage_hf.bench.peers import PROVIDERS, Provider
from sage_hf.bench.shapes import Shape
from sage_hf.bench.training_peers import TRAINING_PROVIDERS
from sage_hf.text import text_table

MISSING = "–"
# Shapes that models send, by the name of the model.
MODEL_SHAPES = {
    "hunyuanvideo-720p": "HunyuanVideo, 720p",
    "cogvideox-2b": "CogVideoX-2B",
    "mochi": "Mochi",
    "flux": "Flux, 1024²",
    "llama-3-prefill": "Llama 3 8B, prefill of 32k",
}
PYTORCH = ("sdpa_fa2", "cudnn")
OURS = "sage_hf:sage2"


def to_json(result: dict[str, Any]) -> str:
    """Return the result of `measure.run` or `measure_training.run` as JSON, with one line for each row."""

    def lines(rows: Sequence[dict[str, Any]]) -> str:
        return "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]"

    tables = {name: lines(result[name]) for name in ("plans", "errors", "quantizers", "rows") if name in result}
    facts = [
        f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}"
        for name, value in result.items()
        if name not in tables
    ]
    return "{\n" + ",\n".join([*facts, *(f'"{name}": {text}' for name, text in tables.items())]) + "\n}\n"


def markdown(result: dict[str, Any]) -> str:
    """Return a Markdown table of the speed of every provider at every shape; the fastest end to end is bold.

    For training, a second table has errors and memory at one shape.
    """
    parts = [_markdown_table(*_speeds(result)), _caption(result)]
    if is_training(result) and (columns := measured(result)):
        shape = common_shape(columns)
        parts += [_markdown_table(*_training_at_shape(columns, shape)), _training_caption(shape)]
    return "\n\n".join(parts)


def attention_gain(result: dict[str, Any]) -> str:
    """Return a Markdown table of one attention call at each model's shape: PyTorch's time, ours and the ratio."""
    times: dict[str, dict[str, float]] = {}
    for row in result["rows"]:
        if row["scope"] == "end_to_end" and "ms" in row:
            times.setdefault(row["shape"], {})[row["provider"]] = row["ms"]
    shapes = {row["shape"]: shape_of(row) for row in result["rows"]}
    header = ["one attention call of", "batch × heads × tokens × head_dim", "PyTorch, ms", "`sage2`, ms", "faster by"]
    cells = []
    for name, model in MODEL_SHAPES.items():
        shape_times = times.get(name, {})
        before = min((shape_times[provider] for provider in PYTORCH if provider in shape_times), default=None)
        if before is not None and OURS in shape_times:
            after = shape_times[OURS]
            cells.append([model, str(shapes[name]), _ms(before), _ms(after), f"{before / after:.2f}×"])
    caption = (
        f"Attention alone, on {result['gpu']}, bfloat16 in and out, quantisation included; PyTorch: the faster of its "
        f"FlashAttention 2 and cuDNN kernels. {_versions(result)}"
    )
    return f"{_markdown_table(header, cells)}\n\n{caption}"


@dataclass(frozen=True)
class ModelGain:
    """Gain of a step of a model by our fastest recipe.

    Attributes:
        name, label, mode: of the model; the label says how many layers ran if not all did.
        recipe: of ours.
        before_ms, after_ms: as it comes, and with ours.
        kernels, norm_rope: what ran, as a row of the result has it.
        saved_ms: what each of PARTS saves; empty if it was not measured apart.
        without_fa3_ms: with ours where FlashAttention 3 is not installed; None if that was not measured apart.
    """

    name: str
    label: str
    mode: str
    recipe: str
    before_ms: float
    after_ms: float
    kernels: Mapping[str, int]
    norm_rope: int
    saved_ms: tuple[float, ...]
    without_fa3_ms: float | None

    @property
    def ratio(self) -> float:
        """Return how much faster a step is."""
        return self.before_ms / self.after_ms

    @property
    def low_bit(self) -> bool:
        """Return whether attention calls ran in few bits."""
        return any(_family(kernel) in LOW_BITS for kernel in self.kernels)

    @property
    def what_ran(self) -> str:
        """Return what ran in how many of the attention calls of a step."""
        families: Counter[str] = Counter()
        for kernel, calls in self.kernels.items():
            families[_family(kernel)] += calls
        ran = ", ".join(f"{family} in {calls} of {families.total()}" for family, calls in families.most_common())
        return f"{ran or 'not recorded'}{' + fused norms' if self.norm_rope else ''}"


RECIPES_OF_GAIN = ("sage_hf:sage3", "sage_hf:sage2", "sage_hf:sage1", "sage_hf:sage_bwd")
"""Providers that compute a whole recipe; others leave out a part of it, or tiles."""
PARTS = ("exact kernel", "norms and rotation", "few bits")
"""Parts of a gain, in the order in which they are added."""
LOW_BITS = ("INT8", "FP4")
PIPELINES = ("cogvideox-2b", "hunyuanvideo-720p", "mochi")
"""Models that sage-hf is made for."""


def _family(kernels: str) -> str:
    """Return what a row's names of a call's kernels mean to a user."""
    kernel = kernels.split(",")[0]
    families = {"int8": "INT8", "nvfp4": "FP4", "fa3": "FA3", "sdpa": "PyTorch", "efficient": "PyTorch"}
    own = "our exact kernel"
    return next((family for prefix, family in families.items() if kernel.startswith(prefix)), own)


def model_gain(result: dict[str, Any]) -> str:
    """Return a Markdown table of whole models: the time of a step before and after, what ran, and what gains how much.

    Args:
        result: JSON with rows {"model", "mode", "provider", "ms", "kernels"}; the provider is "default" for the
            unchanged model and "sage_hf:<recipe>" for ours, of which the fastest counts. A model without both is left
            out. Where "layers" of a row is below "layers_of_model", the table says so.
    """
    gains = model_gains(result)
    header = ["model", "mode", "baseline, ms", "with sage-hf, ms", "recipe", "faster by", "what ran"]
    split = any(gain.saved_ms for gain in gains)
    header += [*(f"{part} saves, ms" for part in PARTS), "without FA3, ms"] if split else []
    cells = []
    for gain in gains:
        line = [gain.label, gain.mode, _ms(gain.before_ms), _ms(gain.after_ms), f"`{gain.recipe}`"]
        line += [f"{gain.ratio:.2f}×", gain.what_ran]
        if split:
            line += [f"{saved:.1f}" for saved in gain.saved_ms] or [MISSING] * len(PARTS)
            line.append(MISSING if gain.without_fa3_ms is None else _ms(gain.without_fa3_ms))
        cells.append(line)
    return f"{_markdown_table(header, cells)}\n\n{_models_caption(result)}"


def low_bit_gain(result: dict[str, Any], most: int) -> str:
    """Return the rows of `model_gain` in which calls ran in few bits, in short, and a line about all others.

    Args:
        result: as of `model_gain`.
        most: largest number of rows: those of PIPELINES come first, then those that gain most.
    """
    gains = model_gains(result)
    low_bit = [gain for gain in gains if gain.low_bit and gain.mode == "eager"]
    low_bit.sort(key=lambda gain: (gain.name not in PIPELINES, -gain.ratio))
    header = ["model, eager", "baseline, ms", "with sage-hf, ms", "without FA3, ms", "faster by"]
    table = [
        [
            *(gain.label, _ms(gain.before_ms), _ms(gain.after_ms)),
            MISSING if gain.without_fa3_ms is None else _ms(gain.without_fa3_ms),
            *(f"{gain.ratio:.2f}×", gain.what_ran),
        ]
        for gain in low_bit[:most]
    ]
    header.append("what ran in its attention calls")
    others = [gain.ratio for gain in gains if gain not in low_bit[:most]]
    slower = sum(ratio < NOT_SLOWER for ratio in others)
    found = f"{slower} slower" if slower else "none is slower"
    span = f"{min(others):.2f}× to {max(others):.2f}×" if others else ""
    rest = f"Of the {len(others)} other steps measured {found}: {span}. " if others else ""
    return f"{_markdown_table(header, table)}\n\n{rest}{_models_caption(result)}"


NOT_SLOWER = 0.97
"""Ratio of a step's times from which ours is not slower: two runs of a model differ by as much."""


def _models_caption(result: dict[str, Any]) -> str:
    installed = any(row.get("fa3_installed") or row["provider"] == "fa3" for row in result["rows"] if "ms" in row)
    fa3 = "; FlashAttention 3 (FA3, `pip install fa3-fwd`) was installed" if installed else ""
    return f"Steps on {result['gpu']}{fa3}. {_versions(result)}"


def model_gains(result: dict[str, Any]) -> list[ModelGain]:
    """Return what each model gains in each mode by our fastest recipe.

    A model without both is left out. Sparse attention computes something else, so its time does not count.
    """
    found = []
    for (label, mode), rows in _model_rows(result).items():
        ours = {name: row["ms"] for name, row in rows.items() if name in RECIPES_OF_GAIN}
        if "default" not in rows or not ours:
            continue
        fastest = min(ours, key=ours.__getitem__)
        row, before = rows[fastest], rows["default"]["ms"]
        steps = [rows.get(f"{fastest}{less}", {}).get("ms") for less in (", no low bits, no norms", ", no low bits")]
        if row["provider"] == "sage_hf:sage_bwd":  # PyTorch's own exact kernels train
            steps[0] = before
        times = [before, *steps, row["ms"]]
        saved = tuple(a - b for a, b in itertools.pairwise(times)) if None not in steps else ()
        without_fa3 = rows.get(f"{fastest}, no fa3", {}).get("ms")
        names = row.get("name", row["model"]), label, mode, fastest.removeprefix("sage_hf:")
        ran = row.get("kernels", {}), row.get("norm_rope", 0)
        found.append(ModelGain(*names, before, row["ms"], *ran, saved, without_fa3))
    return found


def model_speed(result: dict[str, Any]) -> str:
    """Return a Markdown table of every provider's time of a step of every model, and of the share of attention."""
    header, cells = _model_speeds(result)
    return _markdown_table(header, cells)


def model_text(result: dict[str, Any]) -> str:
    """Return tables for a terminal: the time of a step of every model, and what could not run."""
    missing: dict[str, list[str]] = {}
    for row in result["rows"]:
        if "unavailable" in row:
            missing.setdefault(f"{row['provider']}: {row['unavailable']}", []).append(f"{row['name']}, {row['mode']}")
    lines = [f"  {what} ({'; '.join(where)})" for what, where in missing.items()]
    parts = [f"ms of a step on {result['gpu']}. {_versions(result)}", text_table(*_model_speeds(result))]
    return "\n\n".join([*parts, *(["\n".join(["Not measured:", *lines])] if lines else [])])


def _model_rows(result: dict[str, Any]) -> dict[tuple[str, str], dict[str, dict[str, Any]]]:
    """Return (model, with its layers if not all ran; mode) -> provider -> row, of those that have times."""
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        if "ms" in row:
            rows.setdefault((_model_and_layers(row), row["mode"]), {})[row["provider"]] = row
    return rows


def _model_and_layers(row: dict[str, Any]) -> str:
    layers, whole = row.get("layers"), row.get("layers_of_model")
    return row["model"] if layers == whole else f"{layers} of {whole} layers of {row['model']}"


def _model_speeds(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    rows = _model_rows(result)
    providers = list(dict.fromkeys(row["provider"] for row in result["rows"] if "ms" in row))
    shares = {
        (_model_and_layers(row), row["mode"]): row["attention_share"]
        for row in result["rows"]
        if row.get("attention_share") is not None
    }
    cells = []
    for (model, mode), of_model in rows.items():
        share = shares.get((model, mode))
        cells.append(
            [
                model,
                mode,
                *(_ms(of_model[one]["ms"]) if one in of_model else MISSING for one in providers),
                MISSING if share is None else f"{share:.0%}",
            ]
        )
    labels = {one.name: one.label for one in (*MODEL_PROVIDERS, *TRAINING_MODEL_PROVIDERS)}
    return ["model", "mode", *(labels.get(one, one) for one in providers), "share of attention"], cells


def _ms(number: float) -> str:
    return f"{number:.3g}" if number < 100 else f"{number:.0f}"


def _markdown_table(header: list[str], cells: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *cells))


def text(result: dict[str, Any]) -> str:
    """Return tables for a terminal: speeds, errors and memory at one shape, quantisers, and what could not run."""
    parts = [_caption(result), text_table(*_speeds(result, bold=False))]
    if columns := measured(result):
        shape = common_shape(columns)
        at_shape = _training_at_shape if is_training(result) else _at_shape
        parts += [f"At {shape}:", text_table(*at_shape(columns, shape))]
    copied = [row for row in result.get("quantizers", ()) if "ms" in row]
    if copied:
        header = ["quantizer", "shape", "ms", "of a copy's bandwidth"]
        cells = [
            [
                row["name"],
                f"{row['batch']}×{row['heads']}×{row['tokens']}×{row['head_dim']}",
                f"{row['ms']:.3f}",
                f"{row['share_of_copy_bandwidth']:.0%}",
            ]
            for row in copied
        ]
        parts += [text_table(header, cells)]
    return "\n\n".join([*parts, *_unavailable(result)])


def phases_markdown(result: dict[str, Any]) -> str:
    """Return the result of `measure_phases.run` as a Markdown table."""
    caption = (
        f"On {result['gpu']}, from a profiler's trace; a phase counts from the end of the one before. Shares are of "
        f"the bandwidth of a copy, {result['copy_bandwidth'] * 1e-12:.2f} TB/s, whose bytes are counted alike. "
        f"{_versions(result)}"
    )
    return f"{_markdown_table(*_phases(result))}\n\n{caption}"


def phases_text(result: dict[str, Any]) -> str:
    """Return the result of `measure_phases.run` as a table for a terminal, and what could not run."""
    missing = [
        f"  {row['shape']}, {row['what']}: {row['unavailable']}" for row in result["rows"] if "unavailable" in row
    ]
    parts = [f"Phases on {result['gpu']}. {_versions(result)}", text_table(*_phases(result))]
    return "\n\n".join([*parts, *(["\n".join(["Not measured:", *missing])] if missing else [])])


def _phases(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    found: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        if "ms" in row:
            found.setdefault((str(shape_of(row)), row["what"]), {})[row["phase"]] = row
    phases = ("statistics", "quantize", "attention", "whole")
    copied = ("statistics", "quantize", "whole")
    header = ["call", "of", *(f"{phase}, ms" for phase in phases), *(f"{phase}, of a copy" for phase in copied)]
    cells = []
    for names, rows in found.items():
        times = (f"{rows[phase]['ms']:.4f}" if phase in rows else MISSING for phase in phases)
        shares = (rows.get(phase, {}).get("copy_share") for phase in copied)
        cells.append([*names, *times, *(MISSING if share is None else f"{share:.0%}" for share in shares)])
    return header, cells


def rows_of(result: dict[str, Any], provider: Provider) -> dict[Shape, dict[str, Any]]:
    """Return the rows that one provider measured, by shape."""
    return {
        shape_of(row): row
        for row in result["rows"]
        if (row["provider"], row["scope"]) == (provider.name, provider.scope) and "tflops" in row
    }


def shape_of(row: dict[str, Any]) -> Shape:
    """Return the shape that a row was measured at."""
    sizes = (row[name] for name in ("shape", "batch", "q_heads", "kv_heads", "q_len", "head_dim", "causal"))
    return Shape(*sizes)


def measured(result: dict[str, Any]) -> dict[Provider, dict[Shape, dict[str, Any]]]:
    """Return the rows of each provider that measured any, in the order of PROVIDERS or TRAINING_PROVIDERS."""
    providers = TRAINING_PROVIDERS if is_training(result) else PROVIDERS
    found = {provider: rows_of(result, provider) for provider in providers}
    return {provider: rows for provider, rows in found.items() if rows}


def is_training(result: dict[str, Any]) -> bool:
    """Return whether the result comes from `measure_training.run`."""
    return any(row["direction"] == "forward_backward" for row in result["rows"])


def _speeds(result: dict[str, Any], bold: bool = True) -> tuple[list[str], list[list[str]]]:
    columns = measured(result)
    header = ["shape", *map(heading, columns)]
    cells = []
    for shape in dict.fromkeys(map(shape_of, result["rows"])):
        speeds = {one: rows[shape]["tflops"] for one, rows in columns.items() if shape in rows}
        fastest = max((speed for one, speed in speeds.items() if one.scope == "end_to_end"), default=None)
        line = [f"{shape.name}: {shape}"]
        for one in columns:
            cell = f"{speeds[one]:.0f}" if one in speeds else MISSING
            line.append(f"**{cell}**" if bold and one.scope == "end_to_end" and speeds.get(one) == fastest else cell)
        cells.append(line)
    return header, cells


def common_shape(columns: dict[Provider, dict[Shape, dict[str, Any]]]) -> Shape:
    """Return the shape that most providers measured; among several, the one with most operations."""
    shapes = {shape for rows in columns.values() for shape in rows}
    return max(shapes, key=lambda shape: (sum(shape in rows for rows in columns.values()), shape.operations))


def _at_shape(columns: dict[Provider, dict[Shape, dict[str, Any]]], shape: Shape) -> tuple[list[str], list[list[str]]]:
    header = ["provider", "ms", "rel-L1", "rel-L1, K and V biased", "extra memory / Q, K, V", "first call, s"]
    cells = []
    for one, rows in columns.items():
        if row := rows.get(shape):
            memory = f"{row['peak_extra_bytes'] / shape.input_bytes:.2f}" if "peak_extra_bytes" in row else MISSING
            errors = [f"{row[name]:.4f}" for name in ("rel_l1", "rel_l1_biased")]
            cells.append([heading(one), f"{row['ms']:.2f}", *errors, memory, f"{row['compile_s']:.1f}"])
    return header, cells


def _training_at_shape(
    columns: dict[Provider, dict[Shape, dict[str, Any]]], shape: Shape
) -> tuple[list[str], list[list[str]]]:
    header = ["provider", "forward, ms", "backward, ms"]
    header += [f"{name} rel-L1 (biased)" for name in ("O", "dQ", "dK", "dV")]
    header += ["kept for backward, MB", "(counted)", "extra memory / Q, K, V", "first step, s"]
    cells = []
    for one, rows in columns.items():
        if row := rows.get(shape):
            errors = [
                f"{row[f'{name}_rel_l1']:.4f} ({row[f'{name}_rel_l1_biased']:.4f})"
                for name in ("output", "dq", "dk", "dv")
            ]
            counted = shape.low_bit_saved_bytes if one.name.startswith("sage_hf") else shape.saved_bytes
            memory = [f"{row['saved_bytes'] / 1e6:.0f}", f"{counted / 1e6:.0f}"]
            memory += [f"{row['peak_extra_bytes'] / shape.input_bytes:.2f}"]
            times = [f"{row['forward_ms']:.2f}", f"{row['backward_ms']:.2f}"]
            cells.append([heading(one), *times, *errors, *memory, f"{row['compile_s']:.1f}"])
    return header, cells


def _training_caption(shape: Shape) -> str:
    return (
        f"At {shape}. Errors of the output and of the gradients against exact attention in float64, on standard normal "
        "tensors and, in brackets, where K and V have means. Kept for backward: allocated between the passes, with "
        "query, key, value and output where the graph keeps them, as measured and as counted from the sizes."
    )


def heading(provider: Provider) -> str:
    """Return the provider's name for readers."""
    return f"{provider.label} (kernel)" if provider.scope == "kernel" else provider.label


def _caption(result: dict[str, Any]) -> str:
    sizes = "batch × heads (query/key) × tokens × head_dim"
    if is_training(result):
        what = f"forward and backward, 3.5 × forward's operations; {sizes}; bfloat16 in and out, every pass included"
    else:
        what = (
            f"forward; {sizes}; bfloat16 in and out with quantisation included; (kernel): quantised before, attention "
            "alone"
        )
    return f"TFLOP/s on {result['gpu']}, {what}. {_versions(result)}"


def _versions(result: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {result[name]}" for name in ("torch", "triton", "cuda"))
    source = f"commit {result['commit'][:10]}, " if result["commit"] else ""
    return f"{versions}, {source}{result['date']}."


def _unavailable(result: dict[str, Any]) -> list[str]:
    shapes = dict.fromkeys(row["shape"] for row in result["rows"])
    missing: dict[str, list[str]] = {}
    for row in result["rows"]:
        if "unavailable" in row:
            missing.setdefault(f"{row['provider']}, {row['scope']}: {row['unavailable']}", []).append(row["shape"])
    for row in result.get("quantizers", ()):
        if "unavailable" in row:
            missing.setdefault(f"quantizers: {row['unavailable']}", []).append(f"head_dim {row['head_dim']}")
    lines = [
        f"  {what} ({'all shapes' if len(where) == len(shapes) else ', '.join(where)})"
        for what, where in missing.items()
    ]
    return ["\n".join(["Not measured:", *lines])] if lines else []
