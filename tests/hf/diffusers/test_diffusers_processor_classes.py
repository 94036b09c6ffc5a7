"""Every class of processors in the installed diffusers, gone through by its code."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import diffusers
import pytest

from sage_hf.diffusers.families import ADAPTERS, FAMILIES
from sage_hf.diffusers.fused_norms import ROPE_OF_PROCESSORS
from sage_hf.diffusers.layers import DispatchLayer, fixed_backend, recognize
from sage_hf.diffusers.processor import SageAttnProcessor, UnsupportedAttentionError
from sage_hf.identity import name_in_diffusers

pytestmark = pytest.mark.audit

FOLDER = Path(diffusers.__file__).parent
OF_ADAPTERS = {
    *("hidden_size", "cross_attention_dim", "num_tokens", "scale", "state_dict", "to_k_ip", "load_state_dict", "to"),
    *("train_kv", "train_q_out", "to_k_custom_diffusion"),
}
"""Attributes of processors that hold weights: ours has the adapter's class there, or leaves the processor."""


@pytest.fixture(scope="module")
def classes() -> dict[str, list[type]]:
    """Diffusers' processors by the name of their class."""
    found = defaultdict(list)
    for package in ("diffusers.models", "diffusers.pipelines"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            try:
                importlib.import_module(module.name)
            except (ImportError, RuntimeError, AttributeError):  # what it needs is not installed
                continue
    for name, module in list(sys.modules.items()):
        if name.startswith("diffusers.") and module is not None:
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name and "Processor" in value.__name__:
                    found[value.__name__].append(value)
    return {name: [one for one in same if "__call__" in vars(one)] for name, same in found.items()}


def test_what_is_known_by_name_is_one_class_of_diffusers(classes):
    for name in (*FAMILIES, *ADAPTERS):
        assert len(classes[name]) == 1, name
    for name in (*FAMILIES, *ADAPTERS, *ROPE_OF_PROCESSORS):
        for one in classes[name]:
            assert name_in_diffusers(one, "__call__") == name


def test_rope_functions_of_one_name_are_the_same_code(classes):
    for name in ROPE_OF_PROCESSORS:
        sources = {without_annotations(inspect.getsource(one.__call__)) for one in classes[name]}
        assert len(sources) == 1, name


def without_annotations(source: str) -> str:
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(tree)


def test_a_processor_that_dispatches_is_served_or_left_with_a_reason(classes):
    for same in classes.values():
        for one in same:
            calls = list(dispatches(one))
            if not calls:
                continue
            try:
                processor = one()
            except (ImportError, TypeError, ValueError):  # needs a package, or arguments
                continue
            fixed = any(not chosen for chosen in calls) or hasattr(one, "_SUPPORTED_BACKENDS")
            assert bool(fixed_backend(processor)) == fixed, one
            try:
                assert fixed or isinstance(recognize(None, processor), DispatchLayer) or one.__name__ in FAMILIES
            except UnsupportedAttentionError:
                assert fixed, one


def dispatches(processor: type) -> Iterator[bool]:
    """Check whether each call of the dispatch in a processor's code lets its backend be chosen."""
    source = textwrap.dedent(inspect.getsource(processor.__call__))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dispatch_attention_fn":
            backend = next((one.value for one in node.keywords if one.arg == "backend"), None)
            text = "None" if backend is None else ast.unparse(backend)
            yield not (text.startswith(("'", "AttentionBackendName.")))


def test_attributes_that_diffusers_reads_from_processors_are_there():
    ours = SageAttnProcessor()
    read: dict[str, set[str]] = defaultdict(set)
    for folder in ("models", "pipelines", "loaders", "hooks", "modular_pipelines"):
        for path in (FOLDER / folder).rglob("*.py"):
            if "deprecated" not in path.parts:
                for name in attributes_of_processors(ast.parse(path.read_text())):
                    read[name].add(path.name)
    assert {"_attention_backend", "_parallel_config"} <= read.keys()
    unknown = {name: files for name, files in read.items() if not hasattr(ours, name) and name not in OF_ADAPTERS}
    assert not unknown


def attributes_of_processors(tree: ast.AST) -> Iterator[str]:
    """Attributes read from `….processor` of an attention module, or from a variable that holds it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr") and len(node.args) > 1:
            of, name = node.args[0], getattr(node.args[1], "value", None)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            of, name = node.value, node.attr
        else:
            continue
        word = of.attr if isinstance(of, ast.Attribute) else getattr(of, "id", "")
        if word in ("processor", "attn_processor", "attn_proc") and name not in OF_TOKENIZERS:
            yield name


OF_TOKENIZERS = {
    *("apply_chat_template", "tokenizer", "batch_decode", "decode", "create_mm_token_type_ids", "pop", "__call__"),
    *("__class__", "image_processor", "video_processor", "feature_extractor"),
}
"""Attributes of transformers' processors of inputs, which pipelines call by the same word, and of any object."""
