"""Write a folder that `kernels.get_kernel` loads, to upload as a kernel repository: `sage_kernels` and its entry
points."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import sys
from pathlib import Path

import sage_hf
import sage_kernels

NAME = "sage-hf"
VERSION = 1
"""Version of the kernel's interface, for which transformers asks; it grows when callers have to change."""
BACKENDS = ("cuda", "rocm", "xpu", "cpu")
SUFFIXES = (".py", ".cu", ".cuh", ".json")
PACKAGE_INIT = '''"""Low-bit attention of sage-hf as a Hub kernel."""

from .sage_kernels.flash_attention import (
    flash_attn_forward,
    flash_attn_func,
    flash_attn_varlen_func,
    supports_flash_attn,
)

__all__ = ["flash_attn_forward", "flash_attn_func", "flash_attn_varlen_func", "supports_flash_attn"]
'''
OPERATORS = re.compile(r'(torch\.ops\.|Library\("|"(?=sage_kernels::))sage_kernels\b')
"""Name under which operators are registered; it differs from the package's, because a process registers a name once."""


def build(target: Path) -> Path:
    """Write the kernel repository: `build.toml`, and a variant for each backend in `build/`.

    Every variant has the whole backend in Python, Triton and CUDA C++, which compile at first use. Its operators have
    their own name, so that it can be loaded next to sage-hf, or to another version of the kernel.

    Args:
        target: folder to write; it is made if it is missing.

    Returns:
        The target.

    Raises:
        FileExistsError: the target is not empty.
    """
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{target} is not empty: name a new folder")
    sources = _sources()
    digest = hashlib.sha256(b"".join(sources.values())).hexdigest()[:8]
    for backend in BACKENDS:
        identity = f"_sage_hf_{backend}_{digest}"
        files = {"__init__.py": PACKAGE_INIT.encode()}
        for name, content in sources.items():
            if name.endswith(".py"):
                content = OPERATORS.sub(rf"\1sage_kernels{identity}", content.decode()).encode()
            files[f"sage_kernels/{name}"] = content
        variant = target / "build" / f"torch-{backend}"
        for name, content in files.items():
            (variant / name).parent.mkdir(parents=True, exist_ok=True)
            (variant / name).write_bytes(content)
        (variant / "metadata.json").write_text(json.dumps(_metadata(backend, identity, files), indent=2) + "\n")
    (target / "build.toml").write_text(_build_toml())
    return target


def _sources() -> dict[str, bytes]:
    """Return the files of `sage_kernels` that a call needs, by path; `testing` measures and compiles ahead of time."""
    package = Path(str(sage_kernels.__file__)).parent
    paths = sorted(path for path in package.rglob("*") if path.suffix in SUFFIXES)
    names = {path.relative_to(package).as_posix(): path for path in paths}
    return {name: path.read_bytes() for name, path in names.items() if not name.startswith("testing/")}


def _metadata(backend: str, identity: str, files: dict[str, bytes]) -> dict[str, object]:
    """Return the content of a variant's `metadata.json`, with a digest of each other file."""
    hashes = {name: base64.b64encode(hashlib.sha256(content).digest()).decode() for name, content in files.items()}
    return {
        "id": identity,
        "name": NAME,
        "version": VERSION,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": backend},
        "digest": {"algorithm": "sha256", "files": dict(sorted(hashes.items()))},
    }


def _build_toml() -> str:
    backends = ", ".join(f'"{backend}"' for backend in BACKENDS)
    extensions = ", ".join(f'"{suffix[1:]}"' for suffix in SUFFIXES)
    return (
        f"# Written by sage-hf {sage_hf.__version__}.\n"
        f'[general]\nname = "{NAME}"\nversion = {VERSION}\nedition = 5\n'
        f'license = "Apache-2.0"\nbackends = [{backends}]\n'
        f"\n[torch-noarch]\npyext = [{extensions}]\n"
    )


def main(arguments: list[str]) -> int:
    """Run the command: write the folder that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m sage_hf.build_hub_kernel", description=__doc__)
    parser.add_argument("target", type=Path, help="folder to write")
    print(f"wrote {build(parser.parse_args(arguments).target)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
