"""Training text that exists on every machine with Python: the sources of installed packages, as bytes.

Bytes need no tokenizer, which would depend on the machine that made it; a small text gives many tokens; and losses of
different models have the same unit, nats per byte.
"""

import sysconfig
import zlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

VOCABULARY = 256
FILE_END = b"\0"
# Folders of tests (many distributions omit them), of tables, and of packages outside the standard library.
LEFT_OUT = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"}
HELD_OUT_ONE_IN = 16


@dataclass(frozen=True)
class Text:
    """All files of a folder, concatenated, with a zero byte after each.

    Attributes:
        training, held_out: uint8 (bytes,). Each file is entirely in one of them.
        facts: name, sizes and a checksum of the text.
    """

    training: Tensor
    held_out: Tensor
    facts: dict[str, str | int]


def standard_library() -> Path:
    """Return the folder of the standard library of the running Python."""
    return Path(sysconfig.get_paths()["stdlib"])


def package_sources(package: str) -> Path:
    """Return the folder of an installed package.

    Raises:
        ValueError: the package is not installed.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{package!r} is not an installed package")
    return Path(spec.submodule_search_locations[0])


def read_text(folder: Path, name: str) -> Text:
    """Read the Python files below a folder, sorted by path; hold out the first file and every 16th file after it.

    Args:
        folder: searched recursively, except for folders in `LEFT_OUT`.
        name: name of the text in `Text.facts`.

    Raises:
        ValueError: there are fewer than two files.
    """
    paths = [path.relative_to(folder) for path in folder.rglob("*.py")]
    paths = sorted(path for path in paths if not LEFT_OUT.intersection(path.parts))
    files = [(folder / path).read_bytes() + FILE_END for path in paths]
    held_out = b"".join(files[::HELD_OUT_ONE_IN])
    training = b"".join(file for index, file in enumerate(files) if index % HELD_OUT_ONE_IN)
    if not training:
        raise ValueError(f"{folder} has {len(files)} Python files outside of tests: at least 2 are needed")
    facts: dict[str, str | int] = {
        "name": name,
        "files": len(files),
        "training_bytes": len(training),
        "held_out_bytes": len(held_out),
        "crc32": zlib.crc32(held_out, zlib.crc32(training)),
    }
    return Text(_as_tensor(training), _as_tensor(held_out), facts)


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def training_windows(text: Tensor, length: int, count: int, seed: int) -> Tensor:
    """Draw `count` windows at random, the same on every device: uint8 (count, length) on the text's device.

    Raises:
        ValueError: the text is shorter than a window.
    """
    return _windows(
        text, length, torch.randint(_starts(text, length), (count,), generator=torch.Generator().manual_seed(seed))
    )


def held_out_windows(text: Tensor, length: int, count: int) -> Tensor:
    """Return `count` windows at equal distances over the whole text: uint8 (count, length) on the text's device.

    Raises:
        ValueError: the text is shorter than a window.
    """
    return _windows(text, length, torch.linspace(0, _starts(text, length) - 1, count).long())


def _starts(text: Tensor, length: int) -> int:
    if len(text) < length:
        raise ValueError(f"the text has {len(text)} bytes, fewer than the {length} of a window")
    return len(text) - length + 1


def _windows(text: Tensor, length: int, starts: Tensor) -> Tensor:
    return text[(starts[:, None] + torch.arange(length)).to(text.device)]
