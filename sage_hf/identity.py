"""Identity of classes: a class is diffusers' own only if diffusers' module holds this same class object."""

from __future__ import annotations

import sys


def path_of(cls: type, method: str | None = None) -> str:
    """Return "module.Class" if the module holds this class under its name, else "".

    For another class of the same name, a subclass or a patched class, the result is "", so that facts about the path
    are not applied to other code.

    Args:
        cls: the class.
        method: name of a method that must be written in the same module; its library and sage_hf may wrap it.
    """
    module = sys.modules.get(cls.__module__)
    if module is None or vars(module).get(cls.__name__) is not cls:
        return ""
    if method is not None:
        function, library = getattr(cls, method), cls.__module__.partition(".")[0]
        while hasattr(function, "__wrapped__"):  # and its __module__ names the same module
            if getattr(function, "__globals__", {}).get("__name__", "").partition(".")[0] not in (library, "sage_hf"):
                return ""
            function = function.__wrapped__
        if getattr(function, "__globals__", None) is not vars(module):
            return ""
    return f"{cls.__module__}.{cls.__name__}"


def name_in_diffusers(cls: type, method: str | None = None) -> str:
    """Return the name of a class of diffusers, "" for any other class; `method` as in `path_of`."""
    library, _, path = path_of(cls, method).partition(".")
    return path.rpartition(".")[2] if library == "diffusers" else ""
