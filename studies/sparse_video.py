"""A small Wan transformer over the pixels of drawn clips: its data, training and sampling, for `sparse_quality`.

It is diffusers' own class with 4,352 tokens a clip, which learns to draw the scenes of examples/shapes.py from three
words: the colour, the shape and the direction. It has no autoencoder: a token is a patch of 4×4 pixels of two frames.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
from shapes import (
    COLOURS,
    DIRECTIONS,
    SHAPES,
    Scene,
    attribute_matches,
    draw_clips,
    held_out_scenes,
    read_clips,
    train_scenes,
)

WORDS = ("", *COLOURS, *SHAPES, *DIRECTIONS)
"""The words of a prompt; in the empty prompt, the first word stands three times."""
EMPTY_PROMPTS = 0.1
SHIFT = 8.0
"""Shift of noise levels towards more noise, because a shape of thousands of pixels is decided above level 0.9."""
PLACE_CHANNELS = 3
"""Number of channels with each pixel's frame, row and column, added to a noisy clip's three."""
WORD_CHANNELS = 8
"""Number of added channels with a projection of the prompt."""
MEAN = 0.1
"""The model gets (pixel - MEAN) / CONTRAST for a pixel of a clip in [0, 1]."""
CONTRAST = 0.25
"""Divisor of pixels, as above."""
DATA = 0.5
"""Standard deviation of the model's pixels, about."""
HELD_OUT_SEED = 12345
EAGER_STEPS = 3
"""Number of first training steps that are not captured."""


