"""Training loop of the experiments: one run trains with one recipe and records a curve of losses."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm.auto import tqdm
from training_report import finite, resume_or_run
from transformers import get_cosine_schedule_with_warmup

import sage_hf
from sage_hf.bench.results import facts


def run_own_numerics() -> None:
    """From now on, run each recipe's own numerics on every device and at every length, never another recipe."""
    sage_hf.set_routing(False)  # short sequences would train exactly, but the recipes are to be compared
    sage_hf.set_default_fallback("emulate")
    torch.set_float32_matmul_precision("high")


def build_accelerator() -> Accelerator:
    """Build an accelerator that computes in bfloat16 on a GPU and in float32 on a CPU.

    Raises:
        SystemExit: there are several processes; a run takes only one process.
    """
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    if accelerator.num_processes > 1:
        raise SystemExit(
            "a run takes one process: on several GPUs start a process on each, with its own --seeds, one command after "
            "the other, and at the end each command with all --seeds, which collects the runs that were kept"
        )
    return accelerator


def kernels_that_ran(model: nn.Module, recipe: str) -> list[str]:
    """List the kernels that ran for a recipe, as "recipe · kernel · native or emulated".

    Raises:
        RuntimeError: another recipe or exact attention ran instead, which would make a comparison meaningless.
    """
    if recipe == "exact":
        return ["PyTorch's scaled_dot_product_attention"]
    rows = [row for row in sage_hf.explain(model).rows if row.asked == recipe and row.calls]
    if not rows or any(row.recipe != recipe for row in rows):
        raise RuntimeError(f"asked for {recipe}, but this ran:\n{sage_hf.explain(model)}")
    return sorted({f"{row.recipe} · {row.kernel} · {row.numerics}" for row in rows})


@dataclass(frozen=True)
class TrainingPlan:
    """Plan of one run.

    Attributes:
        recipe: recipe of the attention in training.
        lr: peak learning rate.
        steps: number of steps, at least 1.
        points: number of points of the curve, at least 1.
        title: text of the progress bar.

    Raises:
        SystemExit: steps or points is less than 1.
    """

    recipe: str
    lr: float
    steps: int
    points: int
    title: str = ""

    def __post_init__(self) -> None:
        if self.steps < 1 or self.points < 1:
            raise SystemExit(f"{self.steps} steps and {self.points} points of the curve: both must be at least 1")


def train_or_resume(
    path: Path,
    settings: dict[str, Any],
    accelerator: Accelerator,
    load: Callable[[], nn.Module],
    train: Callable[[nn.Module], dict[str, Any]],
) -> dict[str, Any]:
    """Train a model, save its weights to the folder `path`, and return the run; or return the run that is stored there.

    Args:
        path: folder of the weights; the run is kept next to it, as JSON.
        settings: everything that the run depends on, as plain data; the GPU, which also decides the dtype, is added.
        accelerator: made by `build_accelerator`.
        load: makes the initial model.
        train: trains the model in place; see `fit` for the result.

    Raises:
        SystemExit: a kept run has other settings.
    """

    def run() -> dict[str, Any]:
        model = load()
        trained = train(model)
        accelerator.unwrap_model(model, keep_fp32_wrapper=False).save_pretrained(path)
        accelerator.free_memory()
        return {**trained, "facts": facts(accelerator.device)}

    return resume_or_run(path.with_suffix(".json"), {**settings, "gpu": facts(accelerator.device)["gpu"]}, run)


def fit(
    accelerator: Accelerator,
    model: nn.Module,
    loss_of_step: Callable[[int], Tensor],
    held_out_loss: Callable[[], float],
    use_recipe: Callable[[nn.Module, str], None],
    tokens_per_step: int,
    plan: TrainingPlan,
) -> dict[str, Any]:
    """Train a model in place: AdamW, cosine schedule with 5 % of warm-up, gradients clipped to norm 1.

    Args:
        accelerator: made by `build_accelerator`.
        model: prepared by ``accelerator``. Only parameters that require gradients are trained.
        loss_of_step: called with 1, 2, …; returns the scalar loss of that step's batch.
        held_out_loss: called after ``use_recipe(model, "exact")``, in evaluation mode.
        use_recipe: switches the model's attention.
        tokens_per_step: number of tokens in a step's batch.
        plan: the recipe, and how to train.

    Returns:
        "curve": rows of "step", "train_loss" (mean since the row before), "largest_gradient_norm" (since the row
        before) and "held_out_loss"; values that are not finite are None. "kernels": see `kernels_that_ran`.
        "tokens_per_second": if there are several points, without the steps before the first, which compile kernels.
        "peak_memory_bytes": None on a CPU.
    """
    recipe, steps, points = plan.recipe, plan.steps, plan.points
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Weight decay applies to matrices, but not to gains and biases.
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=plan.lr, betas=(0.9, 0.95), fused=True)
    schedule = get_cosine_schedule_with_warmup(optimizer, max(1, steps // 20), steps)
    optimizer = accelerator.prepare(optimizer)
    on_gpu = accelerator.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(accelerator.device)

    def held_out() -> float | None:
        use_recipe(model, "exact")
        model.eval()
        with torch.no_grad():
            loss = held_out_loss()
        use_recipe(model, recipe)
        model.train()
        return finite(loss)

    curve: list[dict[str, Any]] = [
        {"step": 0, "train_loss": None, "largest_gradient_norm": None, "held_out_loss": held_out()}
    ]
    # With more points than steps, each step is a point.
    noted = {round(steps * point / points) for point in range(1, points + 1)} - {0}
    losses: list[Tensor] = []
    norms: list[Tensor] = []
    kernels: list[str] = []
    seconds, timed_steps, started = 0.0, 0, time.perf_counter()
    with tqdm(total=steps, desc=plan.title, mininterval=2.0) as bar:
        for step in range(1, steps + 1):
            loss = loss_of_step(step)
            accelerator.backward(loss)
            norms.append(accelerator.clip_grad_norm_(parameters, 1.0))
            losses.append(loss.detach())
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            kernels = kernels or kernels_that_ran(model, recipe)
            bar.update()
            if step in noted:
                row = {
                    "step": step,
                    "train_loss": finite(torch.stack(losses).mean().item()),
                    "largest_gradient_norm": finite(torch.stack(norms).max().item()),
                }
                if len(curve) > 1 or len(noted) == 1:
                    seconds += time.perf_counter() - started
                    timed_steps += len(losses)
                row["held_out_loss"] = held_out()
                curve.append(row)
                bar.set_postfix({name: row[name] for name in ("train_loss", "held_out_loss")})
                losses, norms, started = [], [], time.perf_counter()
    return {
        "curve": curve,
        "kernels": kernels,
        "tokens_per_second": round(timed_steps * tokens_per_step / seconds),
        "peak_memory_bytes": torch.cuda.max_memory_allocated(accelerator.device) if on_gpu else None,
    }
