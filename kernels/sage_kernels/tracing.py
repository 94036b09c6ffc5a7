"""Decorators of `torch.compiler` that wait until torch._dynamo is imported, which takes as long as torch itself.

Each does what the one of the same name in `torch.compiler` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from .import_hook import when_imported

Function = TypeVar("Function", bound=Callable[..., Any])

DYNAMO = "torch._dynamo"


def assume_constant_result(function: Function) -> Function:
    """Have the compiler call `function` when it traces a call of it, and keep the result."""
    when_imported(DYNAMO, lambda dynamo: dynamo.assume_constant_result(function))
    return function


def allow_in_graph(function: Function) -> Function:
    """Have the compiler put calls of `function` into its graph without following them."""
    when_imported(DYNAMO, lambda dynamo: dynamo.allow_in_graph(function))
    return function


def disable(function: Function) -> Function:
    """Have the compiler break its graph at calls of `function`, and run them as they are."""
    disabled: list[Callable[..., Any]] = [function]

    def replace(dynamo: Any) -> None:
        disabled[0] = dynamo.disable(function)

    when_imported(DYNAMO, replace)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return disabled[0](*args, **kwargs)

    return cast(Function, wrapper)
