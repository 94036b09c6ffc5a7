"""Train small language models with exact and with INT8 attention, compare the two, then run them in FP4.

    python examples/train_language_model.py pretrain    # 1. from scratch: without QK-norm (Llama) and with it (Qwen 3)
    python examples/train_language_model.py finetune    # 2. the exact Llama of seed 0 of step 1, on other text
    python examples/train_language_model.py evaluate    # 3. the models of step 2, with exact, 8-bit and FP4 attention
    python examples/train_language_model.py all         # all three

The text is Python source code as bytes: the standard library for pre-training, torch's sources for fine-tuning. Every
recipe sees the same data in the same order, from the same initial weights; several seeds separate differences from
noise. The held-out loss is always computed with exact attention, because it judges the weights.

Finished runs are kept in ``--run-dir`` and not repeated, so an interrupted command continues with the unfinished run.
Each command writes its section of ``<output>/language_model.json``, with the curves of training, and prints a table.
Training is in bfloat16 on a GPU, and in float32 on a CPU, where ``--size tiny`` takes some minutes.
"""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from source_text import (
    VOCABULARY,
    Text,
    held_out_windows,
    package_sources,
    read_text,
    standard_library,
    training_windows,
)
from torch import Tensor
from tqdm.auto import tqdm
from training_loop import TrainingPlan, build_accelerator, fit, kernels_that_ran, run_own_numerics, train_or_resume
from training_report import (
    compare,
    comparison_table,
    final_losses,
    finite,
    mean_and_spread,
    update_result,
)
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from sage_hf.bench.results import facts
from sage_hf.text import markdown_table

# A model without QK-norm and a model with it; nothing else differs.
ARCHITECTURES = {
    "llama": ("Llama (no QK-norm)", LlamaConfig, LlamaForCausalLM),
    "qwen3": ("Qwen 3 (QK-norm)", Qwen3Config, Qwen3ForCausalLM),
}
TRAINING_RECIPES = ("exact", "sage_bwd", "sage_bwd_int8")
INFERENCE_RECIPES = ("exact", "sage_bwd", "sage2", "sage3")
DEFAULT_OUTPUT = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Size:
    """Sizes of the model and of a training step."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    seq_len: int
    batch_size: int
    held_out_windows: int


SIZES = {
    "small": Size(512, 1536, 8, 8, 4, seq_len=2048, batch_size=16, held_out_windows=64),
    "tiny": Size(64, 128, 2, 2, 1, seq_len=128, batch_size=8, held_out_windows=16),
}


def build_model(architecture: str, size: Size, seed: int) -> PreTrainedModel:
    """Build a model with random weights that depend only on the seed."""
    _, config_class, model_class = ARCHITECTURES[architecture]
    torch.manual_seed(seed)
    return model_class(
        config_class(
            vocab_size=VOCABULARY,
            hidden_size=size.hidden_size,
            intermediate_size=size.intermediate_size,
            num_hidden_layers=size.num_layers,
            num_attention_heads=size.num_heads,
            num_key_value_heads=size.num_kv_heads,
            head_dim=size.hidden_size // size.num_heads,
            max_position_embeddings=size.seq_len,
            tie_word_embeddings=False,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def use_recipe(model: PreTrainedModel, recipe: str) -> None:
    """Switch the attention to a recipe; "exact" is transformers' own "sdpa", without this project."""
    model.set_attn_implementation("sdpa" if recipe == "exact" else recipe)


