"""Procedural clips of one coloured shape moving in one direction, their captions, and a scorer that recognises them.

The grid has 8 colours x 4 shapes x 4 directions = 128 scenes. 48 of them are held out of all training
(:func:`held_out_scenes`), chosen so that every pair of attributes still occurs in training: a model that draws a
held-out scene must have composed it and cannot have copied it.

    >>> generator = torch.Generator().manual_seed(0)
    >>> clips = draw_clips([Scene("red", "circle", "left")], generator=generator)   # (1, 17, 3, 128, 128) in [0, 1]
    >>> read_clips(clips)[0]
    Scene(colour='red', shape='circle', direction='left')
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.90, 0.10, 0.10),
    "green": (0.10, 0.75, 0.15),
    "blue": (0.15, 0.25, 0.95),
    "yellow": (0.95, 0.90, 0.10),
    "magenta": (0.90, 0.15, 0.85),
    "cyan": (0.10, 0.85, 0.90),
    "orange": (1.00, 0.50, 0.05),
    "white": (0.95, 0.95, 0.95),
}
SHAPES: tuple[str, ...] = ("circle", "square", "triangle", "cross")
DIRECTIONS: dict[str, tuple[float, float]] = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}

# The first is the canonical caption; the others teach a model other wordings.
CAPTION_TEMPLATES: tuple[str, ...] = (
    "a {colour} {shape} moving {direction}",
    "{colour} {shape} {direction}",
    "the {colour} {shape} moves to the {direction}",
    "a {shape} that is {colour} going {direction}",
)


class Scene(NamedTuple):
    """Scene that a clip shows. In a reading (:func:`read_clips`) an attribute that was not recognised is None."""

    colour: str | None
    shape: str | None
    direction: str | None

    def caption(self, template: str = CAPTION_TEMPLATES[0]) -> str:
        return template.format(**self._asdict()).replace("a orange", "an orange")


def all_scenes() -> list[Scene]:
    """Return the whole grid of 128 scenes, in a fixed order."""
    return [Scene(c, s, d) for c in COLOURS for s in SHAPES for d in DIRECTIONS]


def is_held_out(scene: Scene) -> bool:
    """Check whether a scene is held out: for each shape and direction, three of the eight colours, in rotation."""
    colour, shape = list(COLOURS).index(scene.colour), SHAPES.index(scene.shape)
    return (colour + 2 * shape + 3 * list(DIRECTIONS).index(scene.direction)) % len(COLOURS) < 3


def held_out_scenes() -> list[Scene]:
    """Return the 48 scenes that no training clip shows."""
    return [scene for scene in all_scenes() if is_held_out(scene)]


def train_scenes() -> list[Scene]:
    """Return the 80 scenes that training clips show."""
    return [scene for scene in all_scenes() if not is_held_out(scene)]


def signed_distance(shape: str, x: Tensor, y: Tensor) -> Tensor:
    """Return the distance to the edge of a shape whose centroid is the origin, negative inside; y points down.

    Every shape has the area of the unit circle, so that size does not reveal the shape.
    """
    if shape == "circle":
        return torch.hypot(x, y) - 1
    if shape == "square":
        return torch.maximum(x.abs(), y.abs()) - math.sqrt(math.pi) / 2
    if shape == "triangle":
        inradius = math.sqrt(math.pi / (3 * math.sqrt(3)))
        return torch.maximum(y, math.sqrt(3) / 2 * x.abs() - y / 2) - inradius
    if shape == "cross":
        half_width = math.sqrt(math.pi / 20)
        long, short = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
        return torch.maximum(long - 3 * half_width, short - half_width)
    raise ValueError(f"unknown shape {shape!r}: one of {', '.join(SHAPES)}")


def _pixel_centres(size: int, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
    """Return x (1, size) and y (size, 1) of the pixel centres, in units of the frame's width."""
    centres = (torch.arange(size, device=device) + 0.5) / size
    return centres[None, :], centres[:, None]


