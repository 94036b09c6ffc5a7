"""Measure what each choice in the recipes with gradients is worth: errors of O, dQ, dK, dV against float64.

python benchmarks/gradient_table.py --video examples/tiny_video --text FOLDER_OR_ID --output
benchmarks/results/cpu-gradient_table.json

All tensors are bfloat16. For drawn tensors dO is Gaussian. For trained models it is what the layer receives: in the
video model from a Gaussian gradient of the model's output, in the language model from its loss.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from record import cpu_facts
from tensors import Sample, dit_like, gaussian, text_gradients, video_gradients

from sage_kernels.formats import int8
from sage_kernels.reference import backward as reference_backward
from sage_kernels.reference import forward as reference
from sage_kernels.spec import transforms
from sage_kernels.spec.recipe import RECIPES, Backward, Recipe

BWD, BWD_INT8 = RECIPES["sage_bwd"], RECIPES["sage_bwd_int8"]
RESULTS = ("O", "dQ", "dK", "dV")


@dataclass(frozen=True)
class Variant:
    """A recipe, with other numbers of consecutive tokens of Q and K that share a scale.

    Attributes:
        recipe: formats and transforms.
        query_tokens: 1…128; 1 is the recipe's choice.
        key_tokens: 64 or 128; None is the recipe's choice. As in the recipes, scales of K are bfloat16.
    """

    recipe: Recipe
    query_tokens: int = 1
    key_tokens: int | None = None


def backward(recipe: Recipe = BWD, **formats: str) -> Variant:
    """Return the recipe with other formats in its backward pass."""
    return Variant(replace(recipe, backward=replace(recipe.backward or Backward(), **formats)))


def published(**formats: str) -> Variant:
    """Return the recipe of arXiv 2505.11594, section 4, as far as its text tells.

    Scales are per tile, over 128 tokens of Q and 64 of K.
    """
    variant = backward(replace(BWD_INT8, smooth_v=False, rotate=False, equalize=False), **{"scales": "tile", **formats})
    return replace(variant, query_tokens=128, key_tokens=64)


# Variants of the default recipe, then of the paper's, which has INT8 in four of five products.
VARIANTS: dict[str, Variant] = {
    "`sage_bwd`": Variant(BWD),
    "`sage_bwd`, consistent δ": backward(delta="consistent"),
    "`sage_bwd`, P·V in FP8": Variant(replace(BWD, pv="fp8", smooth_v=True)),
    "`sage_bwd`, P·V in INT8": Variant(replace(BWD, pv="int8", smooth_v=True)),
    "`sage_bwd`, no balance": Variant(replace(BWD, equalize=False)),
    "`sage_bwd`, no balance, not rotated": Variant(replace(BWD, equalize=False, rotate=False)),
    "`sage_bwd`, no smooth K": Variant(replace(BWD, smooth_k=False)),
    "`sage_bwd`, Q a scale per 64 tokens": Variant(BWD, query_tokens=64),
    "`sage_bwd`, K a scale per 64 tokens": Variant(BWD, key_tokens=64),
    "`sage_bwd`, Q and K a scale per 64 tokens": Variant(BWD, 64, 64),
    "`sage_bwd`, Q and K a scale per 128 tokens": Variant(BWD, 128, 128),
    "`sage_bwd`, dO·Vᵀ in INT8": backward(dp="int8"),
    "`sage_bwd`, dO·Vᵀ in FP8": backward(dp="fp8"),
    "`sage_bwd`, P in INT8": backward(p="int8"),
    "`sage_bwd`, dS in INT8": backward(ds="int8"),
    "`sage_bwd_int8`": Variant(BWD_INT8),
    "`sage_bwd_int8`, consistent δ": backward(BWD_INT8, delta="consistent"),
    "`sage_bwd_int8`, no balance, not rotated": Variant(replace(BWD_INT8, equalize=False, rotate=False)),
    "`sage_bwd_int8`, P·V in FP16": Variant(replace(BWD_INT8, pv="fp16", smooth_v=False)),
    "`sage_bwd_int8`, a scale per tile": backward(BWD_INT8, scales="tile"),
    "`sage_bwd_int8` in FP8": backward(BWD_INT8, p="fp8", ds="fp8"),
    "`sage_bwd_int8` in FP8, a scale per tile": backward(BWD_INT8, p="fp8", ds="fp8", scales="tile"),
    "`sage_bwd_int8`, dO·Vᵀ in INT8": backward(BWD_INT8, dp="int8"),
    "`sage_bwd_int8`, no smooth K": Variant(replace(BWD_INT8, smooth_k=False)),
    "published": published(),
    "published, dO·Vᵀ in INT8": published(dp="int8"),
    "published, in FP8": published(p="fp8", ds="fp8"),
}

SUMMARISED = ("`sage_bwd`", "`sage_bwd`, P·V in INT8", "`sage_bwd_int8`", "published", "published, in FP8")

TEXT = Path(argparse.__file__).read_text()[:6000]
PROMPT = "a red circle moving left"


def drawn(triple: tuple[torch.Tensor, torch.Tensor, torch.Tensor], sigma: float = 1.0) -> Sample:
    """Return a sample of Q and K scaled by `sigma`, V, and a Gaussian dO."""
    query, key, value = triple
    gradient = torch.randn(query.shape, generator=torch.Generator().manual_seed(1))
    return Sample(query * sigma, key * sigma, value, gradient)


def in_bfloat16(sample: Sample) -> Sample:
    """Return the sample in bfloat16, which also keeps gradients that are too small for float16."""
    return Sample(*(x.bfloat16() for x in sample[:4]), sample.is_causal, sample.scale)


def exact(sample: Sample) -> tuple[torch.Tensor, ...]:
    """Return exact O, dQ, dK, dV in float64."""
    leaves = [x.double().requires_grad_() for x in sample[:3]]
    output = F.scaled_dot_product_attention(
        *leaves, is_causal=sample.is_causal, scale=sample.scale, enable_gqa=leaves[0].shape[1] != leaves[1].shape[1]
    )
    return output.detach(), *torch.autograd.grad(output, leaves, sample.output_gradient.double())


def quantized(sample: Sample, variant: Variant) -> tuple[torch.Tensor, ...]:
    """Return O, dQ, dK, dV of the variant."""
    query, key, value, gradient = (x.contiguous() for x in sample[:4])
    recipe, head_dim, kv_len = variant.recipe, query.shape[-1], key.shape[2]
    options = {"is_causal": sample.is_causal, "scale": head_dim**-0.5 if sample.scale is None else sample.scale}
    operands = reference.quantize_operands(query, key, value, recipe)
    if variant.query_tokens != 1:
        codes, scale = in_blocks(
            transformed(query.float(), recipe, operands.equalizer, 1), variant.query_tokens, torch.float32
        )
        q_len = query.shape[2]
        operands = replace(operands, query=codes[:, :, :q_len], query_scale=scale[:, :, :q_len])
    if variant.key_tokens is not None:
        smooth = transforms.smooth(key.float())[0] if recipe.smooth_k else key.float()
        smooth = transformed(smooth, recipe, operands.equalizer, -1)
        codes, scale = in_blocks(smooth, variant.key_tokens, torch.bfloat16)
        operands = replace(operands, key=codes, key_scale=scale)
    output, lse = reference.attend(operands, recipe, kv_len, dtype=query.dtype, mask=None, causal_offset=0, **options)
    saved = reference_backward.save(operands, lse)
    return output, *reference_backward.backward(gradient, value, output, saved, recipe, head_dim=head_dim, **options)


def transformed(x: torch.Tensor, recipe: Recipe, equalizer: torch.Tensor | None, power: int) -> torch.Tensor:
    """Return Q (power 1) or K (power -1), with head_dim a power of two, equalized and rotated as the recipe says."""
    if equalizer is not None:
        x = x * (equalizer**power).repeat_interleave(x.shape[1] // equalizer.shape[1], 1)
    return transforms.rotate(x) if recipe.rotate else x


def in_blocks(x: torch.Tensor, tokens: int, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return INT8 codes and scales, as float32, of x padded to whole blocks of 128 tokens."""
    codes, scale = int8.quantize(F.pad(x, (0, 0, 0, -x.shape[-2] % reference.BLOCK_N)), tokens, scale_dtype)
    return codes.float(), scale.float()


