"""Train a tiny CogVideoX from scratch on procedurally drawn clips, and score its generated clips.

    python examples/train_tiny_video.py vae                      # 1. the autoencoder
    python examples/train_tiny_video.py transformer              # 2. the denoiser and its text encoder
    python examples/train_tiny_video.py score --recipe exact     # 3. held-out prompts, recognised from pixels
    python examples/train_tiny_video.py score --recipe sage3

Half of the clips show two objects that cross. Steps 1 and 2 take under ten minutes each on one data-centre GPU with
``--mixed-precision bf16`` (and ``--compile`` for the transformer). ``--minutes`` ends a training after this time; the
learning rate falls to 0 by then. The result is a diffusers folder for
``CogVideoXPipeline.from_pretrained("examples/tiny_video")``. A step's random numbers depend only on (seed, step,
process).
"""

import argparse
import functools
import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKLCogVideoX, CogVideoXPipeline, CogVideoXTransformer3DModel
from shapes import (
    CAPTION_TEMPLATES,
    Pair,
    Scene,
    draw_clips,
    held_out_pairs,
    held_out_scenes,
    train_pairs,
    train_scenes,
)
from tiny_video_parts import (
    PIPELINE_PROMPT_LENGTH,
    PROMPT_LENGTH,
    TinySize,
    build_scheduler,
    build_text_encoder,
    build_tokenizer,
    build_transformer,
    build_vae,
    rotary_embedding,
)
from tiny_video_score import demo_scenes, generate, recognise, save_gif, score, update_json
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast, T5EncoderModel

logger = logging.getLogger("train_tiny_video")
DEFAULT_FOLDER = Path(__file__).parent / "tiny_video"
LOGGED_SETTINGS = ("steps", "batch_size", "lr", "warmup", "ema_decay", "seed", "mixed_precision", "pairs", "pool")
CAPTION_DROPOUT = 0.1


class VaeObjective(nn.Module):
    """Loss of the autoencoder: reconstruction, plus a small KL term that keeps the latents smooth and centred.

    A shape covers about 5 % of a frame: without a larger weight on shapes, drawing only the background is a local
    optimum.
    """

    def __init__(self, vae: AutoencoderKLCogVideoX, shape_weight: float = 10.0, kl_weight: float = 1e-4):
        super().__init__()
        self.vae = vae
        self.shape_weight = shape_weight
        self.kl_weight = kl_weight

    def forward(self, clips: Tensor, noise: Tensor) -> dict[str, Tensor]:
        """Return the losses for clips (B, 3, F, H, W) in [-1, 1]; noise (B, C, f, h, w) samples the posterior."""
        posterior = self.vae.encode(clips).latent_dist
        error = self.vae.decode(posterior.mean + posterior.std * noise).sample.float() - clips
        background = clips.flatten(-2).median(-1).values[..., None, None]
        weight = 1 + self.shape_weight * (clips - background).abs().amax(1, keepdim=True)
        reconstruction = (weight * (error.square() + 0.2 * error.abs())).mean()
        mean, logvar = posterior.mean.float(), posterior.logvar.float()
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        psnr = -10 * (error.detach() / 2).square().mean().log10()
        return {"loss": reconstruction + self.kl_weight * kl, "psnr": psnr, "kl": kl}

    @torch.no_grad()
    def reconstruct(self, clips: Tensor) -> Tensor:
        """Encode clips (B, F, 3, H, W) in [0, 1] to the latents' means, and decode the means."""
        latents = self.vae.encode(to_model_range(clips)).latent_dist.mode()
        return ((self.vae.decode(latents).sample.transpose(1, 2) + 1) / 2).clamp(0, 1)


class DenoisingObjective(nn.Module):
    """Loss of the denoiser: mean squared error of the predicted velocity. The text encoder is trained, too."""

    def __init__(
        self,
        transformer: CogVideoXTransformer3DModel,
        text_encoder: T5EncoderModel,
        rotary: tuple[Tensor, Tensor],
    ):
        super().__init__()
        self.transformer = transformer
        self.text_encoder = text_encoder
        self.register_buffer("rotary_cos", rotary[0], persistent=False)
        self.register_buffer("rotary_sin", rotary[1], persistent=False)

    def forward(self, noisy: Tensor, velocity: Tensor, timesteps: Tensor, input_ids: Tensor) -> dict[str, Tensor]:
        """Return the loss for noisy latents and their true velocity (B, f, C, h, w).

        timesteps is (B,) int64, and input_ids (B, L) int64.
        """
        predicted = self.transformer(
            hidden_states=noisy,
            encoder_hidden_states=self.text_encoder(input_ids)[0],
            timestep=timesteps,
            image_rotary_emb=(self.rotary_cos, self.rotary_sin),
            return_dict=False,
        )[0]
        return {"loss": F.mse_loss(predicted.float(), velocity)}


