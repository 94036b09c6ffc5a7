"""The request of a nominal call, which predicts the kernels on a device before there is a call."""

from __future__ import annotations

from typing import Any

import torch

from sage_kernels.dispatch.request import Request
from sage_kernels.spec.recipe import get_recipe

NOMINAL_TOKENS = 16384  # more than the limits below which calls are routed to exact attention
NOMINAL_HEADS = 32
NOMINAL_HEAD_DIM = 64


def nominal_request(recipe: str, device: torch.device, **facts: Any) -> Request:
    """Return the request of a long call without a mask, by `recipe` on `device`, with gradients if the recipe has any.

    `facts` are fields of the request to replace; `heads` and `head_dim` hold for Q, K and V at once.
    """
    cuda = device.type == "cuda"
    heads = facts.pop("heads", NOMINAL_HEADS)
    head_dim = facts.pop("head_dim", NOMINAL_HEAD_DIM)
    values = {
        "recipe": recipe,
        "device_type": device.type,
        "capability": torch.cuda.get_device_capability(device) if cuda else None,
        "dtype": torch.bfloat16 if cuda else torch.float32,
        "batch": 1,
        "q_heads": heads,
        "kv_heads": heads,
        "q_len": NOMINAL_TOKENS,
        "kv_len": NOMINAL_TOKENS,
        "head_dim": head_dim,
        "v_head_dim": head_dim,
        "mask": "none",
        "is_causal": False,
        "return_lse": False,
        "grad": get_recipe(recipe).backward is not None,
        "aligned": cuda,
    }
    return Request(**{**values, **facts})
