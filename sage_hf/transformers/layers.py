"""Which modules of a model call transformers' attention interface, and which models have none that does."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import TypeVar, cast

from torch import nn

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""The global through which every modelling file of transformers looks up the attention function."""

Result = TypeVar("Result")

_EVERY_MODEL = frozenset({"torch.nn.modules.module", "transformers.modeling_utils"})


def once_per_class(function: Callable[[type], Result]) -> Callable[[type], Result]:
    """`function`, its results kept (functools.cache, whose types know no class that is hashable)."""
    return cast(Callable[[type], Result], functools.cache(function))


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of `model` that call transformers' attention interface, by dotted name, in the model's order.

    Each reads `sage_recipe` (a recipe's name) and `sage_fallback` from its own attributes in preference to what
    `attn_implementation` says, so that one layer can be set apart. Layers of a model that `refusal` is about are left
    out.
    """
    refused: dict[str, bool] = {}
    layers = {}
    for name, module in model.named_modules():
        if _is_pretrained_model(module):
            refused[name] = refusal(type(module)) is not None
        if _calls_interface(type(module)) and not _of_nearest_parent(name, refused):
            layers[name] = module
    return layers


def unsupported(model: nn.Module) -> str | None:
    """Why setting `attn_implementation` to one of our names would not change `model`, or None if it would."""
    if attention_layers(model):
        return None
    if not _is_pretrained_model(model):
        return f"{type(model).__name__} is not a transformers model"
    return refusal(type(model)) or f"{type(model).__name__} has no layer that calls transformers' attention interface"


@once_per_class
def refusal(model_class: type) -> str | None:
    """Why models of a class must not be given one of our names, or None if they may; judged before there are layers.

    Transformers lets any registered name through. A model that does not look it up then computes attention by its own
    code with masks meant for ours, which loses causality and padding (Bloom), or fails on a name it has no class for
    (GPT-J). One that only combines other models passes: they are judged in their turn.
    """
    file = model_class.__module__
    namespace = vars(sys.modules[file]) if file in sys.modules else {}
    own = {name: value for name, value in namespace.items() if getattr(value, "__module__", file) == file}
    attention = [value for name, value in own.items() if "Attention" in name and _is_module_class(value)]
    if any(isinstance(value, dict) and name.endswith("ATTENTION_CLASSES") for name, value in own.items()):
        return f"{file} chooses among attention classes of its own"
    if attention and not any(_calls_interface(value) for value in own.values() if _is_module_class(value)):
        return f"{file} does not use transformers' attention interface"
    if not (
        getattr(model_class, "_supports_sdpa", False) or getattr(model_class, "_supports_attention_backend", False)
    ):
        return f"{model_class.__name__} supports no attention implementation but its own"
    return None


def _is_module_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _is_pretrained_model(module: nn.Module) -> bool:
    return hasattr(module, "get_correct_attn_implementation")


def _of_nearest_parent(name: str, of_parents: dict[str, bool]) -> bool:
    """What `of_parents` says of the module of that name or else of the closest one around it; False if of none."""
    while name and name not in of_parents:
        name = name.rpartition(".")[0]
    return of_parents.get(name, False)


@once_per_class
def _calls_interface(module_class: type) -> bool:
    return any(_INTERFACE in code.co_names for code in methods(module_class))


def methods(module_class: type) -> Iterator[CodeType]:
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
