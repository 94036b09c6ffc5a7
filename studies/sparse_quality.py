"""Train a small video model densely and with VSA, run the dense model in low bits and sparsely, and judge the clips.

    python studies/sparse_quality.py --output benchmarks/results

For each seed the model of `sparse_video` is trained twice from the same weights on the same batches: with dense exact
attention, and with VSA at 75 %. Then 48 held-out prompts are rendered: by both models as they were trained; by the
dense model with each recipe, and with tiles chosen by each router; by the VSA model with a low-bit fine stage. "rows"
of the JSON have the attributes recognised in the clips; PSNR, SSIM and flicker against the same weights with exact
attention (for VSA, with an exact fine stage), clip by clip from the same noise; and the kept shares of tiles and
attention weight. "training" has the losses. Every row is written at once, so an interrupted run keeps its rows. Seeds
run in turn, or a process on each GPU takes some seeds, and all processes write the same JSON.
"""

from __future__ import annotations

import argparse
import copy
import fcntl
import itertools
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from pooled_tail import with_pooled_tail
from sparse_video import Clips, Denoiser, Size, Training, generate, held_out_loss, score, shown_scenes
from torch import Tensor

import sage_hf
from sage_hf import SageConfig, Sparse
from sage_hf.bench.results import facts, path_of, read, reason, write
from sage_hf.config import LayerRule
from sage_hf.diffusers.processor import sage_of
from sage_hf.metrics import psnr, ssim

SPARSITY = 0.75
RECIPES = ("sage1", "sage2", "sage3", "sage3_paper")
KEEPS = (0.5, 0.25)
ROUTERS = ("mean", "subblock")
DENSE_STEPS = 3
GUIDANCE = 3.0
KINDS = ("dense", "vsa")
"""Kinds of training."""
TOY = Size(15, 32, heads=1, head_dim=32, layers=1, batch=2, pool=80, held_out=4)
JUDGED_BY_SSIM = 8
"""Number of clips whose SSIM the host computes."""
LEARNING_RATE = 1e-3
STEPS = 5200
"""Number of training steps, of `Size.batch` clips each."""
POINTS = 50
"""Number of points of a curve of losses."""
SHOWN = 8
"""Prompts of the picture."""
LABEL_WIDTH = 300
"""Pixels of the picture's first column, which names the rows."""
HEAD_HEIGHT = 66
"""Pixels of the picture's first row, which names the columns."""
ENLARGED = 2
"""Pixels of the picture for each pixel of a clip."""


@dataclass(frozen=True)
class Variant:
    """A way to run a trained model.

    Attributes:
        trained: one of KINDS.
        run: name in the JSON.
        config: the configuration to apply; None: none.
        vsa: whether it attends by VSA although it was trained densely.
        tail: whether sparse calls have a pooled tail.
    """

    trained: str
    run: str
    config: SageConfig | None = None
    vsa: bool = False
    tail: bool = False

    @property
    def is_reference(self) -> bool:
        """Return whether the other variants of the same training are compared with this variant."""
        return self.config is None and not self.vsa


def _config(recipe: str, sparse: Sparse | None = None) -> SageConfig:
    """Return a recipe in self-attention; cross-attention, which has three keys, stays exact."""
    return SageConfig(recipe, fallback="emulate", layers=(LayerRule("*.attn2", "exact"),), sparse=sparse)


def variants() -> list[Variant]:
    """Return all variants, in the order of the table."""
    listed = [Variant("dense", "exact"), *(Variant("dense", recipe, _config(recipe)) for recipe in RECIPES)]
    for keep in KEEPS:
        for router in ROUTERS:
            sparse = Sparse(router, keep, from_tokens=1)
            listed.append(Variant("dense", f"sage2, {router} {keep:g}", _config("sage2", sparse)))
        listed.append(Variant("dense", f"exact, subblock {keep:g}, pooled tail", listed[-1].config, tail=True))
    sparse = Sparse("subblock", KEEPS[-1], dense_steps=DENSE_STEPS, from_tokens=1)
    run = f"sage2, subblock {KEEPS[-1]:g}, {DENSE_STEPS} dense steps"
    listed += [Variant("dense", run, _config("sage2", sparse)), Variant("dense", "VSA, not trained", vsa=True)]
    return [*listed, Variant("vsa", "VSA"), Variant("vsa", "VSA, sage2", _config("sage2"))]


