"""Check what imports what: backends are siblings on a floor that needs none of them."""

import ast
from functools import cache

import pytest
from imports import MODULES, arrows, imported_modules, imported_names

BACKENDS = ("triton", "cuda", "reference")
# Folders above the floor, and which of these folders each may import.
MAY_IMPORT = {
    "reference": set(),
    "cuda": set(),
    "triton": set(),
    "testing": {"triton"},
}
ABOVE = {"sage_hf", "diffusers", "transformers"}


def kernel_modules() -> list[str]:
    return [name for name in MODULES if name.startswith("sage_kernels")]


def backend_of(module: str) -> str:
    """Return the folder of sage_kernels above the floor that holds a module; "" of the floor's."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else ""


def test_no_module_imports_itself_by_way_of_others():
    imports = {name: imported_modules(name) for name in MODULES}
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


def test_no_two_folders_import_each_other():
    """A package's own files are excepted, because they register its folders."""
    found = {folder: set(others) for folder, others in arrows().items() if "/" in folder}
    mutual = {(one, other) for one, others in found.items() for other in others if one in found.get(other, ())}
    assert not mutual


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_backend_imports_the_floor_and_no_other_backend(folder):
    modules = [name for name in kernel_modules() if backend_of(name) == folder]
    assert modules
    for name in modules:
        for imported in imported_modules(name):
            other = backend_of(imported)
            assert other in {"", folder, *MAY_IMPORT[folder]}, f"{name} imports {imported}"


def test_the_floor_imports_neither_triton_nor_a_backend():
    """The file that registers all of them is excepted."""
    floor = [name for name in kernel_modules() if not backend_of(name) and name != "sage_kernels.backends"]
    assert {"sage_kernels.dispatch.registry", "sage_kernels.dispatch.execution", "sage_kernels.ops"} <= set(floor)
    for name in floor:
        for imported in imported_names(name):
            assert imported.split(".")[0] not in ("triton", "cuda"), f"{name} imports {imported}"
            assert backend_of(imported) == "" if imported.startswith("sage_kernels") else True, f"{name}: {imported}"


@pytest.mark.parametrize("folder", ["cuda", "reference"])
def test_a_backend_that_is_not_in_triton_needs_no_triton(folder):
    for name in kernel_modules():
        if backend_of(name) == folder:
            assert not any(one.split(".")[0] == "triton" for one in imported_names(name)), name


@pytest.mark.parametrize("folder", BACKENDS)
def test_a_backends_limits_are_known_before_its_compiler_is_imported(folder):
    for imported in imported_names(f"sage_kernels.{folder}.registration"):
        assert imported.split(".")[0] not in ("triton", "cuda"), imported
        assert not imported.startswith("sage_kernels.triton.common"), imported


def test_the_kernel_backend_imports_nothing_above_it():
    for name in kernel_modules():
        above = {one.split(".")[0] for one in imported_names(name)} & ABOVE
        assert not above, f"{name} imports {above}"


PRIVATE = {"torch": {"sage_kernels.runtime.torch_private"}, "triton": {"sage_kernels.triton.common.triton_abi"}}
"""Modules that may use private names of a package; `testing` and what measures are no part of a call."""


@cache
def nodes_of(name: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))))


def private_names(name: str, package: str) -> set[str]:
    """The dotted private names of a package that a module uses, but for operators of `torch.ops`."""
    known = {package: package}
    found = set()
    for node in nodes_of(name):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package and not node.level:
            known |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Import):
            known |= {one.asname: one.name for one in node.names if one.asname and one.name.split(".")[0] == package}
            found |= {one.name for one in node.names if one.name.split(".")[0] == package}
    found |= set(known.values())
    for node in nodes_of(name):
        parts = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name) and node.id in known:
            found.add(".".join((known[node.id], *reversed(parts))))
    private = {one for one in found if any(part[0] == "_" and part[:2] != "__" for part in one.split("."))}
    return {one for one in private if not one.startswith("torch.ops.")}


@pytest.mark.parametrize("package", PRIVATE)
def test_private_names_of_a_package_stand_in_one_file(package):
    for name in MODULES:
        if name in PRIVATE[package] or name.startswith(("sage_hf.bench", "sage_hf.tune", "sage_kernels.testing")):
            continue
        assert not private_names(name, package), name


def test_private_names_are_found():
    found = private_names("sage_kernels.runtime.torch_private", "torch")
    assert {"torch.utils._python_dispatch.TorchDispatchMode", "torch.Tensor._make_subclass"} <= found
