"""Actions that run right after a module's import, so that code need not import a library that it may never need."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

logger = logging.getLogger(__name__)

ImportAction = Callable[[ModuleType], None]

_lock = threading.RLock()
pending: dict[str, list[tuple[ImportAction, str]]] = {}
"""The waiting actions by the module's name, each with its purpose."""


class _Finder(MetaPathFinder):
    """Finder that leaves the search to later finders, and has pending actions run after the module's execution."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for name in [*pending]:
            if is_imported(name):  # its import passed this finder before there was an action
                _run_pending(name)
        searched: set[str] = self._thread.__dict__.setdefault("searched", set())
        # If a finder that it calls calls it back, it returns at once, or the two would call each other without end.
        if fullname not in pending or fullname in searched:
            return None
        searched.add(fullname)
        try:
            spec = self._spec_from_those_behind(fullname, path, target)
        finally:
            searched.remove(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec, spec.loader)
        return spec

    def _spec_from_those_behind(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None
    ) -> ModuleSpec | None:
        finders = list(sys.meta_path)
        for finder in finders[finders.index(self) + 1 if self in finders else 0 :]:
            find_spec = getattr(finder, "find_spec", None)
            spec = None if find_spec is None else find_spec(fullname, path, target)
            if spec is not None:
                return spec
        return None


class _Loader(Loader):
    """Loader that replaces a module's own loader until the module is executed."""

    def __init__(self, spec: ModuleSpec, loader: Loader) -> None:
        self._spec = spec
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        if self._spec.name in sys.modules:  # not a private copy of the module
            _run_pending(self._spec.name)

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


_finder = _Finder()


def is_imported(module_name: str) -> bool:
    """Return whether a module's import has finished, not only begun."""
    module = sys.modules.get(module_name)
    return module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False)


def _run_pending(name: str) -> None:
    with _lock:
        actions = pending.pop(name, [])
        if not pending and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
    for action, purpose in actions:
        try:
            action(sys.modules[name])
        except Exception as error:  # the caller's import must not fail, whatever its module holds
            logger.warning(
                f"{purpose} will not work: {name} is not as expected: {type(error).__name__}: {error}. Install a "
                "version that sage-hf supports",
                exc_info=logger.isEnabledFor(logging.DEBUG),
            )


def when_imported(module_name: str, action: ImportAction, purpose: str) -> None:
    """Call `action(module)` once: now if `module_name` is imported already, else right after its first import.

    The module is never imported for this. Actions of one module run in the order they were given. After a failed import
    they wait for the next attempt. An action that raises leaves the import alone: a warning says that `purpose` will
    not work. If this thread is importing the module right now, the action runs at the first import after that one.
    """
    with _lock:
        pending.setdefault(module_name, []).append((action, purpose))
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
    if module_name in sys.modules:
        importlib.import_module(module_name)  # waits for an import in progress in another thread
        if is_imported(module_name):
            _run_pending(module_name)
