"""Decorators of `torch.compiler` that wait until torch._dynamo is imported, which takes as long as torch itself.

Each has the effect of the decorator of the same name in `torch.compiler`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar, cast

import torch

from .import_hook import when_imported

Function = TypeVar("Function", bound=Callable[..., Any])

DYNAMO = "torch._dynamo"
PURPOSE = "torch.compile with attention of sage_kernels"


def assume_constant_result(function: Function) -> Function:
    """Have the compiler call `function` when it traces such a call, and keep the result."""
    when_imported(DYNAMO, lambda dynamo: dynamo.assume_constant_result(function), PURPOSE)
    return function


def allow_in_graph(function: Function) -> Function:
    """Have the compiler put calls of `function` into its graph without following them."""
    when_imported(DYNAMO, lambda dynamo: dynamo.allow_in_graph(function), PURPOSE)
    return function


def run_uncompiled(reason: str) -> Callable[[Function], Function]:
    """Have the compiler run a function uncompiled, between two graphs; `reason` is shown where that is an error."""

    def decorate(function: Function) -> Function:
        current = [function]

        def disable_it(dynamo: Any) -> None:
            current[0] = dynamo.disable(function, reason=reason)

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            return current[0](*args, **kwargs)

        when_imported(DYNAMO, disable_it, PURPOSE)
        return cast(Function, run)

    return decorate


class disable:
    """Have the compiler run a method uncompiled; the compiler is loaded when the method is first looked up."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @functools.cached_property
    def _disabled(self) -> Any:
        return torch.compiler.disable(self._function)

    def __get__(self, instance: object, owner: type) -> Any:
        return self if instance is None else MethodType(self._disabled, instance)
