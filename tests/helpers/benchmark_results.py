"""Results of the benchmarks as they would be, without a GPU."""

import torch

from sage_hf.bench import measure
from sage_hf.bench.cases import SHAPES, TRAINING_SHAPES, BenchCase
from sage_hf.bench.providers import PROVIDERS, TRAINING_PROVIDERS

CPU = torch.device("cpu")
SMALL = BenchCase.square("small", (2, 4, 2, 300, 64), causal=True)
FACTS = {"gpu": "NVIDIA H200", "capability": "9.0", "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0"}
FACTS |= {"cudnn": 91900, "packages": {"fa3-fwd": "0.0.3"}, "commit": "0" * 40, "date": "2026-01-01"}


def fake_result() -> dict:
    """Make up a result of `measure.run`: all providers at all shapes but fa3, which is missing, and sage1 uncausal."""
    rows = []
    for shape in SHAPES:
        for index, one in enumerate(PROVIDERS):
            row = measure.new_row(shape, one)
            if one.name == "fa3":
                row["unavailable"] = "ModuleNotFoundError: No module named 'fa3_fwd'"
            elif one.name == "sage_hf:sage1" and shape.upper_left:
                row["unavailable"] = "RuntimeError: no causal"
            else:
                row |= {"kernel": "k", "compile_s": 0.5, "rel_l1": 0.01, "cosine": 0.999}
                row |= {"rel_l1_biased": 1e-3 * (index + 1), "cosine_biased": 0.9, "ms": 2.0, "tflops": 100.0 + index}
                row |= {"peak_extra_bytes": shape.input_bytes // 2} if one.scope == "end_to_end" else {}
            rows.append(row)
    return {**FACTS, "rows": rows}


def fake_training_result() -> dict:
    """Make up a result of `measure.run` of training: every provider at every shape but fa3, which is missing."""
    rows = []
    for shape in TRAINING_SHAPES:
        for index, one in enumerate(TRAINING_PROVIDERS):
            row = measure.new_row(shape, one)
            if one.name == "fa3":
                row["unavailable"] = "ModuleNotFoundError: no backward pass"
            else:
                row |= {"kernel": "k", "compile_s": 0.5, "ms": 3.0, "forward_ms": 1.25, "backward_ms": 1.75}
                errors = [f"{name}_rel_l1" for name in ("output", "dq", "dk", "dv")]
                row |= {name + suffix: 0.01 * (index + 1) for name in errors for suffix in ("", "_biased")}
                row |= {"tflops": 100.0 + index, "peak_extra_bytes": 3 * shape.input_bytes, "saved_bytes": 42_000_000}
            rows.append(row)
    return {**FACTS, "rows": rows}
