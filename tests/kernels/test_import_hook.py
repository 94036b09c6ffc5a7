"""An action follows a module's import, whichever comes first, and leaves no trace."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from sage_kernels.runtime import import_hook
from sage_kernels.runtime.import_hook import when_imported


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_action_runs_at_once_when_the_module_is_imported_already(folder: Path) -> None:
    (folder / "hooked_before.py").write_text("answer = 42\n")
    module = importlib.import_module("hooked_before")
    seen = []
    when_imported("hooked_before", seen.append, "this")
    assert seen == [module]


def test_action_waits_for_the_import_and_sees_the_finished_module(folder: Path) -> None:
    (folder / "hooked_after.py").write_text("answer = 42\n")
    seen = []
    when_imported("hooked_after", lambda module: seen.append(("first", module.answer)), "this")
    when_imported("hooked_after", lambda module: seen.append(("second", module.answer)), "this")
    assert seen == []
    assert "hooked_after" not in sys.modules
    importlib.import_module("hooked_after")
    assert seen == [("first", 42), ("second", 42)]
    importlib.reload(sys.modules["hooked_after"])
    assert len(seen) == 2


def test_submodules_and_modules_that_replace_themselves_are_served(folder: Path) -> None:
    (folder / "hooked_package").mkdir()
    (folder / "hooked_package" / "__init__.py").write_text("")
    (folder / "hooked_package" / "part.py").write_text(
        "import sys, types\nnew = types.ModuleType(__name__)\nnew.replaced = True\nsys.modules[__name__] = new\n"
    )
    seen = []
    when_imported("hooked_package.part", seen.append, "this")
    importlib.import_module("hooked_package")
    assert seen == []
    importlib.import_module("hooked_package.part")
    assert [module.replaced for module in seen] == [True]


def test_the_module_keeps_its_own_loader_and_no_finder_stays_behind(folder: Path) -> None:
    (folder / "hooked_clean.py").write_text("loader = __loader__\n")
    finders = list(sys.meta_path)
    when_imported("hooked_clean", lambda module: None, "this")
    assert importlib.util.find_spec("hooked_clean").origin == str(folder / "hooked_clean.py")
    module = importlib.import_module("hooked_clean")
    assert type(module.loader) is type(module.__spec__.loader) is type(module.__loader__) is SourceFileLoader
    assert "hooked_clean" not in import_hook.pending
    if not import_hook.pending:
        assert [finder for finder in sys.meta_path if type(finder).__module__ == import_hook.__name__] == []
    else:
        assert list(sys.meta_path) == finders


def test_a_failed_import_leaves_the_action_waiting(folder: Path) -> None:
    source = folder / "hooked_failing.py"
    source.write_text("raise RuntimeError('not yet')\n")
    seen = []
    when_imported("hooked_failing", seen.append, "this")
    with pytest.raises(RuntimeError, match="not yet"):
        importlib.import_module("hooked_failing")
    assert seen == []
    source.write_text("ready = True  # now it imports\n")
    importlib.invalidate_caches()
    importlib.import_module("hooked_failing")
    assert [module.ready for module in seen] == [True]


def test_a_missing_module_still_raises_module_not_found(folder: Path) -> None:
    when_imported("hooked_missing", lambda module: None, "this")
    with pytest.raises(ModuleNotFoundError, match="hooked_missing"):
        importlib.import_module("hooked_missing")
    import_hook.pending.pop("hooked_missing")


def test_an_import_under_way_in_another_thread_is_awaited(folder: Path) -> None:
    (folder / "hooked_slow.py").write_text(
        "import builtins\nbuiltins.hooked_slow_started.set()\nbuiltins.hooked_slow_go.wait(10)\nanswer = 42\n"
    )
    import builtins

    builtins.hooked_slow_started, builtins.hooked_slow_go = threading.Event(), threading.Event()
    try:
        importer = threading.Thread(target=importlib.import_module, args=("hooked_slow",))
        importer.start()
        assert builtins.hooked_slow_started.wait(10)
        seen = []
        action = lambda module: seen.append(module.answer)  # noqa: E731
        waiter = threading.Thread(target=when_imported, args=("hooked_slow", action, "this"))
        waiter.start()
        waiter.join(0.05)
        assert seen == []
        builtins.hooked_slow_go.set()
        importer.join(10)
        waiter.join(10)
        assert seen == [42]
    finally:
        del builtins.hooked_slow_started, builtins.hooked_slow_go


def test_an_action_given_inside_the_modules_own_import_waits_for_the_next_one(folder: Path) -> None:
    (folder / "hooked_circular.py").write_text(
        "import builtins\nfrom sage_kernels.runtime.import_hook import when_imported\n"
        "when_imported(__name__, lambda module: builtins.seen.append(module.answer), 'this')\nanswer = 42\n"
    )
    (folder / "imported_later.py").write_text("")
    import builtins

    builtins.seen = seen = []
    try:
        importlib.import_module("hooked_circular")
        assert seen == []
        importlib.import_module("imported_later")
        assert seen == [42]
    finally:
        del builtins.seen


def test_an_import_already_under_way_is_noticed_at_the_next_import(folder: Path) -> None:
    (folder / "hooked_between.py").write_text("answer = 42\n")
    (folder / "imported_after_it.py").write_text("")
    spec, seen = importlib.util.find_spec("hooked_between"), []
    when_imported("hooked_between", lambda module: seen.append(module.answer), "this")
    sys.modules["hooked_between"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    importlib.import_module("imported_after_it")
    assert seen == [42]


def test_an_action_that_raises_leaves_the_import_alone_and_says_what_will_not_work(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seen = []
    for name in ("hooked_broken_before", "hooked_broken_after"):
        (folder / f"{name}.py").write_text("answer = 42\n")
        if name.endswith("before"):
            importlib.import_module(name)
        when_imported(name, lambda module: module.moved_away, "switching its models")
        when_imported(name, seen.append, "this")
        assert importlib.import_module(name).answer == 42
        assert f"switching its models will not work: {name} is not as expected: AttributeError" in caplog.text
        caplog.clear()
    assert [module.__name__ for module in seen] == ["hooked_broken_before", "hooked_broken_after"]


def test_a_copy_of_the_module_for_own_use_is_not_its_import(folder: Path) -> None:
    (folder / "hooked_copied.py").write_text("answer = 42\n")
    seen = []
    when_imported("hooked_copied", seen.append, "this")
    spec = importlib.util.find_spec("hooked_copied")
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    assert copy.answer == 42 and seen == []
    assert seen == [importlib.import_module("hooked_copied")]


def test_threads_that_import_at_once_run_the_action_once(folder: Path) -> None:
    (folder / "hooked_by_many.py").write_text("import time\ntime.sleep(0.05)\nanswer = 42\n")
    seen = []
    when_imported("hooked_by_many", lambda module: seen.append(module.answer), "this")
    threads = [threading.Thread(target=importlib.import_module, args=("hooked_by_many",)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert seen == [42]


def test_copies_of_the_package_wait_for_the_same_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "hooked_by_copies.py").write_text("loader = __loader__\n")
    copies = []
    for number in range(3):
        name = f"import_hook_copy_{number}"
        spec = importlib.util.spec_from_file_location(name, import_hook.__file__)
        copies.append(importlib.util.module_from_spec(spec))
        spec.loader.exec_module(copies[-1])
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seen = []
    for copy in (import_hook, *copies):
        copy.when_imported("hooked_by_copies", seen.append, "this")
    module = importlib.import_module("hooked_by_copies")
    assert seen == [module] * 4
    assert type(module.loader) is type(module.__spec__.loader) is SourceFileLoader
    assert not any(copy.pending for copy in copies)


class DelegatingFinder:
    """Another library's finder: it asks all others on the path."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def find_spec(self, fullname, path, target=None):
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                self.found.append(fullname)
                return spec
        return None


@pytest.mark.parametrize("place", ["in front", "behind"])
def test_a_finder_that_asks_all_others_is_asked_once(folder: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    name = f"hooked_with_{place.replace(' ', '_')}"
    (folder / f"{name}.py").write_text("answer = 42\n")
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    other, seen = DelegatingFinder(), []
    if place == "behind":
        sys.meta_path.insert(0, other)
    when_imported(name, lambda module: seen.append(module.answer), "this")
    if place == "in front":
        sys.meta_path.insert(0, other)
    importlib.import_module(name)
    assert seen == [42]
    assert other.found == [name]
