"""Train a small video model densely and with VSA on this GPU, run the dense one sparsely, and judge what they draw.

python benchmarks/sparse_quality.py --minutes 6.5 --output benchmarks/results

For each seed the model of `sparse_video` is trained twice from the same weights on the same batches: with dense exact
attention, and with VSA at 75 %. Then 48 held-out prompts are rendered: by both as they were trained; by the dense one
with its tiles chosen by each router; by VSA with its fine stage in few bits. "rows" of the JSON have what was
recognised in the clips; PSNR and SSIM against the same weights with exact attention (of VSA: with an exact fine stage),
clip by clip from the same noise; and the share of tiles, and of attention weight, that was kept. "training" has the
losses. The number of training steps follows from measured times, so that the whole ends within --minutes.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from record import git_commit
from sparse_video import Clips, Denoiser, Size, Training, generate, held_out_loss, score, shown_scenes
from torch import Tensor

import sage_hf
from sage_hf import SageConfig, Sparse
from sage_hf.app.metrics import psnr, ssim
from sage_hf.bench.measure import facts, reason
from sage_hf.config import LayerRule
from sage_hf.diffusers.processor import sage_of
from sage_kernels.registry import set_routing

NAME = "sparse_quality"
SPARSITY = 0.75
KEEPS = (0.25, 0.5, 0.15)
ROUTERS = ("mean", "subblock", "share")
DENSE_STEPS = 3
GUIDANCE = 3.0
TOY = Size(8, 16, 2, heads=1, head_dim=32, layers=1, batch=2, pool=80, held_out=4)
JUDGED_BY_SSIM = 8
"""Clips whose SSIM is computed, by the host."""
CALIBRATION_STEPS = 12
TIMED_STEPS = 3
"""Steps of rendering by which its time is planned."""
POINTS = 50
"""Points of a curve of losses."""
SHOWN = 8
"""Prompts of the picture."""
LABEL_WIDTH = 250
ENLARGED = 2


@dataclass(frozen=True)
class Variant:
    """A way to run a trained model.

    Attributes:
        trained: "dense" or "vsa".
        run: name in the JSON.
        config: what is applied; None: nothing.
        vsa: whether it attends by VSA though it was trained densely.
    """

    trained: str
    run: str
    config: SageConfig | None = None
    vsa: bool = False

    @property
    def is_reference(self) -> bool:
        """Return whether the others of the same training are compared with it."""
        return self.config is None and not self.vsa


def _config(sparse: Sparse | None = None, fallback: str | None = None) -> SageConfig:
    """Return `sage2` in self-attention; cross-attention, which has three keys, stays exact."""
    return SageConfig("sage2", fallback=fallback, layers=(LayerRule("*.attn2", "exact"),), sparse=sparse)


def variants(fallback: str | None = None) -> list[Variant]:
    """Return all ways to run the models, what matters most first."""
    found = [Variant("dense", "exact"), Variant("vsa", "VSA"), Variant("dense", "sage2", _config(fallback=fallback))]
    found.append(Variant("dense", "VSA, not trained", vsa=True))
    found.append(Variant("vsa", "VSA, sage2", _config(fallback=fallback)))
    sparse = Sparse("subblock", KEEPS[0], dense_steps=DENSE_STEPS, from_tokens=1)
    found.append(
        Variant("dense", f"sage2, subblock {KEEPS[0]:g}, {DENSE_STEPS} dense steps", _config(sparse, fallback))
    )
    for keep in KEEPS[::2]:
        sparse = Sparse("subblock", keep, from_tokens=1, per_head=True)
        found.append(Variant("dense", f"sage2, subblock {keep:g}, shares of heads", _config(sparse, fallback)))
    for keep in KEEPS:
        for router in ROUTERS:
            sparse = Sparse(router, keep, from_tokens=1)
            found.append(Variant("dense", f"sage2, {router} {keep:g}", _config(sparse, fallback)))
    return found


class Experiment:
    """The whole measurement, within its time.

    Attributes:
        result: the JSON so far.
    """

    def __init__(self, size: Size, device: torch.device, args: argparse.Namespace) -> None:
        self.size, self.device, self.args = size, device, args
        self.started = time.perf_counter()
        self.budget = 60 * args.minutes
        self.fallback = None if device.type == "cuda" else "emulate"
        self.models: dict[tuple[str, int], Denoiser] = {}
        self.references: dict[tuple[str, int], Tensor] = {}
        self.frames: dict[str, Tensor] = {}
        self.result: dict[str, Any] = {
            **facts(device, git_commit()),
            "size": asdict(size) | {"tokens": size.tokens},
            "sparsity": SPARSITY,
            "learning_rate": args.learning_rate,
            "sampling": {"steps": args.sampling_steps, "guidance": GUIDANCE},
            "training": [],
            "rows": [],
        }

    @property
    def elapsed(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self.started

    def run(self) -> None:
        """Train, render, judge, and write the JSON after each part."""
        clips = Clips.to_learn_from(self.size, self.device)
        held_out = Clips.held_out(self.size, self.device)
        self._say(f"{len(clips.clips)} clips drawn")
        steps = self._plan(clips)
        for seed in range(self.args.seeds):
            for trained in ("dense", "vsa"):
                self._train(trained, seed, steps, clips, held_out)
            for variant in variants(self.fallback):
                if self.elapsed > self.budget - 5:
                    self._say(f"no time for {variant.run}, seed {seed}")
                else:
                    self._render(variant, seed)
            self.models.clear()
            if seed == 0:
                self._draw()
        self._say("done")

    def _build(self, trained: str, seed: int) -> Denoiser:
        denoiser = Denoiser(self.size, seed).to(self.device)
        if trained == "vsa":
            sage_hf.enable_vsa(denoiser.transformer, SPARSITY)
        if self.args.compile:
            for block in denoiser.transformer.blocks:
                block.compile(dynamic=False)
        return denoiser

    def _plan(self, clips: Clips) -> int:
        """Measure a training step of both kinds and a step of rendering; return the steps that there is time for."""
        seconds = {}
        for trained in ("dense", "vsa"):
            warm = Training(self._build(trained, 0), self.args.learning_rate, [])
            warm.run(clips, self.size, 0, CALIBRATION_STEPS)
            self._say(f"{trained}: compiled, {CALIBRATION_STEPS} steps in {warm.seconds:.1f} s")
            timed = Training(warm.denoiser, self.args.learning_rate, [])
            timed.run(clips, self.size, 0, CALIBRATION_STEPS)
            seconds[trained] = timed.seconds / CALIBRATION_STEPS
        denoiser = in_low_precision(self._build("dense", 0))
        for _ in range(2):
            began = self.elapsed
            scenes = shown_scenes()
            generate(denoiser, scenes, self.size, steps=TIMED_STEPS, guidance=GUIDANCE, device=self.device)
            self._synchronize()
        step = (self.elapsed - began) / TIMED_STEPS
        count, seeds = len(variants()), self.args.seeds
        judging = seeds * count * (1.4 * self.args.sampling_steps * step + 0.7) + 10
        left = self.budget - self.elapsed
        judging = min(judging, left / 2)
        steps = self.args.steps or max(1, int(0.9 * (left - judging) / seeds / sum(seconds.values())))
        self.result["plan"] = {
            "training_ms": {name: 1e3 * value for name, value in seconds.items()},
            "rendering_ms": 1e3 * step,
            "steps": steps,
            "minutes": self.args.minutes,
        }
        self._say(f"plan: {self.result['plan']}, {judging:.0f} s for judging")
        return steps

    def _train(self, trained: str, seed: int, steps: int, clips: Clips, held_out: Clips) -> None:
        training = Training(self._build(trained, seed), self.args.learning_rate, [])
        training.run(clips, self.size, seed, steps, until=lambda: self.elapsed > 0.95 * self.budget)
        losses = torch.stack(training.losses).float()
        every = max(1, len(losses) // POINTS)
        curve = [part.mean().item() for part in losses.split(every)]
        plain = copy.deepcopy(training.denoiser)
        row = {
            "trained": trained,
            "seed": seed,
            "steps": len(losses),
            "seconds": training.seconds,
            "train_loss": losses[-max(1, len(losses) // 10) :].mean().item(),
            "held_out_loss": held_out_loss(plain, held_out, self.size),
            "curve": [round(loss, 5) for loss in curve],
        }
        self.result["training"].append(row)
        self.models[trained, seed] = plain.eval()
        self._write()
        shown = ", ".join(f"{loss:.4f}" for loss in curve[:: max(1, len(curve) // 8)])
        self._say(
            f"{trained}, seed {seed}: {row['steps']} steps in {training.seconds:.0f} s, loss {row['train_loss']:.5f}, "
            f"held out {row['held_out_loss']:.5f} ({shown})"
        )

    def _render(self, variant: Variant, seed: int) -> None:
        scenes = shown_scenes()
        row: dict[str, Any] = {"trained": variant.trained, "run": variant.run, "seed": seed}
        try:
            denoiser = in_low_precision(self.models[variant.trained, seed])
            if variant.vsa:
                sage_hf.enable_vsa(denoiser.transformer, SPARSITY)
            with applied(denoiser, variant.config, self.args.sampling_steps) as kept:
                clips = generate(
                    denoiser,
                    scenes,
                    self.size,
                    steps=self.args.sampling_steps,
                    guidance=GUIDANCE,
                    device=self.device,
                )
                row |= kept()
            if variant.is_reference:
                self.references[variant.trained, seed] = clips
            elif (reference := self.references.get((variant.trained, seed))) is not None:
                row |= distances(reference, clips)
            row["score"] = score(clips, scenes)
            if seed == 0:
                self.frames[f"{variant.trained}: {variant.run}"] = clips[:: len(scenes) // SHOWN, clips.shape[1] // 2]
        except Exception as error:  # a variant that fails says so in its row, and costs no other one
            row["unavailable"] = reason(error)
        self.result["rows"].append(row)
        self._write()
        told = {key: round(value, 4) if isinstance(value, float) else value for key, value in row.items()}
        self._say(", ".join(f"{key} {value}" for key, value in told.items()))

    def _draw(self) -> None:
        """Write the picture: the middle frame of some prompts with each way to run seed 0's models."""
        if not self.frames:
            return
        side = ENLARGED * self.size.pixels
        picture = Image.new("RGB", (LABEL_WIDTH + SHOWN * side, len(self.frames) * side), "white")
        for line, (label, frames) in enumerate(self.frames.items()):
            pixels = (torch.cat(list(frames), -1) * 255).round().byte().permute(1, 2, 0)
            image = Image.fromarray(pixels.cpu().numpy()).resize((len(frames) * side, side), Image.Resampling.NEAREST)
            picture.paste(image, (LABEL_WIDTH, line * side))
            ImageDraw.Draw(picture).text((4, line * side + side // 2 - 6), label, fill="black")
        picture.save(self._file().with_suffix(".png"))
        self.result["picture"] = list(self.frames)
        self._write()

    def _file(self) -> Path:
        return self.args.output / f"{'-'.join(self.result['gpu'].lower().split())}-{NAME}.json"

    def _write(self) -> None:
        self.args.output.mkdir(parents=True, exist_ok=True)
        self._file().write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")

    def _say(self, text: str) -> None:
        print(f"{self.elapsed:6.1f} s  {text}", flush=True)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def in_low_precision(denoiser: Denoiser) -> Denoiser:
    """Return a copy in evaluation mode, on a GPU in bfloat16 but for what diffusers keeps in float32."""
    denoiser = copy.deepcopy(denoiser).eval()
    keep = set(denoiser.transformer._keep_in_fp32_modules)
    for name, parameter in denoiser.named_parameters():
        if parameter.is_cuda and not keep & set(name.split(".")):
            parameter.data = parameter.data.bfloat16()
    return denoiser


@contextmanager
def applied(denoiser: Denoiser, config: SageConfig | None, steps: int) -> Iterator[Callable[[], dict[str, float]]]:
    """Apply a configuration, and yield a function that returns what was kept.

    Raises:
        RuntimeError: by that function, if a call of self-attention was not sparse though it should be.
    """
    if config is None:
        yield dict
        return
    with sage_hf.apply(denoiser.transformer, config):
        layers = [sage_of(block.attn1).sparse for block in denoiser.transformer.blocks]
        if config.sparse is None:
            yield dict
            return
        layers[0].model.measured_calls = steps

        def kept() -> dict[str, float]:
            found = [layer.kept for layer in layers]
            dense = [why for one in found for why in one.dense]
            if any("steps" not in why for why in dense) or bool(dense) != bool(config.sparse.dense_steps):
                raise RuntimeError(f"not the calls that should be dense were: {dense[:1]}")
            mass = torch.stack([torch.stack(one.mass).mean() for one in found])
            least = torch.stack([torch.stack(one.least).min() for one in found])
            tiles = torch.stack([one.tiles / one.calls for one in found])
            return {
                "tiles": tiles.mean().item(),
                "mass": mass.mean().item(),
                "least_layer_mass": mass.min().item(),
                "least_head_mass": least.min().item(),
            }

        yield kept


def distances(reference: Tensor, clips: Tensor) -> dict[str, float]:
    """Return PSNR and SSIM of clips against those of exact attention: means over clips."""
    pairs = [tuple(x.permute(0, 2, 3, 1).cpu().numpy() for x in pair) for pair in zip(reference, clips, strict=True)]
    judged = pairs[:: -(-len(pairs) // JUDGED_BY_SSIM)]
    return {
        "psnr": sum(min(100.0, psnr(*pair)) for pair in pairs) / len(pairs),
        "ssim": sum(ssim(*pair) for pair in judged) / len(judged),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=6.5, help="that the whole may take")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="of training (default: those that there is time for)")
    parser.add_argument("--sampling-steps", type=int, default=12)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the program on a CPU")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(argv)
    torch.backends.cuda.matmul.allow_tf32 = True
    set_routing(False)  # quality is judged: what is asked for runs, at any cost
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    Experiment(TOY if args.toy else Size(), device, args).run()


if __name__ == "__main__":
    main()
