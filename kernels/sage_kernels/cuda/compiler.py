"""Compile the CUDA C++ of this folder by NVRTC, and keep the machine code in the user's cache folder.

PyTorch's CUDA wheels of 2.10 and newer install NVRTC and `cuda.bindings`; `unavailable` says what else is missing.
Compiling needs no GPU. Two environment variables are read at every use:

    SAGE_KERNELS_CACHE     the cache folder, else sage-hf/cuda in $XDG_CACHE_HOME or ~/.cache
    SAGE_KERNELS_COMPILE   0 forbids compiling; cached code still serves

If nothing can be compiled, because it is forbidden or NVRTC is missing, the cache serves the machine code of the newest
NVRTC version that the driver can run.
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
from functools import cache, cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ..replay import driver
from ..runtime.cache_folder import announce_compilation, cache_folder

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
HEADERS = Path(__file__).parent / "include"
FLAGS = ("-std=c++17", "-default-device", "--ptxas-options=-v")
SPLIT, SPLITTING = "--ptxas-options=--split-compile=0", (13, 0)
"""Option that assembles kernels of a source at the same time, and the oldest NVRTC that was tried with it. It changes
no instruction, so nothing in the cache depends on it; NVRTC's own `-split-compile` does change instructions."""
OLDEST_DRIVER = 12040  # the first driver that tells the sizes of a kernel's parameters; as cuDriverGetVersion counts

Macro = int | float | str
NONE: Mapping[str, Any] = MappingProxyType({})

_VERSION = re.compile(r"(\d+)\.(\d+)\.cubin")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_lock = threading.Lock()
_locks: dict[_Program, threading.Lock] = {}
_unstored: dict[Path, Cubin] = {}
_unusable: set[Path] = set()


class CompileError(RuntimeError):
    """A kernel does not compile, or may not be compiled: names the kernel and its options, and quotes the compiler."""


@dataclass(frozen=True)
class Cubin:
    """Compiled kernels.

    Attributes:
        image: the machine code, an ELF file.
        log: the compiler's log, with the registers and spills of each kernel.
    """

    image: bytes = field(repr=False)
    log: str


def unavailable(
    source: str | None = None,
    macros: Mapping[str, Macro] = NONE,
    arch: str = "sm_90a",
    generated: Mapping[str, str] = NONE,
) -> str:
    """Return why nothing can be compiled for the GPUs here, and what to do about it; "" if it can. Touch no GPU.

    With a source (parameters as in `compile`), return why its machine code is neither compilable now nor in the cache.
    The cache is read only if nothing can be compiled.
    """
    if reason := _unlaunchable():
        return reason
    reason = _forbidden() or missing()
    if not reason:
        return _outdated(_nvrtc_version())
    return "" if source and _cached(_Program.read(source, macros, arch, generated)) else reason


def compile(
    source: str, macros: Mapping[str, Macro], arch: str = "sm_90a", generated: Mapping[str, str] = NONE
) -> Cubin:
    """Return the machine code of a source of this folder, from the cache or the compiler.

    If several threads or processes want the same code, one compiles and the others wait.

    Args:
        source: the file's name. It may `#include "x.cuh"` of `include/`, or a generated header, but no others.
        macros: values by name, as `#define` gives them.
        arch: the GPU's architecture, as ptxas names it.
        generated: texts of headers by name.

    Raises:
        CompileError: the source does not compile, or it is not in the cache and compiling is forbidden or impossible
            here.
    """
    program = _Program.read(source, macros, arch, generated)
    if reason := _unlaunchable():
        raise CompileError(f"{program} is not available: {reason}")
    with _lock:
        lock = _locks.setdefault(program, threading.Lock())
    with lock:
        if cubin := _cached(program):
            return cubin
        if reason := _forbidden() or missing():
            raise CompileError(f"{program} is not in {cache_folder()}, and {reason}")
        path = program.path(_nvrtc_version())
        with _file_lock(path.with_suffix(".lock")):
            if cubin := read(path):
                return cubin
            announce_compilation()
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
                        "each process compiles CUDA kernels again, because it cannot use the cache folder: %s. "
                        "SAGE_KERNELS_CACHE names another folder",
                        error,
                    )
            return cubin


def checked(call: str, answer: tuple[Any, ...]) -> Any:
    """Return the value after the status that a function of `cuda.bindings` returns; None if there is no value.

    Raises:
        RuntimeError: the status is an error, which the message names after `call`.
    """
    if answer[0].value:
        raise RuntimeError(f"{call}: {answer[0].name}")
    return answer[1] if len(answer) > 1 else None


