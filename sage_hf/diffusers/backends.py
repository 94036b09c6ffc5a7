"""Attention backends of diffusers for our recipes: `attention_backend("sage3")`, `set_attention_backend("sage3")`.

The backends' names are in `sage_hf.names`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import torch

from sage_hf.attention import attend_observed, chosen_fallback, sage_attention
from sage_hf.diffusers.bridge import Shards, add_backend, choose_backend, function_modes_are_active, scores_are_skipped
from sage_hf.diffusers.errors import UnsupportedAttentionError
from sage_hf.diffusers.fused_norms import end_trial
from sage_hf.diffusers.parallel import NO_SPARSE_SHARDS
from sage_hf.diffusers.shards import SplitTokens
from sage_hf.names import NAMES
from sage_hf.record import note_bypassed
from sage_hf.sparse.layer import running_layer
from sage_kernels.spec.options import Options

_MEMBERS: dict[tuple[str, str | None], Any] = {}


def backend_member(recipe: str, fallback: str | None) -> Any:
    """Return the member of diffusers' AttentionBackendName for this recipe and fallback."""
    return _MEMBERS[recipe, None if recipe == "exact" else fallback]


@dataclass
class BackendChoice:
    """Choice of a backend for one call of a processor.

    Attributes:
        backend: the member of AttentionBackendName.
        reached: whether one of our backends computed attention.
    """

    backend: Any
    reached: bool = False


class _BackendState(threading.local):
    """The choice for the processor that runs in this thread."""

    choice: BackendChoice | None = None


_thread = _BackendState()


@contextmanager
def choosing(backend: Any) -> Iterator[BackendChoice]:
    """Attend by `backend` in this thread if a processor leaves the choice to diffusers. Eager mode only."""
    before, _thread.choice = _thread.choice, BackendChoice(backend)
    try:
        yield _thread.choice
    finally:
        _thread.choice = before


def _make_backend(recipe: str, fallback: str | None) -> Callable[..., Any]:
    def backend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Run sage_attention on (B, N, H, D) tensors; LSE is (B, H, Nq); a (B, Nk) mask holds for every head and query.

        With FlexAttention's own kind of mask, a BlockMask, FlexAttention runs in place of the recipe.
        """
        if attn_mask is not None and not isinstance(attn_mask, torch.Tensor):
            if return_lse or _split_of(_parallel_config) is not None:
                raise UnsupportedAttentionError(
                    f"a {type(attn_mask).__name__} is served by one process only, without log-sum-exp"
                )
            return by_flex_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if attn_mask is not None and attn_mask.shape == (query.shape[0], key.shape[1]):
            attn_mask = attn_mask[:, None, None]
        sparse = None
        if not torch.compiler.is_compiling():
            end_trial(query, key, tokens_first=True)
            sparse = running_layer()
            if _thread.choice is not None:
                _thread.choice.reached = True
        if (split := _split_of(_parallel_config)) is not None:
            if sparse is not None and (split is not _parallel_config or split.shards.ring > 1):
                raise UnsupportedAttentionError(NO_SPARSE_SHARDS)
            if is_causal or enable_gqa or return_lse:
                raise UnsupportedAttentionError(
                    "attention across processes serves no is_causal=True, enable_gqa=True or return_lse=True"
                )
            query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
            out = split.attend(attend_heads_first, query, key, value, attn_mask, dropout_p=dropout_p, scale=scale)
            return out.transpose(1, 2)
        arguments: dict[str, Any] = {
            "attn_mask": attn_mask,
            "dropout_p": dropout_p,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
            "recipe": recipe,
            "fallback": fallback,
        }
        plain = sparse is None and not (return_lse or (is_causal and attn_mask is not None))
        if plain and not torch.compiler.is_compiling() and not function_modes_are_active():
            options = Options(
                is_causal=is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
                dropout_p=dropout_p,
                recipe=recipe,
                fallback=chosen_fallback(fallback),
                tokens_first=True,
            )
            return attend_observed(query, key, value, attn_mask, None, options)[0]
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if scores_are_skipped(query, value):
            if return_lse:
                raise UnsupportedAttentionError(
                    "skipped attention scores have no log-sum-exp, which ring attention needs: use Ulysses parallelism"
                )
            return value.transpose(1, 2)
        if not return_lse:
            run = sage_attention if sparse is None else sparse.attend
            return run(query, key, value, **arguments).transpose(1, 2)
        out, lse = sage_attention(query, key, value, **arguments, return_lse=True)
        return out.transpose(1, 2), lse

    def attend_heads_first(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
        out = backend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), **options)
        return cast(torch.Tensor, out).transpose(1, 2)

    return backend


def by_flex_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *options: Any) -> Any:
    """Attend by FlexAttention with its own kind of mask, a BlockMask, and note that no recipe ran.

    Args:
        query, key, value, mask, options: as in diffusers' `dispatch_attention_fn`.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn

    if not torch.compiler.is_compiling():
        if _thread.choice is not None:
            _thread.choice.reached = True
        note_bypassed(f"FlexAttention ran, which alone reads the layer's mask, a {type(mask).__name__}")
    return dispatch_attention_fn(query, key, value, mask, *options, backend=AttentionBackendName.FLEX)


def _split_of(config: Any) -> SplitTokens | None:
    """Return the split of tokens by diffusers' ParallelConfig or by our cp_plan; None if tokens are not split."""
    if config is None or isinstance(config, SplitTokens):
        return config
    config = config.context_parallel_config
    return None if config is None else SplitTokens(Shards.of(config))


def register_backends(dispatch: ModuleType) -> None:
    """Register every name of NAMES; `dispatch` is diffusers.models.attention_dispatch.

    Our backends also attend for a processor that names no backend, while it runs inside `choosing`.
    """
    for name, choice in NAMES.items():
        _MEMBERS[choice] = add_backend(dispatch, name, _make_backend(*choice))
    choose_backend(dispatch, _chosen)


def _chosen() -> Any:
    return None if torch.compiler.is_compiling() or (choice := _thread.choice) is None else choice.backend
