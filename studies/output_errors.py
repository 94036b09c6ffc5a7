"""Measure the effect of each choice in the FP4 and INT8 recipes: relative L1 error of the output against float64.

    python studies/output_errors.py --video examples/tiny_video --text FOLDER_OR_ID \\
        --output benchmarks/results/cpu-output_errors.json
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import torch
from tensors import Triple, dit_like, gaussian, parse_arguments, text_activations, video_activations

from sage_hf.bench import results
from sage_hf.metrics import ErrorSums
from sage_hf.text import markdown_table
from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.spec.recipe import RECIPES, Recipe

PAPER = RECIPES["sage3_paper"]
"""The published FP4 recipe."""
SAGE3 = RECIPES["sage3"]
"""Our FP4 recipe."""
SAGE2 = RECIPES["sage2"]
"""Our INT8 and FP8 recipe."""
STEPS = {"scale_steps": SAGE3.scale_steps, "key_scale_steps": SAGE3.key_scale_steps}
SEARCHED = replace(PAPER, smooth_v=True, tensor_scale=True, **STEPS)

# From the published recipe to ours, one choice at a time; then our recipe without one of its choices.
VARIANTS: dict[str, Recipe] = {
    "NVFP4, no smoothing": replace(PAPER, smooth_q=False, smooth_k=False),
    "smooth K": replace(PAPER, smooth_q=False),
    "smooth Q, K (`sage3_paper`)": PAPER,
    "+ smooth V": replace(PAPER, smooth_v=True),
    "+ scale search": SEARCHED,
    "+ rotation": replace(SEARCHED, rotate=True),
    "+ denominators from quantised P": replace(SAGE3, equalize=False, heavy_keys=0),
    "+ heavy keys, the first 64": replace(SAGE3, equalize=False, heavy_choice="first"),
    "+ heavy keys, the heaviest 64": replace(SAGE3, equalize=False),
    "+ equalising (`sage3`)": SAGE3,
    "`sage3` without smooth Q": replace(SAGE3, smooth_q=False),
    "`sage3` with two scales, amax to 6 or 4": replace(SAGE3, scale_steps=(4,), key_scale_steps=(4,)),
    "INT8·FP8, no smooth V": replace(SAGE2, smooth_v=False),
    "INT8·FP8, smooth V (`sage2`)": SAGE2,
    "INT8·FP16 (`sage1`)": RECIPES["sage1"],
}

TEXT = Path(argparse.__file__).read_text()[:6000]
PROMPT = "a red circle moving left"


def relative_l1(triples: list[Triple], truths: list[torch.Tensor], recipe: Recipe) -> float:
    """Return Σ|O - O'| / Σ|O| over all triples."""
    sums = ErrorSums()
    for triple, truth in zip(triples, truths, strict=True):
        sums.add(truth, reference.attention(*triple, recipe)[0])
    return sums.errors().rel_l1


def markdown(rows: list[dict]) -> str:
    """Return the errors as a Markdown table; `rows` as in the JSON."""
    names = list(rows[0]["rel_l1"])
    lines = [[row["variant"], *(f"{row['rel_l1'][name]:.4f}" for name in names)] for row in rows]
    return markdown_table(["variant", *names], lines)


def main() -> None:
    arguments = parse_arguments(__doc__)
    tensors = {
        "Gaussian d=64": [gaussian(1, 4, arguments.tokens, 64)],
        "Gaussian d=128": [gaussian(1, 4, arguments.tokens, 128)],
        "DiT-like d=64": [dit_like(1, 4, arguments.tokens, 64)],
        "DiT-like d=128": [dit_like(1, 4, arguments.tokens, 128)],
    }
    trained = {}
    if arguments.video:
        trained["tiny video"] = video_activations(arguments.video, PROMPT, steps=20, at_steps=(0, 10, 19))
    if arguments.text:
        trained[Path(arguments.text).name] = text_activations(arguments.text, TEXT)
    tensors |= trained
    truths = {name: [sdpa.attention(*triple)[0] for triple in triples] for name, triples in tensors.items()}

    rows = []
    for variant, recipe in VARIANTS.items():
        errors = {name: relative_l1(triples, truths[name], recipe) for name, triples in tensors.items()}
        rows.append({"variant": variant, "rel_l1": errors})
    print(markdown(rows))
    by_recipe = {VARIANTS[row["variant"]]: row["rel_l1"] for row in rows}
    ratios = {name: by_recipe[SAGE3][name] / by_recipe[PAPER][name] for name in trained}
    if ratios:
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        print(f"\nsage3 / sage3_paper on trained models: {ratios}, geometric mean {mean:.3f}")
    if arguments.output:
        facts = {**results.facts(torch.device("cpu")), "tokens": arguments.tokens}
        arguments.output.write_text(json.dumps({**facts, "rows": rows, "sage3_over_paper": ratios}, indent=1) + "\n")
        print(f"wrote {arguments.output}", file=sys.stderr)


if __name__ == "__main__":
    main()
