"""Inspection of the classes in transformers' modelling files by their code, before any layer is built."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import TypeGuard, TypeVar, cast

from torch import nn

INTERFACE = "ALL_ATTENTION_FUNCTIONS"
"""The global through which every modelling file of transformers looks up the attention function."""

Result = TypeVar("Result")

_EVERY_MODEL = frozenset({"torch.nn.modules.module", "transformers.modeling_utils"})


def once_per_class(function: Callable[[type], Result]) -> Callable[[type], Result]:
    """Return `function` with cached results (functools.cache, typed so that it accepts classes)."""
    return cast(Callable[[type], Result], functools.cache(function))


def is_module_class(value: object) -> TypeGuard[type[nn.Module]]:
    """Return whether a value is a subclass of `nn.Module`."""
    return isinstance(value, type) and issubclass(value, nn.Module)


@once_per_class
def calls_interface(module_class: type) -> bool:
    """Return whether a module of the class looks up transformers' attention functions."""
    return any(INTERFACE in code.co_names for code in methods(module_class))


def methods(module_class: type) -> Iterator[CodeType]:
    """Yield the code of the class's methods, including inherited ones but not those that every module or model has."""
    for name in dir(module_class):
        function = inspect.unwrap(inspect.getattr_static(module_class, name))
        if isinstance(function, FunctionType) and function.__module__ not in _EVERY_MODEL:
            yield from _nested(function.__code__)


@once_per_class
def built_classes(module_class: type) -> frozenset[type]:
    """Return the class and the module classes named in its constructor, in theirs, and so on."""
    found: set[type] = set()
    waiting = [module_class]
    while waiting:
        one = waiting.pop()
        if one in found:
            continue
        found.add(one)
        waiting += _named_by_constructor(one)
    return frozenset(found)


def _named_by_constructor(module_class: type) -> list[type]:
    named: list[object] = []
    for base in module_class.__mro__:
        constructor = inspect.unwrap(vars(base).get("__init__", object.__init__))
        if isinstance(constructor, FunctionType) and constructor.__module__ not in _EVERY_MODEL:
            names = {name for code in _nested(constructor.__code__) for name in code.co_names}
            named += [constructor.__globals__.get(name) for name in names]
    return [value for value in named if is_module_class(value)]


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