def errors(samples: list[Sample], truths: list[tuple[torch.Tensor, ...]], variant: Variant) -> dict[str, dict]:
    """Return the errors of O, dQ, dK and dV over all samples: cosine similarity, relative L1 error and relative RMSE.

    Each sample is scaled so that the root mean square of the truth is 1: a layer with small gradients counts like the
    others.
    """
    pairs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {name: [] for name in RESULTS}
    for sample, truth in zip(samples, truths, strict=True):
        for name, wanted, got in zip(RESULTS, truth, quantized(sample, variant), strict=True):
            size = wanted.square().mean().sqrt()
            pairs[name].append((got.double() / size, wanted / size))
    measured = {}
    for name, tensors in pairs.items():
        got, wanted = (torch.cat([pair[side].flatten() for pair in tensors]) for side in (0, 1))
        measured[name] = {
            "cosine": F.cosine_similarity(got, wanted, dim=0).item(),
            "rel_l1": ((got - wanted).abs().sum() / wanted.abs().sum()).item(),
            "rmse": (got - wanted).square().mean().sqrt().item(),
        }
    return measured


def markdown(rows: list[dict], name: str) -> str:
    """Return a Markdown table for one set of tensors: relative L1 error (cosine similarity); `rows` as in the JSON."""
    lines = [f"| {name} | " + " | ".join(RESULTS) + " |", "|---" * (len(RESULTS) + 1) + "|"]
    for row in rows:
        cells = [f"{row[name][result]['rel_l1']:.4f} ({row[name][result]['cosine']:.5f})" for result in RESULTS]
        lines.append(f"| {row['variant']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def summary(rows: list[dict]) -> str:
    """Return a Markdown table of relative L1 errors of dQ / dK / dV, for our recipes and the published one."""
    sets = [name for name in rows[0] if name != "variant"]
    lines = ["| dQ / dK / dV | " + " | ".join(sets) + " |", "|---" * (len(sets) + 1) + "|"]
    for row in rows:
        if row["variant"] in SUMMARISED:
            cells = [
                " / ".join(f"{row[name][result]['rel_l1']:.3f}".lstrip("0") for result in RESULTS[1:]) for name in sets
            ]
            lines.append(f"| {row['variant']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--video", help="CogVideoX pipeline folder whose activations and gradients to measure on")
    parser.add_argument("--text", help="causal language model of transformers, folder or id, likewise")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the drawn tensors")
    parser.add_argument("--output", type=Path, help="where to write the table as JSON")
    arguments = parser.parse_args()

    shape = (1, 2, arguments.tokens, 128)
    tensors = {f"Gaussian σ={sigma}": [drawn(gaussian(*shape), sigma)] for sigma in (1, 3, 10)}
    tensors["DiT-like"] = [drawn(dit_like(*shape))]
    if arguments.video:
        tensors["tiny video"] = video_gradients(arguments.video, PROMPT, steps=20, at_steps=(0, 10, 19))
    if arguments.text:
        tensors[Path(arguments.text).name] = text_gradients(arguments.text, TEXT)
    tensors = {name: [in_bfloat16(sample) for sample in samples] for name, samples in tensors.items()}

    rows: list[dict] = [{"variant": variant} for variant in VARIANTS]
    for name, samples in tensors.items():
        truths = [exact(sample) for sample in samples]
        for row in rows:
            row[name] = errors(samples, truths, VARIANTS[row["variant"]])
        print(markdown(rows, name), end="\n\n", flush=True)
    if arguments.output:
        facts = {**cpu_facts(), "tokens": arguments.tokens}
        arguments.output.write_text(json.dumps({**facts, "rows": rows}, indent=1, ensure_ascii=False) + "\n")
        print(f"wrote {arguments.output}", file=sys.stderr)


if __name__ == "__main__":
    main()