@dataclass(frozen=True)
class _Program:
    """All that a cubin depends on, except the compiler; headers and options are sorted."""

    source: str
    text: str
    headers: tuple[tuple[str, str], ...]
    arch: str
    options: tuple[str, ...]

    @classmethod
    def read(cls, source: str, macros: Mapping[str, Macro], arch: str, generated: Mapping[str, str]) -> _Program:
        """Read a source and the headers that it includes."""
        texts = {source: (SOURCES / source).read_text(encoding="utf-8")}
        unread = [source]
        while unread:
            for name in _INCLUDE.findall(texts[unread.pop()]):
                if name not in texts and (name in generated or (HEADERS / name).is_file()):
                    texts[name] = generated.get(name) or (HEADERS / name).read_text(encoding="utf-8")
                    unread.append(name)
        text = texts.pop(source)
        # The preprocessor needs a number for a bool: it takes the word True for 0.
        defines = (f"-D{name}={value * 1}" for name, value in sorted(macros.items()))
        options = (f"--gpu-architecture={arch}", *FLAGS, *defines)
        return cls(source, text, tuple(sorted(texts.items())), arch, options)

    def __str__(self) -> str:
        return " ".join((self.source, *self.options))

    def path(self, nvrtc: tuple[int, int]) -> Path:
        """Return the cache file for code that this version of NVRTC compiles."""
        return cache_folder() / f"{self.prefix}{nvrtc[0]}.{nvrtc[1]}.cubin"

    def versions(self) -> list[tuple[int, int]]:
        """Return the versions of NVRTC with machine code in the cache folder, or not stored, newest first."""
        folder = cache_folder()
        paths = [*folder.glob(f"{self.prefix}*.cubin"), *(path for path in _unstored if path.parent == folder)]
        matches = (_VERSION.fullmatch(path.name.removeprefix(self.prefix)) for path in paths)
        return sorted({(int(match[1]), int(match[2])) for match in matches if match}, reverse=True)

    @cached_property
    def prefix(self) -> str:
        """Return the prefix of the cache files' names: the whole name except the compiler's version."""
        parts = (self.source, self.text, self.headers, self.options)
        digest = hashlib.sha256(repr(parts).encode()).hexdigest()[:32]
        return f"{Path(self.source).stem}-{self.arch}-{digest}-nvrtc"


def _compile(program: _Program) -> Cubin:
    from cuda.bindings import nvrtc

    names = [name.encode() for name, _ in program.headers]
    headers = [text.encode() for _, text in program.headers]
    split = [SPLIT] if _nvrtc_version() >= SPLITTING else []
    options = [option.encode() for option in (*program.options, *split)]
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


def _unlaunchable() -> str:
    """Return the reason why machine code cannot be loaded and launched here, "" if it can be."""
    return "" if sys.platform == "linux" else "CUDA C++ kernels are for Linux only"


@lru_cache(maxsize=1)
def missing() -> str:
    """Return the reason why nothing can be compiled here, "" if it can be."""
    try:
        _nvrtc_version()
    except (ImportError, RuntimeError) as error:
        why = " ".join(str(error).split())  # on one line, like all reasons
        return f"NVRTC, CUDA's run-time compiler, is not available ({why}): pip install {_packages()}"
    return ""


def forget_machine() -> None:
    """Forget what this machine has (bindings, compiler and driver), to look it up again at the next query."""
    for known in (missing, _outdated, _nvrtc_version):
        known.cache_clear()


def _packages() -> str:
    if (torch.version.cuda or "").startswith("12."):
        return "'cuda-bindings==12.*' nvidia-cuda-nvrtc-cu12"
    return "'cuda-bindings==13.*' 'nvidia-cuda-nvrtc==13.*'"


@cache
def _outdated(nvrtc: tuple[int, int]) -> str:
    """Return why the driver here cannot run code of this version of NVRTC; "" also if there is no driver."""
    version, needed = driver.version(), max(OLDEST_DRIVER, 1000 * nvrtc[0])
    if 0 < version < needed:
        have, need = (f"{number // 1000}.{number % 1000 // 10}" for number in (version, needed))
        major, minor = nvrtc
        return f"CUDA kernels by NVRTC {major}.{minor} need a driver for CUDA {need} or newer, this one is for {have}"
    return ""


@lru_cache(maxsize=1)
def _nvrtc_version() -> tuple[int, int]:
    """Return NVRTC's (major, minor); raise ImportError or RuntimeError if there is no NVRTC."""
    from cuda.bindings import nvrtc

    result, major, minor = nvrtc.nvrtcVersion()
    checked("nvrtcVersion", (result,))
    return major, minor


@contextlib.contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; without locks in the file system, several compile the same: safe."""
    import fcntl

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(path.open("w")), fcntl.LOCK_EX)
        yield


def _cached(program: _Program) -> Cubin | None:
    """Return cached code of the NVRTC here; without NVRTC, the code of the newest suitable compiler."""
    if not (_forbidden() or missing()):
        versions = [_nvrtc_version()]
    else:
        versions = [version for version in program.versions() if not _outdated(version)]
    cubins = (_unstored.get(path) or read(path) for path in map(program.path, versions))
    return next(filter(None, cubins), None)


def read(path: Path) -> Cubin | None:
    """Return the record that `_store` wrote; None if there is none."""
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
    """Write a digest, the log, a zero and the image; the file appears complete under its final name."""
    payload = cubin.log.encode() + b"\0" + cubin.image
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        temporary.write_bytes(hashlib.sha256(payload).digest() + payload)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
