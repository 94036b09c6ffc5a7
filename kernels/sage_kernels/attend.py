"""The one door of attention calls of any kind: check a call, decide what runs, announce that, and run it."""

from __future__ import annotations

from functools import partial

import torch

from . import ops, training
from .dispatch import exact_choice, replays, run
from .dispatch.plan import KernelUnavailableError
from .exact import block_lists, masked_rows, sdpa
from .replay import cache
from .spec import checks
from .spec.block_list import BlockList, check_blocks
from .spec.call import NO_MASK, Call, Mask, softmax_scale
from .spec.derivatives import has_tangent, wants_gradient
from .spec.masks import with_causality
from .spec.options import Options, check_fallback
from .spec.recipe import get_recipe

Result = tuple[torch.Tensor, torch.Tensor | None]
"""(output, lse); the lse counts with `Options.return_lse` only."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    blocks: BlockList | None,
    options: Options,
) -> Result:
    """Compute attention by a recipe, or exactly; differentiable.

    The arguments are those of `sage_hf.sage_attention`, which documents shapes, dtypes and errors, but mask and
    causality may come together: a query then attends to what both allow.

    Returns:
        (output, lse): the output laid out as query is; the lse counts with `return_lse` only.
    """
    if options.tokens_first:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        output, lse = _attend(query, key, value, mask, blocks, options._replace(tokens_first=False))
        return output.transpose(1, 2), lse
    dims = getattr(query, "ndim", 4)
    if dims == 4 or not dims == getattr(key, "ndim", 0) == getattr(value, "ndim", 0) >= 2:
        return _attend(query, key, value, mask, blocks, options)
    sizes = (*query.shape[:-1], value.shape[-1])
    if dims < 4:
        query, key, value = (x[(None,) * (4 - dims)] for x in (query, key, value))
    else:
        if mask is not None and mask.dim() > 3:
            mask = mask.expand(*query.shape[:-3], *mask.shape[-3:]).flatten(0, -4)
        query, key, value = (x.flatten(0, -4) for x in (query, key, value))
    output, lse = _attend(query, key, value, mask, blocks, options)
    return output.reshape(sizes), lse.reshape(sizes[:-1]) if options.return_lse and lse is not None else None


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    blocks: BlockList | None,
    options: Options,
) -> Result:
    """Do as `attend` for tensors (batch, heads, tokens, channels)."""
    check_fallback(options.fallback)
    get_recipe(options.recipe)
    checks.check_causal(options.is_causal)
    checks.check_kinds(query, key, value, mask, options.scale, mask_name="attn_mask")
    if sdpa.autocast_dtype(query) is not None:
        checks.check_memory(query, key, value)
        query, key, value = sdpa.in_autocast_dtype(query, key, value)
    own_dims = options.recipe == "exact" and blocks is None  # by which PyTorch chooses among its kernels
    if mask is not None and mask.dim() < (least := 2 if own_dims else 4):
        mask = mask[(None,) * (least - mask.dim())]
    grad = wants_gradient(query, key, value, mask)
    entry = None if options.dropout_p else ops.find("sage_attention", query, key, value, mask, blocks, options, grad)
    if entry is not None and entry.replay is not None:
        return ops.replay(entry.replay, query, key, value, mask, blocks)

    checks.check_tensors(query, key, value, mask, options.enable_gqa, mask_name="attn_mask")
    grad = grad or has_tangent(query, key, value, mask)
    keys = NO_MASK
    if blocks is not None:
        if options.dropout_p:
            raise ValueError(
                f"dropout_p={options.dropout_p} is not supported with blocks: set the attention dropout to 0"
            )
        keys = Mask.of_blocks(blocks, mask, key.shape[2])
    elif grad and options.recipe != "exact":
        keys = Mask.of(mask, key.shape[2])
    reason = exact_choice.why_exact(query, key, value, keys, options, grad)
    if reason and options.fallback == "error":
        advice = "set it to 0" if options.dropout_p else "run under torch.no_grad() if no gradient is needed"
        raise KernelUnavailableError(f'{reason}: {advice}, or use fallback="native" for exact attention with gradients')
    if reason or options.recipe == "exact":
        return _attend_exactly(query, key, value, mask, blocks, options, reason, entry)
    if grad:
        return _attend_with_gradients(query, key, value, keys, options, entry)
    if entry is not None:  # nothing watches operators
        call = ops.checked_call(query, key, value, mask, blocks, None, options)
        return ops.forward(call, mask, options.fallback, entry)
    return ops.attend(query, key, value, mask, blocks, None, options)


def _attend_exactly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    blocks: BlockList | None,
    options: Options,
    reason: str,
    entry: cache.Entry | None,
) -> Result:
    """Run PyTorch's attention: because it was asked for, or in place of a recipe (`reason`)."""
    if blocks is not None:
        check_blocks(blocks, query, key)
    plan = run.announce_exact(query, key, value, mask, blocks, options, reason)
    exactly = partial(_compute_exactly, blocks=blocks, options=options)
    result = exactly(query, key, value, mask)
    if entry is not None and plan is not None and blocks is None:
        entry.consider(partial(cache.compared, plan, exactly, (query, key, value, mask), result))
    return result


def _compute_exactly(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    blocks: BlockList | None,
    options: Options,
) -> Result:
    """Run PyTorch's attention with gradients; the lse has none, and is of all weights.

    Rows that may attend to no key are 0, unless exact attention without a block list was asked for.
    """
    is_causal, offset, scale = options.is_causal, options.causal_offset, options.scale
    if blocks is not None:
        return block_lists.attend(
            query,
            key,
            value,
            blocks,
            mask=mask,
            is_causal=is_causal,
            causal_offset=offset,
            scale=scale,
            return_lse=options.return_lse,
        )
    if is_causal and (mask is not None or offset):
        mask, is_causal = with_causality(mask, query, key, offset), False
    attend_exactly = sdpa.sdpa if options.recipe == "exact" else masked_rows.attend
    output = attend_exactly(
        query,
        key,
        value,
        mask=mask,
        is_causal=bool(is_causal),
        scale=scale,
        enable_gqa=options.enable_gqa,
        dropout_p=options.dropout_p,
    )
    if not options.return_lse:
        return output, None
    with torch.no_grad():
        return output, ops.log_sum_exp(query, key, mask=mask, is_causal=bool(is_causal), scale=scale)


def _attend_with_gradients(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask,
    options: Options,
    entry: cache.Entry | None,
) -> Result:
    """Run a recipe that has gradients."""
    output, lse = training.attend(query, key, value, mask.valid, mask.blocks, None, options)
    if entry is not None and mask.blocks is None and not options.return_lse:
        entry.consider(partial(_training_replay, query, key, value, mask, options))
    return output, lse


def _training_replay(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Mask, options: Options
) -> cache.Replay | None:
    recipe, scale = get_recipe(options.recipe), softmax_scale(options.scale, query.shape[3])
    call = Call(query, key, value, recipe, mask, options.is_causal, options.causal_offset, scale)
    plan = run.plan_training(run.request_of(call, grad=True), options.fallback)
    return replays.of_training(call, plan, options)
