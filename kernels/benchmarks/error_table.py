"""What each choice in the FP4 and INT8 recipes is worth: relative L1 error of the output against float64 attention.

python kernels/benchmarks/error_table.py --video examples/tiny_video --text FOLDER_OR_ID --output
results/error_table.json
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from dataclasses import replace
from pathlib import Path

import torch
from tensors import Triple, dit_like, gaussian, text_activations, video_activations

from sage_kernels import exact, reference
from sage_kernels.recipe import RECIPES, Recipe

PAPER, SAGE3, SAGE2 = RECIPES["sage3_paper"], RECIPES["sage3"], RECIPES["sage2"]
FOUR_OR_SIX = (0, 4)

VARIANTS: dict[str, Recipe] = {
    "NVFP4, no smoothing": replace(PAPER, smooth_q=False, smooth_k=False),
    "smooth K": replace(PAPER, smooth_q=False),
    "smooth Q, K (`sage3_paper`)": PAPER,
    "+ smooth V": replace(PAPER, smooth_v=True),
    "+ denominators from quantised P": replace(PAPER, smooth_v=True, denominator="quantized_p"),
    "+ scale search": replace(PAPER, tensor_scale=True, smooth_v=True, scale_steps=SAGE3.scale_steps),
    "+ rotation": replace(PAPER, tensor_scale=True, smooth_v=True, scale_steps=SAGE3.scale_steps, rotate=True),
    "+ both denominators and rotation": replace(
        PAPER,
        tensor_scale=True,
        smooth_v=True,
        scale_steps=SAGE3.scale_steps,
        rotate=True,
        denominator="quantized_p",
    ),
    "the same without smooth Q": replace(
        PAPER,
        tensor_scale=True,
        smooth_q=False,
        smooth_v=True,
        scale_steps=SAGE3.scale_steps,
        rotate=True,
        denominator="quantized_p",
    ),
    "`sage3`": SAGE3,
    "INT8·FP8, no smoothing of V": replace(SAGE2, smooth_v=False),
    "`sage2`": SAGE2,
    "`sage1`": RECIPES["sage1"],
}

TEXT = Path(argparse.__file__).read_text()[:6000]
PROMPT = "a red circle moving left"


def relative_l1(triples: list[Triple], truths: list[torch.Tensor], recipe: Recipe) -> float:
    """Σ|O - O'| / Σ|O| over all triples."""
    error = size = 0.0
    for triple, truth in zip(triples, truths, strict=True):
        output, _ = reference.attention(*triple, recipe)
        error += (output - truth).abs().sum().item()
        size += truth.abs().sum().item()
    return error / size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--video", help="CogVideoX pipeline folder whose activations to measure on")
    parser.add_argument("--text", help="transformers text encoder, folder or id, likewise")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the drawn tensors")
    parser.add_argument("--output", type=Path, help="where to write the table as JSON")
    arguments = parser.parse_args()

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
    truths = {name: [exact.attention(*triple)[0] for triple in triples] for name, triples in tensors.items()}

    rows = []
    print("| variant | " + " | ".join(tensors) + " |", "|---" * (len(tensors) + 1) + "|", sep="\n")
    for variant, recipe in VARIANTS.items():
        errors = {name: relative_l1(triples, truths[name], recipe) for name, triples in tensors.items()}
        rows.append({"variant": variant, "rel_l1": errors})
        print(f"| {variant} | " + " | ".join(f"{error:.4f}" for error in errors.values()) + " |", flush=True)
    by_variant = {row["variant"]: row["rel_l1"] for row in rows}
    ratios = {name: by_variant["`sage3`"][name] / by_variant["smooth Q, K (`sage3_paper`)"][name] for name in trained}
    if ratios:
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        print(f"\nsage3 / sage3_paper on trained models: {ratios}, geometric mean {mean:.3f}")
    if arguments.output:
        facts = {"torch": torch.__version__, "python": platform.python_version(), "tokens": arguments.tokens}
        arguments.output.write_text(json.dumps({**facts, "rows": rows, "sage3_over_paper": ratios}, indent=1) + "\n")
        print(f"wrote {arguments.output}", file=sys.stderr)


if __name__ == "__main__":
    main()
