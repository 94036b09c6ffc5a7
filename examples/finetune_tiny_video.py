"""Fine-tune the tiny CogVideoX with exact and with INT8 attention, compare the two, then generate in FP4.

    python examples/finetune_tiny_video.py finetune    # every recipe and seed
    python examples/finetune_tiny_video.py evaluate    # all of them, with exact, 8-bit and FP4 attention
    python examples/finetune_tiny_video.py all         # both

The task: clips run backwards under unchanged captions, so that a shape that "moves left" now moves right. The shipped
model therefore gets every direction wrong at the start; its colours and shapes are right, and should stay right. Only
the transformer learns; the text encoder is frozen. Every recipe sees the same data in the same order. The held-out loss
is the loss of the predicted velocity for clips of the 48 scenes outside all training, always with exact attention.

Finished runs are kept in ``--run-dir`` and not repeated, so an interrupted command continues with the unfinished run.
Each command writes its section of ``<output>/tiny_video.json``, with the curves of training, and prints a table.
Training is in bfloat16 on a GPU and in float32 on a CPU. Needs ``pip install ".[video]"``.
"""

import argparse
import json
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import CogVideoXPipeline, CogVideoXTransformer3DModel
from diffusers.models.attention_processor import CogVideoXAttnProcessor2_0
from shapes import Scene, attribute_matches, held_out_scenes, read_clips, train_scenes
from tiny_video_parts import PROMPT_LENGTH, TinySize, build_scheduler, rotary_embedding
from tiny_video_score import generate
from torch import Tensor
from train_tiny_video import CAPTION_DROPOUT, DEFAULT_FOLDER, caption_ids, encode
from training_loop import TrainingPlan, build_accelerator, fit, kernels_that_ran, run_own_numerics, train_or_resume
from training_report import (
    compare,
    comparison_table,
    final_losses,
    finite,
    mean_and_spread,
    update_result,
)

import sage_hf
from sage_hf.bench.results import facts
from sage_hf.text import markdown_table

TRAINING_RECIPES = ("exact", "sage_bwd", "sage_bwd_int8")
INFERENCE_RECIPES = ("exact", "sage_bwd", "sage2", "sage3")
OPPOSITE = {"left": "right", "right": "left", "up": "down", "down": "up"}
DEFAULT_OUTPUT = Path(__file__).parent / "results"
HELD_OUT_SEED = 1_000_000


class Batch(NamedTuple):
    """Inputs of the transformer, and the output that it should predict.

    Attributes:
        noisy, velocity: the noisy latents and the target, (B, f, C, h, w) float32.
        timesteps: (B,) int64.
        text: output of the text encoder, (B, PROMPT_LENGTH, text_dim).
    """

    noisy: Tensor
    velocity: Tensor
    timesteps: Tensor
    text: Tensor


def as_asked(scene: Scene) -> Scene:
    """Return the scene that the scorer should read from a clip of `scene` that runs backwards."""
    return scene._replace(direction=OPPOSITE[scene.direction])


def use_recipe(transformer: CogVideoXTransformer3DModel, recipe: str) -> None:
    """Switch the attention to a recipe; "exact" is diffusers' own processor, without this project."""
    exact = recipe == "exact"
    transformer.set_attn_processor(CogVideoXAttnProcessor2_0() if exact else sage_hf.SageAttnProcessor(recipe=recipe))


