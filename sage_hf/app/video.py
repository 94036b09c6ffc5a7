"""Write files of videos and images, and combine clips side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sage_hf.files import replacing

INK = (28, 30, 34)
"""Colour of the title."""
PAPER = (255, 255, 255)
"""Colour of the background."""
FAINT = (110, 114, 122)
"""Colour of the lines below a panel."""
MARGIN = 16
PANEL_HEIGHT = 256
LINE_HEIGHT = 28


def can_write_mp4() -> bool:
    """Check whether imageio and an ffmpeg for it are installed (`pip install "sage-hf[video]"`)."""
    try:
        import imageio  # noqa: F401
        import imageio_ffmpeg  # type: ignore[import-untyped]

        imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError):
        return False
    return True


def write_video(frames: np.ndarray, path: Path, fps: int) -> Path:
    """Write uint8 frames (F, H, W, 3) as `path`.mp4, or as `path`.gif without an encoder; write one frame as
    `path`.png.

    The file is written atomically. Older files of the other kinds are removed.

    Returns:
        The path of the file.

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
    """
    from diffusers.utils import export_to_gif

    images = [Image.fromarray(frame) for frame in frames]
    kind = "png" if len(images) == 1 else "mp4" if can_write_mp4() else "gif"
    written = Path(f"{path}.{kind}")
    with replacing(written) as part:
        if kind == "png":
            images[0].save(part)
        elif kind == "mp4":
            _write_mp4(images, part, fps)
        else:
            export_to_gif(images, str(part), fps=fps)
    for other in {"png", "mp4", "gif"} - {kind}:
        Path(f"{path}.{other}").unlink(missing_ok=True)
    return written


def _write_mp4(images: list[Image.Image], path: Path, fps: int) -> None:
    """Write the file and count the frames in it, because an encoder may stop early without an error."""
    from diffusers.utils import export_to_video
    from imageio_ffmpeg import count_frames_and_secs

    block = 2 if images[0].width % 2 == 0 and images[0].height % 2 == 0 else 16
    cause = None
    try:
        export_to_video(images, str(path), fps=fps, quality=8, macro_block_size=block)
        complete = count_frames_and_secs(str(path))[0] == len(images)
    except (OSError, RuntimeError) as error:  # from the pipe to the encoder, or from reading a truncated file
        complete, cause = False, error
    if not complete:
        raise OSError(
            f"the encoder did not write all of {len(images)} frames: is there room on the disk of {path.parent}?"
        ) from cause


def side_by_side(videos: Mapping[str, np.ndarray], title: str) -> np.ndarray:
    """Combine videos into one clip that shows them from left to right under a title.

    Args:
        videos: uint8 videos (F, H, W, 3) of one shape, by label, which may have several lines.
        title: text above them.

    Returns:
        uint8 frames (F, height, width, 3), height and width even.
    """
    labels, clips = list(videos), list(videos.values())
    panel = _panel_size(clips[0])
    font, small = _font(20), _font(16)
    top = MARGIN + 28
    width = len(clips) * (panel[0] + MARGIN) + MARGIN
    lines = max(len(label.splitlines()) for label in labels)
    height = top + panel[1] + MARGIN + LINE_HEIGHT * lines
    page = Image.new("RGB", (width + width % 2, height + height % 2), PAPER)
    draw = ImageDraw.Draw(page)
    draw.text((MARGIN, MARGIN - 4), _fit(title, font, width - 2 * MARGIN), fill=INK, font=font)
    corners = [(MARGIN + column * (panel[0] + MARGIN), top) for column in range(len(clips))]
    for label, (x, y) in zip(labels, corners, strict=True):
        for number, line in enumerate(label.splitlines()):
            place = x, y + panel[1] + 8 + LINE_HEIGHT * number
            draw.text(place, _fit(line, small, panel[0]), fill=FAINT, font=small)
    frames = []
    for pictures in zip(*clips, strict=True):
        frame = page.copy()
        for picture, corner in zip(pictures, corners, strict=True):
            frame.paste(_resize(picture, panel), corner)
        frames.append(np.asarray(frame))
    return np.stack(frames)


def _panel_size(video: np.ndarray) -> tuple[int, int]:
    """Return (width, height) of a panel: small videos are enlarged by a whole factor, large videos are reduced."""
    height, width = video.shape[1:3]
    if height <= PANEL_HEIGHT:
        factor = PANEL_HEIGHT // height
        return width * factor, height * factor
    return max(1, round(width * PANEL_HEIGHT / height)), PANEL_HEIGHT


def _resize(picture: np.ndarray, size: tuple[int, int]) -> Image.Image:
    image = Image.fromarray(picture)
    return image.resize(size, Image.Resampling.BICUBIC if size[0] > image.width else Image.Resampling.LANCZOS)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _fit(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int) -> str:
    """Return the text on one line, cut to `width` pixels."""
    text = " ".join(text.split())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"
