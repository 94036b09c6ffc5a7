"""Context parallelism: diffusers splits a model's tokens among processes, and attention works on all of them.

Each process holds part of the keys and attends with part of the heads.
"""

from __future__ import annotations

from typing import Any

from sage_hf.diffusers.bridge import Shards, leaves_groups, parallel_config_of
from sage_hf.diffusers.errors import UnsupportedAttentionError
from sage_hf.diffusers.shards import split_of

NO_SPARSE_SHARDS = (
    "sparse attention chooses tiles among all tokens, and this context parallelism gives a process a part of them, or "
    "all in another order: use ulysses_degree alone with a cp_plan of sage_hf, apply a configuration without `sparse`, "
    "or run this model without enable_parallelism()"
)


def check_layer(module: Any, layer: Any, shards: Shards, *, by_our_cp_plan: bool, is_sparse: bool) -> None:
    """Raise UnsupportedAttentionError if an attention module cannot attend across processes.

    Sparse attention runs in Ulysses with our cp_plan: each process then has all tokens of its heads, in order.

    Args:
        module: the attention module.
        layer: its `layers.Layer`.
        shards: the processes.
        by_our_cp_plan: whether our context-parallel plan (`cp_plans`) splits the tokens; every layer that runs our
            functions supports it.
        is_sparse: whether the module runs sparse attention.
    """
    if is_sparse and not (by_our_cp_plan and shards.ring == 1):
        raise UnsupportedAttentionError(NO_SPARSE_SHARDS)
    check = layer.check_split if by_our_cp_plan else layer.check_parallel
    check()
    heads = _first_number(module, "heads", "num_attention_heads")
    if heads is not None and heads < shards.ulysses:
        raise UnsupportedAttentionError(
            f"ulysses_degree {shards.ulysses} is more than the layer's {heads} heads: use ring_degree too"
        )
    key_heads = _first_number(module, "kv_heads", "num_key_value_heads")
    if key_heads not in (None, heads) and leaves_groups(layer.original):
        raise UnsupportedAttentionError(
            "attention across processes needs as many key heads as query heads; the layer has "
            f"{key_heads} and {heads}: run this model without enable_parallelism()"
        )


def _first_number(module: Any, *names: str) -> int | None:
    """Return the first of these attributes of a module that it has."""
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


def check_parallelism(model: Any, module: Any, layer: Any, *, is_sparse: bool = False) -> None:
    """Raise UnsupportedAttentionError if `model` runs under context parallelism, which its `module` does not support.

    Args:
        model: the model.
        module: an attention module of the model. A module whose tokens our cp_plan does not split is supported.
        layer: the `layers.Layer` of the module.
        is_sparse: whether the module runs sparse attention.
    """
    config, by_our_cp_plan = parallel_config_of(model), split_of(model) is not None
    if splits_tokens(config) and (not by_our_cp_plan or split_of(module) is not None):
        check_layer(module, layer, Shards.of(config), by_our_cp_plan=by_our_cp_plan, is_sparse=is_sparse)


def splits_tokens(config: Any) -> bool:
    """Check whether a ParallelConfig or ContextParallelConfig asks for context parallelism; False for None."""
    return hasattr(config, "ulysses_degree") or getattr(config, "context_parallel_config", None) is not None
