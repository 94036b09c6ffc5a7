"""Estimate NVFP4 attention on Blackwell GPUs from machine code; nothing in it was measured on one.

python benchmarks/blackwell_model.py                       # compiles this checkout's kernel, without a GPU
python benchmarks/blackwell_model.py --output estimates.json

Of a tile of 128 × 128 scores the model knows the clocks of its matrix products, the instructions that its warps issue
and those of the special function units, by this build's machine code and data sheets. How much of the shorter of matrix
products and softmax is not hidden behind the longer is fitted to one figure: the published speed of SageAttention3 on
an RTX 5090. What quantises Q, K and V is scaled from times on an H200, where benchmarks/results/nvidia-h200-sage3.json
(`preparation.py`) has them. Differences of a few per cent mean nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from record import git_commit

from sage_kernels.cuda import compiler
from sage_kernels.cuda import nvfp4_forward as cuda_forward
from sage_kernels.cuda.launch import architecture
from sage_kernels.language.launch import recording
from sage_kernels.spec.call import Call
from sage_kernels.spec.recipe import get_recipe
from sage_kernels.testing.aot import Instructions, MachineCode, compile_launch, machine_code
from sage_kernels.triton import nvfp4_forward
from sage_kernels.triton.registration import NVFP4Quantizer, nvfp4_unsupported

PREPARATION = Path(__file__).parent / "results/nvidia-h200-sage3.json"
OUR_KERNELS = ("triton", "cuda")  # in that file, which has public SageAttention3's too
TILE = 128  # rows, and keys
WARPS = 8  # of a program, one of which a multiprocessor holds
SCHEDULERS = 4  # of a multiprocessor, each of which issues an instruction a clock
BYTES = 0.5 + 1 / 16  # of an element in NVFP4 with its share of a scale
SHAPES = tuple(product((4096, 16384), (64, 128), (False, True)))  # tokens, head_dim, causal
TOKENS_AND_HEADS = 2**19  # tokens · heads of each shape: 32 heads, and 4 batch elements at 4,096 tokens


CUDA = "CUDA C++"
"""Name of the kernel that waits for someone to try it."""


@dataclass(frozen=True)
class Gpu:
    """Figures of a data sheet.

    Attributes:
        name: as people know it.
        capability: its compute capability.
        multiprocessors: their number.
        gigahertz: boost clock.
        fp4: NVFP4 operations (two per product) a clock and multiprocessor.
        special: exponentials a clock and multiprocessor.
        bandwidth: of the memory, bytes a second.
        warp_rows: rows of scores that a warp holds, whose maxima one vote joins.
    """

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    gigahertz: float
    fp4: int
    special: int
    bandwidth: float
    warp_rows: int

    @property
    def issues_per_second(self) -> float:
        """Return the instructions that all schedulers can issue in a second."""
        return self.multiprocessors * SCHEDULERS * self.gigahertz * 1e9


RTX_5090 = Gpu("RTX 5090", (12, 0), 170, 2.41, 4096, 16, 1.79e12, 16)
GPUS = (
    RTX_5090,
    Gpu("B200", (10, 0), 148, 1.85, 32768, 16, 8e12, 32),
    Gpu("B300", (10, 3), 148, 1.92, 49152, 32, 8e12, 32),
)
H200 = Gpu("H200", (9, 0), 132, 1.98, 0, 16, 4.8e12, 16)


@dataclass(frozen=True)
class Loop:
    """Instructions of a warp for one tile.

    Attributes:
        least: where no maximum grew.
        rescaling: how many more lie behind branches, nearly all of them where one did.
        special: those of the special function unit.
    """

    least: int
    rescaling: int
    special: int


# Machine code of the published kernel's consumer warps, and its published speed (RTX 5090, head_dim 128).
PUBLISHED = {64: Loop(702, 0, 82), 128: Loop(850, 0, 82)}
PUBLISHED_TOPS = 1038


def grown_share(tiles: int, rows: int) -> float:
    """Return the share of tiles in which a maximum of `rows` grows, if each tile is as likely as another to hold it."""
    return sum(1 - (1 - 1 / tile) ** rows for tile in range(1, tiles + 1)) / tiles


def clocks(gpu: Gpu, loop: Loop, head_dim: int, tiles: int) -> tuple[float, float]:
    """Return the clocks of a tile's matrix products and of its softmax, each if it were alone on a multiprocessor."""
    matrix = 4 * TILE * TILE * head_dim / gpu.fp4
    issue = WARPS * (loop.least + grown_share(tiles, gpu.warp_rows) * loop.rescaling) / SCHEDULERS
    special = WARPS * 32 * loop.special / gpu.special
    return matrix, max(issue, special)


