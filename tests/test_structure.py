"""Check what imports what: backends are siblings on a floor that needs none of them."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = {"sage_kernels": ROOT / "kernels/sage_kernels", "sage_hf": ROOT / "sage_hf"}
BACKENDS = ("triton", "gluon", "cuda", "reference")
# Folders beside the floor, and those of them that each may import.
MAY_IMPORT = {
    "reference": set(),
    "cuda": set(),
    "language": set(),
    "triton": {"language"},
    "gluon": {"language"},
    "testing": {"language"},
}
ABOVE = {"sage_hf", "diffusers", "transformers"}


def find_modules() -> dict[str, Path]:
    """Every module of both packages: its name and file."""
    found = {}
    for package, folder in FOLDERS.items():
        for path in folder.rglob("*.py"):
            parts = path.relative_to(folder).with_suffix("").parts
            found[".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))] = path
    return found


MODULES = find_modules()


def imported_names(name: str) -> set[str]:
    """Return the absolute names that a module imports: anywhere, so in functions and for type checkers too."""
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


def kernel_modules() -> list[str]:
    return [name for name in MODULES if name.startswith("sage_kernels")]


def folder_of(module: str) -> str:
    """The folder of sage_kernels beside the floor that holds a module; "" of the floor's."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else ""


def test_no_module_imports_itself_by_way_of_others():
    imports = {name: imported_names(name) & MODULES.keys() for name in MODULES}
    done, path = set(), []

    def visit(name: str) -> None:
        assert name not in path, " → ".join([*path[path.index(name) :], name])
        if name in done:
            return
        path.append(name)
        for other in sorted(imports[name]):
            visit(other)
        path.pop()
        done.add(name)

    for name in MODULES:
        visit(name)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_backend_imports_the_floor_and_no_other_backend(folder):
    modules = [name for name in kernel_modules() if folder_of(name) == folder]
    assert modules
    for name in modules:
        for imported in imported_names(name) & MODULES.keys():
            other = folder_of(imported)
            assert other in {"", folder, *MAY_IMPORT[folder]}, f"{name} imports {imported}"


def test_the_floor_imports_neither_triton_nor_a_backend():
    """But for the file that registers all of them."""
    floor = [name for name in kernel_modules() if not folder_of(name) and name != "sage_kernels.backends"]
    assert {"sage_kernels.registry", "sage_kernels.dispatch", "sage_kernels.ops"} <= set(floor)
    for name in floor:
        for imported in imported_names(name):
            assert imported.split(".")[0] not in ("triton", "cuda"), f"{name} imports {imported}"
            assert folder_of(imported) == "" if imported.startswith("sage_kernels") else True, f"{name}: {imported}"


@pytest.mark.parametrize("folder", ["cuda", "reference"])
def test_a_backend_that_is_not_in_triton_needs_no_triton(folder):
    for name in kernel_modules():
        if folder_of(name) == folder:
            assert not any(one.split(".")[0] == "triton" for one in imported_names(name)), name


@pytest.mark.parametrize("folder", BACKENDS)
def test_what_a_backend_can_do_is_known_before_its_compiler_is_imported(folder):
    for imported in imported_names(f"sage_kernels.{folder}.registration"):
        assert imported.split(".")[0] not in ("triton", "cuda"), imported
        assert folder_of(imported) != "language", imported


def test_the_kernel_backend_imports_nothing_above_it():
    for name in kernel_modules():
        above = {one.split(".")[0] for one in imported_names(name)} & ABOVE
        assert not above, f"{name} imports {above}"
