"""VSA in float64 from its formulas, token by token: the specification of `vsa.vsa_attention`."""

from __future__ import annotations

import math

import torch


def vsa_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor | None,
    grid: tuple[int, int, int],
    sparsity: float,
    scale: float | None = None,
) -> torch.Tensor:
    """Compute VSA (arXiv 2505.13389) in float64, with memory quadratic in tokens; autograd gives its gradients.

    Arguments are as in `vsa.vsa_attention`. Tokens stay in raster order; a matrix assigns tokens to tiles.

    Returns:
        float64 (batch, heads, tokens, head_dim).
    """
    query, key, value = query.double(), key.double(), value.double()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    frames, height, width = grid
    tile_of = torch.tensor(
        [
            ((t // 4) * math.ceil(height / 4) + h // 4) * math.ceil(width / 4) + w // 4
            for t in range(frames)
            for h in range(height)
            for w in range(width)
        ],
        device=query.device,
    )
    tiles = math.ceil(frames / 4) * math.ceil(height / 4) * math.ceil(width / 4)
    member = torch.nn.functional.one_hot(tile_of, tiles).double()  # (tokens, tiles)
    mean = (member / member.sum(0)).mT  # (tiles, tokens)
    coarse_scores = (mean @ query) @ (mean @ key).mT * scale
    coarse = member @ (coarse_scores.softmax(-1) @ (mean @ value))

    kept = min(max(math.ceil(round((1 - sparsity) * tiles, 9)), 1), tiles)
    best = coarse_scores.detach().argsort(dim=-1, descending=True, stable=True)[..., :kept]
    chosen = torch.zeros_like(coarse_scores).scatter(-1, best, 1.0)
    allowed = member @ chosen @ member.mT > 0
    scores = (query @ key.mT * scale).masked_fill(~allowed, -torch.inf)
    fine = scores.softmax(-1) @ value
    return fine if gate is None else coarse * gate.double() + fine
