"""tests/gpu: what runs on a GPU alone can be imported anywhere, so that a name that is gone is missed at once."""

import ast
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.audit
def test_every_gpu_test_is_collected_without_a_gpu():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert collected.returncode == 0, collected.stdout[-2000:] + collected.stderr[-2000:]
    assert "tests collected" in collected.stdout


@pytest.mark.parametrize("file", sorted((ROOT / "tests/gpu").glob("test_*.py")), ids=lambda file: file.stem)
def test_modules_have_the_names_that_a_gpu_test_reads(file):
    """Collecting a test does not read the names in its body."""
    names = vars(import_module(f"tests.gpu.{file.stem}"))
    nodes = (node for node in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(node, ast.Attribute))
    read = [(names.get(node.value.id), node) for node in nodes if isinstance(node.value, ast.Name)]
    of_modules = [(module, node) for module, node in read if isinstance(module, ModuleType)]
    missing = [f"line {node.lineno}: {node.attr}" for module, node in of_modules if not hasattr(module, node.attr)]
    assert not missing
