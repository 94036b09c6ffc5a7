"""The torch.library operators with gradients: attention with low-bit forward and backward passes (SageBwd)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from .dispatch import execution, training_calls
from .dispatch.plan import Plan
from .ops import as_one_sequence, library
from .replay import cache
from .spec import checks, transforms
from .spec.arguments import SCHEMA, OperatorArguments
from .spec.block_list import BlockList, check_blocks
from .spec.call import NO_MASK, AttentionOutput, BackwardCall, Call, Mask, softmax_scale
from .spec.derivatives import refuse_tangents
from .spec.layout import Lengths, with_tokens_first
from .spec.operands import Saved
from .spec.options import Fallback, Options
from .spec.recipe import get_recipe
from .spec.saved import empty_saved

_SAVED = "Tensor saved_query, Tensor query_scale, Tensor saved_key, Tensor key_scale, Tensor equalizer, Tensor lse"
_PARTS = len(Saved._fields)

for _schema in (
    f"training_attention(Tensor query, Tensor key, Tensor value, Tensor? key_mask, {SCHEMA}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    f"training_attention_backward(Tensor output_gradient, Tensor value, Tensor output, {_SAVED}, int head_dim, "
    f"str kernel, Tensor? key_mask, {SCHEMA}) -> (Tensor, Tensor, Tensor)",
    "training_lse(Tensor query, Tensor key, Tensor lse, Tensor? key_mask, float? scale, str recipe) -> Tensor",
):
    library.define(_schema, tags=torch.Tag.pt2_compliant_tag)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    key_mask: torch.Tensor | None = None,
    blocks: BlockList | None = None,
    is_causal: bool = False,
    causal_offset: int = 0,
    scale: float | None = None,
    recipe: str = "sage_bwd",
    fallback: Fallback = "native",
    return_lse: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute low-bit attention with low-bit gradients (arXiv 2505.11594, section 4), by the best kernel for the call.

    The kernels of both passes are chosen by one plan. Exact attention does not run here, because PyTorch computes its
    gradients: ask `dispatch.decide.decide` first.

    Args:
        query: (batch, q_heads, q_len, head_dim) float16, bfloat16 or float32, any strides.
        key, value: (batch, kv_heads, kv_len, head_dim), (batch, kv_heads, kv_len, v_head_dim), dtype and device of
            query; q_heads a multiple of kv_heads.
        key_mask: bool (batch or 1, kv_len), False where a key does not exist; None: all exist.
        blocks: the tiles of keys that each block of rows attends to; None: all tiles. Gradients skip unlisted tiles.
        is_causal: row i attends to the keys 0…i + causal_offset, as far as they exist and are listed.
        causal_offset: see `ops.attention`.
        scale: finite factor of the scores; default head_dim ** -0.5.
        recipe: the name of a recipe with gradients.
        fallback: see `select.select`.
        return_lse: compute the log-sum-exp of each row's scores.

    Returns:
        (output, lse): output (batch, q_heads, q_len, v_head_dim) in query's dtype, laid out in memory as (batch, q_len,
        q_heads, v_head_dim); lse (batch, q_heads, q_len) float32 without a gradient, or (0,) without return_lse. A row
        that may attend to nothing has output 0 and lse -inf, and contributes no gradient. Gradients have query's dtype
        and the layout of the output.

    Raises:
        TypeError: see `ops.attention`.
        ValueError: shapes, dtypes or devices do not fit, or the scale is not finite; see also `select.select` and
            `block_list.check_blocks`.
        KernelUnavailableError: no kernel with gradients serves the call.
        NotImplementedError: on a second derivative, or in forward-mode differentiation.
    """
    options = Options.of_operator(is_causal, causal_offset, scale, recipe, fallback, return_lse)
    checks.check_kinds(query, key, value, None, options)
    refuse_tangents(query, key, value)
    output, lse = call_operator(query, key, value, key_mask, blocks, None, options)
    return output, query.new_empty(0, dtype=torch.float32) if lse is None else lse


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: torch.Tensor | None = None,
    is_causal: bool = False,
    causal_offset: int = 0,
    scale: float | None = None,
    recipe: str = "sage_bwd",
    fallback: Fallback = "native",
    blocks: BlockList | None = None,
) -> torch.Tensor:
    """Compute `attention` of sequences of any lengths that are packed one after another without padding.

    Args:
        query: (total queries, q_heads, head_dim).
        key, value: (total keys, kv_heads, head_dim), (total keys, kv_heads, v_head_dim).
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k: as in `ops.packed_attention`. Keys beyond
            seqused_k have gradient 0.
        is_causal, causal_offset, scale, recipe, fallback: as in `attention`, for each sequence.
        blocks: as in `ops.packed_attention`, with sequences as its batch.

    Returns:
        (total queries, q_heads, v_head_dim) in query's dtype.

    Raises:
        TypeError, KernelUnavailableError, NotImplementedError: see `attention`.
        ValueError: see `attention` and `ops.packed_attention`.
    """
    options = Options.of_operator(is_causal, causal_offset, scale, recipe, fallback)
    lengths = Lengths(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k)
    checks.check_kinds(query, key, value, None, options)
    refuse_tangents(query, key, value)
    query, key, value = map(as_one_sequence, (query, key, value))
    output, _ = call_operator(query, key, value, None, blocks, lengths, options)
    return output.squeeze(0).transpose(0, 1)


