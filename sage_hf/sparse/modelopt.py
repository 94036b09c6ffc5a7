"""Reader of `sparse_attention_config`, which NVIDIA ModelOpt writes into a model's config.json.

Its skip-softmax leaves out a tile whose largest score lies below the running maximum by more than a threshold,
calibrated as a · exp(b · target_sparsity) / tokens. The kernel decides this after Q·Kᵀ, but our router decides before.
So sage-hf uses the share, the layers and the steps, but not the threshold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal

from huggingface_hub.utils import logging

from sage_hf.sparse.config import Sparse

KEY = "sparse_attention_config"
_SKIP_SOFTMAX = ("skip_softmax", "softmax_skip")

logger = logging.get_logger(__name__)


def settings_for(sparse: Sparse | Literal["model"] | None, model: Any, layers: Iterable[str]) -> Sparse | None:
    """Return the settings of `SageConfig.sparse` for one denoiser; see `sparse_of_model`."""
    return sparse_of_model(model.config, layers) if sparse == "model" else sparse


def sparse_of_model(config: Mapping[str, Any], layers: Iterable[str]) -> Sparse:
    """Return the settings that follow from a model's `sparse_attention_config`; unused entries are logged.

    `keep` is the complement of `target_sparsity`; layers of `ignore` become dense layers; `initial_disabled_steps`
    becomes `dense_steps`. Fields are read from the group of skip-softmax (ModelOpt 0.45), or from the same level as the
    groups (earlier). The router and `from_tokens` are our defaults.

    Args:
        config: the model's configuration.
        layers: names of its attention layers.

    Raises:
        ValueError: there is no such configuration, it has no group of skip-softmax, or no target_sparsity.
    """
    shipped = config.get(KEY)
    if not isinstance(shipped, Mapping):
        raise ValueError(f'sparse: this model ships no {KEY}: give the settings instead of "model"')
    groups = shipped.get("config_groups")
    named_groups = groups if isinstance(groups, Mapping) else {}
    algorithms = {name: _algorithm(group) for name, group in named_groups.items()}
    skipping = [name for name, algorithm in algorithms.items() if algorithm in _SKIP_SOFTMAX]
    if not skipping:
        listed = ", ".join(map(str, algorithms.values())) or "no group"
        raise ValueError(f"sparse: {KEY} has {listed}, and sage_hf can use only skip_softmax")
    left_out = [f"the group {name} ({algorithms[name]})" for name in named_groups if name != skipping[0]]
    fields = {**shipped, **named_groups[skipping[0]]}
    sparsity = _of_prefill(fields.get("target_sparsity", fields.get("target_sparse_ratio")))
    if sparsity is None:
        raise ValueError(f"sparse: {KEY} has no target_sparsity, so the share of tiles to keep must be given: keep")
    if not isinstance(sparsity, (int, float)) or not 0 <= sparsity < 1:
        raise ValueError(f"sparse: {KEY}.target_sparsity must be in [0, 1); got {sparsity!r}")
    names, dense = list(layers), []
    for pattern in fields.get("ignore") or ():
        if any(fnmatchcase(name, pattern) for name in names):
            dense.append(pattern)
        else:
            left_out.append(f"the ignored layer {pattern!r}, which matches no attention layer of this model")
    if fields.get("disabled_until_timestep"):
        left_out.append("disabled_until_timestep: give dense_steps, a number of steps")
    left_out.append("the threshold: a router chooses the same share of tiles instead")
    logger.warning(f"these parts of {KEY} are not used: {'; '.join(left_out)}")
    steps = fields.get("initial_disabled_steps") or 0
    return Sparse(keep=round(1 - sparsity, 9), dense_steps=steps, dense_layers=tuple(dense))


def _algorithm(group: object) -> object:
    return group.get("algorithm", group.get("sparse_algo")) if isinstance(group, Mapping) else group


def _of_prefill(value: object) -> Any:
    """Return the number of the prefill phase, if phases have separate numbers."""
    return value.get("prefill") if isinstance(value, Mapping) else value