def fit(
    accelerator: Accelerator,
    objective: nn.Module,
    draw_batch: Callable[[int, int], dict[str, Tensor]],
    show: Callable[[nn.Module, Path], None],
    args: argparse.Namespace,
) -> tuple[nn.Module, list[dict[str, float]]]:
    """Train ``objective`` for ``args.steps`` steps or ``args.minutes``, with samples and a log.

    Args:
        objective: maps the keyword arguments that ``draw_batch`` returns to a dict with "loss".
        draw_batch: called with a step and that step's seed.
        show: writes a sample; called with the averaged objective and a path without suffix.

    Returns:
        The exponential moving average of the objective, and the logged losses.
    """
    if accelerator.num_processes > 1 and args.minutes < math.inf:
        raise SystemExit("--minutes is for one process, whose clock is the only one: give several processes --steps")
    samples = args.run_dir / args.command / "samples"
    samples.mkdir(parents=True, exist_ok=True)
    average = AveragedModel(objective, multi_avg_fn=get_ema_multi_avg_fn(args.ema_decay))
    optimizer = torch.optim.AdamW(objective.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.01)
    started = time.perf_counter()

    def share_done(step: int) -> float:
        return min(1.0, max(step / args.steps, (time.perf_counter() - started) / (60 * args.minutes)))

    def lr_factor(step: int) -> float:
        return min(1.0, step / max(1, args.warmup)) * (1 + math.cos(math.pi * share_done(step))) / 2

    schedule = LambdaLR(optimizer, lr_factor)
    objective, optimizer = accelerator.prepare(objective, optimizer)
    log: list[dict[str, float]] = []
    step, ended = 0, False
    with tqdm(total=args.steps, disable=not accelerator.is_local_main_process, mininterval=2.0) as bar:
        while not ended:
            losses = objective(**draw_batch(step, (args.seed * 1_000_003 + step) * 1_009 + accelerator.process_index))
            accelerator.backward(losses["loss"])
            accelerator.clip_grad_norm_(objective.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            average.update_parameters(accelerator.unwrap_model(objective))
            bar.update()
            step += 1
            ended = share_done(step) == 1
            if step % args.log_every == 0 or ended:
                row = {name: round(value.item(), 5) for name, value in losses.items()}
                log.append({"step": step, **row})
                bar.set_postfix(row)
            if accelerator.is_main_process and (step % args.sample_every == 0 or ended):
                show(average.module, samples / f"step_{step:06d}")
    return average.module, log


def to_model_range(clips: Tensor) -> Tensor:
    """Convert clips (B, F, 3, H, W) in [0, 1] to the VAE's (B, 3, F, H, W) in [-1, 1]."""
    return (clips * 2 - 1).transpose(1, 2).contiguous()


@functools.cache
def train_subjects() -> tuple[Scene | Pair, ...]:
    """Return every scene and every pair of training, the scenes first."""
    return (*train_scenes(), *train_pairs())


def pick_subjects(count: int, pairs: float, generator: torch.Generator) -> Tensor:
    """Return ``count`` random indices into :func:`train_subjects`; a share `pairs` of them are pairs."""
    singles, everything, wanted = len(train_scenes()), len(train_subjects()), round(count * pairs)
    return torch.cat(
        [
            torch.randint(singles, everything, (wanted,), generator=generator),
            torch.randint(singles, (count - wanted,), generator=generator),
        ]
    )


def settings(args: argparse.Namespace, log: list[dict[str, float]]) -> dict:
    """Return the settings of a training that ended with the last step of its log."""
    given = {name: getattr(args, name) for name in LOGGED_SETTINGS if hasattr(args, name)}
    return given | {"steps": log[-1]["step"]}


def train_vae(args: argparse.Namespace, size: TinySize) -> None:
    """Train the autoencoder; save it, with the scaling factor of its latents, as ``<folder>/vae``."""
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    torch.manual_seed(args.seed)
    device = accelerator.device
    objective = VaeObjective(build_vae(size)).to(device)
    frames, channels, height, width = size.latent_shape

    subjects = train_subjects()

    def draw(scenes: Sequence[Scene | Pair], generator: torch.Generator) -> Tensor:
        return draw_clips(scenes, generator=generator, num_frames=size.num_frames, size=size.clip_size, device=device)

    def draw_batch(step: int, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        picked = pick_subjects(args.batch_size, args.pairs, generator).tolist()
        clips = draw([subjects[i] for i in picked], generator)
        noise = torch.randn(args.batch_size, channels, frames, height, width, generator=generator)
        return {"clips": to_model_range(clips), "noise": noise.to(device)}

    def show(averaged: VaeObjective, path: Path) -> None:
        clips = draw(demo_scenes(), torch.Generator().manual_seed(args.seed))
        save_gif(torch.cat([clips, averaged.reconstruct(clips)]), path)

    started = time.perf_counter()
    averaged, log = fit(accelerator, objective, draw_batch, show, args)
    minutes = round((time.perf_counter() - started) / 60, 2)
    if not accelerator.is_main_process:
        return

    generator = torch.Generator().manual_seed(args.seed + 1)
    clips = draw([subjects[i] for i in pick_subjects(16, args.pairs, generator).tolist()], generator)
    with torch.no_grad():
        latents = averaged.vae.encode(to_model_range(clips)).latent_dist.mode()
    averaged.vae.register_to_config(scaling_factor=round(1 / latents.std().item(), 6))
    result: dict = {"minutes": minutes}
    for kind, scenes in (("held_out", held_out_scenes()), ("held_out_pairs", held_out_pairs())):
        parts = [draw(scenes[first : first + 8], generator) for first in range(0, len(scenes), 8)]
        clips, decoded = torch.cat(parts), torch.cat([averaged.reconstruct(part) for part in parts])
        psnr = -10 * (decoded - clips).square().mean((1, 2, 3, 4)).log10()
        right = recognise(decoded, scenes)
        del right["misread"]
        result |= {f"{kind}_psnr_db": round(psnr.mean().item(), 2), f"{kind}_read_of_{len(scenes)}": right}
    logger.info("vae: %s, scaling factor %g", result, averaged.vae.config.scaling_factor)
    averaged.vae.to(torch.float16).save_pretrained(args.folder / "vae")
    update_json(args.folder / "training.json", "vae", {**result, "settings": settings(args, log), "losses": log})


def caption_ids(tokenizer: PreTrainedTokenizerFast, scenes: Sequence[Scene | Pair], length: int) -> Tensor:
    """Return token ids, int64 (scenes + 1, templates, length); the last row is the empty caption."""
    captions = [scene.caption(template) for scene in scenes for template in CAPTION_TEMPLATES]
    captions += [""] * len(CAPTION_TEMPLATES)
    ids = tokenizer(captions, padding="max_length", max_length=length, return_tensors="pt").input_ids
    return ids.view(-1, len(CAPTION_TEMPLATES), length)


@torch.no_grad()
def encode(
    vae: AutoencoderKLCogVideoX, size: TinySize, scenes: Sequence[Scene | Pair], seed: int, backwards: bool = False
) -> Tensor:
    """Return scaled latents, float32 (scenes, f, C, h, w), of a clip of each scene; clips may run backwards."""
    generator, latents = torch.Generator().manual_seed(seed), []
    for first in tqdm(range(0, len(scenes), 32), desc="encoding clips", mininterval=2.0):
        clips = draw_clips(
            scenes[first : first + 32],
            generator=generator,
            num_frames=size.num_frames,
            size=size.clip_size,
            device=vae.device,
        )
        clips = to_model_range(clips.flip(1) if backwards else clips).to(vae.dtype)
        latents.append((vae.encode(clips).latent_dist.mode() * vae.config.scaling_factor).transpose(1, 2).float())
    return torch.cat(latents)


def make_portable(folder: Path) -> None:
    """Remove this machine's paths, and transformers 5's tokenizer class (unknown to transformers 4), from the
    configs."""
    for path in (folder / "model_index.json", folder / "tokenizer" / "tokenizer_config.json"):
        path.write_text(path.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    path = folder / "vae" / "config.json"
    config = json.loads(path.read_text())
    config.pop("_name_or_path", None)
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def train_transformer(args: argparse.Namespace, size: TinySize) -> None:
    """Train transformer and text encoder with the VAE in ``<folder>/vae``; save the whole pipeline in ``<folder>``."""
    if not (args.folder / "vae").is_dir():
        raise SystemExit(f"{args.folder / 'vae'} does not exist: run the vae command first")
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    torch.manual_seed(args.seed)
    device = accelerator.device
    vae = AutoencoderKLCogVideoX.from_pretrained(args.folder / "vae", torch_dtype=torch.float32).to(device)
    vae.requires_grad_(False)
    subjects = train_subjects()
    numbers = pick_subjects(args.pool, args.pairs, torch.Generator().manual_seed(args.seed))
    latents = encode(vae, size, [subjects[i] for i in numbers.tolist()], args.seed).half()
    numbers = numbers.to(device)
    tokenizer, scheduler = build_tokenizer(), build_scheduler()
    lengths = (PROMPT_LENGTH, PIPELINE_PROMPT_LENGTH)
    short_ids, long_ids = (caption_ids(tokenizer, subjects, length).to(device) for length in lengths)
    text_encoder = build_text_encoder(size, len(tokenizer))
    objective = DenoisingObjective(build_transformer(size), text_encoder, rotary_embedding(size)).to(device)
    if args.compile:
        # Static shapes: each of the two prompt lengths is compiled once.
        objective.compile(dynamic=False)

    def draw_batch(step: int, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator(device).manual_seed(seed)

        def randint(high: int) -> Tensor:
            return torch.randint(high, (args.batch_size,), generator=generator, device=device)

        picked, template = randint(len(latents)), randint(len(CAPTION_TEMPLATES))
        timesteps = randint(scheduler.config.num_train_timesteps)
        dropped = torch.rand(args.batch_size, generator=generator, device=device) < CAPTION_DROPOUT
        clean = latents[picked].float()
        noise = torch.randn(clean.shape, generator=generator, device=device)
        # Without max_sequence_length the pipeline pads prompts to the greater length, so the model must know both.
        ids = long_ids if step % 4 == 3 else short_ids
        return {
            "noisy": scheduler.add_noise(clean, noise, timesteps),
            "velocity": scheduler.get_velocity(clean, noise, timesteps),
            "timesteps": timesteps,
            "input_ids": ids[torch.where(dropped, len(ids) - 1, numbers[picked]), template],
        }

    def pipeline(averaged: DenoisingObjective) -> CogVideoXPipeline:
        pipe = CogVideoXPipeline(tokenizer, averaged.text_encoder, vae, averaged.transformer, build_scheduler())
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def show(averaged: DenoisingObjective, path: Path) -> None:
        save_gif(generate(pipeline(averaged), demo_scenes(), guidance_scale=args.guidance_scale), path)

    started = time.perf_counter()
    averaged, log = fit(accelerator, objective, draw_batch, show, args)
    minutes = round((time.perf_counter() - started) / 60, 2)
    if not accelerator.is_main_process:
        return
    pipe = pipeline(averaged)
    # Half precision halves the folder. The text encoder stays in float32: it is tiny, and transformers loads stored
    # dtypes.
    pipe.transformer.to(torch.float16)
    pipe.vae.to(torch.float16)
    pipe.save_pretrained(args.folder)
    make_portable(args.folder)
    generation = {
        "num_frames": size.num_frames,
        "height": size.clip_size,
        "width": size.clip_size,
        "num_inference_steps": args.num_inference_steps,
        "guidance_scale": args.guidance_scale,
        "max_sequence_length": PROMPT_LENGTH,
        "fps": 8,
        "prompts": [scene.caption() for scene in demo_scenes()],
    }
    (args.folder / "generation.json").write_text(json.dumps(generation, indent=1) + "\n")
    result = {"minutes": minutes, "settings": settings(args, log), "losses": log}
    update_json(args.folder / "training.json", "transformer", result)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, batch_size, lr, steps, ema_decay in (
        ("vae", 4, 1.5e-3, 2300, 0.99),
        ("transformer", 256, 1e-3, 12000, 0.999),
    ):
        command = commands.add_parser(name)
        command.add_argument("--steps", type=int, default=steps)
        command.add_argument("--minutes", type=float, default=math.inf, help="end earlier; for one process")
        command.add_argument("--batch-size", type=int, default=batch_size)
        command.add_argument("--pairs", type=float, default=0.5, help="share of the clips that show two objects")
        command.add_argument("--lr", type=float, default=lr)
        command.add_argument("--warmup", type=int, default=200)
        command.add_argument("--ema-decay", type=float, default=ema_decay)
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--mixed-precision", choices=("no", "bf16"), default="no")
        command.add_argument("--run-dir", type=Path, default=Path("runs/tiny_video"), help="samples")
        command.add_argument("--log-every", type=int, default=100)
        command.add_argument("--sample-every", type=int, default=1000)
        if name == "transformer":
            command.add_argument("--compile", action="store_true", help="torch.compile the objective")
            command.add_argument("--pool", type=int, default=24576, help="clips drawn and encoded beforehand")
            command.add_argument("--guidance-scale", type=float, default=3.0)
            command.add_argument("--num-inference-steps", type=int, default=20)
    command = commands.add_parser("score")
    command.add_argument("--recipe", default="exact", help="exact, sage3, sage2, ... (emulated where not native)")
    command.add_argument("--guidance-scale", type=float, default=None, help="default: generation.json")
    command.add_argument("--save", action="store_true", help="write the result into scores.json of the folder")
    command.add_argument("--samples", type=Path, help="a folder for the clips, as gifs")
    for command in commands.choices.values():
        command.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="the pipeline folder")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, size: TinySize | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    args = parse_args(argv)
    if args.command == "score":
        score(args.folder, args.recipe, guidance_scale=args.guidance_scale, save=args.save, samples=args.samples)
        return
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    args.folder.mkdir(parents=True, exist_ok=True)
    {"vae": train_vae, "transformer": train_transformer}[args.command](args, size or TinySize())


if __name__ == "__main__":
    main()
