"""Private names of diffusers stand in one file."""

import ast
from pathlib import Path

import sage_hf

PACKAGE = Path(sage_hf.__file__).parent
BRIDGE = PACKAGE / "diffusers" / "bridge.py"
OF_OTHERS = {"_orig_mod", "_version", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
"""Names of PyTorch that the bridge may read as well."""


def private_names(path: Path) -> set[str]:
    """Names with one underscore that a file reads from objects, as attributes or by a string."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
        if isinstance(name, str) and name.isidentifier() and name.startswith("_") and not name.startswith("__"):
            found.add(name)
    return found


def own_names(path: Path) -> set[str]:
    """Names that a file's classes and functions have, and that its objects assign to themselves."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


def test_no_other_file_names_diffusers_private_api():
    processors = {"_attention_backend", "_parallel_config"}  # which the bridge's base classes have for diffusers
    of_diffusers = private_names(BRIDGE) - (own_names(BRIDGE) - processors) - OF_OTHERS
    assert processors | {"_AttentionBackendRegistry", "_templated_context_parallel_attention"} <= of_diffusers
    for path in (PACKAGE / "diffusers").rglob("*.py"):
        if path != BRIDGE:
            foreign = private_names(path) - own_names(path)
            assert not foreign & of_diffusers, f"{path.name} names {foreign & of_diffusers}"
    for path in (PACKAGE / "apply.py", PACKAGE / "explain.py", PACKAGE / "schedule.py", PACKAGE / "targets.py"):
        assert not private_names(path) & of_diffusers, path.name
