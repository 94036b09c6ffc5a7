"""The front door: SDPA's signature, a recipe, and an honest answer about what ran."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import Any, Literal, overload

import torch

from sage_hf import record
from sage_kernels import ops, training
from sage_kernels.dispatch import replays, run
from sage_kernels.dispatch.registry import FALLBACKS, Fallback, KernelUnavailableError, Plan, Request, exact_plan
from sage_kernels.exact import block_lists, masked_rows, sdpa
from sage_kernels.replay import cache
from sage_kernels.runtime import torch_private
from sage_kernels.spec import checks
from sage_kernels.spec.block_list import BlockList, check_blocks
from sage_kernels.spec.call import Call, Mask, softmax_scale
from sage_kernels.spec.masks import key_mask, with_causality
from sage_kernels.spec.recipe import get_recipe


def set_default_fallback(fallback: str) -> None:
    """Set what `fallback=None` means in this process from now on; at import, SAGE_HF_FALLBACK decides.

    Raises:
        ValueError: `fallback` is not "native", "emulate" or "error".
    """
    global _default_fallback
    _default_fallback = check_fallback(fallback)


def default_fallback() -> Fallback:
    """Return what `fallback=None` means in this process."""
    return _default_fallback


def check_fallback(fallback: str) -> Fallback:
    """Return `fallback` if it is one of the choices; otherwise raise a ValueError that lists them."""
    for known in FALLBACKS:
        if fallback == known:
            return known
    raise ValueError(f"unknown fallback {fallback!r}; choose from: {', '.join(FALLBACKS)}")


def fallback_of_environment() -> Fallback:
    """Return the value of the environment variable SAGE_HF_FALLBACK; "native" if it is empty or not set.

    Raises:
        ValueError: its value is not "native", "emulate" or "error".
    """
    try:
        return check_fallback(os.environ.get("SAGE_HF_FALLBACK") or "native")
    except ValueError as error:
        raise ValueError(f"the environment variable SAGE_HF_FALLBACK: {error}") from None


_default_fallback = fallback_of_environment()

DROPOUT = "attention dropout is computed by exact attention alone"
"""Reason of calls with dropout."""


@overload
def sage_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    recipe: str = "sage3",
    fallback: str | None = None,
    return_lse: Literal[False] = False,
    blocks: BlockList | None = None,
) -> torch.Tensor: ...


@overload
def sage_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    recipe: str = "sage3",
    fallback: str | None = None,
    return_lse: Literal[True],
    blocks: BlockList | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def sage_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    recipe: str = "sage3",
    fallback: str | None = None,
    return_lse: bool = False,
    blocks: BlockList | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute attention in few bits, with the arguments of `torch.nn.functional.scaled_dot_product_attention`.

    It may stand in that function's place: `F.scaled_dot_product_attention = sage_hf.sage_attention`.

    Args:
        query: (batch, q_heads, q_len, head_dim); float16, bfloat16 or float32. Exact attention runs for float64
            and for a head_dim outside 16…256. Query, key and value may all have fewer or more leading dimensions.
        key: (batch, kv_heads, kv_len, head_dim), dtype and device of query.
        value: (batch, kv_heads, kv_len, v_head_dim); exact attention runs for a v_head_dim outside 16…256.
        attn_mask: bool (True: may attend) or floating point (added to the scores), broadcastable to (batch, q_heads,
            q_len, kv_len).
        dropout_p: probability of dropping a weight; exact attention runs unless it is 0.
        is_causal: query i attends to keys 0…i, aligned upper left as in PyTorch; not together with attn_mask.
        scale: finite factor of the scores, which may be 0 or negative; default head_dim ** -0.5.
        enable_gqa: allow q_heads to be a multiple of kv_heads.
        recipe: "sage3", "sage2", "sage1", "sage3_paper"; "sage_bwd" and "sage_bwd_int8", which have gradients; or
            "exact" for PyTorch's own attention.
        fallback: what to do if the recipe has no native kernel: "native" (run the best this device has, else exact
            attention), "emulate" (the recipe's numerics, slowly), "error". None: the process's default ("native",
            unless `set_default_fallback` or SAGE_HF_FALLBACK says otherwise).
        return_lse: also return the log-sum-exp of every row's scores.
        blocks: the tiles of keys that each block of queries attends to (sparse attention); None: all. Beside it
            attn_mask may only say which keys exist. All keys are then in few bits, also those that are heavy otherwise.

    Returns:
        output (batch, q_heads, q_len, v_head_dim) in query's dtype; with return_lse also lse (batch, q_heads, q_len)
        float32. A row that may attend to nothing gives output 0 and lse -inf (with recipe="exact" the output is
        PyTorch's, which on a GPU need not be 0). lse carries no gradient.

    When gradients are wanted, a recipe that has them computes both passes in few bits, at any length, without a mask or
    with a bool one that is the same for all queries and heads (padding). Otherwise, and for the other recipes, the
    output comes from exact attention and carries its gradients, and that is logged. Reentrant checkpointing runs its
    first forward pass without gradients, so as inference: use `use_reentrant=False`.

    Raises:
        ValueError: arguments do not fit together, there is dropout beside blocks, recipe or fallback is unknown, or
            scale is not finite.
        TypeError: query, key or value is not a dense floating-point tensor, scale is not a number, or is_causal is not
            a bool.
        RuntimeError: a tensor's storage was resized to 0.
        KernelUnavailableError: fallback="error" and there is no native kernel.

    Source: SageAttention3, SageBwd (arXiv 2505.11594), SageAttention2 (arXiv 2411.10958), SageAttention (arXiv
    2410.02367).
    """
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask and is_causal=True exclude each other: fold the causal mask into attn_mask")
    dims = getattr(query, "ndim", 4)
    if dims != 4 and dims == getattr(key, "ndim", 0) == getattr(value, "ndim", 0) >= 2:
        options: dict[str, Any] = {"recipe": recipe, "fallback": fallback, "return_lse": return_lse, "blocks": blocks}
        return _attend_with_leading_dimensions(
            query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, options
        )
    if blocks is not None:
        sparse = _attend_to_blocks(
            blocks, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, recipe, fallback, return_lse
        )
        return sparse if return_lse else sparse[0]
    output, lse = attend(
        query,
        key,
        value,
        attn_mask,
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
        recipe=recipe,
        fallback=fallback,
        return_lse=return_lse,
    )
    return output if lse is None or not return_lse else (output, lse)


