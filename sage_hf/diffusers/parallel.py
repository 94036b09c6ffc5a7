"""Context parallelism: diffusers splits a model's tokens among processes, and attention works on all of them.

Each process holds part of the keys and attends with part of the heads.
"""

from __future__ import annotations

from typing import Any

from sage_hf.diffusers.bridge import parallel_config_of
from sage_hf.diffusers.errors import UnsupportedAttentionError
from sage_hf.diffusers.shards import split_of

NO_SHARDS = (
    "sparse attention chooses tiles among all tokens, and this context parallelism gives a process a part of them, or "
    "all in another order: use ulysses_degree alone with a plan of sage_hf, apply a configuration without `sparse`, or "
    "run this model without enable_parallelism()"
)


def check_parallelism(model: Any, layer: Any) -> None:
    """Raise UnsupportedAttentionError if `model` runs under context parallelism, which its `layers.Layer` does not
    support.

    With our plans (`plans`), every layer that runs our functions does.
    """
    if splits_tokens(parallel_config_of(model)):
        check = layer.check_parallel if split_of(model) is None else layer.check_split
        check()


def check_whole(model: Any) -> None:
    """Raise UnsupportedAttentionError if `model` runs under context parallelism in which sparse attention cannot run.

    Sparse attention runs in Ulysses with a plan of sage-hf: each process then has all tokens of its heads, in order.
    """
    split = split_of(model)
    if splits_tokens(parallel_config_of(model)) and (split is None or split.shards.ring > 1):
        raise UnsupportedAttentionError(NO_SHARDS)


def splits_tokens(config: Any) -> bool:
    """Check whether a ParallelConfig or ContextParallelConfig asks for context parallelism; False for None."""
    return hasattr(config, "ulysses_degree") or getattr(config, "context_parallel_config", None) is not None
