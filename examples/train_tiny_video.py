"""Train a tiny CogVideoX from scratch on procedurally drawn clips, and score what it generates.

    python examples/train_tiny_video.py vae                      # 1. the autoencoder
    python examples/train_tiny_video.py transformer              # 2. the denoiser and its text encoder
    python examples/train_tiny_video.py score --recipe exact     # 3. 48 held-out prompts, recognised from pixels
    python examples/train_tiny_video.py score --recipe sage3

Steps 1 and 2 take under ten minutes each on one data-centre GPU with ``--mixed-precision bf16`` (and ``--compile`` for
the transformer). The result is a diffusers folder for ``CogVideoXPipeline.from_pretrained("examples/tiny_video")``.
What a step draws depends on (seed, step, process) only.
"""

import argparse
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import AutoencoderKLCogVideoX, CogVideoXPipeline, CogVideoXTransformer3DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from diffusers.utils import export_to_gif
from PIL import Image
from shapes import CAPTION_TEMPLATES, Scene, attribute_matches, draw_clips, held_out_scenes, read_clips, train_scenes
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
from tiny_video_score import demo_scenes, generate, score, update_json
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerFast, T5EncoderModel

logger = logging.getLogger("train_tiny_video")
DEFAULT_FOLDER = Path(__file__).parent / "tiny_video"
LOGGED_SETTINGS = ("steps", "batch_size", "lr", "warmup", "ema_decay", "seed", "mixed_precision", "pool")
CAPTION_DROPOUT = 0.1


