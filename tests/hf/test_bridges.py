"""Private names of diffusers stand in one file, those of transformers in another, and none of them is indispensable."""

import ast
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sage_hf
from sage_hf.transformers import bridge, masks
from tests.helpers.tiny_transformers import MODELS, of_real_tokens, run

PACKAGE = Path(sage_hf.__file__).parent
OF_PYTORCH = {"_orig_mod", "_version", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
"""Names of PyTorch that any file may read."""
PROCESSORS = {"_attention_backend", "_parallel_config"}
"""Names of diffusers that the base classes in its bridge have as well."""


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text())))


def private_names(path: Path) -> set[str]:
    """Names with one underscore that a file reads from objects, as attributes or by a string."""
    found = set()
    for node in nodes_of(path):
        name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "value", None)
        if isinstance(name, str) and name.isidentifier() and name.startswith("_") and not name.startswith("__"):
            found.add(name)
    return found


def own_names(path: Path) -> set[str]:
    """Names that a file's classes and functions have, and that its objects assign to themselves."""
    found = set()
    for node in nodes_of(path):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return found


@pytest.mark.parametrize(
    ("library", "names"),
    [
        ("diffusers", PROCESSORS | {"_AttentionBackendRegistry"}),
        ("transformers", {"_attn_implementation", "_supports_sdpa", "_supports_flash_attn"}),
    ],
)
def test_no_other_file_names_private_api_of_a_library(library: str, names: set[str]):
    path = PACKAGE / library / "bridge.py"
    foreign = private_names(path) - (own_names(path) - PROCESSORS) - OF_PYTORCH
    assert names <= foreign
    for other in PACKAGE.rglob("*.py"):
        if other != path:
            found = (private_names(other) - own_names(other)) & foreign
            assert not found, f"{other.relative_to(PACKAGE)} names {found}"


def test_a_transformers_without_these_names_is_slower_and_not_wrong(monkeypatch: pytest.MonkeyPatch):
    """Masks then hold causality and padding, and a config's implementation is not known."""
    tiny, inputs = MODELS["llama"], MODELS["llama"].inputs("left")
    model = tiny.build("sage_bwd_emulate")
    expected = of_real_tokens(run(model, **inputs), inputs)
    for name in ("is_causal_mask", "is_full_mask"):
        monkeypatch.setattr(masks, name, lambda function: False)
    monkeypatch.setattr(type(model), "_supports_flash_attn", False)
    found = of_real_tokens(run(model, **inputs), inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert bridge.queries_of({}) is None and bridge.first_query_of({}) is None
    nothing = SimpleNamespace()
    assert bridge.implementation_of(nothing) is None
    assert not bridge.runs_other_attention(nothing) and not bridge.runs_flash_attention(nothing)