def _attend_with_leading_dimensions(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    options: dict[str, Any],
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute `sage_attention` of tensors (…, tokens, channels) with fewer or more than two leading dimensions."""
    if query.dim() < 4:
        tensors = [x[(None,) * (4 - x.dim())] for x in (query, key, value)]
    else:
        tensors = [x.flatten(0, -4) for x in (query, key, value)]
        if mask is not None and mask.dim() > 3:
            mask = mask.expand(*query.shape[:-3], *mask.shape[-3:]).flatten(0, -4)
    found = sage_attention(*tensors, mask, dropout_p, is_causal, scale, enable_gqa, **options)  # type: ignore[call-overload]
    if isinstance(found, torch.Tensor):
        return found.reshape(*query.shape[:-1], value.shape[-1])
    output, lse = found
    return output.reshape(*query.shape[:-1], value.shape[-1]), lse.reshape(query.shape[:-1])


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    causal_offset: int = 0,
    recipe: str = "sage3",
    fallback: str | None = None,
    return_lse: bool = False,
    tokens_first: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `sage_attention`, but accept a mask and causality together; see there for the other arguments.

    Args:
        attn_mask, is_causal: a query attends to what both allow.
        causal_offset: causal query i attends to keys 0…i + causal_offset; only 0 has gradients or exact attention.
        tokens_first: query, key, value and the output are (batch, tokens, heads, channels).

    Returns:
        (output, lse); without return_lse, the lse is None or has no elements.
    """
    if tokens_first:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    chosen_fallback, entry = _default_fallback if fallback is None else fallback, None
    if not torch.compiler.is_compiling() and dropout_p == 0.0:
        if torch_private.autocast_is_active() and all(isinstance(x, torch.Tensor) for x in (query, key, value)):
            checks.check_memory(query, key, value)
            query, key, value = sdpa.in_autocast_dtype(query, key, value)
        mask = attn_mask[(None,) * (4 - attn_mask.dim())] if isinstance(attn_mask, torch.Tensor) else attn_mask
        options = is_causal, causal_offset, scale, enable_gqa, recipe, chosen_fallback, return_lse
        grad = ops.wants_gradient(query, key, value, attn_mask)
        entry = cache.find("sage_attention", (query, key, value, mask), options, grad)
        if entry is not None and entry.replay is not None:
            run.announce(entry.replay.plan)
            output, lse = entry.replay(query, key, value, mask)
            if record.observers:
                record.notify_observers(
                    *(query, key, value, attn_mask, is_causal, causal_offset, scale, enable_gqa, output)
                )
            return output.transpose(1, 2) if tokens_first else output, lse
    return _attend(
        *(entry, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa),
        *(causal_offset, recipe, chosen_fallback, return_lse, tokens_first),
    )


def _attend(
    entry: cache.Entry | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    causal_offset: int,
    recipe: str,
    fallback: str,
    return_lse: bool,
    tokens_first: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Do as `attend` for a call that is not replayed, whose tensors have heads before tokens."""
    checked_fallback = check_fallback(fallback)
    checks.check_causal(is_causal)
    is_causal = bool(is_causal)
    lse: torch.Tensor | None
    get_recipe(recipe)
    checks.check_kinds(query, key, value, attn_mask, scale, mask_name="attn_mask")
    checks.check_memory(query, key, value, attn_mask)
    query, key, value = sdpa.in_autocast_dtype(query, key, value)
    checks.check_tensors(query, key, value, attn_mask, enable_gqa, "attn_mask")
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (2 - attn_mask.dim())]
    mask = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]
    wants_gradient = _wants_gradient(query, key, value, mask)
    valid = key_mask(mask, key.shape[2]) if wants_gradient else None
    reason = DROPOUT if dropout_p and recipe != "exact" else ""
    if wants_gradient and not reason:
        reason = _why_exact(query, key, value, mask, valid, is_causal, recipe, checked_fallback)

    if recipe == "exact" or reason:
        if recipe != "exact" and checked_fallback == "error":
            advice = "set it to 0" if dropout_p else "run under torch.no_grad() if no gradient is needed"
            raise KernelUnavailableError(
                f'{reason}: {advice}, or use fallback="native" for exact attention with gradients'
            )
        plan = _record_exact(query, key, value, mask, is_causal, recipe, return_lse, reason, wants_gradient)
        exactly = partial(
            _exact,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
            recipe=recipe,
            return_lse=return_lse,
        )
        output, lse = exactly(query, key, value, attn_mask)
        if entry is not None and plan is not None:
            entry.consider(partial(cache.compared, plan, exactly, (query, key, value, attn_mask), (output, lse)))
    elif wants_gradient:
        output, lse = training.attention(
            query,
            key,
            value,
            valid=valid,
            is_causal=is_causal,
            scale=scale,
            recipe=recipe,
            fallback=checked_fallback,
            return_lse=return_lse,
        )
        if entry is not None and not return_lse:
            entry.consider(
                partial(_training_replay, query, key, value, mask, is_causal, scale, recipe, checked_fallback)
            )
    elif entry is None:
        output, lse = ops.attention(
            query,
            key,
            value,
            mask=mask,
            is_causal=is_causal,
            causal_offset=causal_offset,
            scale=scale,
            recipe=recipe,
            fallback=checked_fallback,
            return_lse=return_lse,
        )
    else:  # nothing watches operators
        checked = ops.checked_call(query, key, value, mask, is_causal, causal_offset, scale, recipe, return_lse)
        plan = run.plan_of(checked, checked_fallback)
        output, lse = result = run.run(checked, plan)
        entry.consider(partial(replays.of_call, checked, plan, mask, result))
    if not torch.compiler.is_compiling():
        record.notify_observers(*(query, key, value, attn_mask, is_causal, causal_offset, scale, enable_gqa, output))
    return output.transpose(1, 2) if tokens_first else output, lse


def _training_replay(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
    recipe: str,
    fallback: Fallback,
) -> cache.Replay | None:
    """Make the replay of a call with gradients; arguments as in `training.attention`, the mask 4-D."""
    options = Mask.of(mask, key.shape[2]), is_causal, 0, softmax_scale(scale, query.shape[3])
    call = Call(query, key, value, get_recipe(recipe), *options)
    plan = run.plan_training(run.request_of(call, grad=True), fallback)
    return replays.of_training(call, plan, scale, fallback)


def _exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    recipe: str,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run PyTorch's attention with gradients; return (output, lse), the lse without a gradient and of all weights.

    Rows that may attend to no key are 0, unless exact attention is the recipe that was asked for.
    """
    if is_causal and mask is not None:
        mask, is_causal = with_causality(mask, query, key), False
    attend_exactly = sdpa.sdpa if recipe == "exact" else masked_rows.attend
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa, "dropout_p": dropout_p}
    output = attend_exactly(query, key, value, mask=mask, is_causal=is_causal, **options)
    if not return_lse:
        return output, query.new_empty(0, dtype=torch.float32)
    with torch.no_grad():
        return output, ops.log_sum_exp(query, key, mask=mask, is_causal=is_causal, scale=scale)


def _record_exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    recipe: str,
    return_lse: bool,
    reason: str,
    grad: bool,
) -> Plan | None:
    """Record that exact attention runs: because it was asked for, or in place of a recipe (`reason`).

    Returns:
        The plan, unless the call is being compiled.
    """
    if torch.compiler.is_compiling():
        if recipe != "exact":
            record.report_exact(None, reason, recipe)
        return None
    request = Request.of(query, key, value, mask, is_causal, recipe, return_lse, grad and bool(reason))
    plan = exact_plan(request, *([] if recipe == "exact" else [("", reason)]))
    run.announce(plan)
    return plan


