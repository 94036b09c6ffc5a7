"""The table of what FP4 attention needs before it attends, from the results of `preparation.py`."""

from __future__ import annotations

from typing import Any

import sageattention3

KERNELS = {
    "cuda": "ours, in CUDA C++",
    "triton": "ours, in Triton",
    sageattention3.NAME: "public SageAttention3",
}


def markdown(result: dict[str, Any]) -> str:
    """Return a table of what `preparation.py` wrote: "all" and "delta_scores" of each kernels at each shape."""
    lines = [
        "| batch × heads × tokens × head_dim | kernels | statistics, Q, K and V, ms | their bytes copied | ΔS, ms |",
        "|---|---|---|---|---|",
    ]
    found = {(row["kernels"], row["phase"], _sizes(row)): row for row in result["rows"]}

    def ms(row: dict[str, Any] | None) -> str:
        if row is None:
            return ""
        return "≥ " * ("without" in row) + f"{row['ms']:.3f}" if "ms" in row else "does not run"

    for sizes in dict.fromkeys(map(_sizes, result["rows"])):
        for kernels, name in KERNELS.items():
            whole, delta = (found.get((kernels, phase, sizes)) for phase in ("all", "delta_scores"))
            if whole is not None or delta is not None:
                copied = f"{whole['copy_ms']:.3f}" if whole is not None and "copy_ms" in whole else ""
                lines.append(f"| {sizes} | {name} | {ms(whole)} | {copied} | {ms(delta)} |")
    return "\n".join(lines)


def _sizes(row: dict[str, Any]) -> str:
    return " × ".join(f"{row[name]:,}" for name in ("batch", "heads", "tokens", "head_dim"))
