"""Plugin of vLLM-Omni: its backends SAGE_ATTN and SAGE_ATTN_3, computed by sage-hf, with masks and grouped queries."""

from __future__ import annotations

import os
from importlib.util import find_spec

from sage_hf.drop_in import REPLACEMENT_MODULES, drop_in

PLUGIN = "sage_hf"
BACKENDS = {
    "SAGE_ATTN": "sage_hf.vllm_omni.backend.Sage2Backend",
    "SAGE_ATTN_3": "sage_hf.vllm_omni.backend.Sage3Backend",
}


def register() -> None:
    """Register the backends; vLLM-Omni calls this in each of its processes, by the entry point in pyproject.toml.

    Where SageAttention itself is installed, vLLM-Omni keeps SageAttention's backends, unless VLLM_PLUGINS names
    "sage_hf". vLLM-Omni imports `sageattention` to check that the backends are available, so `drop_in` provides it.
    """
    spec = find_spec("sageattention")
    installed = spec is not None and not str(spec.origin).startswith(REPLACEMENT_MODULES)
    if installed and PLUGIN not in os.environ.get("VLLM_PLUGINS", "").split(","):
        return
    from vllm_omni.diffusion.attention.backends.registry import (
        DiffusionAttentionBackendEnum,
        register_diffusion_backend,
    )

    drop_in()
    for name, path in BACKENDS.items():
        if name in DiffusionAttentionBackendEnum.__members__:
            register_diffusion_backend(DiffusionAttentionBackendEnum[name], path)
