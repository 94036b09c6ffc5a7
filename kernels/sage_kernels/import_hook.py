"""Actions that run right after a module's import, so that code which may need a library need not import it."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]

_lock = threading.RLock()
pending: dict[str, list[Action]] = {}


class _Finder(MetaPathFinder):
    """Finder that leaves the search to the other finders, and has pending actions run after the module's execution."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in pending:
            return None
        for finder in tuple(sys.meta_path):
            find_spec = getattr(finder, "find_spec", None)
            if finder is self or find_spec is None:
                continue
            spec = find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec, spec.loader)
                return spec
        return None


class _Loader(Loader):
    """Stand-in for a module's loader until the module is executed; then the real loader takes its place again."""

    def __init__(self, spec: ModuleSpec, loader: Loader) -> None:
        self._spec = spec
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _run_pending(self._spec.name, sys.modules.get(self._spec.name, module))

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


_finder = _Finder()


def _run_pending(name: str, module: ModuleType) -> None:
    with _lock:
        actions = pending.pop(name, [])
        if not pending and _finder in sys.meta_path:
            sys.meta_path.remove(_finder)
    for action in actions:
        action(module)


def when_imported(module_name: str, action: Action) -> None:
    """Call `action(module)` once: now if `module_name` is imported already, else right after its first import.

    The module is never imported for this. Actions of one module run in the order they were given. After a failed import
    they wait for the next attempt; an action that raises makes the import fail that triggered it.

    Raises:
        ImportError: this thread is importing `module_name` right now, so it can neither be used nor waited for.
    """
    with _lock:
        if module_name not in sys.modules:
            pending.setdefault(module_name, []).append(action)
            if _finder not in sys.meta_path:
                sys.meta_path.insert(0, _finder)
            return
    module = importlib.import_module(module_name)  # waits for an import that is under way in another thread
    if getattr(getattr(module, "__spec__", None), "_initializing", False):
        raise ImportError(
            f"sage_hf was imported from inside the import of {module_name}: import {module_name} first, or later"
        )
    action(module)