def call_operator(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    blocks: BlockList | None,
    lengths: Lengths | None,
    options: Options,
) -> AttentionOutput:
    """Run `attention` for tensors without tangents that `checks.check_kinds` accepts.

    With `lengths`, sequences are packed into one batch element, and there is no LSE.
    """
    arguments = OperatorArguments.of(blocks, lengths, options).for_training()
    output, *saved = torch.ops.sage_kernels.training_attention(query, key, value, key_mask, *arguments)
    if not options.return_lse:
        return output, None
    with torch.no_grad():
        lse = torch.ops.sage_kernels.training_lse(query, key, saved[-1], key_mask, options.scale, options.recipe)
        return output, lse


def run_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Mask,
    plan: Plan,
    options: Options,
    entry: cache.ReplayEntry,
) -> torch.Tensor:
    """Announce and run a call with gradients by the kernels of its plan, outside of operators.

    Args:
        query, key, value: tensors that `checks.check_tensors` accepts.
        mask: no mask, or a key-padding mask.
        plan: the kernels of both passes.
        options: the caller's options.
        entry: the call's entry in the replay cache.

    Returns:
        The output, with gradients.
    """
    call = Call.of(query, key, value, mask, options)
    execution.announce(plan)
    output = training_calls.attend_with_gradients(call, plan, options)
    entry.prepare_when_repeated(partial(training_calls.replay_of_training, call, plan, options))
    return output


def _mask(key_mask: torch.Tensor | None, blocks: BlockList | None) -> Mask:
    """Return the `Mask` of existing keys and of a block list."""
    call_mask = Mask.of_keys(key_mask)
    if blocks is None:
        return call_mask
    return replace(call_mask, kind="blocks" if key_mask is None else "block_keys", blocks=blocks)


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    arguments: OperatorArguments,
) -> Call:
    return Call.of(query, key, value, _mask(key_mask, arguments.blocks), arguments.options, arguments.lengths)


def _training_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_mask: torch.Tensor | None, *flat: Any
) -> tuple[torch.Tensor, ...]:
    arguments = OperatorArguments(*flat)
    checks.check_tensors(query, key, value, None)
    checks.check_head_dims(query, value)
    checks.check_memory(key_mask)
    checks.check_key_mask(key_mask, key)
    checks.check_lengths(query, key, arguments.lengths)
    if arguments.blocks is not None:
        check_blocks(arguments.blocks, query, key, arguments.lengths)
    output, saved = execution.attend_and_save(_call(query, key, value, key_mask, arguments), arguments.fallback)
    return with_tokens_first(output), *(part.contiguous() for part in saved)


def _fake_training_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, key_mask: torch.Tensor | None, *flat: Any
) -> tuple[torch.Tensor, ...]:
    arguments = OperatorArguments(*flat)
    call = Call(query, key, value, get_recipe(arguments.recipe), NO_MASK, lengths=arguments.lengths)
    output, lse = call.new_outputs(saves_lse=True)
    assert lse is not None
    return output, *empty_saved(call, lse)


def _training_attention_backward(
    output_gradient: torch.Tensor, value: torch.Tensor, output: torch.Tensor, *flat: Any
) -> tuple[torch.Tensor, ...]:
    *parts, head_dim, kernel, key_mask = flat[: _PARTS + 3]
    saved, arguments = Saved(*parts), OperatorArguments(*flat[_PARTS + 3 :])
    if not kernel:  # a traced graph: sizes are known only now; output and V have the sizes of Q and K
        forward_call = _call(output, value, value, key_mask, arguments)
        request = replace(execution.request_of(forward_call, grad=True), head_dim=head_dim)
        kernel = execution.select_training(request, arguments.fallback).backward
    call = BackwardCall(
        output_gradient,
        value,
        output,
        saved,
        head_dim,
        get_recipe(arguments.recipe),
        _mask(key_mask, arguments.blocks),
        is_causal=arguments.is_causal,
        causal_offset=arguments.causal_offset,
        scale=softmax_scale(arguments.scale, head_dim),
        lengths=arguments.lengths,
    )
    return tuple(map(with_tokens_first, execution.backward(call, kernel)))


