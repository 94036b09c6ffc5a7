"""Folders that can be written, and files that are there whole or not at all."""

from pathlib import Path

import pytest

from sage_hf.files import check_folder, replacing, writable_folder


@pytest.mark.parametrize("path", ["/proc/sage-hf", "/proc/self/sage-hf/below"])  # refused to root too
def test_a_folder_that_cannot_be_made_is_refused_naming_flag_and_folder(path):
    with pytest.raises(ValueError, match=f"--output {path} cannot be written"), writable_folder(Path(path), "--output"):
        raise AssertionError("the folder cannot be there")


def test_a_folder_that_cannot_be_written_is_refused():
    with pytest.raises(ValueError, match="--output /proc cannot"), writable_folder(Path("/proc"), "--output"):
        raise AssertionError("nobody can write there")


def test_folders_made_for_nothing_are_removed_and_others_stay(tmp_path):
    with writable_folder(tmp_path / "a" / "b", "--output"):
        assert (tmp_path / "a" / "b").is_dir()
    assert tmp_path.is_dir() and not (tmp_path / "a").exists()
    with pytest.raises(KeyboardInterrupt), writable_folder(tmp_path / "a" / "b", "--output"):
        (tmp_path / "a" / "b" / "file").touch()
        raise KeyboardInterrupt
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["file"]


def test_an_empty_folder_that_was_there_before_stays(tmp_path):
    with writable_folder(tmp_path, "--output"):
        pass
    assert tmp_path.is_dir()


def test_a_link_to_nothing_is_no_folder(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for path in (tmp_path / "link", tmp_path / "link" / "below"):
        with pytest.raises(
            ValueError, match=f"--output must be a folder, and {tmp_path / 'link'} is a link to nothing"
        ):
            check_folder(path, "--output")


def test_a_link_to_a_folder_is_one(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    check_folder(tmp_path / "link" / "new", "--output")


def test_a_file_is_replaced_at_the_end_or_not_at_all(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_text("before")
    with pytest.raises(KeyboardInterrupt), replacing(path) as part:
        part.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "before"
    with replacing(path) as part:
        part.write_text("after")
        assert path.read_text() == "before" and part.suffix == ".mp4"
    assert path.read_text() == "after" and list(tmp_path.iterdir()) == [path]
