"""Train a small video model densely and with VSA on this GPU, run the dense one sparsely, and judge what they draw.

python studies/sparse_quality.py --minutes 9.4 --output benchmarks/results

For each seed the model of `sparse_video` is trained twice from the same weights on the same batches: with dense exact
attention, and with VSA at 75 %. Then 48 held-out prompts are rendered: by both as they were trained; by the dense one
with its tiles chosen by each router; by VSA with its fine stage in few bits. "rows" of the JSON have what was
recognised in the clips; PSNR and SSIM against the same weights with exact attention (of VSA: with an exact fine stage),
clip by clip from the same noise; and the share of tiles, and of attention weight, that was kept. "training" has the
losses. Every row is written when it is known: a run that is cut keeps what it has.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from sparse_video import Clips, Denoiser, Size, Training, generate, held_out_loss, score, shown_scenes
from torch import Tensor

import sage_hf
from sage_hf import SageConfig, Sparse
from sage_hf.bench.results import facts, path_of, reason, write
from sage_hf.config import LayerRule
from sage_hf.diffusers.processor import sage_of
from sage_hf.metrics import psnr, ssim
from sage_kernels.dispatch.select import set_routing

SPARSITY = 0.75
KEEPS = (0.25, 0.5, 0.15)
ROUTERS = ("mean", "subblock", "share")
DENSE_STEPS = 3
GUIDANCE = 3.0
KINDS = ("dense", "vsa")
"""Kinds of training."""
TOY = Size(8, 16, 2, heads=1, head_dim=32, layers=1, batch=2, pool=80, held_out=4)
JUDGED_BY_SSIM = 8
"""Clips whose SSIM is computed, by the host."""
LEARNING_RATE = 2e-3
STEPS = 11_000
"""Training steps, of `Size.batch` clips."""
POINTS = 50
"""Points of a curve of losses."""
SHOWN = 8
"""Prompts of the picture."""
LABEL_WIDTH, HEAD_HEIGHT = 300, 66
ENLARGED = 3


@dataclass(frozen=True)
class Variant:
    """A way to run a trained model.

    Attributes:
        trained: one of KINDS.
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


def _order(one: Variant) -> tuple[bool, bool, float]:
    """Return the place of a way in the picture: dense models before VSA's, dense calls before sparse ones."""
    sparse = None if one.config is None else one.config.sparse
    return one.trained == "vsa", one.vsa, -getattr(sparse, "keep", 1.0)


class Study:
    """The models of all seeds, the ways to run them, and the JSON and the picture, written when there is more.

    Attributes:
        result: the JSON so far.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.end = args, time.time() + 60 * args.minutes
        self.size = TOY if args.toy else Size()
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.variants = variants(None if self.device.type == "cuda" else "emulate")
        self.frames: dict[str, Any] = {}
        self.result: dict[str, Any] = {
            **facts(self.device),
            "size": asdict(self.size) | {"tokens": self.size.tokens},
            "sparsity": SPARSITY,
            "learning_rate": LEARNING_RATE,
            "sampling": {"steps": args.sampling_steps, "guidance": GUIDANCE},
            "training": [],
            "rows": [],
        }

    def run(self) -> None:
        """Train, render and judge, seed after seed, until the time is over."""
        clips, held_out = Clips.to_learn_from(self.size, self.device), Clips.held_out(self.size, self.device)
        for seed, kind in itertools.product(range(self.args.seeds), KINDS):
            if time.time() > self.end:
                break
            denoiser, reference = self._train(kind, seed, clips, held_out), None
            for variant in self.variants:
                if variant.trained == kind and time.time() < self.end:
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
        """Add the row of a way to run a model; return its clips, None if it fails."""
        scenes, clips = shown_scenes(), None
        row: dict[str, Any] = {"trained": variant.trained, "run": variant.run, "seed": seed}
        try:
            denoiser = in_low_precision(denoiser)
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
            if reference is not None:
                row |= distances(reference, clips)
            row["score"] = score(clips, scenes)
            if seed == 0:
                frames = clips[:: len(scenes) // SHOWN, clips.shape[1] // 2].cpu().numpy()
                self.frames[f"{variant.trained}: {variant.run}"] = frames
                self._draw()
        except Exception as error:  # a variant that fails says so in its row, and costs no other one
            row["unavailable"] = reason(error)
        self._add("rows", row)
        return clips

    def _add(self, table: str, row: dict[str, Any]) -> None:
        """Add a row, write the JSON, and print the row."""
        self.result[table].append(row)
        write(self._file(), self.result)
        print(", ".join(f"{key} {x}" for key, x in row.items() if key != "curve"), flush=True)

    def _draw(self) -> None:
        """Write the picture: prompts, and below them a frame of each way to run seed 0's models, in order."""
        ordered = sorted(self.variants, key=_order)
        labels = [label for one in ordered if (label := f"{one.trained}: {one.run}") in self.frames]
        side = ENLARGED * self.size.pixels
        picture = Image.new("RGB", (LABEL_WIDTH + SHOWN * side, HEAD_HEIGHT + len(labels) * side), "white")
        draw, font = ImageDraw.Draw(picture), ImageFont.load_default(13)
        scenes = shown_scenes()
        for column, scene in enumerate(scenes[:: len(scenes) // SHOWN]):
            middle = (LABEL_WIDTH + column * side + side // 2, HEAD_HEIGHT // 2)
            draw.multiline_text(middle, "\n".join(scene), "black", font, anchor="mm", align="center", spacing=2)
        for line, label in enumerate(labels):
            frames = self.frames[label]
            pixels = (np.concatenate(list(frames), -1) * 255).round().astype(np.uint8).transpose(1, 2, 0)
            image = Image.fromarray(pixels).resize((len(frames) * side, side), Image.Resampling.NEAREST)
            picture.paste(image, (LABEL_WIDTH, HEAD_HEIGHT + line * side))
            draw.text((8, HEAD_HEIGHT + line * side + side // 2), label, "black", font, anchor="lm")
        picture.save(self._file().with_suffix(".png"))
        self.result["picture"] = labels

    def _file(self) -> Path:
        return path_of(self.args.output, self.result, "sparse_quality")


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
    parser.add_argument("--minutes", type=float, default=9.4, help="after which the run is cut")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS, help="of training")
    parser.add_argument("--sampling-steps", type=int, default=12)
    parser.add_argument("--toy", action="store_true", help="a tiny model, to try the program on a CPU")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results"))
    torch.backends.cuda.matmul.allow_tf32 = True
    set_routing(False)  # quality is judged: what is asked for runs, at any cost
    Study(parser.parse_args(argv)).run()


if __name__ == "__main__":
    main()
