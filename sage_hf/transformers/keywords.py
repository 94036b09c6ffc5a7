"""The keywords that a model passes to its attention function: which change the result, and who can honour them."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from types import CodeType

from torch import nn

from sage_hf.sources import source_of
from sage_hf.transformers.bridge import EAGER, INTERFACE, is_paged_cache
from sage_hf.transformers.inspection import methods, once_per_class
from sage_kernels.flash_attention import HARMLESS

NAMED = frozenset(
    {
        "module",
        "query",
        "key",
        "value",
        "attention_mask",
        "dropout",
        "scaling",
        "is_causal",
        "position_bias",
        "softcap",
        "s_aux",
        "output_attentions",
    }
)
"""Parameters of `sage_attention_forward` for which models pass values."""


def sort_keywords(module: nn.Module, keywords: dict[str, object]) -> dict[str, object]:
    """Select the keywords that only the model's eager attention can honour.

    A keyword is ignored only if its value is None, if it is in `HARMLESS`, or if neither the code of `module` nor the
    model's eager attention names it: then a caller passed it to the model, which merely passed it on.

    Args:
        module: the calling attention layer.
        keywords: the keywords of the call that `sage_attention_forward` does not name.

    Raises:
        TypeError: the layer passes a keyword that the model's eager attention does not know either, such as a keyword
            for a kernel that picks keys (DeepSeek V3.2).
        ValueError: the keywords contain a paged cache, which comes without a mask.
    """
    for_eager = {}
    for name, value in keywords.items():
        if value is None or name in HARMLESS:
            continue
        if name == "cache" and is_paged_cache(value):
            raise ValueError(
                "continuous batching hands over a paged cache and no mask: call "
                'model.set_attn_implementation("sdpa") before generating with it'
            )
        if name in _eager_names(type(module)):
            for_eager[name] = value
        elif name in _own_names(type(module)):
            raise TypeError(
                f"{type(module).__name__} hands {name}= to its attention function, which may change the result and "
                'which sage_hf does not know: call model.set_attn_implementation("sdpa"), or "eager"'
            )
    return for_eager


@once_per_class
def unknown_keywords(module_class: type) -> frozenset[str]:
    """Return the keywords that the class's own code passes and for which `sort_keywords` would raise TypeError.

    They are read from the class's source, so keywords passed as `**kwargs` are missing; without a source there are
    none.
    """
    handed = {name for code in methods(module_class) if INTERFACE in code.co_names for name in _handed_on(code)}
    return frozenset(handed) - NAMED - HARMLESS - _eager_names(module_class)


def _handed_on(code: CodeType) -> Iterator[str]:
    """Yield the keywords with which the code calls functions that it looked up in transformers' attention interface."""
    tree = source_of(code)
    if tree is None:
        return
    looked_up = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None and _mentions(node.value, INTERFACE):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            looked_up |= {target.id for target in targets if isinstance(target, ast.Name)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(_mentions(node.func, name) for name in (*looked_up, INTERFACE)):
            yield from (keyword.arg for keyword in node.keywords if keyword.arg is not None)


def _mentions(tree: ast.AST, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))


def has_eager_attention(module: nn.Module) -> bool:
    """Check whether the file that defines the layer's `forward` has an eager attention function."""
    return _eager_attention(type(module)) is not None


def eager_attention_of(module: nn.Module) -> Callable[..., tuple]:
    """Return the eager attention function of the file that defines the layer's `forward`.

    Raises:
        ValueError: the file has no eager attention function.
    """
    eager = _eager_attention(type(module))
    if eager is None:
        raise ValueError(
            f"{type(module).__name__} has no eager attention that could compute this call: call "
            'model.set_attn_implementation("eager")'
        )
    return eager


def _eager_attention(module_class: type[nn.Module]) -> Callable[..., tuple] | None:
    return getattr(inspect.unwrap(module_class.forward), "__globals__", {}).get(EAGER)


@once_per_class
def _eager_names(module_class: type) -> frozenset[str]:
    eager = _eager_attention(module_class)
    return frozenset() if eager is None else frozenset(_names(inspect.unwrap(eager).__code__))


@once_per_class
def _own_names(module_class: type) -> frozenset[str]:
    return frozenset(name for code in methods(module_class) for name in _names(code))


def _names(code: CodeType) -> set[str]:
    """Return the names of variables and parameters, the keywords of calls, and the strings in the code."""
    names = set(code.co_varnames)
    for constant in code.co_consts:
        for part in constant if isinstance(constant, tuple) else (constant,):
            if isinstance(part, str):
                names.add(part)
    return names