def _wants_gradient(*tensors: torch.Tensor | None) -> bool:
    """Return whether reverse-mode or forward-mode differentiation would go through one of the tensors."""
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return True
    return ops.has_tangent(*tensors)


def _why_exact(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    valid: torch.Tensor | None,
    is_causal: bool,
    recipe: str,
    fallback: Fallback,
    blocks: BlockList | None = None,
) -> str:
    """Return why this call falls back to exact gradients; "" if the recipe computes its own."""
    if recipe == "exact":
        return ""
    if get_recipe(recipe).backward is None:
        return f"{recipe} is forward only and gradients are wanted"
    if ops.has_tangent(query, key, value, mask):
        return f"{recipe} has no forward-mode derivative"
    if not torch.compiler.is_compiling() and torch_private.transforms_are_active():
        return f"{recipe} cannot be differentiated inside a transform of torch.func"
    if mask is not None and valid is None:
        return f"{recipe} has gradients without a mask or with a bool one that is the same for all queries and heads"
    if fallback == "error":
        return ""  # `training.attention` raises, and says why
    options: dict[str, Any] = {"valid": valid, "blocks": blocks, "is_causal": is_causal}
    return training.why_exact(query, key, value, **options, recipe=recipe, fallback=fallback)


def _attend_to_blocks(
    blocks: BlockList,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    recipe: str,
    fallback: str | None,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `sage_attention` over a block list; return (output, lse), the lse empty if it is not wanted."""
    checked_fallback = default_fallback() if fallback is None else check_fallback(fallback)
    get_recipe(recipe)
    checks.check_kinds(query, key, value, attn_mask, scale, mask_name="attn_mask")
    checks.check_memory(query, key, value, attn_mask, blocks.counts, blocks.tiles)
    query, key, value = sdpa.in_autocast_dtype(query, key, value)
    checks.check_tensors(query, key, value, attn_mask, enable_gqa, "attn_mask")
    if dropout_p:
        raise ValueError(f"dropout_p={dropout_p} is not supported beside blocks: set the attention dropout to 0")
    mask = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.dim())]
    checks.check_causal(is_causal)
    keys, is_causal, reason = Mask.of_blocks(blocks, mask, key.shape[2]), bool(is_causal), ""
    wants_gradient = recipe != "exact" and _wants_gradient(query, key, value)
    if wants_gradient:
        facts = (query, key, value, mask, keys.valid, is_causal, recipe, checked_fallback, blocks)
        reason = _why_exact(*facts)
        if reason and checked_fallback == "error":
            raise KernelUnavailableError(f"{reason}: run under torch.no_grad() if no gradient is needed")
    options: dict[str, Any] = {"mask": mask, "is_causal": is_causal, "scale": scale, "return_lse": return_lse}
    if recipe == "exact" or reason:
        check_blocks(blocks, query, key)  # otherwise the operator does
        request = None
        if not torch.compiler.is_compiling():
            request = Request.of(query, key, value, mask, is_causal, recipe, return_lse, bool(reason))
            request = replace(request, mask=keys.kind)
        if reason:
            record.report_exact(request, reason, recipe)
        elif request is not None:
            record.file_plan(exact_plan(request))
        output, found = block_lists.attend(query, key, value, blocks, **options)
        lse = query.new_empty(0, dtype=torch.float32) if found is None else found
    elif wants_gradient:
        del options["mask"]
        output, lse = training.attention(
            query, key, value, valid=keys.valid, blocks=blocks, recipe=recipe, fallback=checked_fallback, **options
        )
    else:
        output, lse = ops.attention(
            query, key, value, blocks=blocks, recipe=recipe, fallback=checked_fallback, **options
        )
    if not torch.compiler.is_compiling():
        record.notify_observers(query, key, value, attn_mask, is_causal, 0, scale, enable_gqa, output)
    return output, lse