class VaeObjective(nn.Module):
    """Loss of the autoencoder: reconstruction, plus a small KL term that keeps the latents smooth and centred.

    A shape covers about 5 % of a frame: without a larger weight there, drawing only the background is a local optimum.
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
        """Encode clips (B, F, 3, H, W) in [0, 1] to the latents' means, and decode these."""
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

        The others are timesteps (B,) int64 and input_ids (B, L) int64.
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
    """Train ``objective`` for ``args.steps`` steps, with samples and a log.

    Args:
        objective: maps the keyword arguments that ``draw_batch`` returns to a dict with "loss".
        draw_batch: called with a step and that step's seed.
        show: called with the averaged objective and a path without suffix, to which it writes a sample.

    Returns:
        The exponential moving average of the objective, and the losses logged.
    """
    samples = args.run_dir / args.command / "samples"
    samples.mkdir(parents=True, exist_ok=True)
    average = AveragedModel(objective, multi_avg_fn=get_ema_multi_avg_fn(args.ema_decay))
    optimizer = torch.optim.AdamW(objective.parameters(), lr=args.lr, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, args.warmup, args.steps)
    objective, optimizer = accelerator.prepare(objective, optimizer)
    log: list[dict[str, float]] = []
    with tqdm(total=args.steps, disable=not accelerator.is_local_main_process, mininterval=2.0) as bar:
        for step in range(args.steps):
            losses = objective(**draw_batch(step, (args.seed * 1_000_003 + step) * 1_009 + accelerator.process_index))
            accelerator.backward(losses["loss"])
            accelerator.clip_grad_norm_(objective.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            average.update_parameters(accelerator.unwrap_model(objective))
            bar.update()
            done = step + 1
            if done % args.log_every == 0 or done == args.steps:
                row = {name: round(value.item(), 5) for name, value in losses.items()}
                log.append({"step": done, **row})
                bar.set_postfix(row)
            if accelerator.is_main_process and (done % args.sample_every == 0 or done == args.steps):
                show(average.module, samples / f"step_{done:06d}")
    return average.module, log


def to_model_range(clips: Tensor) -> Tensor:
    """Convert clips (B, F, 3, H, W) in [0, 1] to the VAE's (B, 3, F, H, W) in [-1, 1]."""
    return (clips * 2 - 1).transpose(1, 2).contiguous()


def save_gif(clips: Tensor, path: Path) -> None:
    """Write clips (B, F, 3, H, W) in [0, 1] side by side into one gif."""
    frames = (clips.float().clamp(0, 1) * 255).round().byte().permute(1, 3, 0, 4, 2).flatten(2, 3)
    export_to_gif([Image.fromarray(frame) for frame in frames.cpu().numpy()], str(path.with_suffix(".gif")), fps=8)


def random_scenes(count: int, generator: torch.Generator) -> list[Scene]:
    scenes = train_scenes()
    return [scenes[i] for i in torch.randint(len(scenes), (count,), generator=generator).tolist()]


def settings(args: argparse.Namespace) -> dict:
    return {name: getattr(args, name) for name in LOGGED_SETTINGS if hasattr(args, name)}


def train_vae(args: argparse.Namespace, size: TinySize) -> None:
    """Train the autoencoder; save it, with the scaling factor of its latents, as ``<folder>/vae``."""
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    torch.manual_seed(args.seed)
    device = accelerator.device
    objective = VaeObjective(build_vae(size)).to(device)
    frames, channels, height, width = size.latent_shape

    def draw(scenes: Sequence[Scene], generator: torch.Generator) -> Tensor:
        return draw_clips(scenes, generator=generator, num_frames=size.num_frames, size=size.clip_size, device=device)

    def draw_batch(step: int, seed: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        clips = draw(random_scenes(args.batch_size, generator), generator)
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
    clips = draw(random_scenes(16, generator), generator)
    with torch.no_grad():
        latents = averaged.vae.encode(to_model_range(clips)).latent_dist.mode()
    averaged.vae.register_to_config(scaling_factor=round(1 / latents.std().item(), 6))
    psnr, readings = [], []
    for start in range(0, len(held_out_scenes()), 8):
        clips = draw(held_out_scenes()[start : start + 8], generator)
        decoded = averaged.reconstruct(clips)
        psnr += (-10 * (decoded - clips).square().mean((1, 2, 3, 4)).log10()).tolist()
        readings += read_clips(decoded)
    right = {name: sum(hits) for name, hits in attribute_matches(readings, held_out_scenes()).items()}
    result = {"minutes": minutes, "held_out_psnr_db": round(sum(psnr) / len(psnr), 2), "held_out_read_of_48": right}
    logger.info("vae: %s, scaling factor %g", result, averaged.vae.config.scaling_factor)
    averaged.vae.to(torch.float16).save_pretrained(args.folder / "vae")
    update_json(args.folder / "training.json", "vae", {**result, "settings": settings(args), "losses": log})


def caption_ids(tokenizer: PreTrainedTokenizerFast, length: int) -> Tensor:
    """Return token ids (training scenes + 1, templates, length); the last row is the empty caption."""
    captions = [scene.caption(template) for scene in train_scenes() for template in CAPTION_TEMPLATES]
    captions += [""] * len(CAPTION_TEMPLATES)
    ids = tokenizer(captions, padding="max_length", max_length=length, return_tensors="pt").input_ids
    return ids.view(-1, len(CAPTION_TEMPLATES), length)


@torch.no_grad()
def encode(
    vae: AutoencoderKLCogVideoX, size: TinySize, scenes: Sequence[Scene], seed: int, backwards: bool = False
) -> Tensor:
    """Return scaled latents (scenes, f, C, h, w) float32 of a drawn clip of each scene, which may run backwards."""
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
    """Remove this machine's paths, and transformers 5's tokenizer class, which 4 does not know, from the configs."""
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
    numbers = torch.arange(args.pool) % len(train_scenes())
    latents = encode(vae, size, [train_scenes()[i] for i in numbers.tolist()], args.seed).half()
    numbers = numbers.to(device)
    tokenizer, scheduler = build_tokenizer(), build_scheduler()
    short_ids, long_ids = (caption_ids(tokenizer, n).to(device) for n in (PROMPT_LENGTH, PIPELINE_PROMPT_LENGTH))
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
    # Half precision halves the folder; the text encoder is tiny, and transformers would load it as it is stored.
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
    result = {"minutes": minutes, "settings": settings(args), "losses": log}
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
        command.add_argument("--batch-size", type=int, default=batch_size)
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
    for command in commands.choices.values():
        command.add_argument("--folder", type=Path, default=DEFAULT_FOLDER, help="the pipeline folder")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, size: TinySize | None = None) -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    args = parse_args(argv)
    if args.command == "score":
        score(args.folder, args.recipe, guidance_scale=args.guidance_scale, save=args.save)
        return
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    args.folder.mkdir(parents=True, exist_ok=True)
    {"vae": train_vae, "transformer": train_transformer}[args.command](args, size or TinySize())


if __name__ == "__main__":
    main()
