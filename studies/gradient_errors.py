"""Measure the effect of each choice in the recipes with gradients: errors of O, dQ, dK, dV against float64.

    python studies/gradient_errors.py --video examples/tiny_video --text FOLDER_OR_ID \\
        --output benchmarks/results/cpu-gradient_errors.json

All tensors are bfloat16. For random tensors dO is Gaussian. For trained models it is the gradient that the layer
receives: in the video model from a Gaussian gradient of the model's output, in the language model from its loss.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from tensors import Sample, dit_like, gaussian, parse_arguments, text_gradients, video_gradients

from sage_hf.bench import results
from sage_hf.metrics import ErrorSums
from sage_hf.text import markdown_table
from sage_kernels.exact.gradients import Gradients, exact_gradients
from sage_kernels.formats import fp8, int8
from sage_kernels.reference import forward as reference
from sage_kernels.spec import transforms
from sage_kernels.spec.recipe import RECIPES, Recipe

BWD = RECIPES["sage_bwd"]
"""Our recipe with gradients."""
BWD_INT8 = RECIPES["sage_bwd_int8"]
"""The same with all products in INT8."""
RESULTS = ("O", "dQ", "dK", "dV")


@dataclass(frozen=True)
class Formats:
    """Formats of the products of a backward pass (arXiv 2505.11594, section 4); kernels serve only the recipes'
    formats.

    Attributes:
        p: format of P and dO in dV = Pᵀ·dO: "16bit", "int8" or "fp8".
        ds: format of dS, K and Q in dQ = dS·K and dK = dSᵀ·Q. In 16 bits, K and Q have the forward pass's INT8 values.
        dp: format of dO and V in dP = dO·Vᵀ.
        scales: extent of an 8-bit format's scale. "row": a row of a tile of P or dS along the sum, and a token of dO or
            V in dP; "tile": a tile, and a tile's tokens.
        delta: the sum over a row of P∘dP that softmax's gradient subtracts. "output": rowsum(dO∘O) of the forward
            pass's output; "consistent": the sum of the backward pass's own P and dP (arXiv 2603.00040).
    """

    p: str = "16bit"
    ds: str = "16bit"
    dp: str = "16bit"
    scales: str = "row"
    delta: str = "output"


@dataclass(frozen=True)
class Variant:
    """A recipe with the formats of its backward pass, and the numbers of tokens of Q and K that share a scale.

    Attributes:
        recipe: formats and transforms of the forward pass.
        formats: formats of the backward pass.
        query_tokens: 1…128; 1 is the recipe's choice.
        key_tokens: 64 or 128; None is the recipe's choice. As in the recipes, scales of K are bfloat16.
    """

    recipe: Recipe
    formats: Formats = Formats()
    query_tokens: int = 1
    key_tokens: int | None = None


INT8 = Formats(p="int8", ds="int8")


def published(**formats: str) -> Variant:
    """Return the recipe of arXiv 2505.11594, section 4, as far as the text specifies it.

    Scales are per tile, over 128 tokens of Q and 64 of K.
    """
    recipe = replace(BWD_INT8, smooth_v=False, rotate=False, equalize=False)
    return Variant(recipe, replace(INT8, **{"scales": "tile", **formats}), 128, 64)


# Variants of the default recipe, then of the paper's recipe, which has INT8 in four of five products.
VARIANTS: dict[str, Variant] = {
    "`sage_bwd`": Variant(BWD),
    "`sage_bwd`, consistent δ": Variant(BWD, Formats(delta="consistent")),
    "`sage_bwd`, P·V in FP8": Variant(replace(BWD, pv="fp8", smooth_v=True)),
    "`sage_bwd`, P·V in INT8": Variant(replace(BWD, pv="int8", smooth_v=True)),
    "`sage_bwd`, no equalising": Variant(replace(BWD, equalize=False)),
    "`sage_bwd`, no equalising, not rotated": Variant(replace(BWD, equalize=False, rotate=False)),
    "`sage_bwd`, no smooth K": Variant(replace(BWD, smooth_k=False)),
    "`sage_bwd`, Q a scale per 64 tokens": Variant(BWD, query_tokens=64),
    "`sage_bwd`, K a scale per 64 tokens": Variant(BWD, key_tokens=64),
    "`sage_bwd`, Q and K a scale per 64 tokens": Variant(BWD, query_tokens=64, key_tokens=64),
    "`sage_bwd`, Q and K a scale per 128 tokens": Variant(BWD, query_tokens=128, key_tokens=128),
    "`sage_bwd`, dO·Vᵀ in INT8": Variant(BWD, Formats(dp="int8")),
    "`sage_bwd`, dO·Vᵀ in FP8": Variant(BWD, Formats(dp="fp8")),
    "`sage_bwd`, P in INT8": Variant(BWD, Formats(p="int8")),
    "`sage_bwd`, dS in INT8": Variant(BWD, Formats(ds="int8")),
    "`sage_bwd_int8`": Variant(BWD_INT8, INT8),
    "`sage_bwd_int8`, consistent δ": Variant(BWD_INT8, replace(INT8, delta="consistent")),
    "`sage_bwd_int8`, no equalising, not rotated": Variant(replace(BWD_INT8, equalize=False, rotate=False), INT8),
    "`sage_bwd_int8`, P·V in FP16": Variant(replace(BWD_INT8, pv="fp16", smooth_v=False), INT8),
    "`sage_bwd_int8`, a scale per tile": Variant(BWD_INT8, replace(INT8, scales="tile")),
    "`sage_bwd_int8` in FP8": Variant(BWD_INT8, Formats(p="fp8", ds="fp8")),
    "`sage_bwd_int8` in FP8, a scale per tile": Variant(BWD_INT8, Formats(p="fp8", ds="fp8", scales="tile")),
    "`sage_bwd_int8`, dO·Vᵀ in INT8": Variant(BWD_INT8, replace(INT8, dp="int8")),
    "`sage_bwd_int8`, no smooth K": Variant(replace(BWD_INT8, smooth_k=False), INT8),
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


def exact(sample: Sample) -> Gradients:
    """Return exact O, dQ, dK, dV in float64."""
    return exact_gradients(sample.output_gradient, *sample[:3], is_causal=sample.is_causal, scale=sample.scale)


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
    output, lse = reference.attend_to_operands(
        operands, recipe, kv_len, dtype=query.dtype, mask=None, causal_offset=0, **options
    )
    delta = (gradient.float() * output.float()).sum(-1, keepdim=True)
    return output, *gradients(operands, lse, delta, value, gradient, variant, **options)


TILE = 64
"""Numbers of queries and keys of a tile of the backward pass."""


def gradients(
    operands: reference.ReferenceOperands,
    lse: torch.Tensor,
    delta: torch.Tensor,
    value: torch.Tensor,
    gradient: torch.Tensor,
    variant: Variant,
    *,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dQ, dK and dV in value's dtype, from all scores at once; arguments as in the reference's backward pass."""
    formats, recipe, dtype = variant.formats, variant.recipe, value.dtype
    (kv_heads, kv_len), (q_heads, q_len) = value.shape[1:3], gradient.shape[1:3]
    group = q_heads // kv_heads

    def padded(x: torch.Tensor) -> torch.Tensor:
        return F.pad(x.float(), (0, 0, 0, -x.shape[2] % TILE))

    query, query_scale = padded(operands.query[:, :, :q_len]), padded(operands.query_scale[:, :, :q_len])
    key, key_scale = padded(operands.key[:, :, :kv_len]), padded(operands.key_scale[:, :, :kv_len])
    key_factor = torch.ones(1) if operands.equalizer is None else operands.equalizer.float()
    query_factor = 1 / (key_factor if operands.equalizer is None else key_factor.repeat_interleave(group, 1))

    def restored(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return (transforms.unrotate(x) if recipe.rotate else x) * factor

    def operand(codes: torch.Tensor, scale: torch.Tensor, factor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the Q or K that multiplies dS, and the factor of dS before rounding."""
        if formats.ds == "16bit":
            return (restored(codes, factor) * scale).to(dtype).float(), torch.ones_like(scale)
        return (codes if formats.ds == "int8" else fp8.round_to_e4m3(codes).float()), scale

    query_operand, query_scaling = operand(query, query_scale, query_factor)
    key_operand, key_scaling = (x.repeat_interleave(group, 1) for x in operand(key, key_scale, key_factor))
    key, key_scale = (x.repeat_interleave(group, 1) for x in (key, key_scale))
    gradient, value = padded(gradient), padded(value).repeat_interleave(group, 1)

    exists = torch.ones(q_len, kv_len, dtype=torch.bool)
    exists = F.pad(exists.tril() if is_causal else exists, (0, key.shape[2] - kv_len, 0, query.shape[2] - q_len))
    scores = (query * query_scale * scale) @ (key * key_scale).mT
    p = (scores - padded(lse.unsqueeze(-1))).exp().masked_fill(~exists, 0.0)
    tokens = 1 if formats.scales == "row" else TILE
    dp = rounded(gradient, formats.dp, (tokens, -1), dtype) @ rounded(value, formats.dp, (tokens, -1), dtype).mT
    subtracted = (p * dp).sum(-1, keepdim=True) if formats.delta == "consistent" else padded(delta)
    ds = p * (dp - subtracted)

    whole = formats.scales == "tile"
    by_column, by_row = ((TILE, TILE), (TILE, TILE)) if whole else ((TILE, 1), (1, TILE))
    dv = rounded(p, formats.p, by_column, dtype).mT @ rounded(gradient, formats.p, (TILE, -1), dtype)
    dk = rounded(ds * query_scaling, formats.ds, by_column, dtype).mT @ query_operand
    dq = rounded(ds * key_scaling.mT, formats.ds, by_row, dtype) @ key_operand
    dk, dv = (x.unflatten(1, (kv_heads, group)).sum(2) for x in (dk, dv))
    if formats.ds != "16bit":
        dq, dk = restored(dq, 1 / query_factor), restored(dk, 1 / key_factor)
    head_dim = operands.query.shape[-1]
    without_padding = dq[:, :, :q_len, :head_dim] * scale, dk[:, :, :kv_len, :head_dim] * scale, dv[:, :, :kv_len]
    return without_padding[0].to(dtype), without_padding[1].to(dtype), without_padding[2].to(dtype)


def rounded(x: torch.Tensor, kind: str, extent: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Round x (batch, heads, rows, columns) to `dtype` ("16bit"), or to INT8 or e4m3 with a scale per block.

    `extent` is a block's number of rows and columns; -1 means all.
    """
    if kind == "16bit":
        return x.to(dtype).float()
    rows, columns = (size if size > 0 else x.shape[axis] for size, axis in zip(extent, (2, 3), strict=True))
    blocks = x.unflatten(3, (-1, columns)).unflatten(2, (-1, rows)).transpose(3, 4).flatten(4)
    codes, scales = int8.quantize(blocks, 1) if kind == "int8" else fp8.quantize(blocks, -1)
    dequantized = (codes.float() * scales).unflatten(4, (rows, columns)).transpose(3, 4)
    return dequantized.flatten(4).flatten(2, 3)


def transformed(x: torch.Tensor, recipe: Recipe, equalizer: torch.Tensor | None, power: int) -> torch.Tensor:
    """Return Q (power 1) or K (power -1), head_dim padded to a power of two, equalized and rotated by the recipe."""
    if equalizer is not None:
        x = x * (equalizer**power).repeat_interleave(x.shape[1] // equalizer.shape[1], 1)
    return transforms.rotate(x) if recipe.rotate else x


def in_blocks(x: torch.Tensor, tokens: int, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return INT8 codes and scales, as float32, of x padded to whole blocks of 128 tokens."""
    codes, scale = int8.quantize(F.pad(x, (0, 0, 0, -x.shape[-2] % reference.BLOCK_N)), tokens, scale_dtype)
    return codes.float(), scale.float()


def errors(samples: list[Sample], truths: list[tuple[torch.Tensor, ...]], variant: Variant) -> dict[str, dict]:
    """Return the errors of O, dQ, dK and dV over all samples: cosine similarity, relative L1 error and relative RMSE.

    Each sample is scaled so that the root mean square of the truth is 1: a layer with small gradients counts like other
    layers.
    """
    sums = {name: ErrorSums() for name in RESULTS}
    for sample, truth in zip(samples, truths, strict=True):
        for name, wanted, actual in zip(RESULTS, truth, quantized(sample, variant), strict=True):
            size = wanted.square().mean().sqrt()
            sums[name].add(wanted / size, actual.double() / size)
    errors_by_result = {name: sums[name].errors() for name in RESULTS}
    return {
        name: {"cosine": result_errors.cosine, "rel_l1": result_errors.rel_l1, "rmse": result_errors.rmse}
        for name, result_errors in errors_by_result.items()
    }


def markdown(rows: list[dict], name: str) -> str:
    """Return a Markdown table for one set of tensors: relative L1 error (cosine similarity); `rows` as in the JSON."""
    lines = [
        [
            row["variant"],
            *(f"{row[name][result]['rel_l1']:.4f} ({row[name][result]['cosine']:.5f})" for result in RESULTS),
        ]
        for row in rows
    ]
    return markdown_table([name, *RESULTS], lines)


def summary(rows: list[dict]) -> str:
    """Return a Markdown table of relative L1 errors of dQ / dK / dV, for our recipes and the published recipe."""
    sets = [name for name in rows[0] if name != "variant"]
    lines = [
        [
            row["variant"],
            *(" / ".join(f"{row[name][result]['rel_l1']:.3f}".lstrip("0") for result in RESULTS[1:]) for name in sets),
        ]
        for row in rows
        if row["variant"] in SUMMARISED
    ]
    return markdown_table(["dQ / dK / dV", *sets], lines)


def main() -> None:
    arguments = parse_arguments(__doc__)
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
        facts = {**results.facts(torch.device("cpu")), "tokens": arguments.tokens}
        arguments.output.write_text(json.dumps({**facts, "rows": rows}, indent=1, ensure_ascii=False) + "\n")
        print(f"wrote {arguments.output}", file=sys.stderr)


if __name__ == "__main__":
    main()
