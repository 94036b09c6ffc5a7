"""The public entry point: `sage_attention`, with the arguments of PyTorch's attention and a recipe."""

from __future__ import annotations

import os
from typing import Literal, overload

import torch

from sage_hf import record
from sage_kernels.attend import attend as kernels_attend
from sage_kernels.dispatch.select import set_routing as set_routing
from sage_kernels.spec.block_list import BlockList as BlockList
from sage_kernels.spec.options import Fallback, Options, check_fallback


def set_default_fallback(fallback: str) -> None:
    """Set the meaning of `fallback=None` in this process from now on; at import, SAGE_HF_FALLBACK sets it.

    Raises:
        ValueError: `fallback` is not "native", "emulate" or "error".
    """
    global _default_fallback
    _default_fallback = check_fallback(fallback)


def default_fallback() -> Fallback:
    """Return the fallback that `None` stands for in this process."""
    return _default_fallback


def chosen_fallback(fallback: str | None) -> Fallback:
    """Return a caller's fallback; the process's default for None.

    Raises:
        ValueError: it is not "native", "emulate" or "error".
    """
    return _default_fallback if fallback is None else check_fallback(fallback)


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
    """Compute attention in low bits, with the arguments of `torch.nn.functional.scaled_dot_product_attention`.

    It may replace that function: `F.scaled_dot_product_attention = sage_hf.sage_attention`.

    Args:
        query: (batch, q_heads, q_len, head_dim); float16, bfloat16 or float32. Exact attention runs for float64
            and for a head_dim outside 16…256. All three may have fewer or more leading dimensions; a batch or head
            dimension of size 1 is broadcast.
        key: (batch, kv_heads, kv_len, head_dim), dtype and device of query.
        value: (batch, kv_heads, kv_len, v_head_dim); exact attention runs for a v_head_dim outside 16…256.
        attn_mask: bool (True: may attend) or floating point (added to the scores), broadcastable to (batch, q_heads,
            q_len, kv_len); or PyTorch's CausalBias.
        dropout_p: probability of dropping a weight; exact attention runs unless it is 0.
        is_causal: query i attends to keys 0…i, aligned upper left as in PyTorch; not together with attn_mask.
        scale: finite factor of the scores, which may be 0 or negative; default head_dim ** -0.5.
        enable_gqa: allow q_heads to be a multiple of kv_heads.
        recipe: "sage3", "sage2", "sage1", "sage3_paper"; "sage_bwd" and "sage_bwd_int8", which have gradients; or
            "exact" for PyTorch's own attention.
        fallback: the reaction if the recipe has no native kernel: "native" (run the best recipe that this device has,
            or else exact attention), "emulate" (the recipe's numerics, slowly), "error". None: the process's default
            ("native", unless `set_default_fallback` or SAGE_HF_FALLBACK says otherwise).
        return_lse: also return the log-sum-exp of every row's scores.
        blocks: the tiles of keys that each block of queries attends to (sparse attention); None: all. With blocks,
            attn_mask may only say which keys exist, and all keys are quantised: no heavy keys stay in 16 bits.

    Returns:
        output (batch, q_heads, q_len, v_head_dim) in query's dtype, or under autocast in autocast's; with return_lse
        also lse (batch, q_heads, q_len) float32. A row that may attend to no key gives output 0 and lse -inf (with
        recipe="exact" the output is PyTorch's, which on a GPU need not be 0). lse carries no gradient.

    When gradients are wanted, a recipe with gradients computes both passes in low bits, at any length, without a mask
    or with a bool mask that is the same for all queries and heads (padding). Otherwise, and for the other recipes,
    exact attention computes output and gradients, and the log says so. Reentrant checkpointing runs its first forward
    pass without gradients, so that pass runs as inference: use `use_reentrant=False`.

    Raises:
        ValueError: arguments do not fit together, there is dropout with blocks, recipe or fallback is unknown, or
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
    options = Options(
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
        dropout_p=dropout_p,
        recipe=recipe,
        fallback=chosen_fallback(fallback),
        return_lse=return_lse,
    )
    output, lse = attend_observed(query, key, value, attn_mask, blocks, options)
    return output if lse is None or not return_lse else (output, lse)


def attend_observed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    blocks: BlockList | None,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute `sage_attention`, but accept a mask and causality together, and let observers see the call.

    Args:
        query, key, value, blocks: as in `sage_attention`; with `options.tokens_first`, query, key, value and the output
            are (batch, tokens, heads, channels).
        mask: as `attn_mask` in `sage_attention`.
        options: all other arguments; a query attends to the keys that mask and causality both allow.

    Returns:
        (output, lse); the lse is valid only with `options.return_lse`.
    """
    output, lse = kernels_attend(query, key, value, mask, blocks, options)
    if record.observers and not torch.compiler.is_compiling():
        record.notify_observers(query, key, value, mask, blocks, options, output)
    return output, lse
