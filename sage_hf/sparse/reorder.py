"""Put a denoiser's video tokens in 4×4×4 order from its first block to its last, instead of in each attention call.

Attention without a mask, like all operations of a block on single tokens, gives each token the same result in any
order. So hidden states are reordered before the first block, and put back after the last block. Other arguments of
blocks with a row for each token, such as rotary embeddings, are reordered once per call of the model.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from sage_hf.sparse.grids import Grid, TokenLayout, by_name
from sage_hf.sparse.order import TileOrder
from sage_kernels.runtime import dynamo

FOR_ALL_TOKENS = frozenset(
    ("hidden_states", "encoder_hidden_states", "temb", "attention_mask", "encoder_attention_mask", "attention_kwargs")
)
"""Arguments of blocks, in addition to `TokenLayout.of_tokens`, that have no entry for each video token.

Masks have entries for text; over video tokens they are constant."""


class Reordering(threading.local):
    """Hooks that keep a denoiser's tokens in 4×4×4 order from its first block to its last.

    Each thread that calls the denoiser has its own attributes.

    Attributes:
        active: whether tokens are in 4×4×4 order now.
        grid: (frames, height, width) of the current call in tokens, if the call may be reordered; else None.
    """

    def __init__(self, layout: TokenLayout) -> None:
        self.layout = layout
        self.active = False
        self.grid: Grid | None = None
        self._order: TileOrder | None = None
        self._permuted: list[tuple[Any, Any]] = []  # arguments of the current call, in raster order and in 4×4×4 order

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle without the running call."""
        return type(self), (self.layout,)

    def begin_call(self, grid: Grid | None) -> None:
        """Prepare for a call of the denoiser; grid is None if the call must not be reordered."""
        self.active, self.grid, self._order = False, grid, None
        self._permuted.clear()

    def attach(self, denoiser: nn.Module) -> list[torch.utils.hooks.RemovableHandle]:
        """Follow the calls of the denoiser's blocks, until `remove()` of the returned handles.

        Blocks with an unknown argument, as in another version of diffusers, are not changed.
        """
        blocks = [block for name in self.layout.blocks for block in getattr(denoiser, name)]
        known = FOR_ALL_TOKENS | set(self.layout.of_tokens)
        if any(name not in known for block in blocks for name in _parameters(type(block))):
            return []
        handles: list[torch.utils.hooks.RemovableHandle] = []
        for block in blocks:
            hook = partial(self._before, block is blocks[0], _parameters(type(block)))
            handles.append(block.register_forward_pre_hook(hook, with_kwargs=True))
        if blocks:
            handles.append(blocks[-1].register_forward_hook(self._behind_the_last))
            handles.append(denoiser.register_forward_hook(self._behind_the_model))
        return handles

    def _before(
        self, is_first: bool, names: list[str], block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if is_first:
            self._activate(by_name(names, args, kwargs))
        if not self.active:
            return None
        named = [self._put_in_order(is_first, name, x) for name, x in zip(names, args, strict=False)]
        return (*named, *args[len(named) :]), {
            name: self._put_in_order(is_first, name, kwargs[name]) for name in kwargs
        }

    def _activate(self, arguments: Mapping[str, Any]) -> None:
        """Begin the order if the call may be reordered and the first block's arguments are as expected."""
        if self.grid is None or torch.compiler.is_compiling():
            return
        states = arguments["hidden_states"]
        order = TileOrder.of(self.grid, states.device)
        tokens = len(order.tokens)
        if states.dim() == 3 and states.shape[1] == tokens and self._understands(arguments, tokens):
            self._order, self.active = order, True

    def _understands(self, arguments: Mapping[str, Any], tokens: int) -> bool:
        """Check that arguments with one entry for each token have the entries in the dimension that the layout names.

        A tensor without a dimension of this size is the same for all tokens.
        """
        for name, (dims, axis) in self.layout.of_tokens.items():
            for x in _tensors(arguments.get(name)):
                if tokens in x.shape and (x.dim() != dims or x.shape[axis] != tokens):
                    return False
        return True

    def _put_in_order(self, is_first: bool, name: str, value: Any) -> Any:
        if name == "hidden_states":
            return self._permute(value, 1) if is_first else value
        if name not in self.layout.of_tokens or value is None:
            return value
        for before, after in self._permuted:
            if before is value:
                return after
        dims, axis = self.layout.of_tokens[name]
        after = _changed(value, lambda x: self._permute(x, axis) if x.dim() == dims else x)
        self._permuted.append((value, after))
        return after

    def _permute(self, x: torch.Tensor, axis: int) -> torch.Tensor:
        assert self._order is not None
        tokens = self._order.tokens
        return x.index_select(axis, tokens.to(x.device)) if x.shape[axis] == len(tokens) else x

    def _behind_the_last(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not self.active:
            return None
        assert self._order is not None
        states = output[0] if isinstance(output, tuple) else output
        states = states.index_select(1, self._order.places.to(states.device))
        self.begin_call(None)
        return (states, *output[1:]) if isinstance(output, tuple) else states

    @dynamo.disable
    def _behind_the_model(self, denoiser: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.active:
            self.begin_call(None)
            raise RuntimeError(
                f"sparse attention: the last block that {type(denoiser).__name__} had at `sage_hf.apply` did not run, "
                "so tokens are still in 4×4×4 order: call `sage_hf.apply` again after changing the model's blocks"
            )


def _parameters(block_class: Any) -> list[str]:
    """Return the names of the parameters of a block's forward; the block ignores other arguments."""
    parameters = inspect.signature(block_class.forward).parameters.values()
    return [
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD or parameter.kind is parameter.KEYWORD_ONLY
    ][1:]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_changed(item, change) for item in value)
    return value
