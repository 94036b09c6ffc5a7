"""Video files, clips side by side, and contact sheets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

INK, PAPER, FAINT = (28, 30, 34), (255, 255, 255), (110, 114, 122)
MARGIN = 16
PANEL_HEIGHT = 256


def can_write_mp4() -> bool:
    """Whether imageio and an ffmpeg for it are installed (`pip install "sage-hf[video]"`)."""
    try:
        import imageio  # noqa: F401
        import imageio_ffmpeg  # type: ignore[import-untyped]

        imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError):
        return False
    return True


def write_video(frames: np.ndarray, path: Path, fps: int) -> Path:
    """Write uint8 frames (F, H, W, 3) as `path`.mp4, or as `path`.gif where no encoder is installed.

    An older file of the other kind is removed.

    Returns:
        The file written.
    """
    from diffusers.utils import export_to_gif, export_to_video

    images = [Image.fromarray(frame) for frame in frames]
    mp4, gif = Path(f"{path}.mp4"), Path(f"{path}.gif")
    if can_write_mp4():
        gif.unlink(missing_ok=True)
        even = images[0].width % 2 == 0 and images[0].height % 2 == 0
        block = 2 if even else 16
        return Path(export_to_video(images, str(mp4), fps=fps, quality=8, macro_block_size=block))
    mp4.unlink(missing_ok=True)
    return Path(export_to_gif(images, str(gif), fps=fps))


def side_by_side(videos: Mapping[str, np.ndarray], title: str) -> np.ndarray:
    """One clip of several: uint8 videos (F, H, W, 3) of one shape by label, left to right under a title.

    Returns:
        uint8 frames (F, height, width, 3), both even.
    """
    labels, clips = list(videos), list(videos.values())
    panel = _panel_size(clips[0])
    font, small = _font(20), _font(16)
    top = MARGIN + 28
    width = len(clips) * (panel[0] + MARGIN) + MARGIN
    height = top + panel[1] + MARGIN + 28
    page = Image.new("RGB", (width + width % 2, height + height % 2), PAPER)
    draw = ImageDraw.Draw(page)
    draw.text((MARGIN, MARGIN - 4), _fit(title, font, width - 2 * MARGIN), fill=INK, font=font)
    corners = [(MARGIN + column * (panel[0] + MARGIN), top) for column in range(len(clips))]
    for label, (x, y) in zip(labels, corners, strict=True):
        draw.text((x, y + panel[1] + 8), _fit(label, small, panel[0]), fill=FAINT, font=small)
    frames = []
    for pictures in zip(*clips, strict=True):
        frame = page.copy()
        for picture, corner in zip(pictures, corners, strict=True):
            frame.paste(_resize(picture, panel), corner)
        frames.append(np.asarray(frame))
    return np.stack(frames)


def contact_sheet(rows: Sequence[tuple[str, Mapping[str, np.ndarray]]], columns: int = 5) -> Image.Image:
    """A picture of a few frames of each video, for pages that show no video.

    Args:
        rows: (title, uint8 videos (F, H, W, 3) by label), one per prompt.
        columns: frames shown of each video, from the first to the last.
    """
    font, small = _font(20), _font(16)
    panel = _panel_size(rows[0][1][next(iter(rows[0][1]))], 160)
    labels = [label for _, videos in rows for label in videos]
    gap = MARGIN // 2
    left = 2 * MARGIN + max(int(small.getlength(label)) for label in labels)
    width = left + columns * (panel[0] + gap) - gap + MARGIN
    heights = [40 + len(videos) * (panel[1] + gap) for _, videos in rows]
    page = Image.new("RGB", (width, sum(heights) + MARGIN), PAPER)
    draw = ImageDraw.Draw(page)
    y = MARGIN
    for title, videos in rows:
        draw.text((MARGIN, y), _fit(title, font, width - 2 * MARGIN), fill=INK, font=font)
        y += 32
        for label, frames in videos.items():
            draw.text((MARGIN, y + panel[1] // 2), label, fill=FAINT, font=small, anchor="lm")
            for column, frame in enumerate(np.linspace(0, len(frames) - 1, columns).round().astype(int)):
                page.paste(_resize(frames[frame], panel), (left + column * (panel[0] + gap), y))
            y += panel[1] + gap
        y += 8
    return page


def _panel_size(video: np.ndarray, height: int = PANEL_HEIGHT) -> tuple[int, int]:
    """(width, height) of a panel; small videos are enlarged by a whole factor, large ones reduced."""
    video_height, video_width = video.shape[1:3]
    if video_height <= height:
        factor = height // video_height
        return video_width * factor, video_height * factor
    return max(1, round(video_width * height / video_height)), height


def _resize(picture: np.ndarray, size: tuple[int, int]) -> Image.Image:
    image = Image.fromarray(picture)
    return image.resize(size, Image.Resampling.BICUBIC if size[0] > image.width else Image.Resampling.LANCZOS)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _fit(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"