class Study:
    """The models of some seeds and their variants, with the JSON and the picture to which each result is added."""

    def __init__(self, args: argparse.Namespace, seeds: Sequence[int]) -> None:
        self.args, self.seeds = args, seeds
        self.size = TOY if args.toy else Size()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.facts = facts(self.device)
        self.path = path_of(args.output, self.facts, "sparse_quality")
        self.frames: dict[str, Any] = {}

    def begin(self) -> None:
        """Write a JSON without rows."""
        size = asdict(self.size) | {"tokens": self.size.tokens}
        sampling = {"steps": self.args.sampling_steps, "guidance": GUIDANCE}
        result = {"size": size, "sparsity": SPARSITY, "learning_rate": LEARNING_RATE, "sampling": sampling}
        write(self.path, self.facts | result | {"training": [], "rows": []})

    def run(self) -> None:
        """Train, render and judge until the time is over: all seeds in one kind of training, then in the next kind."""
        torch.backends.cuda.matmul.allow_tf32 = True
        sage_hf.set_routing(False)  # quality is judged, so the requested recipe runs even where it is slow
        clips, held_out = Clips.to_learn_from(self.size, self.device), Clips.held_out(self.size, self.device)
        for kind, seed in itertools.product(self.args.trained, self.seeds):
            if time.time() > self.args.end:
                break
            denoiser, reference = self._train(kind, seed, clips, held_out), None
            for variant in variants():
                if variant.trained == kind and time.time() < self.args.end:
                    rendered = self._render(variant, seed, denoiser, reference)
                    reference = rendered if variant.is_reference else reference

    def _train(self, kind: str, seed: int, clips: Clips, held_out: Clips) -> Denoiser:
        denoiser = Denoiser(self.size, seed).to(self.device)
        if kind == "vsa":
            sage_hf.enable_vsa(denoiser.transformer, SPARSITY)
        if self.device.type == "cuda":
            for block in denoiser.transformer.blocks:
                block.compile(dynamic=False)
        training = Training(denoiser, LEARNING_RATE, [])
        training.run(clips, self.size, seed, self.args.steps)
        losses = torch.stack(training.losses).float()
        curve = [part.mean().item() for part in losses.split(max(1, len(losses) // POINTS))]
        plain = copy.deepcopy(denoiser).eval()
        row = {
            "trained": kind,
            "seed": seed,
            "steps": len(losses),
            "seconds": training.seconds,
            "train_loss": losses[-max(1, len(losses) // 10) :].mean().item(),
            "held_out_loss": held_out_loss(plain, held_out, self.size),
            "curve": [round(loss, 5) for loss in curve],
        }
        self._add("training", row)
        return plain

    def _render(self, variant: Variant, seed: int, denoiser: Denoiser, reference: Tensor | None) -> Tensor | None:
        """Add the row of a variant; return its clips, None if it fails."""
        scenes, clips = shown_scenes(), None
        row: dict[str, Any] = {"trained": variant.trained, "run": variant.run, "seed": seed}
        try:
            denoiser = in_low_precision(denoiser)
            if variant.vsa:
                sage_hf.enable_vsa(denoiser.transformer, SPARSITY)
            tail = with_pooled_tail() if variant.tail else nullcontext()
            with tail, applied(denoiser, variant.config, self.args.sampling_steps) as kept:
                clips = generate(
                    denoiser, scenes, self.size, steps=self.args.sampling_steps, guidance=GUIDANCE, device=self.device
                )
                row |= kept()
            if reference is not None:
                row |= distances(reference, clips)
            row["score"] = score(clips, scenes)
            if seed == self.args.seeds[0]:
                frames = clips[:: len(scenes) // SHOWN, clips.shape[1] // 2].cpu().numpy()
                self.frames[f"{variant.trained}: {variant.run}"] = frames
                self._draw()
        except Exception as error:  # a failed variant's row holds the error, and other variants still run
            row["unavailable"] = reason(error)
        self._add("rows", row)
        return clips

    def _add(self, table: str, row: dict[str, Any]) -> None:
        """Add a row to the JSON, and print it."""
        with self._changed() as result:
            result[table].append(row)
        print(", ".join(f"{key} {x}" for key, x in row.items() if key != "curve"), flush=True)

    @contextmanager
    def _changed(self) -> Iterator[dict[str, Any]]:
        """Yield the JSON to change, and write it afterwards; other processes wait."""
        folder = os.open(self.args.output, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            result = read(self.path)
            yield result
            write(self.path, result)
        finally:
            os.close(folder)

    def _draw(self) -> None:
        """Write the picture: prompts, and below them a frame of each variant of the first seed's models."""
        side = ENLARGED * self.size.pixels
        picture = Image.new("RGB", (LABEL_WIDTH + SHOWN * side, HEAD_HEIGHT + len(self.frames) * side), "white")
        draw, font = ImageDraw.Draw(picture), ImageFont.load_default(13)
        scenes = shown_scenes()
        for column, scene in enumerate(scenes[:: len(scenes) // SHOWN]):
            middle = (LABEL_WIDTH + column * side + side // 2, HEAD_HEIGHT // 2)
            draw.multiline_text(middle, "\n".join(scene), "black", font, anchor="mm", align="center", spacing=2)
        for line, (label, frames) in enumerate(self.frames.items()):
            pixels = (np.concatenate(list(frames), -1) * 255).round().astype(np.uint8).transpose(1, 2, 0)
            image = Image.fromarray(pixels).resize((len(frames) * side, side), Image.Resampling.NEAREST)
            picture.paste(image, (LABEL_WIDTH, HEAD_HEIGHT + line * side))
            draw.text((8, HEAD_HEIGHT + line * side + side // 2), label, "black", font, anchor="lm")
        picture.save(self.path.with_suffix(".png"))
        with self._changed() as result:
            result["picture"] = list(self.frames)


def in_low_precision(denoiser: Denoiser) -> Denoiser:
    """Return a copy in evaluation mode; on a GPU in bfloat16, except for the modules that diffusers keeps in
    float32."""
    denoiser = copy.deepcopy(denoiser).eval()
    keep = set(denoiser.transformer._keep_in_fp32_modules)
    for name, parameter in denoiser.named_parameters():
        if parameter.is_cuda and not keep & set(name.split(".")):
            parameter.data = parameter.data.bfloat16()
    return denoiser


@contextmanager
def applied(denoiser: Denoiser, config: SageConfig | None, steps: int) -> Iterator[Callable[[], dict[str, float]]]:
    """Apply a configuration, and yield a function that returns the kept shares.

    Raises:
        RuntimeError: raised by this function if a call of self-attention was dense but should have been sparse.
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
            statistics = [layer.statistics for layer in layers]
            dense = [why for layer in statistics for why in layer.dense]
            if any("steps" not in why for why in dense) or bool(dense) != bool(config.sparse.dense_steps):
                raise RuntimeError(f"not the calls that should be dense were: {dense[:1]}")
            mass = torch.stack([torch.stack(layer.mass).mean() for layer in statistics])
            least = torch.stack([torch.stack(layer.least).min() for layer in statistics])
            tiles = torch.stack([layer.tiles / layer.calls for layer in statistics])
            return {
                "tiles": tiles.mean().item(),
                "mass": mass.mean().item(),
                "least_layer_mass": mass.min().item(),
                "least_head_mass": least.min().item(),
            }

        yield kept


def distances(reference: Tensor, clips: Tensor) -> dict[str, float]:
    """Return the distances of clips (B, F, 3, H, W) from exact attention's clips.

    `psnr` and `ssim` are means over clips. `flicker` is the mean absolute difference of successive frames, over all
    clips, divided by exact attention's flicker: above 1, clips change more from frame to frame.
    """
    pairs = [tuple(x.permute(0, 2, 3, 1).cpu().numpy() for x in pair) for pair in zip(reference, clips, strict=True)]
    judged = pairs[:: -(-len(pairs) // JUDGED_BY_SSIM)]
    of_exact, of_clips = (x.diff(dim=1).abs().mean().item() for x in (reference, clips))
    return {
        "psnr": sum(min(100.0, psnr(*pair)) for pair in pairs) / len(pairs),
        "ssim": sum(ssim(*pair) for pair in judged) / len(judged),
        "flicker": of_clips / of_exact,
    }


def _run(args: argparse.Namespace, seeds: Sequence[int]) -> None:
    """Run some seeds in a separate process."""
    Study(args, seeds).run()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=math.inf, help="after which the run is cut")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trained", choices=KINDS, nargs="+", default=KINDS, help="kinds of training, in turn")
    parser.add_argument("--steps", type=int, default=STEPS, help="of training")
    parser.add_argument("--sampling-steps", type=int, default=16)
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the program on a CPU")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(argv)
    args.end = time.time() + 60 * args.minutes
    study = Study(args, args.seeds)
    study.begin()
    workers = min(len(args.seeds), torch.cuda.device_count())
    if workers < 2:
        study.run()
        return
    processes = []
    for gpu in range(workers):
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
        of_gpu = (args, args.seeds[gpu::workers])
        processes.append(multiprocessing.get_context("spawn").Process(target=_run, args=of_gpu))
        processes[-1].start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit("a seed failed")


if __name__ == "__main__":
    main()
