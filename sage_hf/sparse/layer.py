"""Sparse self-attention of one layer of a denoiser: the choice of sparse calls, the tokens' order, and statistics."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from typing import Any, Literal

import torch
from huggingface_hub.utils import logging
from torch import nn

from sage_hf.attention import chosen_fallback, sage_attention
from sage_hf.attributes import SPLIT
from sage_hf.changes import inner
from sage_hf.sparse.config import BLOCK, Sparse
from sage_hf.sparse.grids import Grid, TokenLayout, arguments_of, layout_of
from sage_hf.sparse.order import TileOrder
from sage_hf.sparse.reorder import Reordering
from sage_hf.sparse.routers import Router, even_budgets, kept_mass, tile_mass
from sage_kernels.dispatch.plan import KernelUnavailableError
from sage_kernels.dispatch.request import Request
from sage_kernels.dispatch.select import select
from sage_kernels.runtime import dynamo
from sage_kernels.spec.masks import as_key_mask, with_leading_dims

MEASURED_CALLS = 8
"""Default of `SparseModel.measured_calls`."""
SAMPLED_ROWS = 64
"""Number of rows of a head whose attention weight decides the share of tiles of each head."""

logger = logging.get_logger(__name__)


class _DenoiserCall(threading.local):
    """The denoiser call that a thread is running."""

    grid: Grid | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _DenoiserCall, ()


class SparseModel:
    """State that the sparse layers of one denoiser share: its grid of tokens, and whether the step is dense.

    Attributes:
        settings: the configuration.
        call: the current call; its `grid` is (frames, height, width) in tokens, None if unknown.
        dense_step: whether the current step attends densely.
        reordering: keeps the denoiser's tokens in 4×4×4 order between its blocks; None: its blocks are unknown.
        measured_calls: number of each layer's first sparse calls in which the kept attention weight is measured.
    """

    def __init__(self, settings: Sparse, denoiser: nn.Module) -> None:
        self.settings = settings
        self.layout: TokenLayout | None = layout_of(denoiser)
        self.call = _DenoiserCall()
        self.dense_step = settings.dense_steps > 0
        self.router = settings.make_router()
        self.measured_calls = MEASURED_CALLS
        self.reordering = None if self.layout is None else Reordering(self.layout)

    def attach(self, denoiser: nn.Module) -> Callable[[], None]:
        """Follow the denoiser's calls until the returned function is called."""
        handles = [denoiser.register_forward_pre_hook(self._follow, with_kwargs=True)]
        if self.reordering is not None:
            handles += self.reordering.attach(inner(denoiser))
        return partial(_remove, handles)

    def set_step(self, step: int) -> None:
        """Move to a denoising step, 0 being the first."""
        self.dense_step = step < self.settings.dense_steps

    @dynamo.disable
    def _follow(self, denoiser: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        model = inner(denoiser)
        self.call.grid = None if self.layout is None else self.layout.grid(model, arguments_of(model, args, kwargs))
        if self.reordering is not None:
            # A block that runs again for its gradients would get tokens in raster order. A block whose tokens are split
            # among processes would be given rotary embeddings of a part of them.
            whole = not torch.is_grad_enabled() and model is denoiser and not hasattr(model, SPLIT)
            grid = self.call.grid if whole else None
            enough = grid is not None and math.prod(grid) >= self.settings.from_tokens
            self.reordering.begin_call(grid if enough else None)

    @property
    def is_reordered(self) -> bool:
        """Check whether the denoiser's tokens are in 4×4×4 order already."""
        return self.reordering is not None and self.reordering.active

    def order(self, tokens: int, device: torch.device) -> TokenOrder | None:
        """Return the order for a call's tokens.

        Return None if the grid is unknown: then text is unknown too, and all tokens count as video.
        """
        if self.layout is None or self.call.grid is None or math.prod(self.call.grid) > tokens:
            return None
        return order_with_text(self.call.grid, tokens, self.layout.text, device)


@dataclass(frozen=True)
class TokenOrder:
    """Order of a call's tokens: video in 4×4×4 tiles, and text in its original place.

    Attributes:
        tokens: int64 (tokens,), the index of the token at each place.
        places: the inverse.
        text: the places of text.
    """

    tokens: torch.Tensor
    places: torch.Tensor
    text: slice


@lru_cache(maxsize=16)
def order_with_text(grid: Grid, tokens: int, text: Literal["first", "last"], device: torch.device) -> TokenOrder:
    """Return the order of a call of `tokens` tokens; tokens outside the grid are text."""
    video = TileOrder.of(grid, device).tokens
    first = tokens - len(video) if text == "first" else 0
    order = torch.arange(tokens, device=device)
    order[first : first + len(video)] = first + video
    return TokenOrder(order, order.argsort(), slice(0, first) if text == "first" else slice(len(video), tokens))


def permute_tokens(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return x (batch, heads, tokens, channels) with its tokens at `index`.

    The result is laid out as (batch, tokens, heads, channels), like models' projections: a token is one run of memory.
    """
    return x.transpose(1, 2).index_select(1, index).transpose(1, 2)


@dataclass
class SparsityStatistics:
    """Statistics of the tiles that a layer's calls kept. Sums stay on their device until they are read.

    Attributes:
        calls: number of sparse calls.
        tiles: sum over calls of the share of kept tiles.
        mass, least: for each measured call, the mean share of kept attention weight, and the smallest share of a head.
        dense: number of calls that attended densely, by reason.
        ordered: whether the latest sparse call had its tokens in 4×4×4 order.
    """

    calls: int = 0
    tiles: torch.Tensor | None = None
    mass: list[torch.Tensor] = field(default_factory=list)
    least: list[torch.Tensor] = field(default_factory=list)
    dense: Counter[str] = field(default_factory=Counter)
    ordered: bool = False


class SparseLayer:
    """Sparse self-attention of one layer.

    Attributes:
        model: the state that it shares with the denoiser's other layers.
        always_dense: whether the configuration keeps this layer dense.
        crosses: whether the layer is known to be cross-attention, which may have as many keys as queries.
        statistics: statistics of its calls.
        router: the layer's own router, with a share for each head; None: the router of `model`, or not measured yet.
    """

    def __init__(self, model: SparseModel, always_dense: bool = False, crosses: bool = False) -> None:
        self.model = model
        self.always_dense = always_dense
        self.crosses = crosses
        self.statistics = SparsityStatistics()
        self.router: Router | None = None

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        *,
        recipe: str,
        fallback: str | None,
        **options: Any,
    ) -> torch.Tensor:
        """Run `sage_attention` over the tiles that the router chooses, or densely if that is not possible.

        Args:
            query, key, value, attn_mask, recipe, fallback, options: as in `sage_attention`.
        """
        arguments = {"recipe": recipe, "fallback": fallback, **options}
        if torch.compiler.is_compiling():
            log_dense_graphs()
            return sage_attention(query, key, value, attn_mask, **arguments)
        if reason := self._why_dense(query, key, value, attn_mask, recipe, fallback, options):
            self.statistics.dense[reason] += 1
            return sage_attention(query, key, value, attn_mask, **arguments)
        order = self.model.order(query.shape[2], query.device)
        inside = None if self.model.is_reordered else order  # work that remains in this call
        if inside is not None:
            query, key, value = (permute_tokens(x, inside.tokens) for x in (query, key, value))
            if attn_mask is not None and attn_mask.shape[-1] > 1:
                attn_mask = attn_mask.index_select(-1, inside.tokens)
        scale = options.get("scale")
        text = [] if order is None else [order.text]
        blocks = self._router_for(query, key, scale).route(query, key, scale, dense=text)
        self._count(query, key, blocks, scale, order is not None)
        output = sage_attention(query, key, value, attn_mask, blocks=blocks, **arguments)
        return output if inside is None else permute_tokens(output, inside.places)

    def _router_for(self, query: torch.Tensor, key: torch.Tensor, scale: float | None) -> Router:
        """Return the router of a call; shares of heads are measured from the attention weight of the first call."""
        if not self.model.settings.per_head:
            return self.model.router
        if self.router is None:
            q_len = query.shape[2]
            rows = torch.linspace(0, q_len - 1, min(SAMPLED_ROWS, q_len), device=query.device).long()
            mass = tile_mass(query, key, scale, block_n=BLOCK, rows=rows)
            self.router = self.model.settings.make_router(even_budgets(mass, self.model.settings.keep))
        return self.router

    def _why_dense(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None,
        recipe: str,
        fallback: str | None,
        options: dict[str, Any],
    ) -> str:
        settings = self.model.settings
        if self.crosses or query.shape[2] != key.shape[2]:
            return "cross-attention"
        if self.always_dense:
            return "a layer that the configuration keeps dense"
        if recipe == "exact":
            return "exact attention over a block list is no faster than dense attention"
        if self.model.dense_step:
            return f"one of the first {settings.dense_steps} steps"
        if query.shape[2] < settings.from_tokens:
            return f"fewer than {settings.from_tokens} tokens, the configuration's from_tokens"
        if options.get("is_causal") or options.get("return_lse") or options.get("dropout_p"):
            return "causal attention, dropout, or a requested log-sum-exp"
        if attn_mask is not None and as_key_mask(with_leading_dims(attn_mask), key.shape[2]) is None:
            return "a mask other than a key-padding mask"
        if attn_mask is not None and self.model.order(query.shape[2], query.device) is None:
            return "a key-padding mask with unknown text tokens: a row might keep only padding"
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            return "gradients are wanted"
        request = replace(Request.of(query, key, value, recipe=recipe), mask="blocks", list_sizes=(BLOCK, BLOCK))
        try:
            plan = select(request, chosen_fallback(fallback))
        except KernelUnavailableError:
            return f"no kernel of {recipe} takes block lists here"
        return f"{recipe} does not run here: {plan.brief_reason}" if plan.numerics == "exact" else ""

    def _count(self, query: torch.Tensor, key: torch.Tensor, blocks: Any, scale: float | None, ordered: bool) -> None:
        statistics = self.statistics
        share = blocks.counts.float().mean() / math.ceil(key.shape[2] / blocks.block_n)
        statistics.tiles = share if statistics.tiles is None else statistics.tiles + share
        if statistics.calls < self.model.measured_calls:
            mass = kept_mass(query, key, blocks, scale)
            statistics.mass.append(mass.mean())
            statistics.least.append(mass.min())
        statistics.calls += 1
        statistics.ordered = ordered


def sparsity_of(layer: SparseLayer) -> str:
    """Summarise the tiles that a layer's calls kept, as one line of text; "" before any call."""
    statistics, parts = layer.statistics, []
    if statistics.calls:
        assert statistics.tiles is not None
        order = "4×4×4" if statistics.ordered else "raster"
        mass = ""
        if statistics.mass:
            mean, least = (float(torch.stack(x).mean()) for x in (statistics.mass, statistics.least))
            mass = f" {mean:.1%} of attention weight (least head {least:.1%}),"
        if isinstance(shares := getattr(layer.router, "keep", None), tuple):
            order += f" order, heads {min(shares):.0%} to {max(shares):.0%}"
        else:
            order += " order"
        parts.append(
            f"{statistics.calls} sparse {'call' if statistics.calls == 1 else 'calls'} by "
            f"{layer.model.settings.router}: {float(statistics.tiles) / statistics.calls:.1%} of tiles,{mass} {order}"
        )
    parts += [f"{calls} dense: {reason}" for reason, calls in statistics.dense.items()]
    return "; ".join(parts)


class _SparseState(threading.local):
    """The sparse layer whose attention this thread is computing."""

    def __init__(self) -> None:
        self.layer: SparseLayer | None = None


_thread = _SparseState()


@contextmanager
def running(layer: SparseLayer | None) -> Iterator[None]:
    """File calls of diffusers' attention backends in the block under this layer."""
    before, _thread.layer = _thread.layer, layer
    try:
        yield
    finally:
        _thread.layer = before


def running_layer() -> SparseLayer | None:
    """Return the sparse layer whose processor is running in this thread."""
    return _thread.layer


def _remove(handles: list[torch.utils.hooks.RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


@dynamo.assume_constant_result
@cache
def log_dense_graphs() -> None:
    """Log once, when the first layer with sparse attention is compiled, that compiled layers attend densely."""
    logger.warning("sparse attention runs eagerly only: inside a compiled graph these layers attend densely")
