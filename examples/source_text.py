"""Text that every machine with Python already has: the sources of installed packages, as bytes.

Bytes need no tokenizer, so nothing about a model depends on the machine that made one; a small text gives many tokens;
and losses of different models are in the same unit, nats a byte.
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
# Tests (many distributions leave them out), tables, and packages that are not the standard library's own.
LEFT_OUT = {"test", "tests", "idle_test", "encodings", "pydoc_data", "site-packages", "dist-packages"}
HELD_OUT_ONE_IN = 16


@dataclass(frozen=True)
class Text:
    """All files of a folder, one after the other, each with a zero byte after it.

    Attributes:
        training, held_out: uint8 (bytes,). A file is wholly in one of them.
        facts: Where it comes from, and a checksum.
    """

    training: Tensor
    held_out: Tensor
    facts: dict[str, str | int]


def standard_library() -> Path:
    """The folder of the standard library of the running Python."""
    return Path(sysconfig.get_paths()["stdlib"])


def package_sources(package: str) -> Path:
    """The folder of an installed package.

    Raises:
        ValueError: it is not installed.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{package!r} is not an installed package")
    return Path(spec.submodule_search_locations[0])


def read_text(folder: Path, name: str) -> Text:
    """The Python files below a folder, sorted by path; the first and every 16th after it are held out.

    Args:
        folder: Is searched recursively, `LEFT_OUT` left out.
        name: What to call it in `Text.facts`.

    Raises:
        ValueError: there are fewer than two.
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
    """`count` windows drawn at random, the same on every device: uint8 (count, length) on the text's device.

    Raises:
        ValueError: the text is shorter than a window.
    """
    return _windows(
        text, length, torch.randint(_starts(text, length), (count,), generator=torch.Generator().manual_seed(seed))
    )


def held_out_windows(text: Tensor, length: int, count: int) -> Tensor:
    """`count` windows at equal distances over the whole text: uint8 (count, length) on the text's device.

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
