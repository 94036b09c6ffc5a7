"""Exact attention whose rows without a key are 0, whatever the backend gives.

PyTorch's GPU kernels give zeros, and no gradient, where an additive mask is -inf throughout. A bool mask is made
additive by PyTorch in three launches, for cuDNN with a finite number in place of -inf, so that such rows are not 0.
Here that takes one launch, with -inf. What the kernels give is tried out once; otherwise, zeros are chosen afterwards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from . import exact

_BACKENDS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
"""Those that take masks."""
_found: dict[torch.device, bool] = {}


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Call `exact.sdpa`; rows that may attend to no key are 0, and contribute to no gradient.

    Args:
        query, key, value, mask, is_causal, scale, enable_gqa: as in `exact.sdpa`.
    """
    options: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    if mask is None:
        return exact.sdpa(query, key, value, **options)
    if _gives_zeros(query, key, value, mask):
        return exact.sdpa(query, key, value, mask=additive(mask, query.dtype), **options)
    output = exact.sdpa(query, key, value, mask=mask, **options)
    return torch.where(exact.attended_rows(mask), output, 0.0)


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a bool mask as the numbers that are added to scores, 0 and -inf; an additive one as it is.

    Returns:
        Of a bool mask: a tensor of its size in `dtype`, with size 1 where it is broadcast, whose rows begin at
        multiples of 16 bytes.
    """
    if mask.dtype != torch.bool:
        return mask
    mask = exact.unexpanded(mask)
    *sizes, columns = mask.shape
    multiple = exact.ROW_ELEMENTS
    rows = torch.empty((*sizes, -(-columns // multiple) * multiple), dtype=dtype, device=mask.device)
    return torch.log(mask, out=rows[..., :columns])  # in one launch


def _gives_zeros(*tensors: torch.Tensor) -> bool:
    """Return whether `exact.sdpa` gives zeros where an additive mask is -inf throughout.

    Args:
        tensors: the call's, Q first.
    """
    query = tensors[0]
    if not query.is_cuda or torch.version.hip is not None or query.dtype not in (torch.float16, torch.bfloat16):
        return False
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    if torch._C._len_torch_dispatch_stack() or any(type(x) not in (torch.Tensor, torch.nn.Parameter) for x in tensors):
        return False
    if query.device not in _found:
        if torch.cuda.is_current_stream_capturing():
            return False
        _found[query.device] = all(_backend_gives_zeros(backend, query.device) for backend in _BACKENDS)
    return _found[query.device]


def _backend_gives_zeros(backend: SDPBackend, device: torch.device) -> bool:
    """Return whether a backend gives zeros in rows that are masked, and no gradient for them."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        # One row of the first batch element has no key, and none of the second one has.
        mask = torch.zeros(2, 1, 128, 128, dtype=torch.bfloat16, device=device)
        mask[0, :, 5] = mask[1] = -torch.inf
        inputs = [torch.ones(2, 2, 128, 64, dtype=mask.dtype, device=device).requires_grad_() for _ in range(3)]
        try:
            with sdpa_kernel(backend):
                output = exact.sdpa(*inputs, mask=mask)
                gradients = torch.autograd.grad(output, inputs, torch.ones_like(output))
        except RuntimeError:  # it is not there
            return False
        found = output.detach(), *gradients
        # The other rows are the mean of ones, and each key of the first element gets 127 times 1/128 of a gradient.
        expected = torch.ones_like(mask[0, :, :, :1])
        expected[:, 5] = 0.0
        zeros = all(not x[1].any() for x in found) and not found[1][0, :, 5].any()
        near = (found[0][0] - expected).abs().max() < 0.01 and (found[3][0] - 127 / 128).abs().max() < 0.01
        return bool(zeros and near and all(x.isfinite().all() for x in found))