def fitted_share() -> float:
    """Return the share of the shorter of both that is not hidden, so that the published kernel has its speed."""
    operations = 4 * TILE * TILE * 128
    measured = operations * RTX_5090.multiprocessors * RTX_5090.gigahertz * 1e9 / (PUBLISHED_TOPS * 1e12)
    matrix, softmax = clocks(RTX_5090, PUBLISHED[128], 128, 128)
    return (measured - max(matrix, softmax)) / min(matrix, softmax)


def attention_ms(gpu: Gpu, loop: Loop, tokens: int, head_dim: int, causal: bool, share: float) -> float:
    """Estimate the kernel's time for `TOKENS_AND_HEADS`; causal, the tiles at the diagonal count whole."""
    tiles = -(-tokens // TILE)
    seen = (tiles + 1) / 2 if causal else tiles
    parts = clocks(gpu, loop, head_dim, max(1, round(seen)))
    rows = TOKENS_AND_HEADS / TILE
    per_tile = max(parts) + share * min(parts)
    return rows * seen * per_tile / (gpu.multiprocessors * gpu.gigahertz * 1e9) * 1e3


def preparation_ms(gpu: Gpu, tokens: int, head_dim: int, measured: dict[str, Any] | None) -> float | None:
    """Estimate statistics, quantisation and the scores of Q's means; None without measured times of that shape.

    Each phase takes as many instructions as on the H200, and no less than copying its bytes.
    """
    wanted = {"tokens": tokens, "head_dim": head_dim}
    rows = [row for row in (measured or {"rows": []})["rows"] if wanted.items() <= row.items()]
    rows = [row for row in rows if row["kernels"] in OUR_KERNELS]
    rows = [row for row in rows if row["batch"] * row["heads"] * row["tokens"] == TOKENS_AND_HEADS]
    whole = [row for row in rows if row["phase"] == "all"]
    delta = [row for row in rows if row["phase"] == "delta_scores"]
    if measured is None or not whole or not delta:
        return None

    def scaled(row: dict[str, Any]) -> float:
        copy = row.get("copy_ms", 0) * measured["copy_bandwidth"] / gpu.bandwidth
        return max(row["ms"] * H200.issues_per_second / gpu.issues_per_second, copy)

    return min(map(scaled, whole)) + min(map(scaled, delta))


def least_preparation_ms(gpu: Gpu, head_dim: int) -> float:
    """Return the time of reading Q once, K and V twice, all in 16 bits, and of writing the operands."""
    return TOKENS_AND_HEADS * head_dim * (5 * 2 + 3 * BYTES) / gpu.bandwidth * 1e3


def compiled(head_dim: int, capability: tuple[int, int]) -> MachineCode:
    """Compile this checkout's native kernel for `sage3`, without a mask and an LSE."""
    shape = (1, 32, 4096, head_dim)
    query, key, value = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for _ in range(3))
    call = Call(query, key, value, get_recipe("sage3"), scale=head_dim**-0.5)
    with recording() as launches:
        nvfp4_forward.attend(call, NVFP4Quantizer(), capability, native=True)
    return machine_code(compile_launch(launches[-1], capability).asm["cubin"])


def compiled_by_nvrtc(head_dim: int, capability: tuple[int, int]) -> MachineCode:
    """Compile the kernel in CUDA C++ likewise."""
    config = cuda_forward.Config(
        channels=head_dim,
        is_causal=False,
        padded=False,
        return_lse=False,
        smooth_q=True,
        quantized_denominator=True,
        heavy=True,
        native=True,
    )
    kernel = cuda_forward.kernel(config, torch.bfloat16)
    return machine_code(kernel.source.compile(architecture(capability)).image)


def loop_of(loop: Instructions) -> Loop:
    """Return what the model needs of a loop."""
    return Loop(loop.least, loop.skippable, loop.counts["MUFU"])