def draw_clips(
    scenes: Sequence[Scene],
    *,
    generator: torch.Generator,
    num_frames: int = 17,
    size: int = 128,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw one clip for each scene, with random size, speed, path, shade and background.

    Args:
        scenes: B scenes.
        generator: a CPU generator; the same seed draws the same clips on every device.
        num_frames: frames of each clip.
        size: height and width in pixels.
        device: device of the clips.

    Returns:
        (B, num_frames, 3, size, size) float32 in [0, 1].
    """
    batch = len(scenes)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(batch, *shape, generator=generator)

    radius = uniform(0.10, 0.16)
    travel = uniform(0.32, 0.48)
    # A triangle reaches 1.56 radii from its centroid: with this margin every path stays inside the frame.
    margin = 1.56 * radius
    along = margin + (1 - 2 * margin - travel) * uniform(0, 1)
    across = margin + (1 - 2 * margin) * uniform(0, 1)
    heading = torch.tensor([DIRECTIONS[scene.direction] for scene in scenes], dtype=torch.float32)
    path = along[:, None] + travel[:, None] * torch.linspace(0, 1, num_frames)
    sign = heading.sum(-1, keepdim=True)
    path = torch.where(sign > 0, path, 1 - path)
    horizontal = heading[:, :1] != 0
    centre_x = torch.where(horizontal, path, across[:, None])
    centre_y = torch.where(horizontal, across[:, None], path)

    colour = torch.tensor([COLOURS[scene.colour] for scene in scenes]) * uniform(0.85, 1.0, 1)
    backdrop = uniform(0.02, 0.12, 1) + uniform(-0.02, 0.02, 3)
    slope = uniform(-0.04, 0.04, 2)

    radius, centre_x, centre_y = (t.to(device) for t in (radius, centre_x, centre_y))
    colour, backdrop, slope = (t.to(device) for t in (colour, backdrop, slope))
    x, y = _pixel_centres(size, device)
    coverage = torch.empty(batch, num_frames, size, size, device=device)
    for shape in SHAPES:
        rows = [i for i, scene in enumerate(scenes) if scene.shape == shape]
        if rows:
            scale = radius[rows, None, None, None]
            dx = (x - centre_x[rows, :, None, None]) / scale
            dy = (y - centre_y[rows, :, None, None]) / scale
            coverage[rows] = (0.5 - signed_distance(shape, dx, dy) * scale * size).clamp(0, 1)

    shading = slope[:, :1, None] * (x - 0.5) + slope[:, 1:, None] * (y - 0.5)
    background = (backdrop[:, :, None, None] + shading[:, None]).clamp(0, 1)[:, None]
    return torch.lerp(background, colour[:, None, :, None, None], coverage[:, :, None])


def _masks(clips: Tensor) -> tuple[Tensor, Tensor]:
    """Return the foreground (B, F, H, W) as 0/1, and whether a frame shows an object of a shape's size (B, F).

    The background is each frame's median colour; the edge is where the contrast falls to half of its peak.
    """
    background = clips.flatten(-2).median(-1).values[..., None, None]
    contrast = (clips - background).abs().amax(2)
    peak = contrast.flatten(-2).kthvalue(int(0.99 * contrast[0, 0].numel()), dim=-1).values
    mask = (contrast > peak[..., None, None] / 2).float()
    share = mask.mean((-2, -1))
    return mask, (peak > 0.2) & (share > 0.005) & (share < 0.3)


def _read_colour(clip: Tensor, mask: Tensor) -> str | None:
    """Return the palette entry nearest to the median foreground colour at any brightness; None if none is near."""
    pixels = clip.permute(0, 2, 3, 1)[mask > 0]
    colour = pixels.median(0).values
    names, palette = list(COLOURS), torch.tensor(list(COLOURS.values()), device=clip.device)
    distance = (colour / colour.max() - palette / palette.amax(1, keepdim=True)).norm(dim=1)
    nearest = int(distance.argmin())
    return names[nearest] if distance[nearest] < 0.35 else None


def _read_shape(mask: Tensor, area: Tensor, centre_x: Tensor, centre_y: Tensor) -> str | None:
    """Return the shape whose template at the mask's centroid and area overlaps it best; None up to an IoU of 0.6."""
    x, y = _pixel_centres(mask.shape[-1], mask.device)
    scale = (area / math.pi).sqrt()[:, None, None]
    dx, dy = (x - centre_x[:, None, None]) / scale, (y - centre_y[:, None, None]) / scale
    overlap = []
    for shape in SHAPES:
        template = (signed_distance(shape, dx, dy) < 0).float()
        intersection = (template * mask).sum()
        overlap.append(intersection / (template.sum() + mask.sum() - intersection))
    best = int(torch.stack(overlap).argmax())
    return SHAPES[best] if overlap[best] > 0.6 else None


def _read_direction(frames: Tensor, centre_x: Tensor, centre_y: Tensor) -> str | None:
    """Return the direction of the centroid's least-squares velocity.

    It is None if the centroid moves by less than 1/8 of the frame's width in the clip, or diagonally.
    """
    time = frames - frames.mean()
    velocity = torch.stack([(time * centre_x).sum(), (time * centre_y).sum()]) / time.square().sum()
    travel = velocity * (frames[-1] - frames[0])
    major, minor = travel.abs().max(), travel.abs().min()
    if major < 0.125 or major < 2 * minor:
        return None
    headings = torch.tensor(list(DIRECTIONS.values()), dtype=travel.dtype, device=travel.device)
    return list(DIRECTIONS)[int((headings @ travel).argmax())]


def read_clips(clips: Tensor) -> list[Scene]:
    """Recognise colour, shape and direction from pixels alone.

    Args:
        clips: (B, F, 3, H, W) in [0, 1], H == W, any floating dtype.

    Returns:
        One :class:`Scene` for each clip; all attributes are None if fewer than 3/4 of the frames show an object.
    """
    if clips.ndim != 5 or clips.shape[2] != 3 or clips.shape[3] != clips.shape[4]:
        raise ValueError(f"clips must be (batch, frames, 3, size, size) in [0, 1], got {tuple(clips.shape)}")
    clips = clips.float()
    masks, seen = _masks(clips)
    x, y = _pixel_centres(clips.shape[-1], clips.device)
    readings = []
    for clip, mask, visible in zip(clips, masks, seen, strict=True):
        if visible.float().mean() < 0.75:
            readings.append(Scene(None, None, None))
            continue
        frames, clip, mask = visible.nonzero()[:, 0].float(), clip[visible], mask[visible]
        total = mask.sum((-2, -1))
        centre_x, centre_y = (mask * x).sum((-2, -1)) / total, (mask * y).sum((-2, -1)) / total
        area = total / mask[0].numel()
        readings.append(
            Scene(
                _read_colour(clip, mask),
                _read_shape(mask, area, centre_x, centre_y),
                _read_direction(frames, centre_x, centre_y),
            )
        )
    return readings


def attribute_matches(readings: Sequence[Scene], scenes: Sequence[Scene]) -> dict[str, list[bool]]:
    """Return, for each attribute and for colour and direction together, which clips show what was asked for."""
    pairs = list(zip(readings, scenes, strict=True))
    matches = {name: [getattr(r, name) == getattr(s, name) for r, s in pairs] for name in Scene._fields}
    matches["colour and direction"] = [c and d for c, d in zip(matches["colour"], matches["direction"], strict=True)]
    return matches
