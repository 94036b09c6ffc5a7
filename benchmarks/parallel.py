"""Measure whole steps of denoisers on one GPU, and on several GPUs whose processes share a step's tokens.

    torchrun --nproc-per-node 2 benchmarks/run.py parallel
    torchrun --nproc-per-node 2 benchmarks/run.py parallel --p2p off
    torchrun --nproc-per-node 2 benchmarks/run.py parallel --tiny     # on CPUs, to see that the program runs

Models have random weights at their real sizes, with as many layers as `sage-hf bench --model` measures. A row of
<gpu>x<processes>-parallel.json has model, layers, provider ("default": the unmodified model; "-compiled" behind a name:
with compiled blocks), gpus, mode, p2p, ms (the median step, host time included), peak_bytes of the fullest GPU, and
rel_l1, the output's distance from the unmodified model's output on one GPU. The row of a failed measurement holds the
reason. Rows of the same commit and versions are not measured again, so an interrupted run continues.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import diffusers
import torch
import torch.distributed as dist

import sage_hf
from sage_hf import SageConfig, Sparse
from sage_hf.bench import models, results
from sage_hf.bench.measure_models import compiled_blocks
from sage_hf.bench.model_inputs import Draw, flux
from sage_hf.bench.models import BenchModel, LoadedModel
from sage_hf.bench.results import Row, reason
from sage_hf.bench.timing import synchronize
from sage_hf.diffusers import UnsupportedAttentionError

MODELS = "hunyuanvideo-720p", "cogvideox-2b", "wan-14b", "mochi", "flux-1024"
"""Names in `sage_hf.bench.models`, the most important first."""
COMPILED = "-compiled"
"""End of the name of a provider whose blocks are compiled."""
KEYS = "model", "provider", "gpus", "mode", "p2p"
WARM_UP = 3
"""Number of untimed first steps on a GPU."""
BLOCKS = 3
"""Number of timed blocks of consecutive steps on a GPU."""
MOST_STEPS = 10
"""Largest number of steps of a block."""
BLOCK_SECONDS = 0.3
"""Time of a block, if it has fewer steps."""


class TinyDraw(Draw):
    """Inputs like the real models' inputs, but with few video tokens."""

    def normal(self, *size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return standard normal elements; a latent video has 8 × 8 places and at most 16 frames."""
        if len(size) == 5:
            size = (*size[:2], min(size[2], 16), 8, 8)
        return super().normal(*size, dtype=dtype)


def tiny(model: BenchModel) -> BenchModel:
    """Return a model with few heads, layers and tokens."""
    sizes = {"num_attention_heads": 4} | dict.fromkeys(model.depths, 1)
    draw = flux(128) if model.name.startswith("flux") else model.inputs
    inputs = lambda generator: draw(TinyDraw(generator.device))  # noqa: E731
    return replace(model, config={**model.config, **sizes}, inputs=inputs, layers_of_model=len(model.depths))


@dataclass
class Bench:
    """Settings that all rows of a run share.

    Attributes:
        device: device of this process.
        control: a process group on CPUs, by which all processes agree on decisions.
        path: the JSON file.
        result: facts and rows.
        references: by model, the unmodified model's output on one GPU.
    """

    device: torch.device
    control: Any
    path: Path
    result: results.BenchmarkResult
    references: dict[str, torch.Tensor] = field(default_factory=dict)

    def everyones(self, value: Any) -> list[Any]:
        """Return the values of all processes."""
        values = [None] * dist.get_world_size()
        dist.all_gather_object(values, value, group=self.control)
        return values

    def row(self, **keys: Any) -> Row | None:
        """Return the first process's row with these keys; None if it has none."""
        rows = [row for row in self.result["rows"] if all(row[key] == keys[key] for key in KEYS)]
        return self.everyones(rows[0] if rows else None)[0]

    def write(self, row: Row) -> None:
        """Put a row into the file, in place of an earlier row with the same keys."""
        rows = self.result["rows"]
        rows[:] = [kept_row for kept_row in rows if any(kept_row[key] != row[key] for key in KEYS)] + [row]
        if dist.get_rank() == 0:
            results.write(self.path, self.result)

    def measure(self, row: Row, prepare: Callable[[], Callable[[], torch.Tensor]]) -> None:
        """Measure a row, unless it was measured, or `prepare`, which returns the step, raises an error."""
        if self.row(**row) is not None:
            return
        failed = ""
        try:
            step = prepare()
        except Exception as error:  # the row holds the reason
            failed = reason(error)
        if not any(failures := self.everyones(failed)):
            try:
                row = {**row, **self._measured(row["model"], step)}
            except Exception as error:  # the row holds the reason
                failed = reason(error)
            failures = self.everyones(failed)
        if any(failures):
            row = {**row, "unavailable": next(filter(None, failures))}
        self.write(row)
        if dist.get_rank() == 0:
            print(*(row[key] for key in KEYS), row.get("ms", row.get("unavailable")), row.get("rel_l1", ""), flush=True)

    def _measured(self, model: str, step: Callable[[], torch.Tensor]) -> Row:
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(WARM_UP if on_gpu else 1):
            output = step()
        once = max(self.everyones(self._seconds(step, 1)))
        count = max(1, min(MOST_STEPS, int(BLOCK_SECONDS / once)))
        blocks = [max(self.everyones(self._seconds(step, count))) / count for _ in range(BLOCKS if on_gpu else 1)]
        reference, output = self.references[model], output.float().cpu()
        peak = torch.cuda.max_memory_allocated() if on_gpu else 0
        return {
            "ms": round(1e3 * statistics.median(blocks), 3),
            "rel_l1": float((output - reference).abs().sum() / reference.abs().sum()),
            "peak_bytes": max(self.everyones(peak)),
        }

    def _seconds(self, step: Callable[[], object], count: int) -> float:
        synchronize(self.device)
        dist.barrier(group=self.control)
        start = time.perf_counter()
        for _ in range(count):
            step()
        return synchronize(self.device) - start


def config_of(provider: str) -> SageConfig | None:
    """Return the configuration of a provider: a recipe, or "<recipe>-keep<share>" for sparse attention."""
    name = provider.removesuffix(COMPILED)
    if name == "default":
        return None
    recipe, _, keep = name.partition("-keep")
    return SageConfig(recipe, sparse=Sparse("subblock", float(keep)) if keep else None)


def build(model: BenchModel, device: torch.device, layers: int | None) -> LoadedModel:
    """Return a model with the same random weights in each process."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    torch.manual_seed(0)
    return models.load(model, device, layers)


def measure_model(
    bench: Bench, model: BenchModel, layers: int | None, providers: Sequence[str], modes: Sequence[str], p2p: str
) -> Iterator[None]:
    """Measure a model on one GPU and in the first mode; then, at each iteration, in the next mode."""
    processes = dist.get_world_size()
    for number, mode in enumerate(modes):
        loaded = build(model, bench.device, layers)
        if number == 0:
            bench.references[model.name] = loaded.step().float().cpu()
        of_all = {"model": model.name, "layers": loaded.layers}
        for provider in providers if number == 0 else ():
            row = {**of_all, "provider": provider, "gpus": 1, "mode": "", "p2p": ""}
            with Applied(loaded, provider) as applied:
                bench.measure(row, applied)
        sharded = Sharded(loaded, degrees_of(mode, processes))
        for provider in providers:
            row = {**of_all, "provider": provider, "gpus": processes, "mode": mode, "p2p": p2p}
            with Applied(loaded, provider, sharded) as applied:
                bench.measure(row, applied)
        del loaded, sharded, applied  # otherwise the next model's peak would include this model
        yield


class Sharded:
    """A model whose tokens are split among all processes when it is called.

    Args:
        loaded: the model.
        degrees: arguments of diffusers' ContextParallelConfig.
    """

    def __init__(self, loaded: LoadedModel, degrees: dict[str, int]) -> None:
        self.module: Any = loaded.module
        self.config = diffusers.ContextParallelConfig(**degrees)
        self.enabled = False

    def __call__(self) -> None:
        """Split the tokens, unless they are split already."""
        if not self.enabled:
            self.module.enable_parallelism(config=self.config)
            self.enabled = True


class Applied:
    """Preparation of a model's step with a provider, which is removed when the context ends."""

    def __init__(self, loaded: LoadedModel, provider: str, sharded: Callable[[], None] = lambda: None) -> None:
        self.loaded, self.provider, self.sharded = loaded, provider, sharded
        self.changes = ExitStack()

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *raised: object) -> None:
        self.changes.close()

    def __call__(self) -> Callable[[], torch.Tensor]:
        """Return the step."""
        config: Any = config_of(self.provider)
        if config is not None:
            self.changes.enter_context(sage_hf.apply(self.loaded.module, config))
        elif isinstance(self.sharded, Sharded) and getattr(self.sharded.module, "_cp_plan", None) is None:
            raise UnsupportedAttentionError("diffusers has no plan for this model")
        self.sharded()
        if self.provider.endswith(COMPILED):
            self.changes.enter_context(compiled_blocks(self.loaded.module))
        return torch.no_grad()(self.loaded.step)


