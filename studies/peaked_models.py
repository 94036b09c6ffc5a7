"""Measure the peaks of trained models' attention, and the effect of recipes and outlier handling, on a CPU.

    python studies/peaked_models.py --text FOLDER_OR_ID --output benchmarks/results

The models: examples/tiny_video, examples/tiny_llama, whose sequences begin with BOS, and with --text a text encoder
such as all-MiniLM-L6-v2. The JSON has "heads", the heaviest key and the loudest channel of each head; "rows", errors
over all layers as in `peaked_errors`; and "perplexity", the Llama's on held-out text with every recipe. "change" is
relative to exact attention, "standard_error" is the change's standard error over windows of text, and "divergence" is
the Kullback-Leibler divergence of the model's predictions from its predictions with exact attention. The divergence, in
nats per byte, is the change for a text that the model itself generates, and varies a third as much from text to text.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import output_errors
import torch
from peaked_errors import OURS, markdown, registered, variants
from tensors import Inputs, text_activations, video_activations
from torch import Tensor

import sage_hf
from sage_hf import record
from sage_hf.app.peaks import channel_loudness
from sage_hf.bench import results
from sage_hf.metrics import ErrorSums
from sage_hf.text import markdown_table
from sage_kernels.dispatch.registry import forget_choices
from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.spec.recipe import Recipe

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LLAMA = "tiny Llama"
"""Name of examples/tiny_llama in the results."""
VIDEO = "tiny video"
"""Name of examples/tiny_video in the results."""
STEPS = (0, 10, 19)
"""Denoising steps, of 20, in which the video model's calls are measured."""
WINDOWS = 384
"""Number of held-out windows for the Llama's perplexity: with 48, its change has a standard error of 0.1 %."""
BATCH = 8


def read_llama(folder: Path) -> tuple[torch.nn.Module, Tensor]:
    """Return the trained Llama in float32 and held-out tokens (WINDOWS, tokens), each window after BOS."""
    sys.path.insert(0, str(EXAMPLES))
    from source_text import held_out_windows, read_text, standard_library
    from train_tiny_llama import with_bos
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    text = read_text(standard_library(), "the Python standard library")
    return model, with_bos(held_out_windows(text.held_out, model.config.max_position_embeddings - 1, WINDOWS))


@torch.no_grad()
def llama_layers(model: torch.nn.Module, tokens: Tensor) -> list[Inputs]:
    """Return the Llama's attention calls for the given tokens.

    Raises:
        ValueError: a call has a mask.
    """
    calls: list[record.AttentionCall] = []
    model.set_attn_implementation("sage_exact")
    with record.observe(calls.append):
        model(tokens, attention_mask=torch.ones_like(tokens))
    if any(call.attn_mask is not None for call in calls):
        raise ValueError("the Llama's calls have masks")
    return [Inputs(call.query, call.key, call.value, call.is_causal, call.causal_offset, call.scale) for call in calls]