class Task:
    """Data of the task, drawn and encoded once: latents of backward clips, and the encoded captions."""

    def __init__(self, pipe: CogVideoXPipeline, size: TinySize, pool: int, device: torch.device):
        self.scheduler = build_scheduler()
        self.rotary = tuple(table.to(device) for table in rotary_embedding(size))
        scenes = train_scenes()
        self.scene_numbers = torch.arange(pool) % len(scenes)
        self.latents = encode(pipe.vae, size, [scenes[i] for i in self.scene_numbers.tolist()], 0, backwards=True)
        with torch.no_grad():
            # (scenes + 1, templates, tokens, channels); the last scene is the empty caption.
            ids = caption_ids(pipe.tokenizer, scenes, PROMPT_LENGTH).to(device)
            self.captions = pipe.text_encoder(ids.flatten(0, 1))[0].unflatten(0, ids.shape[:2])
            held_out = [scene.caption() for scene in held_out_scenes()]
            ids = pipe.tokenizer(held_out, padding="max_length", max_length=PROMPT_LENGTH, return_tensors="pt")
            held_out_text = pipe.text_encoder(ids.input_ids.to(device))[0]
        latents = encode(pipe.vae, size, held_out_scenes(), HELD_OUT_SEED, backwards=True)
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(HELD_OUT_SEED)).to(device)
        timesteps = torch.linspace(0, self.scheduler.config.num_train_timesteps - 1, len(latents)).long().to(device)
        self.held_out = self.batch(latents, noise, timesteps, held_out_text)

    def batch(self, clean: Tensor, noise: Tensor, timesteps: Tensor, text: Tensor) -> Batch:
        noisy = self.scheduler.add_noise(clean, noise, timesteps)
        return Batch(noisy, self.scheduler.get_velocity(clean, noise, timesteps), timesteps, text)

    def draw(self, batch_size: int, seed: int) -> Batch:
        """Draw a batch for training, which depends only on the seed."""
        generator, device = torch.Generator().manual_seed(seed), self.latents.device
        picked = torch.randint(len(self.latents), (batch_size,), generator=generator)
        template = torch.randint(self.captions.shape[1], (batch_size,), generator=generator)
        timesteps = torch.randint(self.scheduler.config.num_train_timesteps, (batch_size,), generator=generator)
        dropped = torch.rand(batch_size, generator=generator) < CAPTION_DROPOUT
        caption = torch.where(dropped, len(self.captions) - 1, self.scene_numbers[picked])
        clean = self.latents[picked.to(device)]
        noise = torch.randn(clean.shape, generator=generator).to(device)
        return self.batch(clean, noise, timesteps.to(device), self.captions[caption.to(device), template.to(device)])

    def held_out_parts(self, batch_size: int) -> Iterator[Batch]:
        for part in zip(*(tensor.split(batch_size) for tensor in self.held_out), strict=True):
            yield Batch(*part)

    def predict(self, transformer: CogVideoXTransformer3DModel, batch: Batch) -> Tensor:
        """Return the velocity that the transformer predicts, float32."""
        return transformer(
            hidden_states=batch.noisy,
            encoder_hidden_states=batch.text,
            timestep=batch.timesteps,
            image_rotary_emb=self.rotary,
            return_dict=False,
        )[0].float()


