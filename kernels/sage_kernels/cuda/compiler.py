"""Compiling the CUDA C++ of this folder by NVRTC, and keeping the machine code in the user's cache folder.

PyTorch's CUDA wheels of 2.10 and newer install NVRTC and `cuda.bindings`; `why_not` says what is missing elsewhere.
Compiling needs no GPU. Two environment variables are read at every use:

    SAGE_KERNELS_CACHE     the cache folder, else sage-hf/cuda in $XDG_CACHE_HOME or ~/.cache
    SAGE_KERNELS_COMPILE   0 forbids compiling; what is in the cache still serves
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
HEADERS = Path(__file__).parent / "include"
FLAGS = ("-std=c++17", "-default-device", "--ptxas-options=-v")
OLDEST_DRIVER = 12040  # the first that tells the sizes of a kernel's parameters; as cuDriverGetVersion counts

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_lock = threading.Lock()
_unstored: dict[Path, Cubin] = {}
_unusable: set[Path] = set()


class CompileError(RuntimeError):
    """A kernel does not compile, or may not: says which, with what options, and all that the compiler says."""


@dataclass(frozen=True)
class Cubin:
    """Compiled kernels.

    Attributes:
        image: the machine code, an ELF file.
        log: the compiler's, with the registers and spills of each kernel.
    """

    image: bytes = field(repr=False)
    log: str


def why_not(source: str | None = None, macros: Mapping[str, int | str] | None = None, arch: str = "sm_90a") -> str:
    """Why nothing can be compiled for the GPUs here, and what to do about it; "" when it can. Touches no GPU.

    With a source (macros and arch as of `compile`): why that cannot be had, compiled now or from the cache. The cache
    is read only where compiling is forbidden.
    """
    if reason := _missing() or _outdated():
        return reason
    forbidden = _forbidden()
    if forbidden and source and _cached(_Program.read(source, macros or {}, arch).path):
        return ""
    return forbidden


def compile(source: str, macros: Mapping[str, int | str], arch: str = "sm_90a") -> Cubin:
    """The machine code of a source of this folder, from the cache or the compiler.

    Of all threads and processes that want the same, one compiles and the others wait.

    Args:
        source: the file's name. It may `#include "x.cuh"` of `include/`; there are no other headers.
        macros: values by name, as `#define` gives them.
        arch: the GPU's architecture, as ptxas names it.

    Raises:
        CompileError: it does not compile, or compiling is forbidden, or impossible here.
    """
    if missing := _missing():
        raise CompileError(f"{source} cannot be compiled: {missing}")
    program = _Program.read(source, macros, arch)
    path = program.path
    with _lock:
        if cubin := _cached(path):
            return cubin
        if reason := _forbidden():
            raise CompileError(f"{program} is not in {path.parent}, and {reason}")
        with _file_lock(path.with_suffix(".lock")):
            if cubin := _load(path):
                return cubin
            start = time.perf_counter()
            cubin = _compile(program)
            logger.info("%s: compiled in %.1f s", program, time.perf_counter() - start)
            try:
                _store(path, cubin)
            except OSError as error:
                _unstored[path] = cubin
                if path.parent not in _unusable:
                    _unusable.add(path.parent)
                    logger.warning(
                        "CUDA kernels are compiled again by each process, for want of a cache folder: %s. "
                        "SAGE_KERNELS_CACHE names another one",
                        error,
                    )
            return cubin


def checked(call: str, answer: tuple[Any, ...]) -> Any:
    """The value behind the status that a function of `cuda.bindings` returns, None when there is none.

    Raises:
        RuntimeError: the status is an error, which the message names after `call`.
    """
    if answer[0].value:
        raise RuntimeError(f"{call}: {answer[0].name}")
    return answer[1] if len(answer) > 1 else None


@dataclass(frozen=True)
class _Program:
    """All that a cubin depends on but the compiler; headers and options in one order."""

    source: str
    text: str
    headers: tuple[tuple[str, str], ...]
    arch: str
    options: tuple[str, ...]

    @classmethod
    def read(cls, source: str, macros: Mapping[str, int | str], arch: str) -> _Program:
        texts = {source: (SOURCES / source).read_text(encoding="utf-8")}
        unread = [source]
        while unread:
            for name in _INCLUDE.findall(texts[unread.pop()]):
                if name not in texts and (HEADERS / name).is_file():
                    texts[name] = (HEADERS / name).read_text(encoding="utf-8")
                    unread.append(name)
        text = texts.pop(source)
        # A bool is a number to the preprocessor, which takes the word True for 0.
        defines = (f"-D{name}={value * 1}" for name, value in sorted(macros.items()))
        options = (f"--gpu-architecture={arch}", *FLAGS, *defines)
        return cls(source, text, tuple(sorted(texts.items())), arch, options)

    def __str__(self) -> str:
        return " ".join((self.source, *self.options))

    @property
    def path(self) -> Path:
        """Of the cubin in the cache."""
        parts = (self.source, self.text, self.headers, self.options, _nvrtc_version())
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
        return _cache_folder() / f"{Path(self.source).stem}-{self.arch}-{digest}.cubin"


def _compile(program: _Program) -> Cubin:
    from cuda.bindings import nvrtc

    names = [name.encode() for name, _ in program.headers]
    headers = [text.encode() for _, text in program.headers]
    options = [option.encode() for option in program.options]
    text, name = program.text.encode(), program.source.encode()
    handle = checked("nvrtcCreateProgram", nvrtc.nvrtcCreateProgram(text, name, len(names), headers, names))
    try:
        (result,) = nvrtc.nvrtcCompileProgram(handle, len(options), options)
        buffer = bytearray(checked("nvrtcGetProgramLogSize", nvrtc.nvrtcGetProgramLogSize(handle)))
        checked("nvrtcGetProgramLog", nvrtc.nvrtcGetProgramLog(handle, buffer))
        log = buffer.rstrip(b"\0").decode(errors="replace")
        if result.value:
            raise CompileError(f"{program} does not compile ({result.name}):\n{log}")
        image = bytearray(checked("nvrtcGetCUBINSize", nvrtc.nvrtcGetCUBINSize(handle)))
        checked("nvrtcGetCUBIN", nvrtc.nvrtcGetCUBIN(handle, image))
        return Cubin(bytes(image), log)
    finally:
        nvrtc.nvrtcDestroyProgram(handle)


def _forbidden() -> str:
    if os.environ.get("SAGE_KERNELS_COMPILE") == "0":
        return "SAGE_KERNELS_COMPILE=0 forbids compiling CUDA kernels"
    return ""


@lru_cache(maxsize=1)
def _missing() -> str:
    """What compiling lacks here."""
    if sys.platform != "linux":
        return "CUDA C++ kernels are for Linux only"
    if (torch.version.cuda or "").startswith("12."):
        packages = "'cuda-bindings==12.*' nvidia-cuda-nvrtc-cu12"
    else:
        packages = "'cuda-bindings==13.*' 'nvidia-cuda-nvrtc==13.*'"
    try:
        _nvrtc_version()
    except (ImportError, RuntimeError) as error:
        return f"NVRTC, CUDA's run-time compiler, is not available ({error}): pip install {packages}"
    return ""


@lru_cache(maxsize=1)
def _outdated() -> str:
    """Why the driver here cannot run what is compiled; "" also where there is none."""
    from cuda.bindings import driver

    try:
        version = checked("cuDriverGetVersion", driver.cuDriverGetVersion())
    except RuntimeError:
        return ""
    needed = max(OLDEST_DRIVER, 1000 * _nvrtc_version()[0])
    if version < needed:
        have, need = (f"{number // 1000}.{number % 1000 // 10}" for number in (version, needed))
        major, minor = _nvrtc_version()
        return f"CUDA kernels by NVRTC {major}.{minor} need a driver for CUDA {need} or newer, this one is for {have}"
    return ""


@lru_cache(maxsize=1)
def _nvrtc_version() -> tuple[int, int]:
    """(major, minor); ImportError or RuntimeError when there is none."""
    from cuda.bindings import nvrtc

    result, major, minor = nvrtc.nvrtcVersion()
    checked("nvrtcVersion", (result,))
    return major, minor


def _cache_folder() -> Path:
    if folder := os.environ.get("SAGE_KERNELS_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sage-hf" / "cuda"


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Held by one process at a time, where the file system can: otherwise several compile the same, which is safe."""
    import fcntl

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield


def _cached(path: Path) -> Cubin | None:
    return _unstored.get(path) or _load(path)


def _load(path: Path) -> Cubin | None:
    """What `_store` wrote there, None when there is nothing or something else."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, payload = content[:32], content[32:]
    if digest != hashlib.sha256(payload).digest():
        return None
    log, _, image = payload.partition(b"\0")
    return Cubin(image, log.decode())


def _store(path: Path, cubin: Cubin) -> None:
    """A digest, the log, a zero and the image, under their final name at once."""
    payload = cubin.log.encode() + b"\0" + cubin.image
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(hashlib.sha256(payload).digest() + payload)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