@dataclass(frozen=True)
class Size:
    """Sizes of clips, model and batch; the defaults are the measured sizes.

    Attributes:
        frames, pixels: number of frames of a clip, and its height and width.
        patch: frames, rows and columns of a token.
        heads, head_dim, layers: sizes of the transformer.
        batch: clips of a training step.
        pool: number of training clips.
        held_out: number of clips for the held-out loss.
    """

    frames: int = 33
    pixels: int = 64
    patch: tuple[int, int, int] = (2, 4, 4)
    heads: int = 6
    head_dim: int = 64
    layers: int = 6
    batch: int = 8
    pool: int = 8000
    held_out: int = 96

    @property
    def grid(self) -> tuple[int, int, int]:
        """Return (frames, height, width) in tokens."""
        frames, height, width = self.patch
        return -(-self.frames // frames), self.pixels // height, self.pixels // width

    @property
    def repeated(self) -> int:
        """Return how often the first frame is repeated before the clip, so that patches divide the frames.

        Causal autoencoders of video models also repeat it.
        """
        return self.grid[0] * self.patch[0] - self.frames

    @property
    def tokens(self) -> int:
        """Return the number of tokens of a clip."""
        return math.prod(self.grid)


class Denoiser(nn.Module):
    """Velocity of a noisy clip, given the noise level and three words.

    The transformer's output has unit variance at every level, as in EDM (arXiv 2206.00364): the clip is estimated as
    skip · noisy + out · output, with the factors for which the output has the least variance.
    """

    def __init__(self, size: Size, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(len(WORDS), 64)
        self.prompt = nn.Linear(3 * 64, WORD_CHANNELS)
        self.transformer = WanTransformer3DModel(
            patch_size=size.patch,
            num_attention_heads=size.heads,
            attention_head_dim=size.head_dim,
            in_channels=3 + PLACE_CHANNELS + WORD_CHANNELS,
            out_channels=3,
            text_dim=64,
            freq_dim=128,
            ffn_dim=4 * size.heads * size.head_dim,
            num_layers=size.layers,
            rope_max_seq_len=64,
        )
        nn.init.zeros_(self.transformer.condition_embedder.time_proj.weight)  # blocks begin close to the identity

    def forward(self, noisy: Tensor, level: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        """Return (velocity, factor) of noisy clips (B, 3, F, H, W) at levels (B,) in [0, 1].

        The velocity is noise minus clip, float32; `factor`, (B, 1, 1, 1, 1), is the share of an error of the
        transformer's output in it.
        """
        text = self.words(words)
        sides = [torch.linspace(-1, 1, side, device=noisy.device, dtype=text.dtype) for side in noisy.shape[2:]]
        places = torch.stack(torch.meshgrid(*sides, indexing="ij")).expand(len(noisy), -1, -1, -1, -1)
        prompt = self.prompt(text.flatten(1))[..., None, None, None].expand(-1, -1, *noisy.shape[2:])
        channels = torch.cat([noisy.to(text.dtype), places, prompt.to(text.dtype)], 1)
        output = self.transformer(channels, 1000 * level, text, return_dict=False)[0].float()
        at = level.float().view(-1, 1, 1, 1, 1)
        variance = ((1 - at) * DATA) ** 2 + at**2
        factor = DATA * variance.rsqrt()
        return noisy.float() * (at - (1 - at) * DATA**2) / variance - factor * output, factor


class Clips:
    """Random clips on a device, and training batches made of them.

    Attributes:
        clips: uint8 (pool, frames, 3, pixels, pixels).
        words: int64 (pool, 3).
        repeated: `Size.repeated`.
    """

    def __init__(self, scenes: Sequence[Scene], size: Size, seed: int, device: torch.device) -> None:
        generator, parts = torch.Generator().manual_seed(seed), []
        for first in range(0, len(scenes), 100):
            part = scenes[first : first + 100]
            drawn = draw_clips(part, generator=generator, num_frames=size.frames, size=size.pixels, device=device)
            parts.append((drawn * 255).round().byte())
        self.clips = torch.cat(parts)
        self.words = word_ids(scenes).to(device)
        self.repeated = size.repeated

    @classmethod
    def to_learn_from(cls, size: Size, device: torch.device) -> Clips:
        """Draw the pool: the same number of clips of each training scene."""
        scenes = train_scenes()
        return cls([scenes[i % len(scenes)] for i in range(size.pool)], size, 0, device)

    @classmethod
    def held_out(cls, size: Size, device: torch.device) -> Clips:
        """Draw clips of scenes that training does not show."""
        scenes = held_out_scenes()
        return cls([scenes[i % len(scenes)] for i in range(size.held_out)], size, HELD_OUT_SEED, device)

    def take(self, picked: Tensor | slice) -> Tensor:
        """Return clips in the model's form, float32 (B, 3, F, H, W), where F includes repeated frames."""
        clips = self.clips[picked]
        clips = torch.cat([clips[:, :1].expand(-1, self.repeated, -1, -1, -1), clips], 1)
        return ((clips.float() / 255 - MEAN) / CONTRAST).transpose(1, 2).contiguous()


def word_ids(scenes: Sequence[Scene]) -> Tensor:
    """Return the prompts of scenes: int64 (B, 3)."""
    return torch.tensor([[WORDS.index(str(word)) for word in scene] for scene in scenes])


def shifted(level: Tensor) -> Tensor:
    """Return noise levels in [0, 1] moved towards more noise."""
    return SHIFT * level / (1 + (SHIFT - 1) * level)


def flow_loss(denoiser: nn.Module, clean: Tensor, noise: Tensor, level: Tensor, words: Tensor) -> Tensor:
    """Return the mean squared error of the transformer's output, computed in bfloat16 on a GPU; 1 without knowledge."""
    at = level.view(-1, 1, 1, 1, 1)
    with torch.autocast(clean.device.type, torch.bfloat16, enabled=clean.is_cuda):
        velocity, factor = denoiser((1 - at) * clean + at * noise, level, words)
    return ((velocity - (noise - clean)) / factor).square().mean()


def draw_batch(clips: Clips, size: Size, seed: int, step: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (clean, noise, level, words) of a training step, which depend on seed and step alone."""
    device = clips.clips.device
    generator = torch.Generator(device).manual_seed(1_000_003 * (seed + 1) + step)
    picked = torch.randint(len(clips.clips), (size.batch,), generator=generator, device=device)
    clean = clips.take(picked)
    noise = torch.randn(clean.shape, generator=generator, device=device)
    # One level from each of `batch` equal parts of [0, 1], for less variance.
    level = (torch.arange(size.batch, device=device) + torch.rand(size.batch, generator=generator, device=device)) / (
        size.batch
    )
    dropped = torch.rand(size.batch, 1, generator=generator, device=device) < EMPTY_PROMPTS
    return clean, noise, shifted(level), clips.words[picked].masked_fill(dropped, 0)


@dataclass
class Training:
    """A training run.

    Attributes:
        denoiser: the model.
        learning_rate: peak learning rate; it rises for 5 % of the steps, and then falls to 0 by a cosine.
        losses: losses of all steps, on the device.
        seconds: time of the steps.
    """

    denoiser: Denoiser
    learning_rate: float
    losses: list[Tensor]
    seconds: float = 0.0

    def run(self, clips: Clips, size: Size, seed: int, steps: int) -> None:
        """Train for a number of steps; on a GPU, nearly all steps replay a CUDA graph."""
        warmup = max(1, steps // 20)

        def rate(step: int) -> float:
            return self.learning_rate * min((step + 1) / warmup, 0.5 + 0.5 * math.cos(math.pi * step / steps))

        self.denoiser.train()
        started = time.perf_counter()
        with on_stream_of_its_own(clips.clips.device):
            update = Update(self.denoiser)
            for step in range(steps):
                self.losses.append(update(draw_batch(clips, size, seed, step), rate(step)))
            self.losses[-1].item()
        self.seconds += time.perf_counter() - started


class Update:
    """Steps of AdamW on batches of one shape.

    On a GPU, the first `EAGER_STEPS` steps compile and make the optimizer's state. The next step is captured in a CUDA
    graph; it and all later steps replay the graph, because the host launches a small model's kernels more slowly than
    they run.
    """

    def __init__(self, denoiser: Denoiser) -> None:
        self.denoiser = denoiser
        self.parameters = list(denoiser.parameters())
        self.on_gpu = self.parameters[0].is_cuda
        self.rate = torch.zeros((), device=self.parameters[0].device)
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=self.rate,
            betas=(0.9, 0.98),
            weight_decay=0.01,
            fused=self.on_gpu,
            capturable=self.on_gpu,
        )
        self.steps = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch: tuple[Tensor, ...] = ()
        self.loss = torch.empty(())

    def __call__(self, batch: tuple[Tensor, ...], rate: float) -> Tensor:
        """Take a step with a batch of `draw_batch` at a learning rate, and return its loss."""
        self.rate.fill_(rate)
        self.steps += 1
        if not self.on_gpu or self.steps <= EAGER_STEPS:
            return self._step(batch)
        if self.graph is None:
            self.batch = tuple(x.clone() for x in batch)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
                self.loss = self._step(self.batch)
        for fixed, x in zip(self.batch, batch, strict=True):
            fixed.copy_(x)
        self.graph.replay()
        return self.loss.clone()

    def _step(self, batch: tuple[Tensor, ...]) -> Tensor:
        loss = flow_loss(self.denoiser, *batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


@contextmanager
def on_stream_of_its_own(device: torch.device) -> Iterator[None]:
    """Run on a separate stream of a GPU, because the default stream cannot be captured."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


@torch.no_grad()
def held_out_loss(denoiser: Denoiser, clips: Clips, size: Size) -> float:
    """Return the loss on held-out clips, each at its own level and with its own noise, the same for every model."""
    denoiser.eval()
    generator = torch.Generator().manual_seed(HELD_OUT_SEED)
    count, losses = len(clips.clips), []
    levels = shifted((torch.arange(count) + 0.5)[torch.randperm(count, generator=generator)] / count)
    for first in range(0, count, size.batch):
        part = slice(first, first + size.batch)
        clean = clips.take(part)
        noise = torch.randn(clean.shape, generator=generator).to(clean.device)
        loss = flow_loss(denoiser, clean, noise, levels[part].to(clean.device), clips.words[part])
        losses.append((loss.item(), len(clean)))
    return sum(loss * clips for loss, clips in losses) / count


@torch.no_grad()
def generate(
    denoiser: nn.Module, scenes: Sequence[Scene], size: Size, *, steps: int, guidance: float, device: torch.device
) -> Tensor:
    """Render scenes, each from its own seed, by Euler steps with classifier-free guidance, all in one batch of pairs.

    Returns:
        Clips (B, F, 3, H, W) float32 in [0, 1].
    """
    shape = (3, size.repeated + size.frames, size.pixels, size.pixels)
    seeds = [torch.Generator().manual_seed(1000 + i) for i in range(len(scenes))]
    x = torch.stack([torch.randn(shape, generator=seed_generator) for seed_generator in seeds]).to(device)
    words = word_ids(scenes).to(device)
    words = torch.cat([words, torch.zeros_like(words)])
    levels = shifted(torch.linspace(1, 0, steps + 1)).tolist()
    for level, following in itertools.pairwise(levels):
        both = torch.cat([x, x])
        with_prompt, empty = denoiser(both, torch.full((len(both),), level, device=device), words)[0].chunk(2)
        x = x + (following - level) * torch.lerp(empty, with_prompt, guidance)
    return (x * CONTRAST + MEAN).clamp(0, 1).transpose(1, 2)[:, size.repeated :].contiguous()


def shown_scenes() -> list[Scene]:
    """Return the scenes to render: the 48 scenes that training does not show."""
    return held_out_scenes()


def score(clips: Tensor, scenes: Sequence[Scene]) -> dict[str, int]:
    """Return the numbers of clips in which colour, shape, direction, and all three match the prompt."""
    matches = attribute_matches(read_clips(clips), scenes)
    counts = {name: sum(matches[name]) for name in Scene._fields}
    return counts | {"all": sum(map(all, zip(*(matches[name] for name in Scene._fields), strict=True)))}
