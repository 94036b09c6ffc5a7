"""Entry point of dense calls, with or without gradients: check a call, decide what runs, announce it, run it."""

from __future__ import annotations

from functools import partial

import torch

from . import ops, training
from .dispatch import execution
from .dispatch.decide import decide
from .exact.attend import attend_exactly
from .replay import cache
from .spec import checks
from .spec.autocast import in_autocast_dtype
from .spec.block_list import BlockList, check_blocks
from .spec.call import NO_MASK, AttentionOutput, Mask
from .spec.derivatives import has_tangent, wants_gradient
from .spec.masks import with_leading_dims, without_causal_bias
from .spec.options import Options, check_fallback
from .spec.recipe import get_recipe


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    blocks: BlockList | None,
    options: Options,
) -> AttentionOutput:
    """Compute attention by a recipe, or exactly; differentiable.

    The arguments are as in `sage_hf.sage_attention`, which documents shapes, dtypes and errors. Here, mask and
    causality may be given together: a query then attends to the keys that both allow.

    Returns:
        (output, lse): the output, laid out like query; the lse is valid with `return_lse` only.
    """
    if options.tokens_first:
        return _attend_with_tokens_first(query, key, value, mask, blocks, options)
    if _have_other_dims(query, key, value):
        return _attend_in_four_dims(query, key, value, mask, blocks, options)
    check_fallback(options.fallback)
    get_recipe(options.recipe)
    checks.check_kinds(query, key, value, mask, options)
    query, key, value = in_autocast_dtype(query, key, value)
    mask, options = without_causal_bias(mask, options, query, key)
    if mask is not None:
        keeps_dims = options.recipe == "exact" and blocks is None  # PyTorch chooses its kernel by the mask's dimensions
        mask = with_leading_dims(mask, 2 if keeps_dims else 4)
    grad = wants_gradient(query, key, value, mask)
    lists, sizes = ((), ()) if blocks is None else (blocks.tensors, blocks.sizes)
    entry = None
    if not options.dropout_p and not torch.compiler.is_compiling():
        entry = cache.find("sage_attention", (query, key, value, mask, *lists), (*options, *sizes), grad)
    if entry is not None and entry.replay is not None:
        execution.announce(entry.replay.plan)
        return entry.replay(query, key, value, mask, *lists)
    if (common := _in_common_sizes(query, key, value, options)) is not None:
        query, key, value, options = common
        return attend(query, key, value, mask, blocks, options)
    checks.check_tensors(query, key, value, mask, options.enable_gqa)
    grad = grad or has_tangent(query, key, value, mask)
    return _attend_anew(query, key, value, mask, blocks, options, grad, entry)


def _attend_anew(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    blocks: BlockList | None,
    options: Options,
    grad: bool,
    entry: cache.ReplayEntry | None,
) -> AttentionOutput:
    """Decide between exact attention and the recipe for a checked call that is not replayed, and run it."""
    call_mask = NO_MASK
    if blocks is not None:
        if options.dropout_p:
            raise ValueError(
                f"dropout_p={options.dropout_p} is not supported with blocks: set the attention dropout to 0"
            )
        call_mask = Mask.of_blocks(blocks, mask, key.shape[2])
    elif grad and options.recipe != "exact":
        call_mask = Mask.of(mask, key.shape[2])
    decision = decide(query, key, value, call_mask, options, grad)
    if decision.bypasses_kernels:
        return _run_exactly(query, key, value, mask, blocks, options, decision.reason, entry)
    if grad:
        plan = decision.plan
        if plan is None or entry is None or blocks is not None or options.return_lse:
            return training.call_operator(query, key, value, call_mask.key_mask, blocks, None, options)
        return training.run_call(query, key, value, call_mask, plan, options, entry), None
    if entry is None:
        return ops.call_operator(query, key, value, mask, blocks, None, options)
    # A cache entry implies that no active mode wants to see the operator.
    call = ops.new_call(query, key, value, mask, blocks, None, options)
    return ops.run_call(call, mask, options.fallback, entry)


def _attend_with_tokens_first(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    blocks: BlockList | None,
    options: Options,
) -> AttentionOutput:
    """Attend to tensors (batch, tokens, heads, channels)."""
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() != 4:  # heads and tokens could be mistaken for each other
            raise ValueError(f"{name} has shape {tuple(x.shape)}; expected (batch, tokens, heads, channels)")
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    output, lse = attend(query, key, value, mask, blocks, options.replace(tokens_first=False))
    return output.transpose(1, 2), lse


def _have_other_dims(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the tensors agree in their number of dimensions, and it is not 4; checks follow later."""
    dims = getattr(query, "ndim", 4)
    return dims != 4 and dims >= 2 and getattr(key, "ndim", 0) == getattr(value, "ndim", 0) == dims


def _attend_in_four_dims(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    blocks: BlockList | None,
    options: Options,
) -> AttentionOutput:
    """Attend to tensors with fewer or more leading dimensions than batch and heads."""
    missing = max(0, 4 - query.ndim)
    if missing:
        query, key, value = (with_leading_dims(x) for x in (query, key, value))
        outer: tuple[int, ...] = ()
    else:
        outer = torch.broadcast_shapes(query.shape[:-3], key.shape[:-3], value.shape[:-3])
        query, key, value = (x.expand(*outer, *x.shape[-3:]).flatten(0, -4) for x in (query, key, value))
        if mask is not None and mask.dim() > 3:
            mask = mask.expand(*outer, *mask.shape[-3:]).flatten(0, -4)
    output, lse = attend(query, key, value, mask, blocks, options)
    sizes = (*outer, *output.shape[missing or 1 :])
    return output.reshape(sizes), lse.reshape(sizes[:-1]) if options.return_lse and lse is not None else None


def _in_common_sizes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Options] | None:
    """Return the tensors, batch or heads of size 1 repeated as PyTorch repeats them; None if nothing is repeated.

    A single head of keys is not repeated: queries are grouped instead.
    """
    tensors = query, key, value
    if any(x.dim() != 4 for x in tensors):
        return None
    batch, heads = (_repeated_size(*(x.shape[dim] for x in tensors)) for dim in range(2))
    is_grouped = heads != -1 and key.shape[1] == value.shape[1] == 1
    if is_grouped:
        heads = -1
    if batch == heads == -1 and (options.enable_gqa or not is_grouped):
        return None
    query, key, value = (x.expand(batch, heads, -1, -1) for x in tensors)
    return query, key, value, options.replace(enable_gqa=options.enable_gqa or is_grouped)


def _repeated_size(*sizes: int) -> int:
    """Return the size to which sizes of 1 are repeated; -1 if no size is 1, or if the other sizes differ."""
    others = [size for size in sizes if size != 1]
    if len(others) in (0, len(sizes)):
        return -1
    return others[0] if all(size == others[0] for size in others) else -1


def _run_exactly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    blocks: BlockList | None,
    options: Options,
    reason: str,
    entry: cache.ReplayEntry | None,
) -> AttentionOutput:
    """Run PyTorch's attention: because the caller asked for it, or in place of a recipe (`reason`)."""
    if blocks is not None:
        check_blocks(blocks, query, key)
    plan = execution.announce_exact(query, key, value, mask, blocks, options, reason)
    exactly = partial(attend_exactly, blocks=blocks, options=options, zero_rows=options.recipe != "exact")
    result = exactly(query, key, value, mask)
    if entry is not None and plan is not None and blocks is None:
        entry.prepare_when_repeated(partial(cache.replay_of_function, plan, exactly, (query, key, value, mask), result))
    return result
