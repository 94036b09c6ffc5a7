"""Low-bit attention for Hugging Face diffusers and transformers.

Importing this package registers the attention implementations "sage3", "sage2", "sage1", "sage_bwd" with
transformers and the backends of the same names with diffusers, each when that library is imported; it imports neither
of them itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from sage_hf.apply import apply
from sage_hf.attention import sage_attention, set_default_fallback
from sage_hf.config import SageConfig
from sage_hf.diffusers.install import install
from sage_hf.explain import explain
from sage_hf.sparse.config import Sparse
from sage_hf.transformers import register

__version__ = "0.1.0"

_PROCESSORS = (
    "SageAttn1Processor",
    "SageAttn2Processor",
    "SageAttn3Processor",
    "SageAttnProcessor",
    "SageBwdProcessor",
)

__all__ = [
    "SageConfig",
    "Sparse",
    "apply",
    "enable_vsa",
    "explain",
    "record_layer_errors",
    "sage_attention",
    "set_default_fallback",
    *_PROCESSORS,
]

install()
register()


def __getattr__(name: str) -> Any:
    if name in _PROCESSORS or name == "enable_vsa":
        return getattr(import_module("sage_hf.diffusers"), name)
    if name == "record_layer_errors":
        return import_module("sage_hf.app.layer_errors").record_layer_errors
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
