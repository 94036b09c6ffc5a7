"""Verdicts of the self-check: which kernels passed on this machine, and which gave wrong results or failed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..replay import driver
from ..runtime.cache_folder import cache_folder
from ..runtime.hardware import Capability, device_of
from ..runtime.toolchain import triton_version
from ..spec.layout import padded_channels

logger = logging.getLogger(__name__)

SWITCH = "SAGE_HF_SELF_CHECK"
"""The environment variable that switches the self-check off; SAGE_HF stands for the distribution, sage-hf."""
FAILED = "failed its self-check"
QK_NORM_ROPE = "qk_norm_rope"
"""Name in place of a recipe for a kernel of QK-norm and RoPE."""
KV = "kv_cache, "
"""Prefix of the name in place of a recipe for a kernel of a KV cache; the cache's format follows."""


def enabled() -> bool:
    """Return whether kernels are checked and verdicts apply; the environment variable SAGE_HF_SELF_CHECK=0 says no."""
    return os.environ.get(SWITCH) != "0"


def subject(kernel: str, recipe: str, head_dim: int) -> str:
    """Return the subject of a verdict: a kernel, or kernels joined by " + ", with a recipe and a size of heads."""
    return f"{kernel}, {recipe}, head_dim {padded_channels(head_dim)}"


def failure(kernel: str, recipe: str, head_dim: int, capability: Capability | None) -> str:
    """Return why a kernel failed its self-check on the GPU of this capability; "" if it did not fail."""
    verdicts = _verdicts(capability)
    if not verdicts or not enabled():
        return ""
    reason = verdicts.get(subject(kernel, recipe, head_dim), "")
    return f"{FAILED}: {reason}" if reason else ""


def passed(subject_key: str, capability: Capability | None) -> bool:
    """Return whether kernels passed their self-check, in this process or an earlier one."""
    return _verdicts(capability).get(subject_key) == ""


def is_known(subject_key: str, capability: Capability | None) -> bool:
    """Return whether kernels passed or failed their self-check, in this process or an earlier one."""
    return subject_key in _verdicts(capability)


def record(subject_key: str, reason: str, capability: Capability | None) -> None:
    """Store a verdict, on disk too if it is writable: why a kernel failed, or "" if it passed."""
    verdicts = _verdicts(capability)
    verdicts[subject_key] = reason
    path, machine = _path(capability), machine_of(capability)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            json.dump({"machine": machine, "verdicts": verdicts}, file, indent=1)
        os.replace(file.name, path)
    except OSError as error:
        logger.info("the verdicts of the self-check are not kept: %s", error)


@lru_cache(maxsize=16)
def _verdicts(capability: Capability | None) -> dict[str, str]:
    """Return the stored verdicts for this machine; none if the file's format is not the format of `record`."""
    if not _folder().is_dir():
        return {}
    try:
        stored = json.loads(_path(capability).read_text())["verdicts"]
        if all(isinstance(text, str) for pair in stored.items() for text in pair):
            return dict(stored)
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        pass
    return {}


def drop(capability: Capability | None) -> None:
    """Drop all verdicts on this machine, on disk too, before its kernels are checked anew."""
    _verdicts(capability).clear()
    with contextlib.suppress(OSError):
        _path(capability).unlink()


def forget() -> None:
    """Forget all verdicts read or recorded in this process; files stay."""
    _verdicts.cache_clear()
    machine_of.cache_clear()


@lru_cache(maxsize=16)
def machine_of(capability: Capability | None) -> dict[str, Any]:
    """Return the facts of a verdict: the GPU, its driver, PyTorch, Triton and the source of this package."""
    device = device_of(capability)
    return {
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else "",
        "capability": capability,
        "driver": driver.version() if device.type == "cuda" else 0,
        "torch": torch.__version__,
        "triton": triton_version(),
        "source": _source_digest(),
    }


def _source_digest() -> str:
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".cu", ".cuh"):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _folder() -> Path:
    return cache_folder() / "self_check"


def _path(capability: Capability | None) -> Path:
    """Return the file for this machine, whose name changes with every fact that a verdict depends on."""
    name = hashlib.sha256(json.dumps(machine_of(capability)).encode()).hexdigest()[:16]
    return _folder() / f"{name}.json"
