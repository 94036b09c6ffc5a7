"""Docstrings open with a verb or with a noun that names the thing, never with a fragment."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("sage_hf", "kernels", "examples", "benchmarks")
FRAGMENTS = {"Of", "What", "Whether", "Why", "How", "As", "Where", "Those", "That"}
# Nouns name modules and classes; a function does something, also where ruff's D401 does not look: in a property.
ARTICLES = {"A", "An", "The"}


def find_openings(tree: ast.Module) -> list[tuple[ast.AST, str]]:
    """Return each module, class and function with a docstring, and the docstring's first word."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = ((node, ast.get_docstring(node)) for node in ast.walk(tree) if isinstance(node, kinds))
    return [(node, text.split()[0].rstrip(",.:;")) for node, text in texts if text]


def find_faults(tree: ast.Module) -> list[str]:
    """Return "name: word" for each docstring that opens with a fragment, or a function's with an article."""
    return [
        f"{getattr(node, 'name', 'the module')}: {word}"
        for node, word in find_openings(tree)
        if word in FRAGMENTS or (word in ARTICLES and not isinstance(node, ast.Module | ast.ClassDef))
    ]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_docstring_opens_with_a_fragment(folder):
    paths = sorted((ROOT / folder).rglob("*.py"))
    assert paths
    faults = {str(path.relative_to(ROOT)): find_faults(ast.parse(path.read_text(encoding="utf-8"))) for path in paths}
    assert not {path: found for path, found in faults.items() if found}


@pytest.mark.parametrize(
    ("source", "faults"),
    [
        ('"""What this is."""', ["the module: What"]),
        ('class Sum:\n    """Of all."""', ["Sum: Of"]),
        ('class Sum:\n    @property\n    def of(self):\n        """The sum."""', ["of: The"]),
        ('async def add():\n    """Whether."""', ["add: Whether"]),
        ('"""The sum."""\nclass Sum:\n    """A sum."""\n    def add(self):\n        """Add what is there."""', []),
    ],
)
def test_fragments_are_found_in_modules_classes_and_functions(source, faults):
    assert find_faults(ast.parse(source)) == faults
