"""The names `sageattention` and `sageattn3` for programs that import them; `python -m sage_hf.drop_in COMMAND …`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

REPLACEMENT_MODULES = str(Path(__file__).with_name("replacement_modules"))
NAMES = ("sageattention", "sageattn3")


class DropIn:
    """Handle of a `drop_in`: `restore()`, or leaving a `with` block, removes the modules again."""

    def restore(self) -> None:
        """Remove the modules that are still in place; functions that a program holds keep working."""
        if REPLACEMENT_MODULES in sys.path:
            sys.path.remove(REPLACEMENT_MODULES)
        for name in _loaded(ours=True):
            del sys.modules[name]

    def __enter__(self) -> DropIn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()


def drop_in() -> DropIn:
    """Provide the modules `sageattention` and `sageattn3` with the documented functions, computed by sage-hf.

    From then on, `import sageattention` finds sage-hf's functions, even if SageAttention is installed. Call `drop_in`
    before a program looks for the package: diffusers looks for it, and for its version, at import. Programs that
    another process starts need `python -m sage_hf.drop_in COMMAND …`.

    Returns:
        A handle that removes the modules: `handle.restore()`, or `with sage_hf.drop_in():`.

    Raises:
        RuntimeError: another `sageattention` or `sageattn3` is loaded already.

    Source: SageAttention's documentation describes the functions of `replacement_modules`.

    Example:
        >>> handle = sage_hf.drop_in()
        >>> from sageattention import sageattn
        >>> out = sageattn(q, k, v, tensor_layout="NHD", is_causal=True)
        >>> handle.restore()
    """
    foreign = _loaded(ours=False)
    if foreign:
        raise RuntimeError(
            f"another {' and '.join(foreign)} is loaded already: call sage_hf.drop_in() before it is imported"
        )
    if REPLACEMENT_MODULES not in sys.path:
        sys.path.insert(0, REPLACEMENT_MODULES)
    return DropIn()


def _loaded(ours: bool) -> list[str]:
    """Return the names of loaded modules that are ours, or another package's."""
    files = {name: getattr(sys.modules[name], "__file__", None) or "" for name in NAMES if name in sys.modules}
    return [name for name, file in files.items() if file.startswith(REPLACEMENT_MODULES + os.sep) == ours]


def main(command: list[str]) -> int:
    """Run a command whose Python processes and subprocesses have the modules of `drop_in`; return its exit status."""
    if not command or command[0] in ("-h", "--help"):
        print("usage: python -m sage_hf.drop_in COMMAND …\nexample: python -m sage_hf.drop_in python main.py")
        return 0 if command else 2
    paths = [REPLACEMENT_MODULES, *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if os.name == "posix":  # the command takes this process's place, so it gets the signals
        os.execvp(command[0], command)
    return subprocess.call(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
