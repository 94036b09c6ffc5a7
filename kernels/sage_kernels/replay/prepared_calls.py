"""The calls that `prepared` prepares: PyTorch's exact attention, a bound kernel of it, and launches on a tape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from ..dispatch.registry import Attend, Plan, transposed
from ..exact import masked_rows, sdpa
from .launch_plan import Tape


class Prepared(Protocol):
    """Call that is ready to be repeated."""

    @property
    def plan(self) -> Plan:
        """Return what runs."""

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (output, lse), the latter None if it is not wanted, for arguments that `look_up` finds alike."""

    def shortcut(self, tokens_first: bool) -> Attend:
        """Return what computes the output alone, outside of autocast, in the fewest steps.

        Args:
            tokens_first: its tensors, but the mask, are (batch, tokens, heads, channels).
        """


def output_alone(call: Prepared) -> Attend:
    """Return what runs a call and returns its output."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return call(query, key, value, mask)[0]

    return attend


@dataclass(slots=True, eq=False)
class ExactCall:
    """Call of exact attention without the LSE.

    Attributes:
        plan: as in `Prepared`.
        is_causal, scale, enable_gqa: as in `exact.sdpa`.
        direct: PyTorch's function takes the arguments as they are, but for the mask, of which it takes a view.
        mask_form: size and strides of that view; None without a mask, and where rows without a key are set to 0.
        empties_rows: rows that may attend to no key are set to 0.
        tokens_first: the output is laid out as (batch, tokens, heads, channels).
        cudnn: PyTorch may take its cuDNN backend.
        autocast: the caller's autocast holds, which rounds an additive mask; otherwise there is none.
        shared_rows: the single queries that share keys and values are rows of one head (`dispatch.shares_rows`).
    """

    plan: Plan
    is_causal: bool
    scale: float | None
    enable_gqa: bool
    direct: bool
    mask_form: tuple[torch.Size, tuple[int, ...]] | None
    empties_rows: bool
    tokens_first: bool
    cudnn: bool
    autocast: bool
    shared_rows: bool

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        """Attend."""
        if not self.autocast and torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(query.device.type):
            with torch.autocast(query.device.type, enabled=False):
                return self(query, key, value, mask)
        attend = self._attend_directly if self.direct else self._attend
        output = attend(query, key, value, mask)
        return output.transpose(1, 2).contiguous().transpose(1, 2) if self.tokens_first else output, None

    def shortcut(self, tokens_first: bool) -> Attend:
        """Return the function that attends itself where it takes the arguments as they are."""
        attend = output_alone(self)
        if self.direct and self.mask_form is None and not self.tokens_first:
            attend = partial(self.by, is_causal=self.is_causal, scale=self.scale, enable_gqa=self.enable_gqa)
        return transposed(attend) if tokens_first else attend

    @property
    def by(self) -> Callable[..., torch.Tensor]:
        """Return what attends, as in `exact.sdpa`."""
        return sdpa.pytorch_sdpa if self.cudnn else sdpa.without_cudnn

    def _attend_directly(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        view = None if mask is None or self.mask_form is None else mask.as_strided(*self.mask_form)
        return self.by(query, key, value, view, is_causal=self.is_causal, scale=self.scale, enable_gqa=self.enable_gqa)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        if mask is not None and mask.dim() < 2:
            mask = mask[(None,) * (2 - mask.dim())]
        batch, q_heads, q_len, _ = query.shape
        gqa = self.enable_gqa and not self.shared_rows
        if self.shared_rows:
            query = query.reshape(batch, key.shape[1], -1, query.shape[3])
        attend = masked_rows.attend if self.empties_rows else sdpa.sdpa
        options: dict[str, Any] = {"is_causal": self.is_causal, "scale": self.scale, "enable_gqa": gqa, "by": self.by}
        output = attend(query, key, value, mask=mask, **options)
        return output.reshape(batch, q_heads, q_len, -1) if self.shared_rows else output


@dataclass(slots=True, eq=False)
class BoundCall:
    """Call of exact attention by a kernel that cannot be rehearsed (`registry.BoundExact`).

    Attributes:
        plan: as in `Prepared`.
        attend, tokens_first: what the kernel has bound, and the layout of that function's tensors.
    """

    plan: Plan
    attend: Attend
    tokens_first: bool

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        """Attend."""
        return self.shortcut(False)(query, key, value, mask), None

    def shortcut(self, tokens_first: bool) -> Attend:
        """Return the function that is bound."""
        return self.attend if tokens_first == self.tokens_first else transposed(self.attend)


@dataclass(slots=True, eq=False)
class TapedCall:
    """Call without gradients by kernels whose launches were rehearsed.

    Attributes:
        plan: as in `Prepared`.
        tape: its launches; the arguments are Q, K, V and the mask, if there is one.
        return_lse: the LSE is wanted.
    """

    plan: Plan
    tape: Tape
    return_lse: bool

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend."""
        addresses = [query.data_ptr(), key.data_ptr(), value.data_ptr()]
        if mask is not None:
            addresses.append(mask.data_ptr())
        output, *others = self.tape.run(*addresses, arguments=(query, key, value, mask))
        return output, others[0] if self.return_lse else None

    def shortcut(self, tokens_first: bool) -> Attend:
        """Return what runs the tape, which reads addresses alone, unless an operator is on it."""
        attend = output_alone(self)
        if not tokens_first:
            return attend
        return transposed(attend) if self.tape.has_operators else lambda *tensors: attend(*tensors).transpose(1, 2)
