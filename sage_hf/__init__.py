"""Low-bit attention for Hugging Face diffusers and transformers.

Importing this package registers the attention implementations "sage3", "sage2", "sage1", "sage_bwd" with transformers,
and backends of the same names with diffusers, as soon as each library is imported. It imports none of transformers,
diffusers and torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sage_hf.diffusers.install import install
from sage_hf.transformers import register

if TYPE_CHECKING:
    from sage_hf.app.calibrate import calibrate
    from sage_hf.app.layer_errors import record_layer_errors
    from sage_hf.apply import apply, restore
    from sage_hf.attention import BlockList, sage_attention, set_default_fallback, set_routing
    from sage_hf.config import LayerRule, SageConfig, StepRule
    from sage_hf.diffusers import context_parallel_plan, enable_vsa
    from sage_hf.diffusers.processor import (
        SageAttn1Processor,
        SageAttn2Processor,
        SageAttn3Processor,
        SageAttnProcessor,
        SageBwdProcessor,
    )
    from sage_hf.drop_in import drop_in
    from sage_hf.explain import explain
    from sage_hf.sparse.config import Sparse
    from sage_hf.transformers.kv_cache import QuantizedKVCache

__version__ = "0.1.0"

__all__ = [
    "BlockList",
    "LayerRule",
    "QuantizedKVCache",
    "SageAttn1Processor",
    "SageAttn2Processor",
    "SageAttn3Processor",
    "SageAttnProcessor",
    "SageBwdProcessor",
    "SageConfig",
    "Sparse",
    "StepRule",
    "apply",
    "calibrate",
    "context_parallel_plan",
    "drop_in",
    "enable_vsa",
    "explain",
    "record_layer_errors",
    "restore",
    "sage_attention",
    "set_default_fallback",
    "set_routing",
]

_HOME = {
    "BlockList": "attention",
    "LayerRule": "config",
    "QuantizedKVCache": "transformers.kv_cache",
    "SageConfig": "config",
    "Sparse": "sparse",
    "StepRule": "config",
    "apply": "apply",
    "calibrate": "app.calibrate",
    "drop_in": "drop_in",
    "explain": "explain",
    "record_layer_errors": "app.layer_errors",
    "restore": "apply",
    "sage_attention": "attention",
    "set_default_fallback": "attention",
    "set_routing": "attention",
}
"""Submodules that hold names of `__all__`; the remaining names are in `diffusers`."""


class _Package(ModuleType):
    """Module whose functions `apply`, `drop_in` and `explain` are not hidden by submodules of the same names."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("apply", "drop_in", "explain") and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

install()
register()


def __getattr__(name: str) -> Any:
    if name in __all__:
        value = getattr(import_module(f"{__name__}.{_HOME.get(name, 'diffusers')}"), name)
        return globals().setdefault(name, value)
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
