"""Norms and rotations that a kernel runs in place of a processor's own are those of the processor, in every family."""

from __future__ import annotations

import pytest
import torch

from sage_hf import record
from sage_hf.diffusers import SageAttnProcessor, attention_layers, heads
from tests.helpers.families import FAMILIES, Family, each_family, run


@pytest.fixture
def seen(monkeypatch) -> list[heads.Rope | None]:
    """Let the CPU's samples be served, by the reference; the rotation of each call."""
    calls: list[heads.Rope | None] = []

    def norm_rope(x, norm, rope):
        calls.append(rope)
        return original(x, norm, rope)

    original = heads.norm_rope
    monkeypatch.setattr(heads, "norm_rope", norm_rope)
    monkeypatch.setattr(heads, "suits", lambda sample: True)
    monkeypatch.setattr(heads, "gains", lambda module, sample: True)
    return calls


def queries_and_keys(case: Family, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    model, inputs = case.build(dtype), case.make_inputs(dtype)
    model.set_attn_processor(SageAttnProcessor("sage1", "emulate"))
    calls: list[record.AttentionCall] = []
    with record.observe(calls.append):
        run(model, inputs)
    return [(call.query, call.key) for call in calls]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_family
def test_queries_and_keys_are_those_of_the_processor(case: Family, dtype: torch.dtype, monkeypatch, request):
    expected = queries_and_keys(case, dtype)
    seen = request.getfixturevalue("seen")
    found = queries_and_keys(case, dtype)
    print(case.name, len(seen), sum(r is not None for r in seen), [type(m.processor._known_layer(m).original).__name__ for m in ()])
    worst=0
    for i,(own, theirs) in enumerate(zip(found, expected, strict=True)):
        for x, y in zip(own, theirs, strict=True):
            worst=max(worst,((x.float()-y.float()).norm()/y.float().norm()).item())
            if i==0: first=worst
    print("WORST",first,worst)
