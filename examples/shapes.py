"""Procedural clips of one or two moving coloured shapes, their captions, and a scorer that recognises them.

The grid has 8 colours x 4 shapes x 4 directions = 128 scenes. 48 of them are held out of all training
(:func:`held_out_scenes`), chosen so that every two attributes still occur together in training: a model that draws a
held-out scene must have composed it, and cannot have copied it. Two scenes of different colours and directions make a
:class:`Pair`, a clip of two shapes whose paths cross near its middle. A pair with a held-out scene is held out.

    >>> generator = torch.Generator().manual_seed(0)
    >>> clips = draw_clips([Scene("red", "circle", "left")], generator=generator)   # (1, 17, 3, 128, 128) in [0, 1]
    >>> read_clips(clips)[0]
    Scene(colour='red', shape='circle', direction='left')
    >>> pair = Pair(Scene("red", "circle", "left"), Scene("blue", "square", "right"))
    >>> pair.caption()
    'a red circle moving left and a blue square moving right'
    >>> read_pairs(draw_clips([pair], generator=generator))[0] == pair
    True
"""

import itertools
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

# The first caption is canonical; the others teach a model other wordings.
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


class Pair(NamedTuple):
    """Two scenes that one clip shows: their shapes cross, and the second covers the first."""

    first: Scene
    second: Scene

    def caption(self, template: str = CAPTION_TEMPLATES[0]) -> str:
        return f"{self.first.caption(template)} and {self.second.caption(template)}"


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


def can_cross(first: Scene, second: Scene) -> bool:
    """Check whether two scenes make a pair: their colours differ, and their paths are not parallel in time."""
    return first.colour != second.colour and first.direction != second.direction


def train_pairs() -> list[Pair]:
    """Return every pair of two training scenes, in both orders."""
    return [Pair(*scenes) for scenes in itertools.permutations(train_scenes(), 2) if can_cross(*scenes)]


