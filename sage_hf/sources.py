"""The source of functions, read to know how they behave before they run."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import CodeType
from typing import Any


def source_of(function: CodeType | Callable[..., Any]) -> ast.Module | None:
    """Return the syntax tree of a function's source; None if there is no source file."""
    try:
        text = textwrap.dedent(inspect.getsource(function))
        try:
            return ast.parse(text)
        except SystemError:  # from Python before 3.12.2, if another thread parses at the same time
            return ast.parse(text)
    except (OSError, SyntaxError):  # a part of a statement, such as a lambda
        return None
