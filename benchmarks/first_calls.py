"""Measure the waiting time of a user's first call: each kind of call in a separate process, with empty caches.

The rows of <gpu>-first_calls.json have call, the recipe and kernel that ran, and times: "import_s" of importing sage_hf
after torch, "first_s" of the first call with all that it loads and compiles, "second_ms" of the second call,
"other_length_ms" of a call of another, odd length, and "exact_ms" of PyTorch's own first call, which comes before ours:
the time in which PyTorch imports and loads its libraries counts there. A call with gradients includes its backward
pass. "cached_s" is "first_s" of a second process, which finds the caches that the first process filled. Processes run
one after the other, because compilers need the cores.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from typing import Any

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "plain, head_dim 64": {"head_dim": 64},
    "causal": {"is_causal": True},
    "key mask": {"mask": "keys"},
    "key mask, head_dim 64": {"mask": "keys", "head_dim": 64},
    "padded texts": {"mask": "keys", "batch": 8, "tokens": 512, "head_dim": 64},
    "window": {"mask": "window"},
    "bias of each head": {"mask": "bias", "tokens": 1024, "head_dim": 64},
    "decoding": {"q_len": 1},
    "training": {"recipe": "sage_bwd"},
}
"""Calls of 24 heads of 128 channels and 8,192 tokens, unless the call says otherwise."""


def measure_call(
    recipe: str = "sage2",
    batch: int = 1,
    tokens: int = 8192,
    q_len: int | None = None,
    head_dim: int = 128,
    mask: str = "none",
    is_causal: bool = False,
) -> dict[str, Any]:
    """Return the row of a call, in a process without earlier calls."""
    import time

    import torch
    import torch.nn.functional as F

    grad = recipe == "sage_bwd"

    def step(tokens: int) -> Any:
        """Return a function that runs attention of a length, and its backward pass if gradients are wanted."""
        lengths = q_len or tokens, tokens, tokens
        shapes = ((batch, length, 24, head_dim) for length in lengths)
        inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for shape in shapes]
        index = torch.arange(tokens, device="cuda")
        masks = {
            "keys": lambda: (index < tokens - tokens // 8).expand(batch, 1, 1, tokens),
            "window": lambda: ((index[:, None] - index).abs() <= 1024)[None, None],
            "bias": lambda: torch.randn(1, 24, tokens, tokens, device="cuda", dtype=torch.bfloat16),
        }
        attn_mask = masks[mask]() if mask in masks else None
        gradient = torch.randn(batch, lengths[0], 24 * head_dim, device="cuda", dtype=torch.bfloat16)
        for x in inputs:
            x.requires_grad_(grad)

        def run(attend: Any, **options: Any) -> None:
            with torch.set_grad_enabled(grad):
                output = attend(*inputs, attn_mask, is_causal=is_causal, **options)
            if grad:  # as a linear layer returns it
                output.transpose(1, 2).flatten(2).backward(gradient)
                for x in inputs:
                    x.grad = None

        return run

    def timed(run: Any, attend: Any, **options: Any) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(attend, **options)
        torch.cuda.synchronize()
        return time.perf_counter() - start

    call_inputs, longer_inputs = step(tokens), step(tokens + tokens // 4 + 5)
    exact_s = timed(call_inputs, F.scaled_dot_product_attention)
    start = time.perf_counter()
    from sage_hf import record, sage_attention

    import_s = time.perf_counter() - start
    # Low-bit training, even where exact attention trains faster.
    ours = partial(timed, attend=sage_attention, recipe=recipe, fallback="error" if grad else "native")
    announced_calls: list[Any] = []
    with record.observe(announced_calls.append):
        first_s, second_s, other_s = (ours(run) for run in (call_inputs, call_inputs, longer_inputs))
    plan = announced_calls[0].plan
    times = {"import_s": import_s, "first_s": first_s, "second_ms": second_s * 1e3, "other_length_ms": other_s * 1e3}
    times["exact_ms"] = exact_s * 1e3
    return {"recipe": plan.recipe, "kernel": plan.kernel, **{name: round(time, 3) for name, time in times.items()}}


def run_alone(name: str) -> dict[str, Any]:
    """Return the row of a call in a new process with empty caches (ours, Triton's, NVRTC's), and in a second
    process."""
    with tempfile.TemporaryDirectory() as folder:
        caches = {"TRITON_CACHE_DIR": "triton", "SAGE_KERNELS_CACHE": "sage", "CUDA_CACHE_PATH": "cuda"}
        environment = {**os.environ, **{variable: f"{folder}/{name}" for variable, name in caches.items()}}
        command = [sys.executable, __file__, name]
        rows = []
        for _ in range(2):
            process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if process.returncode:
                return {"call": name, "unavailable": process.stderr.strip().splitlines()[-1]}
            rows.append(json.loads(process.stdout.splitlines()[-1]))
    return {"call": name, **rows[0], "cached_s": rows[1]["first_s"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `execute` but the output's to the parser."""
    parser.add_argument("--calls", nargs="+", choices=CALLS, default=list(CALLS), metavar="NAME", help="default: all")


def execute(args: argparse.Namespace) -> None:
    """Measure, and write <gpu>-first_calls.json as rows come."""
    from sage_hf.bench import command, results

    result = {**results.facts(command.gpu("cuda")), "rows": []}
    path = results.path_of(args.output, result, "first_calls")
    for name in args.calls:
        result["rows"].append(run_alone(name))
        print(result["rows"][-1], flush=True)
        results.write(path, result)
    print(f"wrote {path}")


if __name__ == "__main__":  # in a process without earlier calls
    print(json.dumps(measure_call(**CALLS[sys.argv[1]])))