def held_out_pairs() -> list[Pair]:
    """Return 48 pairs of held-out scenes; each scene is the first of one pair."""
    scenes = held_out_scenes()
    partners = scenes[len(scenes) // 2 :] + 2 * scenes
    return [
        Pair(scene, next(partner for partner in partners[number:] if can_cross(scene, partner)))
        for number, scene in enumerate(scenes)
    ]


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
    scenes: Sequence[Scene | Pair],
    *,
    generator: torch.Generator,
    num_frames: int = 17,
    size: int = 128,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draw one clip for each scene or pair, with random sizes, speeds, paths, shades and background.

    The shapes of a pair are a little smaller, start apart and meet near the middle of the frame and of the clip.

    Args:
        scenes: B scenes or pairs.
        generator: a CPU generator; the same seed draws the same clips on every device.
        num_frames: frames of each clip.
        size: height and width in pixels.
        device: device of the clips.

    Returns:
        (B, num_frames, 3, size, size) float32 in [0, 1].
    """
    clips_of_pairs = [i for i, scene in enumerate(scenes) if isinstance(scene, Pair)]
    firsts = [scene.first if isinstance(scene, Pair) else scene for scene in scenes]
    # One row for each shape: the first shape of every clip, then the second shape of every pair.
    objects = firsts + [scene.second for scene in scenes if isinstance(scene, Pair)]
    batch = len(scenes)
    in_pair = torch.tensor([isinstance(scene, Pair) for scene in scenes] + [True] * len(clips_of_pairs))

    def uniform(rows: int, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(rows, *shape, generator=generator)

    radius = uniform(len(objects), 0.10, 0.16)
    travel = uniform(len(objects), 0.32, 0.48)
    radius = torch.where(in_pair, (radius + 0.10) / 2, radius)
    travel = torch.where(in_pair, (travel + 0.52) / 2, travel)
    # A triangle reaches 1.56 radii from its centroid; with this margin, every path stays inside the frame.
    margin = 1.56 * radius
    place_along, place_across = uniform(len(objects), 0, 1), uniform(len(objects), 0, 1)
    near_middle = 0.46 - travel / 2 + 0.08 * place_along
    along = torch.where(in_pair, near_middle, margin + (1 - 2 * margin - travel) * place_along)
    across = torch.where(in_pair, 0.46 + 0.08 * place_across, margin + (1 - 2 * margin) * place_across)
    heading = torch.tensor([DIRECTIONS[scene.direction] for scene in objects], dtype=torch.float32)
    path = along[:, None] + travel[:, None] * torch.linspace(0, 1, num_frames)
    sign = heading.sum(-1, keepdim=True)
    path = torch.where(sign > 0, path, 1 - path)
    horizontal = heading[:, :1] != 0
    centre_x = torch.where(horizontal, path, across[:, None])
    centre_y = torch.where(horizontal, across[:, None], path)

    colour = torch.tensor([COLOURS[scene.colour] for scene in objects]) * uniform(len(objects), 0.85, 1.0, 1)
    backdrop = uniform(batch, 0.02, 0.12, 1) + uniform(batch, -0.02, 0.02, 3)
    slope = uniform(batch, -0.04, 0.04, 2)

    radius, centre_x, centre_y = (t.to(device) for t in (radius, centre_x, centre_y))
    colour, backdrop, slope = (t.to(device) for t in (colour, backdrop, slope))
    x, y = _pixel_centres(size, device)
    coverage = torch.empty(len(objects), num_frames, size, size, device=device)
    for shape in SHAPES:
        rows = [i for i, scene in enumerate(objects) if scene.shape == shape]
        if rows:
            scale = radius[rows, None, None, None]
            dx = (x - centre_x[rows, :, None, None]) / scale
            dy = (y - centre_y[rows, :, None, None]) / scale
            coverage[rows] = (0.5 - signed_distance(shape, dx, dy) * scale * size).clamp(0, 1)

    shading = slope[:, :1, None] * (x - 0.5) + slope[:, 1:, None] * (y - 0.5)
    background = (backdrop[:, :, None, None] + shading[:, None]).clamp(0, 1)[:, None]
    colour, coverage = colour[:, None, :, None, None], coverage[:, :, None]
    clips = torch.lerp(background, colour[:batch], coverage[:batch])
    clips[clips_of_pairs] = torch.lerp(clips[clips_of_pairs], colour[batch:], coverage[batch:])
    return clips


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


def _nearest_colours(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Return each pixel's (N, 3) nearest palette entry at any brightness, and whether the entry is near."""
    palette = torch.tensor(list(COLOURS.values()), device=pixels.device)
    distance = torch.cdist(pixels / pixels.amax(1, keepdim=True), palette / palette.amax(1, keepdim=True))
    nearest = distance.min(1)
    return nearest.indices, nearest.values < 0.35


def _read_colour(clip: Tensor, mask: Tensor) -> str | None:
    """Return the palette entry nearest to the median foreground colour; None if no entry is near."""
    pixels = clip.permute(0, 2, 3, 1)[mask > 0]
    nearest, near = _nearest_colours(pixels.median(0).values[None])
    return list(COLOURS)[int(nearest)] if near else None


def _read_shape(mask: Tensor, area: Tensor, centre_x: Tensor, centre_y: Tensor) -> str | None:
    """Return the shape whose template, at the mask's centroid and area, overlaps it best; None if the IoU is at most
    0.6."""
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


def _checked(clips: Tensor) -> Tensor:
    """Return clips in float32; raise ValueError if their layout is not the readers' layout."""
    if clips.ndim != 5 or clips.shape[2] != 3 or clips.shape[3] != clips.shape[4]:
        raise ValueError(f"clips must be (batch, frames, 3, size, size) in [0, 1], got {tuple(clips.shape)}")
    return clips.float()


def _track(mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return area, centre_x and centre_y (F,) of a mask (F, H, W), in units of the frame."""
    x, y = _pixel_centres(mask.shape[-1], mask.device)
    total = mask.sum((-2, -1))
    return total / mask[0].numel(), (mask * x).sum((-2, -1)) / total, (mask * y).sum((-2, -1)) / total


def read_clips(clips: Tensor) -> list[Scene]:
    """Recognise colour, shape and direction of one object from pixels alone.

    Args:
        clips: (B, F, 3, H, W) in [0, 1], H == W, any floating dtype.

    Returns:
        One :class:`Scene` for each clip; all attributes are None if fewer than 3/4 of the frames show an object.
    """
    clips = _checked(clips)
    masks, seen = _masks(clips)
    readings = []
    for clip, mask, visible in zip(clips, masks, seen, strict=True):
        if visible.float().mean() < 0.75:
            readings.append(Scene(None, None, None))
            continue
        frames, clip, mask = visible.nonzero()[:, 0].float(), clip[visible], mask[visible]
        area, centre_x, centre_y = _track(mask)
        readings.append(
            Scene(
                _read_colour(clip, mask),
                _read_shape(mask, area, centre_x, centre_y),
                _read_direction(frames, centre_x, centre_y),
            )
        )
    return readings


def _read_part(colour: str, mask: Tensor) -> Scene:
    """Read the object that a mask (F, H, W) of one colour shows, even if another object covers it in some frames.

    The shape is read in frames that show nearly all of the object, the direction also in frames that show half of it.
    """
    area = mask.mean((-2, -1))
    usual = area.quantile(0.75)
    visible = area > usual / 2
    if usual < 0.005 or visible.float().mean() < 0.5:
        return Scene(None, None, None)
    frames, mask, whole = visible.nonzero()[:, 0].float(), mask[visible], (area > 0.9 * usual)[visible]
    area, centre_x, centre_y = _track(mask)
    shape = _read_shape(mask[whole], area[whole], centre_x[whole], centre_y[whole])
    return Scene(colour, shape, _read_direction(frames, centre_x, centre_y))


def read_pairs(clips: Tensor) -> list[Pair]:
    """Recognise the two objects of each clip from pixels alone: the two commonest colours, each tracked separately.

    Args:
        clips: (B, F, 3, H, W) in [0, 1], H == W, any floating dtype.

    Returns:
        One :class:`Pair` for each clip, the commonest colour first; all attributes of an unseen object are None.
    """
    clips = _checked(clips)
    masks, _ = _masks(clips)
    readings = []
    for clip, mask in zip(clips, masks, strict=True):
        nearest, near = _nearest_colours(clip.permute(0, 2, 3, 1).reshape(-1, 3))
        index = torch.where(near & (mask.flatten() > 0), nearest, len(COLOURS)).view(mask.shape)
        commonest = index.flatten().bincount(minlength=len(COLOURS) + 1)[:-1].topk(2).indices.tolist()
        readings.append(Pair(*(_read_part(list(COLOURS)[i], (index == i).float()) for i in commonest)))
    return readings


def _objects(reading: Scene | Pair, scene: Scene | Pair) -> list[tuple[Scene, Scene]]:
    """Return (reading, requested scene) for each object; the colour identifies the objects of a pair."""
    if isinstance(scene, Scene):
        return [(reading, scene)]
    found = {part.colour: part for part in reading}
    return [(found.get(part.colour, Scene(None, None, None)), part) for part in scene]


def attribute_matches(
    readings: Sequence[Scene] | Sequence[Pair], scenes: Sequence[Scene] | Sequence[Pair]
) -> dict[str, list[bool]]:
    """Return, for each attribute and for colour and direction together, which clips match the request.

    In a pair both objects must match: a shape or direction counts only in its requested colour.
    """
    clips = [_objects(reading, scene) for reading, scene in zip(readings, scenes, strict=True)]
    matches = {
        name: [all(getattr(r, name) == getattr(s, name) for r, s in clip) for clip in clips] for name in Scene._fields
    }
    matches["colour and direction"] = [c and d for c, d in zip(matches["colour"], matches["direction"], strict=True)]
    return matches
