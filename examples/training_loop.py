"""One run of a training experiment: a recipe, a seed, a curve of losses."""

import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from tqdm.auto import tqdm
from training_report import finite
from transformers import get_cosine_schedule_with_warmup

import sage_hf


def build_accelerator() -> Accelerator:
    """Bfloat16 on a GPU, float32 on a CPU.

    Raises:
        SystemExit: started on several processes; a run is one process's.
    """
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    if accelerator.num_processes > 1:
        raise SystemExit(
            "a run takes one process: on several GPUs start a process on each, with its own --seeds, one command after "
            "the other, and at the end each command with all --seeds, which collects the runs that were kept"
        )
    return accelerator


def kernels_that_ran(model: nn.Module, recipe: str) -> list[str]:
    """What ran for a recipe, as "recipe · kernel · native or emulated".

    Raises:
        RuntimeError: exact attention ran in its place, so that a comparison would be one of exact with itself.
    """
    if recipe == "exact":
        return ["PyTorch's scaled_dot_product_attention"]
    rows = [row for row in sage_hf.explain(model).rows if row.asked == recipe and row.calls]
    if not rows or any(row.recipe != recipe for row in rows):
        raise RuntimeError(f"asked for {recipe}, but this ran:\n{sage_hf.explain(model)}")
    return sorted({f"{row.recipe} · {row.kernel} · {row.numerics}" for row in rows})


def fit(
    accelerator: Accelerator,
    model: nn.Module,
    loss_of_step: Callable[[int], Tensor],
    held_out_loss: Callable[[], float],
    use_recipe: Callable[[nn.Module, str], None],
    *,
    recipe: str,
    lr: float,
    steps: int,
    tokens_per_step: int,
    points: int,
    title: str,
) -> dict[str, Any]:
    """Trains a model in place: AdamW, cosine schedule with 5 % of warm-up, gradients clipped to norm 1.

    Args:
        model: Prepared by ``accelerator``. What needs no gradient stays as it is.
        loss_of_step: Called with 1, 2, …: the scalar loss of that step's batch.
        held_out_loss: Called after ``use_recipe(model, "exact")``, in evaluation mode.
        use_recipe: Switches the model's attention.
        recipe: Of the attention in training.
        steps, points: How many steps, and how often along the way to note the losses; each at least 1.
        title: Of the progress bar.

    Returns:
        "curve": rows of "step", "train_loss" (mean since the row before), "largest_gradient_norm" (likewise) and
        "held_out_loss"; what is not finite is None. "kernels" as `kernels_that_ran`; "tokens_per_second", without
        the steps before the first of several points, which compile the kernels; "peak_memory_bytes", None on a CPU.

    Raises:
        SystemExit: no steps, or no points.
    """
    if steps < 1 or points < 1:
        raise SystemExit(f"{steps} steps and {points} points of the curve: both must be at least 1")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Matrices decay, gains and biases do not.
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
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
    # Of more points than steps, each step is one.
    noted = {round(steps * point / points) for point in range(1, points + 1)} - {0}
    losses: list[Tensor] = []
    norms: list[Tensor] = []
    kernels: list[str] = []
    seconds, timed_steps, started = 0.0, 0, time.perf_counter()
    with tqdm(total=steps, desc=title, mininterval=2.0) as bar:
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