def head_peaks(layer: Inputs) -> list[dict[str, Any]]:
    """Return, for each query head, the largest "share" of a key, this "key", and the "loudest_channel" of the head's K.

    For a batch, shares are means over the samples.
    """
    weights = sdpa.mean_weights(layer.query, layer.key, is_causal=layer.is_causal, scale=layer.scale).mean(0)
    loudness = channel_loudness(layer.key).mean(0).repeat_interleave(len(weights) // layer.key.shape[1])
    shares, keys = weights.max(-1)
    return [
        {"share": round(share, 3), "key": key, "loudest_channel": round(loud, 2)}
        for share, key, loud in zip(shares.tolist(), keys.tolist(), loudness.tolist(), strict=True)
    ]


@torch.no_grad()
def errors(layers: Sequence[Inputs]) -> list[dict[str, Any]]:
    """Return rows of "provider", "outlier_handling" and "rel_l1" over all layers."""
    truths = [sdpa.attention(*layer[:3], **layer.options)[0] for layer in layers]
    rows = []
    for name in OURS:
        for handled, recipe in variants(name).items():
            sums = ErrorSums()
            for layer, truth in zip(layers, truths, strict=True):
                sums.add(truth, reference.attention(*layer[:3], recipe, **layer.options)[0])
            rows.append({"provider": name, "outlier_handling": handled, "rel_l1": sums.errors().rel_l1})
    return rows


@torch.no_grad()
def log_probabilities(model: torch.nn.Module, tokens: Tensor) -> Tensor:
    """Return log-probabilities of every byte at all places except the first: float32 (windows, tokens - 1,
    vocabulary)."""
    batches = tokens.split(BATCH)
    return torch.cat([model(x, attention_mask=torch.ones_like(x)).logits[:, :-1].log_softmax(-1) for x in batches])


def losses_of(predicted: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss of each window in nats per byte, float64 (windows,), from its `log_probabilities`."""
    return -predicted.gather(-1, tokens[:, 1:, None]).double().mean((1, 2))


def measure(model: torch.nn.Module, tokens: Tensor, truth: Tensor, recipe: Recipe) -> dict[str, float]:
    """Return "perplexity", and the differences of a recipe's predictions from exact attention's predictions, `truth`.

    Raises:
        RuntimeError: calls ran another recipe.
    """
    name = recipe.name.split()[0]  # the recipe's name in transformers
    with registered(replace(recipe, name=name)):
        forget_choices()
        record.clear()
        model.set_attn_implementation(f"{name}_emulate")
        actual = log_probabilities(model, tokens)
        ran = {row.recipe for row in sage_hf.explain(model).rows if row.calls}
    forget_choices()
    if ran != {name}:
        raise RuntimeError(f"asked for {name}, but {', '.join(sorted(ran))} ran")
    losses = losses_of(actual, tokens)
    differences = losses - losses_of(truth, tokens)
    return {
        "perplexity": losses.mean().exp().item(),
        "change": differences.mean().expm1().item(),
        "standard_error": (differences.std() / len(tokens) ** 0.5).item(),
        "divergence": (truth.exp() * (truth - actual)).sum(-1).mean().item(),
    }


def perplexities(model: torch.nn.Module, tokens: Tensor) -> list[dict[str, Any]]:
    """Return rows of "provider", "outlier_handling", "perplexity" per byte, and differences from exact attention."""
    model.set_attn_implementation("sdpa")
    truth = log_probabilities(model, tokens)
    best = losses_of(truth, tokens).mean().exp().item()
    rows: list[dict[str, Any]] = [{"provider": "exact", "perplexity": best, "change": 0.0}]
    for name in OURS:
        for handled, recipe in variants(name).items():
            rows.append({"provider": name, "outlier_handling": handled, **measure(model, tokens, truth, recipe)})
            print(perplexity_markdown(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    return rows


def perplexity_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Return a table of the Llama's perplexity with every recipe, without → with outlier handling, and its changes."""
    lines = []
    for name in dict.fromkeys(row["provider"] for row in rows):
        mine = [row for row in rows if row["provider"] == name]
        cells = [" → ".join(f"{row['perplexity']:.4f}" for row in mine), "–", "–"]
        if name != "exact":
            cells[1] = " → ".join(f"{row['change']:+.3%} ± {row['standard_error']:.3%}" for row in mine)
            cells[2] = " → ".join(f"{row['divergence']:.5f}" for row in mine)
        lines.append([name if name == "exact" else f"`{name}`", *cells])
    return markdown_table(["attention", "perplexity a byte", "change", "divergence"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--video", default=str(EXAMPLES / "tiny_video"), help="CogVideoX pipeline folder")
    parser.add_argument("--llama", type=Path, default=EXAMPLES / "tiny_llama", help="folder of train_tiny_llama.py")
    parser.add_argument("--text", help="transformers text encoder, folder or id")
    parser.add_argument("--output", type=Path, default=Path("output"), metavar="DIR", help="folder for the JSON")
    args = parser.parse_args()
    llama, tokens = read_llama(args.llama)
    models = {
        VIDEO: [Inputs(*x) for x in video_activations(args.video, output_errors.PROMPT, steps=20, at_steps=STEPS)],
        LLAMA: llama_layers(llama, tokens[:BATCH]),
    }
    if args.text:
        models[Path(args.text).name] = [Inputs(*x) for x in text_activations(args.text, output_errors.TEXT)]
    depth = len(models[VIDEO]) // len(STEPS)
    heads = [
        {
            "model": name,
            "layer": index % depth if name == VIDEO else index,
            **({"step": STEPS[index // depth]} if name == VIDEO else {}),
            "heads": head_peaks(layer),
        }
        for name, layers in models.items()
        for index, layer in enumerate(layers)
    ]
    rows = [{"tensor": name, **row} for name, layers in models.items() for row in errors(layers)]
    result = {
        **results.facts(torch.device("cpu")),
        "heads": heads,
        "perplexity": perplexities(llama, tokens),
        "rows": rows,
    }
    print(f"{markdown(rows)}\n\n{perplexity_markdown(result['perplexity'])}")
    results.write(results.path_of(args.output, result, "peaked_models"), result)


if __name__ == "__main__":
    main()