def _fake_training_attention_backward(
    output_gradient: torch.Tensor, value: torch.Tensor, output: torch.Tensor, *flat: Any
) -> tuple[torch.Tensor, ...]:
    (batch, q_heads, q_len, _), head_dim = output.shape, flat[_PARTS]
    kv_heads, kv_len, v_head_dim = value.shape[1:]
    sizes = ((q_len, q_heads, head_dim), (kv_len, kv_heads, head_dim), (kv_len, kv_heads, v_head_dim))
    return tuple(value.new_empty(batch, *size).transpose(1, 2) for size in sizes)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, key_mask = inputs[:4]
    arguments = OperatorArguments(*inputs[4:])
    ctx.save_for_backward(value, *output, key_mask, *arguments.tensors)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    kernel = ""
    if type(query) in (torch.Tensor, torch.nn.Parameter):  # not a tracer's tensor, whose sizes may change
        request = execution.request_of(_call(query, key, value, key_mask, arguments), grad=True)
        kernel = execution.select_training(request, arguments.fallback).backward
    ctx.head_dim, ctx.kernel = query.shape[3], kernel
    ctx.arguments = arguments.with_tensors((None,) * len(arguments.tensors))


def _backward(ctx: Any, output_gradient: torch.Tensor | None, *others: None) -> tuple[torch.Tensor | None, ...]:
    no_gradients = (None,) * (len(ctx.needs_input_grad) - 3)
    if output_gradient is None:
        return None, None, None, *no_gradients
    saved_tensors = ctx.saved_tensors
    forward, key_mask, tensors = saved_tensors[: _PARTS + 2], saved_tensors[_PARTS + 2], saved_tensors[_PARTS + 3 :]
    arguments = ctx.arguments.with_tensors(tensors).for_training()
    gradients = torch.ops.sage_kernels.training_attention_backward(
        output_gradient, *forward, ctx.head_dim, ctx.kernel, key_mask, *arguments
    )
    wanted = zip(gradients, ctx.needs_input_grad, strict=False)
    return *(gradient if needed else None for gradient, needed in wanted), *no_gradients


def _no_second_derivative(ctx: Any, *gradients: torch.Tensor) -> None:
    raise NotImplementedError(
        'low-bit attention has no second derivative: use recipe="exact" (attn_implementation="sage_exact") within '
        'torch.nn.attention.sdpa_kernel(SDPBackend.MATH), or attn_implementation="eager", where a gradient is '
        "differentiated again"
    )


def _training_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    lse: torch.Tensor,
    key_mask: torch.Tensor | None,
    scale: float | None,
    recipe: str,
) -> torch.Tensor:
    """Return `Saved.lse` plus the share of each row's scores that was subtracted with K's mean before quantising."""
    if 0 in (*query.shape, key.shape[2]) or not get_recipe(recipe).smooth_k:
        return lse.clone()
    scale = query.shape[3] ** -0.5 if scale is None else scale
    with torch.autocast(query.device.type, enabled=False):
        key, counted = key.float(), None if key_mask is None else key_mask[:, None, :, None]
        if get_recipe(recipe).equalize:
            counted = transforms.quiet_keys(key, counted)
        mean = transforms.mean_of_tokens(key, counted)
        grouped = query.float().unflatten(1, (key.shape[1], -1))
        return lse + scale * grouped.matmul(mean.unsqueeze(2).mT).flatten(1, 2).squeeze(-1)


def _fake_training_lse(query: torch.Tensor, key: torch.Tensor, lse: torch.Tensor, *options: object) -> torch.Tensor:
    return torch.empty_like(lse)


for _name, _run, _fake in (
    ("training_attention", _training_attention, _fake_training_attention),
    ("training_attention_backward", _training_attention_backward, _fake_training_attention_backward),
    ("training_lse", _training_lse, _fake_training_lse),
):
    library.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"sage_kernels::{_name}", _fake, lib=library)
torch.library.register_autograd(
    "sage_kernels::training_attention", _backward, setup_context=_save_for_backward, lib=library
)
torch.library.register_autograd("sage_kernels::training_attention_backward", _no_second_derivative, lib=library)