def train(
    accelerator: Accelerator,
    transformer: CogVideoXTransformer3DModel,
    task: Task,
    seed: int,
    batch_size: int,
    plan: TrainingPlan,
) -> dict[str, Any]:
    """Train a transformer in place on batches that depend only on the seed; see `fit` for the result."""
    transformer = accelerator.prepare(transformer)

    def loss_of_step(step: int) -> Tensor:
        batch = task.draw(batch_size, seed * 1_000_003 + step)
        return F.mse_loss(task.predict(transformer, batch), batch.velocity)

    def held_out_loss() -> float:
        return mean_squared_error(task, [task.predict(transformer, part) for part in task.held_out_parts(batch_size)])

    *_, height, width = task.latents.shape
    tokens = PROMPT_LENGTH + task.latents.shape[1] * (height // 2) * (width // 2)
    return fit(
        accelerator,
        transformer,
        loss_of_step,
        held_out_loss,
        use_recipe,
        batch_size * tokens,
        plan,
    )


def mean_squared_error(task: Task, predicted: list[Tensor]) -> float:
    """Return the mean squared error of the velocities predicted for the held-out clips."""
    return F.mse_loss(torch.cat(predicted), task.held_out.velocity).item()


def relative_l1(exact: Tensor, other: Tensor) -> float:
    """Return Σ|exact − other| / Σ|exact|."""
    return ((exact - other).abs().sum() / exact.abs().sum()).item()


class Experiment:
    """Both commands, with the data and the pipeline that they share."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.accelerator = build_accelerator()
        self.generation = json.loads((args.folder / "generation.json").read_text())
        self.pipe = CogVideoXPipeline.from_pretrained(args.folder).to(self.accelerator.device)
        self.pipe.set_progress_bar_config(disable=True)
        size = TinySize(
            num_frames=self.generation["num_frames"],
            clip_size=self.generation["height"],
            latent_channels=self.pipe.vae.config.latent_channels,
        )
        self.task = Task(self.pipe, size, args.pool, self.accelerator.device)
        self.base_crc32 = 0
        for path in sorted(args.folder.rglob("*.safetensors")):
            self.base_crc32 = zlib.crc32(path.read_bytes(), self.base_crc32)
        self.result = args.output / "tiny_video.json"

    def weights(self, recipe: str, seed: int) -> Path:
        return self.args.run_dir / f"{recipe}-{seed}"

    def load(self, folder: Path) -> CogVideoXTransformer3DModel:
        transformer = CogVideoXTransformer3DModel.from_pretrained(folder, torch_dtype=torch.float32)
        return transformer.to(self.accelerator.device).eval()

    def one_run(self, recipe: str, seed: int) -> dict[str, Any]:
        """Train with a recipe and a seed and save the weights, or return a finished run."""
        args, path = self.args, self.weights(recipe, seed)
        settings = {
            "recipe": recipe,
            "seed": seed,
            "steps": args.steps,
            "lr": args.lr,
            "batch_size": args.batch_size,
            "pool": args.pool,
            "points": args.points,
            "base": {"name": args.folder.name, "crc32": self.base_crc32},
        }
        plan = TrainingPlan(recipe, args.lr, args.steps, args.points, path.name)
        return train_or_resume(
            path,
            settings,
            self.accelerator,
            lambda: self.load(args.folder / "transformer"),
            lambda transformer: train(self.accelerator, transformer, self.task, seed, args.batch_size, plan),
        )

    def runs(self) -> list[dict[str, Any]]:
        return [self.one_run(recipe, seed) for seed in self.args.seeds for recipe in self.args.recipes]

    def finetune(self) -> None:
        runs = self.runs()
        comparison = compare(final_losses(runs))
        print(f"\nvelocity error on held-out scenes\n{comparison_table(comparison)}", flush=True)
        update_result(self.result, "finetune", {"comparison": comparison, "runs": runs})

    @torch.no_grad()
    def measure(self, folder: Path, recipes: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Measure one set of weights with each recipe; the first recipe is "exact", and the other recipes are compared
        to it.

        Returns:
            recipe → row, with "held_out_loss"; "velocity_rel_l1" and "clips_rel_l1", Σ|exact − low-bit| / Σ|exact|;
            the number of held-out "prompts", and the numbers of prompts whose clip shows the right "colour", "shape",
            "direction" or "all" of these; and "kernels", the kernels that ran.
        """
        scenes = held_out_scenes()
        scenes = scenes[:: max(1, len(scenes) // self.args.prompts)][: self.args.prompts]
        self.pipe.transformer = transformer = self.load(folder)
        rows: dict[str, dict[str, Any]] = {}
        for recipe in recipes:
            use_recipe(transformer, recipe)
            with self.accelerator.autocast():
                parts = self.task.held_out_parts(self.args.batch_size)
                predicted = [self.task.predict(transformer, part) for part in parts]
                clips = generate(
                    self.pipe,
                    scenes,
                    guidance_scale=self.generation["guidance_scale"],
                    num_inference_steps=self.generation["num_inference_steps"],
                    batch_size=16,
                )
            velocity = torch.cat(predicted)
            if not rows:
                exact_velocity, exact_clips = velocity, clips
            asked = [as_asked(scene) for scene in scenes]
            readings = read_clips(clips)
            right = attribute_matches(readings, asked)
            rows[recipe] = {
                "held_out_loss": finite(mean_squared_error(self.task, predicted)),
                "velocity_rel_l1": finite(relative_l1(exact_velocity, velocity)),
                "clips_rel_l1": finite(relative_l1(exact_clips, clips)),
                "prompts": len(scenes),
                **{name: sum(right[name]) for name in Scene._fields},
                "all": sum(reading == scene for reading, scene in zip(readings, asked, strict=True)),
                "kernels": kernels_that_ran(transformer, recipe),
            }
        return rows

    def evaluate(self) -> None:
        self.runs()
        models: dict[str, list[Path]] = {"not fine-tuned": [self.args.folder / "transformer"]}
        for recipe in self.args.recipes:
            models[recipe] = [self.weights(recipe, seed) for seed in self.args.seeds]
        rows, table = [], []
        for trained_with, folders in models.items():
            measured = [self.measure(folder, INFERENCE_RECIPES) for folder in folders]
            rows.append({"trained_with": trained_with, "seeds": measured})
            for recipe in INFERENCE_RECIPES:
                seed_rows = [seed[recipe] for seed in measured]
                table.append(
                    [
                        trained_with,
                        recipe,
                        mean_and_spread(row["held_out_loss"] for row in seed_rows),
                        mean_and_spread(row["velocity_rel_l1"] for row in seed_rows),
                        mean_and_spread(row["clips_rel_l1"] for row in seed_rows),
                        *(f"{sum(row[name] for row in seed_rows)}" for name in (*Scene._fields, "all")),
                        f"{sum(row['prompts'] for row in seed_rows)}",
                    ]
                )
        header = ["trained with", "run with", "held-out loss", "velocity rel-L1", "clips rel-L1"]
        print(f"\n{markdown_table([*header, *Scene._fields, 'all', 'of'], table)}", flush=True)
        section = {"seeds": self.args.seeds, "rows": rows, "facts": facts(self.accelerator.device)}
        update_result(self.result, "evaluate", section)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("finetune", "evaluate", "all"))
    parser.add_argument("--recipes", nargs="+", choices=TRAINING_RECIPES, default=list(TRAINING_RECIPES))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--pool", type=int, default=2560, help="clips drawn and encoded beforehand")
    parser.add_argument("--points", type=int, default=20, help="of a curve")
    parser.add_argument("--prompts", type=int, default=48, help="to score a model by, at most 48")
    parser.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="the pipeline folder to begin with")
    parser.add_argument("--run-dir", type=Path, default=Path("runs/finetune_tiny_video"), help="weights and parts")
    parser.add_argument("--output", type=Path, default=DEFAULT_OUTPUT, help="folder of the JSON")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    run_own_numerics()
    experiment = Experiment(args)
    if args.command in ("finetune", "all"):
        experiment.finetune()
    if args.command in ("evaluate", "all"):
        experiment.evaluate()


if __name__ == "__main__":
    main()
