"""Identity of classes: a class is diffusers' own if diffusers' module holds that very class, whatever its name says."""

from __future__ import annotations

import inspect
import sys


def path_of(cls: type, method: str | None = None) -> str:
    """Return "module.Class" of a class that its module holds under its name, else "".

    A namesake, a subclass and a patched class are foreign, so what is known by path is known of no other code.

    Args:
        cls: the class.
        method: name of a method that must be the one written in that module.
    """
    module = sys.modules.get(cls.__module__)
    if module is None or vars(module).get(cls.__name__) is not cls:
        return ""
    if method is not None:
        function = inspect.unwrap(getattr(cls, method))
        if getattr(function, "__globals__", None) is not vars(module):
            return ""
    return f"{cls.__module__}.{cls.__name__}"


def name_in_diffusers(cls: type, method: str | None = None) -> str:
    """Return the name of a class of diffusers, "" of any other; `method` as in `path_of`."""
    library, _, rest = path_of(cls, method).partition(".")
    return rest.rpartition(".")[2] if library == "diffusers" else ""
