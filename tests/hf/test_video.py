"""Writing videos and images, alone and side by side."""

import resource

import imageio.v3 as imageio
import numpy as np
import pytest

from sage_hf.app import video

RED, BLUE = (200, 30, 30), (30, 30, 200)


def clip(color, frames: int = 5, height: int = 64, width: int = 48) -> np.ndarray:
    return np.broadcast_to(np.array(color, np.uint8), (frames, height, width, 3)).copy()


def test_mp4_keeps_frames_and_size(tmp_path):
    path = video.write_video(clip(RED), tmp_path / "clip", fps=8)
    frames = imageio.imread(path)
    assert path.name == "clip.mp4" and frames.shape == (5, 64, 48, 3)
    assert np.abs(frames.mean((0, 1, 2)) - RED).max() < 8  # chroma of 8-bit limited-range YUV


def test_a_single_frame_is_an_image(tmp_path):
    path = video.write_video(clip(RED, 1), tmp_path / "clip", fps=8)
    assert path.name == "clip.png" and (imageio.imread(path) == RED).all()
    assert [path] == list(tmp_path.iterdir())
    video.write_video(clip(RED), tmp_path / "clip", fps=8)
    assert [entry.name for entry in tmp_path.iterdir()] == ["clip.mp4"]


def test_without_encoder_a_gif_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(video, "can_write_mp4", lambda: False)
    path = video.write_video(clip(RED), tmp_path / "clip", fps=8)
    assert path.name == "clip.gif" and imageio.imread(path).shape[1:] == (64, 48, 3)


@pytest.mark.parametrize(("first", "then"), [(True, False), (False, True)])
def test_an_older_file_of_the_other_kind_is_removed(tmp_path, monkeypatch, first, then):
    for encoder in (first, then):
        monkeypatch.setattr(video, "can_write_mp4", lambda encoder=encoder: encoder)
        path = video.write_video(clip(RED), tmp_path / "clip", fps=8)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("size", [(64, 48), (61, 47), (300, 500)])
def test_side_by_side_shows_both_and_can_be_encoded(tmp_path, size):
    both = video.side_by_side({"exact": clip(RED, 3, *size), "sage3 (emulated)": clip(BLUE, 3, *size)}, "a title " * 30)
    assert both.shape[0] == 3 and both.shape[1] % 2 == both.shape[2] % 2 == 0
    middle = both[1, both.shape[1] // 2]
    assert (middle[both.shape[2] // 4] == RED).all() and (middle[3 * both.shape[2] // 4] == BLUE).all()
    assert imageio.imread(video.write_video(both, tmp_path / "both", fps=8)).shape == both.shape


@pytest.mark.parametrize("encoder", [True, False])
def test_a_full_disk_is_an_error_and_keeps_the_previous_file(tmp_path, monkeypatch, encoder):
    monkeypatch.setattr(video, "can_write_mp4", lambda: encoder)
    frames = np.random.default_rng(0).integers(0, 255, (8, 128, 128, 3), np.uint8)
    before = video.write_video(clip(RED), tmp_path / "clip", fps=8)
    content = before.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))  # as a full disk; also of the encoder's process
    try:
        with pytest.raises(OSError):
            video.write_video(frames, tmp_path / "clip", fps=8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == [before] and before.read_bytes() == content
