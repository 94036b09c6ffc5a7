"""Processes that have imported torch, and nothing else, without the second that it takes each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from typing import Any


class Forks:
    """A process that has imported torch, and is copied for each piece of code. Use it as a context manager."""

    def __enter__(self) -> Forks:
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, __file__], **pipes)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def run(self, code: str, environment: Mapping[str, str] | None = None) -> str:
        """Run `code` as a program's, after `import torch`, and return what it prints.

        Args:
            code: what to run.
            environment: variables, in place of this process's.

        Raises:
            AssertionError: the code ends with another status than 0; the message is what it wrote to standard error.
        """
        print(json.dumps([code, dict(os.environ if environment is None else environment)]), file=self._process.stdin)
        self._process.stdin.flush()
        status, output, errors = json.loads(self._process.stdout.readline())
        assert status == 0, errors
        return output


def serve() -> None:
    """Answer each line of standard input, code and environment, by the status, output and errors of a copy."""
    import torch  # noqa: F401

    for line in sys.stdin:
        code, environment = json.loads(line)
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            copy = os.fork()
            if copy == 0:
                os.environ.clear()
                os.environ.update(environment)
                os.dup2(output.fileno(), 1)
                os.dup2(errors.fileno(), 2)
                _run_and_exit(code)
            _, status = os.waitpid(copy, 0)
            said = [file.seek(0) or file.read() for file in (output, errors)]
        print(json.dumps([status, *said]), flush=True)


def _run_and_exit(code: str) -> None:
    status = 1
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
        status = 0
    except SystemExit as request:
        status = int(request.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.path[0] = ""  # as of `python -c`
    serve()