def estimates(
    gpus: Sequence[Gpu], loops: dict[tuple[str, int], Loop], measured: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """Return rows of estimates; `loops` has those of each (GPU's name, head_dim) that was compiled.

    Names of the kernel in CUDA C++ end with ", " and CUDA.
    """
    share, rows = fitted_share(), []
    for gpu, (tokens, head_dim, causal) in product(gpus, SHAPES):
        for provider, loop in (
            ("published", PUBLISHED[head_dim] if gpu.capability[0] == 12 else None),
            ("sage_hf:sage3", loops.get((gpu.name, head_dim))),
            (f"sage_hf:sage3, {CUDA}", loops.get((f"{gpu.name}, {CUDA}", head_dim))),
        ):
            if loop is None:
                continue
            ms = attention_ms(gpu, loop, tokens, head_dim, causal, share)
            ours = provider != "published"
            before = preparation_ms(gpu, tokens, head_dim, measured) if ours else None
            operations = 4 * TOKENS_AND_HEADS * tokens * head_dim * (0.5 if causal else 1)
            rows.append(
                {
                    "estimate": True,
                    "gpu": gpu.name,
                    "provider": provider,
                    "tokens": tokens,
                    "head_dim": head_dim,
                    "causal": causal,
                    "attention_ms": ms,
                    "attention_tflops": operations / ms / 1e9,
                    "preparation_ms": before,
                    "least_preparation_ms": least_preparation_ms(gpu, head_dim),
                    "end_to_end_tflops": None if before is None else operations / (ms + before) / 1e9,
                }
            )
    return rows


def assumptions(loops: dict[tuple[str, int], Loop], measured: dict[str, Any] | None) -> list[str]:
    """Return what the estimates stand on, a sentence each."""
    lines = ["ESTIMATES. Nothing here was measured on a Blackwell GPU."]
    lines += [
        f"{gpu.name}: {gpu.multiprocessors} multiprocessors at {gpu.gigahertz} GHz, {gpu.fp4} FP4 operations and "
        f"{gpu.special} exponentials a clock each, {gpu.bandwidth / 1e12:g} TB/s (data sheets)."
        for gpu in GPUS
    ]
    lines += [
        f"{name}, head_dim {head_dim}: {loop.least} instructions a tile and warp, {loop.rescaling} more where a "
        f"maximum grew, {loop.special} special functions (machine code of this build; Triton {triton.__version__})."
        for (name, head_dim), loop in loops.items()
    ]
    grown = [
        f"{grown_share(tiles, RTX_5090.warp_rows):.0%} of a warp's tiles at {tiles * TILE} keys" for tiles in (32, 128)
    ]
    lines += [
        f"Published kernel: {PUBLISHED[64].least} and {PUBLISHED[128].least} instructions at head_dim 64 and 128. Its "
        f"{PUBLISHED_TOPS} TOPS on an RTX 5090 give the one fitted number, for every kernel and GPU: "
        f"{fitted_share():.2f} of the shorter of matrix products and softmax is not hidden.",
        "A maximum grows as if each tile were as likely as another to hold it: with 16 rows a warp in "
        f"{' and '.join(grown)}.",
        "Preparation: times on an H200 by instructions issued a second, no less than copying."
        if measured
        else f"Preparation: not known, {PREPARATION.name} is missing; only the time of moving its bytes is given.",
    ]
    return lines


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the estimates as a Markdown table."""
    columns = ("estimated", "kernel", "tokens", "head_dim", "attention, ms", "preparation, ms", "TFLOP/s", "end to end")
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        before, whole = row["preparation_ms"], row["end_to_end_tflops"]
        cells = (
            row["gpu"],
            row["provider"],
            f"{row['tokens']}{' causal' if row['causal'] else ''}",
            row["head_dim"],
            f"{row['attention_ms']:.2f}",
            f"≥ {row['least_preparation_ms']:.2f}" if before is None else f"{before:.2f}",
            f"{row['attention_tflops']:.0f}",
            "–" if whole is None else f"{whole:.0f}",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON to write the assumptions and estimates into")
    arguments = parser.parse_args()
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    loops: dict[tuple[str, int], Loop] = {}
    for gpu, head_dim in product(GPUS, (64, 128)):
        if reason := nvfp4_unsupported(gpu.capability, version):
            print(f"{gpu.name} is left out: {reason}")
        else:
            loops[gpu.name, head_dim] = loop_of(compiled(head_dim, gpu.capability).main_loop)
    if reason := compiler.why_not(arch=architecture(RTX_5090.capability)):
        print(f"{RTX_5090.name}, {CUDA} is left out: {reason}")
    else:
        for head_dim in (64, 128):
            code = compiled_by_nvrtc(head_dim, RTX_5090.capability)
            loops[f"{RTX_5090.name}, {CUDA}", head_dim] = loop_of(code.lean_loop)
    measured = json.loads(PREPARATION.read_text(encoding="utf-8")) if PREPARATION.exists() else None
    lines, rows = assumptions(loops, measured), estimates(GPUS, loops, measured)
    print("\n".join(lines), table(rows), lines[0], sep="\n\n")
    if arguments.output:
        facts = {"estimates_only": lines, "triton": triton.__version__, "commit": git_commit(), "rows": rows}
        arguments.output.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