def loss_of(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """Return the mean loss in nats per byte over windows, uint8 (count, seq_len)."""
    tokens = windows.long()
    # Without a mask, transformers 4 treats every batch as packed sequences, which have no low-bit gradients.
    return model(tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss


def held_out_loss(accelerator: Accelerator, model: PreTrainedModel, windows: Tensor, batch_size: int) -> float:
    """Return `loss_of` many windows, computed in batches."""
    losses = []
    for batch in windows.split(batch_size):
        with accelerator.autocast():
            losses.append(loss_of(model, batch) * len(batch))
    return float(torch.stack(losses).sum() / len(windows))


def train(
    accelerator: Accelerator, model: PreTrainedModel, text: Text, size: Size, seed: int, plan: TrainingPlan
) -> dict[str, Any]:
    """Train a model in place on windows that depend only on the seed; see `fit` for the result."""
    model = accelerator.prepare(model)
    training = text.training.to(accelerator.device)
    windows = held_out_windows(text.held_out, size.seq_len, size.held_out_windows).to(accelerator.device)

    def loss_of_step(step: int) -> Tensor:
        step_seed = seed * 1_000_003 + step
        return loss_of(model, training_windows(training, size.seq_len, size.batch_size, step_seed))

    return fit(
        accelerator,
        model,
        loss_of_step,
        lambda: held_out_loss(accelerator, model, windows, size.batch_size),
        use_recipe,
        size.batch_size * size.seq_len,
        plan,
    )


class Experiments:
    """The three commands, with the settings that they share."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.size = SIZES[args.size]
        self.accelerator = build_accelerator()
        self.result = args.output / "language_model.json"

    def one_run(
        self, folder: str, architecture: str, recipe: str, seed: int, text: Text, base: Path | None = None
    ) -> dict[str, Any]:
        """Train with a recipe and a seed, from ``base`` or from scratch, and save the weights; or return a finished
        run."""
        args, path = self.args, self.args.run_dir / folder / f"{recipe}-{seed}"
        stage = "pretrain" if base is None else "finetune"
        steps, lr = getattr(args, f"{stage}_steps"), getattr(args, f"{stage}_lr")
        settings = {
            "stage": stage,
            "architecture": architecture,
            "recipe": recipe,
            "seed": seed,
            "steps": steps,
            "lr": lr,
            "points": args.points,
            "size": asdict(self.size),
            "text": text.facts,
        }
        if base is not None:
            settings["base"] = json.loads(base.with_suffix(".json").read_text())["settings"]

        def load() -> PreTrainedModel:
            model = build_model(architecture, self.size, seed)
            return model if base is None else type(model).from_pretrained(base, dtype=torch.float32)

        plan = TrainingPlan(recipe, lr, steps, args.points, f"{folder} {path.name}")
        return train_or_resume(
            path,
            settings,
            self.accelerator,
            load,
            lambda model: train(self.accelerator, model, text, self.size, seed, plan),
        )

    def pretraining_text(self) -> Text:
        return read_text(self.args.text or standard_library(), "the Python standard library")

    def finetuning_text(self) -> Text:
        return read_text(self.args.finetune_text or package_sources("torch"), "the Python sources of torch")

    def finish(self, stage: str, groups: dict[str, list[dict[str, Any]]]) -> None:
        """Write and print the results of a stage's runs."""
        section: dict[str, Any] = {}
        for title, runs in groups.items():
            final = final_losses(runs)
            section[title] = {"comparison": compare(final), "runs": runs}
            print(f"\n{stage}: {title}, {len(final)} recipes, seeds {', '.join(map(str, self.args.seeds))}")
            print(comparison_table(section[title]["comparison"]), flush=True)
        update_result(self.result, stage, section)

    def pretrain(self) -> None:
        args, text = self.args, self.pretraining_text()
        groups = {
            title: [
                self.one_run(f"pretrain-{architecture}", architecture, recipe, seed, text)
                for seed in args.seeds
                for recipe in args.recipes
            ]
            for architecture, (title, *_) in ARCHITECTURES.items()
        }
        self.finish("pretrain", groups)

    def base(self) -> Path:
        """Return the weights to fine-tune with all seeds: the weights pre-trained with exact attention and seed 0."""
        self.one_run("pretrain-llama", "llama", "exact", 0, self.pretraining_text())
        return self.args.run_dir / "pretrain-llama" / "exact-0"

    def finetuned(self) -> list[dict[str, Any]]:
        base, text = self.base(), self.finetuning_text()
        return [
            self.one_run("finetune-llama", "llama", recipe, seed, text, base)
            for seed in self.args.seeds
            for recipe in self.args.recipes
        ]

    def finetune(self) -> None:
        self.finish("finetune", {"Llama, fine-tuned on other text": self.finetuned()})

    @torch.no_grad()
    def evaluate(self) -> None:
        """Measure the held-out perplexity per byte of every fine-tuned model with every inference recipe."""
        size, folders = self.size, {"not fine-tuned": [self.base()]}
        for run in self.finetuned():
            recipe, seed = run["settings"]["recipe"], run["settings"]["seed"]
            folders.setdefault(recipe, []).append(self.args.run_dir / "finetune-llama" / f"{recipe}-{seed}")
        text = self.finetuning_text()
        device = self.accelerator.device
        windows = held_out_windows(text.held_out, size.seq_len, size.held_out_windows).to(device)
        rows: list[dict[str, Any]] = []
        kernels: dict[str, list[str]] = {}
        with tqdm(total=sum(map(len, folders.values())) * len(INFERENCE_RECIPES), desc="evaluate") as bar:
            for trained_with, models in folders.items():
                perplexity: dict[str, list[float | None]] = {recipe: [] for recipe in INFERENCE_RECIPES}
                for folder in models:
                    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
                    for recipe in INFERENCE_RECIPES:
                        use_recipe(model, recipe)
                        loss = held_out_loss(self.accelerator, model, windows, size.batch_size)
                        perplexity[recipe].append(finite(math.exp(loss)))
                        kernels[recipe] = kernels_that_ran(model, recipe)
                        bar.update()
                rows.append({"trained_with": trained_with, "perplexity": perplexity})
        header = ["trained with", *(f"run with {recipe}" for recipe in INFERENCE_RECIPES)]
        table = markdown_table(
            header, [[row["trained_with"], *map(mean_and_spread, row["perplexity"].values())] for row in rows]
        )
        print(f"\nheld-out perplexity a byte, {text.facts['name']}\n{table}", flush=True)
        section = {
            "text": text.facts,
            "seeds": self.args.seeds,
            "kernels": kernels,
            "rows": rows,
            "facts": facts(device),
        }
        update_result(self.result, "evaluate", section)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("pretrain", "finetune", "evaluate", "all"))
    parser.add_argument("--size", choices=tuple(SIZES), default="small", help="tiny: for a CPU")
    parser.add_argument("--recipes", nargs="+", choices=TRAINING_RECIPES, default=list(TRAINING_RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--pretrain-steps", type=int, default=500)
    parser.add_argument("--pretrain-lr", type=float, default=1e-3)
    parser.add_argument("--finetune-steps", type=int, default=200)
    parser.add_argument("--finetune-lr", type=float, default=2e-4)
    parser.add_argument("--points", type=int, default=20, help="of a curve")
    parser.add_argument("--text", type=Path, help="folder of Python files; default: the standard library")
    parser.add_argument("--finetune-text", type=Path, help="folder of Python files; default: torch's")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/language_model"), help="weights and parts")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="folder of the JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    run_own_numerics()
    experiments = Experiments(args)
    commands: dict[str, Callable[[], None]] = {
        "pretrain": experiments.pretrain,
        "finetune": experiments.finetune,
        "evaluate": experiments.evaluate,
    }
    for name, command in commands.items():
        if args.command in (name, "all"):
            command()


if __name__ == "__main__":
    main()
