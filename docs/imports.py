"""Imports among the modules of both packages, read from their source without importing them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"sage_hf": ROOT / "sage_hf", "sage_kernels": ROOT / "kernels/sage_kernels"}


def find_modules() -> dict[str, Path]:
    """Return every module of both packages: its name and file."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


MODULES = find_modules()


@cache
def imported_names(name: str) -> set[str]:
    """Return the absolute names that a module of the packages imports, in functions and for type checkers too."""
    path = MODULES[name]
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from package import module` imports the module.
            found |= {full if (full := f"{module}.{alias.name}") in MODULES else module for alias in node.names}
    return found


def imported_modules(name: str) -> set[str]:
    """Return the other modules of both packages that a module imports."""
    return imported_names(name) & MODULES.keys() - {name}


def folder_of(name: str) -> str:
    """Return a module's folder as tables show it: "sage_hf/bench", or "sage_hf" for a file directly in the package."""
    package, *rest = name.split(".")
    return f"{package}/{rest[0]}" if rest and (FOLDERS[package] / rest[0]).is_dir() else package


def arrows() -> dict[str, list[str]]:
    """Return each folder of the packages with the other folders that it imports."""
    found: dict[str, set[str]] = {}
    for name in MODULES:
        found.setdefault(folder_of(name), set()).update(map(folder_of, imported_modules(name)))
    return {folder: sorted(others - {folder}) for folder, others in sorted(found.items())}
