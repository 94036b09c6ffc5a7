"""Exact attention whose rows without a key are 0, whatever the backend returns.

With gradients, such rows attend to every key, and zeros replace their output: kernels would divide by 0, and cuDNN's
kernel returns NaN if -inf is added throughout (PyTorch 2.11, one query).

Without gradients, PyTorch's GPU kernels return zeros in rows whose additive mask is -inf throughout. PyTorch makes a
bool mask additive in three launches; for cuDNN it uses a finite number in place of -inf, so such rows are not 0. Here
the conversion takes one launch, with -inf. The kernels of a head_dim are tried once; if they return other values, zeros
are filled in afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention, can_use_efficient_attention

from ..replay import driver
from ..runtime import torch_private
from ..spec.derivatives import wants_gradient
from ..spec.masks import additive, attended_rows
from . import sdpa

ROWS, NEAR = 128, 0.02
"""Queries and keys of a trial, and the largest error of an output of about 1: more than rounding causes."""
_gives_zeros_by_kind: dict[tuple[object, ...], bool] = {}


def attend_with_zero_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    dropout_p: float = 0.0,
    backend: Callable[..., torch.Tensor] | None = None,
) -> torch.Tensor:
    """Call `exact.sdpa`; rows that may attend to no key are 0 and contribute to no gradient.

    Args:
        query, key, value, mask, is_causal, scale, enable_gqa, dropout_p, backend: as in `exact.sdpa`.
    """
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    options |= {"dropout_p": dropout_p, "backend": backend}
    if mask is None:
        return sdpa.sdpa(query, key, value, **options)
    if wants_gradient(query, key, value, mask) or torch_private.transforms_are_active():
        rows, mask = attended_rows(mask), sdpa.stored_part(mask)
        mask = mask | ~rows if mask.dtype == torch.bool else torch.where(rows, mask, 0.0)
        return torch.where(rows, sdpa.sdpa(query, key, value, mask=mask, **options), 0.0)
    if _gives_zeros(query, key, value, mask):
        return sdpa.sdpa(query, key, value, mask=additive(mask, query.dtype), **options)
    output = sdpa.sdpa(query, key, value, mask=mask, **options)
    return torch.where(attended_rows(mask), output, 0.0)


def _gives_zeros(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> bool:
    """Return whether `exact.sdpa` returns zeros in rows whose additive mask is -inf throughout."""
    if not query.is_cuda or torch.version.hip is not None or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if torch.compiler.is_compiling() or torch_private.tangents_are_active():
        return False
    plain = all(type(x) in (torch.Tensor, torch.nn.Parameter) for x in (query, key, value, mask))
    if not plain or torch_private.dispatch_modes() or 0 in (*query.shape, *value.shape):
        return False
    kind = query.device, query.dtype, query.shape[3], value.shape[3]
    allowed = torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
    if (gives_zeros := _gives_zeros_by_kind.get((*kind, *allowed))) is None:
        if torch.cuda.is_current_stream_capturing():
            return False
        with driver.relaxed_capture():
            gives_zeros = all(_gives_zeros_by(backend, *kind) for backend in (_cudnn, _efficient, _math))
        _gives_zeros_by_kind[(*kind, *allowed)] = gives_zeros
    return gives_zeros


def _gives_zeros_by(
    backend: Callable[..., torch.Tensor], device: torch.device, dtype: torch.dtype, head_dim: int, v_head_dim: int
) -> bool:
    """Return whether a backend returns zeros in hidden rows, for the calls that it serves."""
    # One row of the first batch element has no key, and no row of the second element has a key.
    allowed = torch.ones(2, 1, ROWS, ROWS, dtype=torch.bool, device=device)
    allowed[0, :, 5] = allowed[1] = False
    mask, kept = additive(allowed, dtype), torch.ones(ROWS, 1, dtype=dtype, device=device)
    kept[5] = 0.0
    inputs = [torch.ones(2, 2, ROWS, count, dtype=dtype, device=device) for count in (head_dim, head_dim, v_head_dim)]
    try:
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            output = sdpa.sdpa(*inputs, mask=mask, backend=backend)
    except _RefusedError:
        return True
    except RuntimeError:
        return False
    # The other rows are the mean of ones.
    return not output[1].any() and not output[0, :, 5].any() and bool((output[0] - kept).abs().max() < NEAR)


class _RefusedError(Exception):
    """Error of a backend that does not serve a call."""


# The backends that take masks, each with the arguments of PyTorch's function.


def _cudnn(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor, scale: float, **_: object
) -> torch.Tensor:
    if not can_use_cudnn_attention(SDPAParams(query, key, value, attn_mask, 0.0, False, False)):
        raise _RefusedError
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, attn_mask, False, scale=scale
    )[0]
    return output


def _efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor, scale: float, **_: object
) -> torch.Tensor:
    if not can_use_efficient_attention(SDPAParams(query, key, value, attn_mask, 0.0, False, False)):
        raise _RefusedError
    mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, False, scale=scale
    )[0]
    return output


def _math(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor, scale: float, **_: object
) -> torch.Tensor:
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(query, key, value, attn_mask, scale=scale)[
        0
    ]
    return output
