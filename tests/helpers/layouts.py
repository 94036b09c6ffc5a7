"""Memory layouts in which attention gets its tensors."""

import torch

LAYOUTS = ("contiguous", "tokens first", "packed", "every other channel", "one head for all", "offset")


def lay_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the same values in other strides, next to memory that holds NaN."""
    if layout == "tokens first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "packed":
        tokens_first = x.transpose(1, 2)
        return torch.stack((torch.full_like(tokens_first, torch.nan), tokens_first), 2)[:, :, 1].transpose(1, 2)
    if layout == "every other channel":
        return torch.stack((x, torch.full_like(x, torch.nan)), -1).flatten(-2)[..., ::2]
    if layout == "one head for all":
        return x[:, :1].expand_as(x)
    if layout == "offset":
        memory = torch.full((x.numel() + 1,), torch.nan, dtype=x.dtype, device=x.device)
        memory[1:] = x.flatten()
        return memory[1:].view(x.shape)
    return x
