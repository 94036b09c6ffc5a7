"""Low-bit attention for diffusers models: processors for every family, and attention backends.

Importing this package does not import diffusers; using one of its names does.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "FixedBackendError": "errors",
    "SageAttn1Processor": "processor",
    "SageAttn2Processor": "processor",
    "SageAttn3Processor": "processor",
    "SageAttnProcessor": "processor",
    "SageBwdProcessor": "processor",
    "UnsupportedAttentionError": "errors",
    "VSALayer": "layers",
    "attention_layers": "processor",
    "bind": "processor",
    "check_parallelism": "parallel",
    "context_parallel_plan": "cp_plans",
    "enable_vsa": "gates",
    "exchange_processor": "processor",
    "layer_of": "processor",
    "log_kept": "processor",
    "naming": "errors",
    "remove_processors": "processor",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
