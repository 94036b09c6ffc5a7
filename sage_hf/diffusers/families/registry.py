"""Registry of our functions for diffusers' processors whose attention backend cannot be chosen."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

FamilyFunction = TypeVar("FamilyFunction", bound=Callable[..., Any])

FAMILIES: dict[str, Callable[..., Any]] = {}
"""Class name of diffusers' processor -> function(attend, attn, …) with the further arguments of its `__call__`."""
ADAPTERS: dict[str, Callable[..., Any]] = {}
"""Class name of an IP-Adapter's processor, which holds weights -> function(attend, attn, adapter, …)."""


def computes(*processors: str, fused: str | None = None) -> Callable[[FamilyFunction], FamilyFunction]:
    """Register a function that computes the same as diffusers' processors of these class names.

    Args:
        processors: the names.
        fused: name of the processor that computes the same by fused projections: the function with `fused=True`.

    Raises:
        ValueError: one of the processors has a function already.
    """
    register = _into(FAMILIES, processors)
    if fused is None:
        return register
    register_fused = _into(FAMILIES, (fused,))

    def register_both(function: FamilyFunction) -> FamilyFunction:
        registered = register(function)
        register_fused(partial(function, fused=True))
        return registered

    return register_both


def computes_adapter(*processors: str) -> Callable[[FamilyFunction], FamilyFunction]:
    """Register a function that computes the same as diffusers' IP-Adapter processors of these class names."""
    return _into(ADAPTERS, processors)


def _into(table: dict[str, Callable[..., Any]], names: tuple[str, ...]) -> Callable[[FamilyFunction], FamilyFunction]:
    if known := [name for name in names if name in FAMILIES or name in ADAPTERS]:
        raise ValueError(f"{known[0]} has a function already")

    def register(function: FamilyFunction) -> FamilyFunction:
        table.update(dict.fromkeys(names, function))
        return function

    return register
