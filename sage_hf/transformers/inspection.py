"""Inspection of the code of classes in transformers' modelling files, before any layer is built."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeGuard, TypeVar, cast

from torch import nn

from sage_hf.sources import source_of
from sage_hf.transformers.bridge import EVERY_MODEL, INTERFACE, asks_for_implementation, runs_other_attention

Answer = TypeVar("Answer")


def once_per_class(function: Callable[[type], Answer]) -> Callable[[type], Answer]:
    """Return `function` with cached results (functools.cache, typed so that it accepts classes)."""
    return cast(Callable[[type], Answer], functools.cache(function))


def is_module_class(value: object) -> TypeGuard[type[nn.Module]]:
    """Check whether a value is a subclass of `nn.Module`."""
    return isinstance(value, type) and issubclass(value, nn.Module)


@once_per_class
def calls_interface(module_class: type) -> bool:
    """Check whether a module of the class looks up transformers' attention functions."""
    return any(INTERFACE in code.co_names for code in methods(module_class))


def methods(module_class: type) -> Iterator[CodeType]:
    """Yield the code of the class's methods, including inherited methods but not methods of every module or model.

    If a method calls `super()`, the overridden methods count too.
    """
    for name in dir(module_class):
        for base in module_class.__mro__:
            chain: list[Any] = []  # including wrappers, which may be a patch
            function: Any = vars(base).get(name, object.__init__)
            function = inspect.unwrap(function, stop=chain.append)
            for wrapped in (*chain, function):
                if isinstance(wrapped, FunctionType) and wrapped.__module__ not in EVERY_MODEL:
                    yield from _nested(wrapped.__code__)
            if name in vars(base) and "super" not in getattr(getattr(function, "__code__", None), "co_names", ()):
                break


@once_per_class
def built_classes(module_class: type) -> frozenset[type]:
    """Return the class, the module classes named in its constructor, in their constructors, and so on."""
    built: set[type] = set()
    waiting = [module_class]
    while waiting:
        waiting_class = waiting.pop()
        if waiting_class in built:
            continue
        built.add(waiting_class)
        waiting += _named_by_constructor(waiting_class)
    return frozenset(built)


@functools.cache
def models_of(config_class: type) -> list[Any]:
    """Return the imported model classes with a config of the class, or else of its closest base that has such models.

    Classes that run only their own attention are left out: our masks are not made for them, only for models inside
    them. `registration` clears this cache when a model is built, because its class may be new.
    """
    from transformers import PreTrainedModel

    models: set[Any] = set()
    waiting: set[Any] = {PreTrainedModel}
    while waiting:
        waiting = {subclass for known_class in waiting for subclass in known_class.__subclasses__()}
        models |= waiting
    models = {model for model in models if runs_other_attention(model)}
    for base in config_class.__mro__:
        if matching := [model for model in models if model.config_class is base]:
            return matching
    return []


@once_per_class
def asks_for_sdpa(model_class: type) -> bool:
    """Check whether the model, or a module that it builds, behaves differently if the implementation is named
    "sdpa"."""
    return any(
        asks_for_implementation(code.co_names) and "'sdpa'" in repr(code.co_consts)
        for built in built_classes(model_class)
        for code in methods(built)
    )


@once_per_class
def computes_with_masks(model_class: type) -> bool:
    """Check whether attention layers that the model builds compute with their masks, instead of only passing them on.

    The answer is read from the source of the layers' methods; a method without source counts as computing with its
    mask.
    """
    codes = {code for layer in filter(calls_interface, built_classes(model_class)) for code in methods(layer)}
    return any(_computes_with_masks(code) for code in codes if "attention_mask" in code.co_varnames)


def swapped_in_readers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that were put into a model and read its masks, by dotted name.

    The model's class does not build such modules. Two kinds of modules are left out: classes of transformers, which a
    model may take from tables; and modules that only hand their masks to modules which call the attention interface.
    """
    classes = {type(module) for module in model.modules() if hasattr(module, "set_attn_implementation")}
    known = {code for module_class in classes for built in built_classes(module_class) for code in methods(built)}

    def reads(module: nn.Module) -> bool:
        if type(module).__module__.startswith("transformers."):
            return False
        codes = [code for code in methods(type(module)) if code not in known and "attention_mask" in code.co_varnames]
        if any(map(calls_interface, map(type, module.modules()))):
            return any(map(_computes_with_masks, codes))
        return any(map(_loads_mask, codes))

    return {name: module for name, module in model.named_modules() if reads(module)}


def _loads_mask(code: CodeType) -> bool:
    return any(
        "LOAD" in instruction.opname and instruction.argval == "attention_mask"
        for instruction in dis.get_instructions(code)
    )


def _computes_with_masks(code: CodeType) -> bool:
    tree = source_of(code)
    if tree is None:
        return True
    handed_on: list[ast.expr | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not ast.unparse(node.func).startswith(("torch.", "nn.", "F.")):
            handed_on += [node.func, *node.args, *(keyword.value for keyword in node.keywords)]
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Is | ast.IsNot):
            handed_on.append(node.left)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.Return):
            handed_on.append(node.value)
        elif isinstance(node, ast.IfExp):
            handed_on += [node.body, node.orelse]
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
    return any(name.id.endswith("mask") and name not in handed_on for name in names)


def _named_by_constructor(module_class: type) -> list[type]:
    """Return the module classes that a constructor names: global, of the function around it, in modules, in tables."""
    referenced: list[object] = []
    for base in module_class.__mro__:
        constructor = inspect.unwrap(vars(base).get("__init__", object.__init__))
        if isinstance(constructor, FunctionType) and constructor.__module__ not in EVERY_MODEL:
            names = {name for code in _nested(constructor.__code__) for name in code.co_names}
            values = [constructor.__globals__[name] for name in names if name in constructor.__globals__]
            for cell in constructor.__closure__ or ():
                with contextlib.suppress(ValueError):  # it is empty
                    values.append(cell.cell_contents)
            modules = [
                value for value in values if isinstance(value, ModuleType) and not value.__name__.startswith("torch")
            ]
            values += [vars(module)[name] for module in modules for name in names if name in vars(module)]
            referenced += values + [value for table in values if isinstance(table, dict) for value in table.values()]
    return [value for value in referenced if is_module_class(value)]


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
