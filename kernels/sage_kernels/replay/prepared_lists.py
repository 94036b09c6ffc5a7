"""Prepared calls over block lists: as in `prepared`, with the list's tensors among the arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from ..dispatch import registry
from ..dispatch.registry import Plan, get_forward, get_quantizer
from ..spec.block_list import BlockList
from ..spec.call import Call, Mask
from ..spec.recipe import get_recipe
from .launch_plan import Tape
from .prepared import CALLS, is_capturing, is_plain, layout_of, modes_are_active, repeatable, settings
from .trace import Rehearsal


@dataclass(slots=True, eq=False)
class ListCall:
    """Call over a block list by kernels whose launches were rehearsed.

    Attributes:
        plan: as in `prepared_calls.Prepared`.
        tape: its launches; the arguments are Q, K, V, the list's counts and tiles, and the mask, if there is one.
        return_lse: the LSE is wanted.
    """

    plan: Plan
    tape: Tape
    return_lse: bool

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend."""
        output, *others = self.tape.run(*[x.data_ptr() for x in tensors], arguments=tensors)
        return output, others[0] if self.return_lse else None


@dataclass(slots=True, eq=False)
class ListSlot:
    """Knowledge of calls over block lists that agree in all but addresses and values.

    Attributes:
        prepared: the call, if it is prepared.
        calls: how many there were before.
    """

    prepared: ListCall | None = None
    calls: int = 0

    def prepare(self, call: Call, plan: Plan, result: tuple[torch.Tensor, torch.Tensor | None]) -> None:
        """Count a call that was not prepared; prepare the second one, if its launches can be repeated.

        Args:
            call, plan: the call, and what ran.
            result: the output and the LSE that `dispatch.run` returned for it.
        """
        if is_capturing():
            return
        self.calls += 1
        if self.calls == 2:
            self.prepared = prepare(call, plan, result)


@lru_cache(maxsize=CALLS)
def _slot(*facts: object) -> ListSlot:
    return ListSlot()


registry.forgetters.append(_slot.cache_clear)


def find(tensors: tuple[torch.Tensor, ...], *options: object) -> ListSlot | None:
    """Return what is known of a call, or None if such a call is never prepared.

    Args:
        tensors: Q, K, V, the list's counts and tiles, and the mask, if there is one.
        options: all else that decides what runs.
    """
    if modes_are_active() or not is_plain(*tensors):
        return None
    return _slot(*layout_of(*tensors), settings(), *options)


def prepare(call: Call, plan: Plan, result: tuple[torch.Tensor, torch.Tensor | None]) -> ListCall | None:
    """Prepare a call, or return None if it runs no kernels, or such whose launches cannot be repeated."""
    if not call.query.is_cuda or plan.numerics == "exact" or call.is_empty:
        return None
    return prepare_launches(call, plan, result)


def prepare_launches(call: Call, plan: Plan, result: tuple[torch.Tensor, torch.Tensor | None]) -> ListCall | None:
    """Prepare a call that a GPU's kernels serve; None if their launches cannot be repeated."""
    blocks, mask, (output, lse) = call.mask.blocks, call.mask.tensor, result
    assert blocks is not None
    given = [call.query, call.key, call.value, blocks.counts, blocks.tiles, *([] if mask is None else [mask])]

    def rehearse(rehearsal: Rehearsal) -> Tape:
        query, key, value, counts, tiles, *masks = inputs = [rehearsal.stand_in(x) for x in given]
        lists = BlockList(counts, tiles, blocks.block_m, blocks.block_n)
        stand_in = replace(
            call,
            query=query,
            key=key,
            value=value,
            mask=Mask.of_blocks(lists, masks[0] if masks else None, call.key.shape[2]),
            recipe=get_recipe(plan.recipe),
        )
        output, lse = get_forward(plan.kernel).attend(stand_in, get_quantizer(plan.quantizer))
        outputs = [output.transpose(1, 2).contiguous().transpose(1, 2)]
        if call.return_lse:
            assert lse is not None
            outputs.append(lse)
        return Tape(rehearsal, inputs, outputs, call.query.device)

    tape = repeatable(rehearse, given, [output, lse] if call.return_lse and lse is not None else [output])
    return None if tape is None else ListCall(plan, tape, call.return_lse)
