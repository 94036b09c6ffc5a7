"""Which modules of a model call transformers' attention interface, and which models have none that does."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType

from torch import nn

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""The global through which every modelling file of transformers looks up the attention function."""

_EVERY_MODEL = frozenset({"torch.nn.modules.module", "transformers.modeling_utils"})


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of `model` that call transformers' attention interface, by dotted name, in the model's order.

    Each reads `sage_recipe` (a recipe's name) and `sage_fallback` from its own attributes in preference to what
    `attn_implementation` says, so that one layer can be set apart.
    """
    return {name: module for name, module in model.named_modules() if _calls_interface(type(module))}


def unsupported(model: nn.Module) -> str | None:
    """Why setting `attn_implementation` would not change `model`, or None if it would."""
    if attention_layers(model):
        return None
    if not hasattr(model, "set_attn_implementation"):
        return f"{type(model).__name__} is not a transformers model"
    return (
        f"no layer of {type(model).__name__} calls transformers' attention interface: "
        "its attention, if it has any, is computed in its own code"
    )


@functools.cache
def ignores_interface(model_class: type) -> bool:
    """Whether the module that defines `model_class` has attention layers of its own, none calling the interface.

    A class is judged before it has layers to look at. One that only combines other models passes: they are judged
    in their turn.
    """
    module = sys.modules.get(model_class.__module__)
    if module is None:
        return False
    own = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == module.__name__
    ]
    return any("Attention" in value.__name__ for value in own) and not any(map(_calls_interface, own))


@functools.cache
def _calls_interface(module_class: type[nn.Module]) -> bool:
    return any(_INTERFACE in code.co_names for code in methods(module_class))


def methods(module_class: type[nn.Module]) -> Iterator[CodeType]:
    """Code of the class's methods, inherited ones included, without those every module or model has."""
    for name in dir(module_class):
        function = inspect.unwrap(inspect.getattr_static(module_class, name))
        if isinstance(function, FunctionType) and function.__module__ not in _EVERY_MODEL:
            yield from _nested(function.__code__)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