def degrees_of(mode: str, processes: int) -> dict[str, int]:
    """Return arguments of ContextParallelConfig; "both" has rings of two."""
    if mode == "both":
        return {"ring_degree": 2, "ulysses_degree": processes // 2}
    return {f"{mode}_degree": processes}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `execute` but the output's to the parser."""
    parser.add_argument("--models", nargs="+", default=MODELS, metavar="NAME", help=f"default: {' '.join(MODELS)}")
    providers = "default", "exact", "sage2"
    parser.add_argument("--providers", nargs="+", default=providers, help=f"default: {' '.join(providers)}")
    parser.add_argument(
        "--modes", nargs="+", default=("ulysses", "ring"), help='default: ulysses ring; "both" has rings of two'
    )
    parser.add_argument("--p2p", choices=("on", "off"), default="on", help="off: as by PCIe, through the host")
    parser.add_argument("--layers", type=int, help="at most so many layers of each model")
    parser.add_argument("--tiny", action="store_true", help="few tokens and heads, on CPUs")


def execute(args: argparse.Namespace) -> None:
    """Measure, and write <gpu>x<processes>-parallel.json after each row; a file of the same commit is continued."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if args.p2p == "off":
        os.environ["NCCL_P2P_DISABLE"] = "1"
    device = torch.device("cpu") if args.tiny else torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    if args.tiny:
        torch.accelerator.device_count = lambda: 1  # diffusers divides by this number
    else:
        torch.cuda.set_device(device)
    diffusers.logging.set_verbosity_error()
    limit = timedelta(seconds=120)  # a process that waits for a failed process ends, and all other processes with it
    dist.init_process_group("gloo" if args.tiny else "nccl", timeout=limit)
    control = dist.new_group(backend="gloo", timeout=limit)

    facts = results.facts(device)
    path = results.path_of(args.output, {"gpu": f"{facts['gpu']}x{dist.get_world_size()}"}, "parallel")
    result = {**facts, "rows": results.earlier_rows(path, facts) if dist.get_rank() == 0 else []}
    bench = Bench(device, control, path, result)
    models_by_name = {model.name: model for model in models.MODELS}
    chosen = [models_by_name[name] for name in args.models]
    runs = [
        measure_model(bench, model, args.layers, args.providers, args.modes, args.p2p)
        for model in (map(tiny, chosen) if args.tiny else chosen)
    ]
    with torch.no_grad():
        for _ in args.modes:  # the first mode of every model comes before the second mode of any
            for run in runs:
                next(run, None)
    dist.barrier(group=control)
    dist.destroy_process_group()
