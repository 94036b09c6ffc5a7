"""The user's one line, on whole pipelines."""

from __future__ import annotations

import pytest
import torch

from sage_hf import SageAttn3Processor, SageAttnProcessor, record
from sage_hf.diffusers import attention_layers
from tests.helpers.pipelines import PIPELINES, generate


@pytest.mark.parametrize("name", PIPELINES)
def test_one_line_switches_a_pipeline(name):
    make, arguments = PIPELINES[name]
    pipe = make()
    expected = generate(pipe, arguments)
    assert expected.isfinite().all()

    pipe.transformer.set_attn_processor(SageAttnProcessor("exact"))
    assert torch.equal(generate(pipe, arguments), expected)
    record.clear()
    pipe.transformer.set_attn_processor(SageAttn3Processor(fallback="emulate"))
    low_bit = generate(pipe, arguments)
    assert not torch.equal(low_bit, expected)
    assert torch.cosine_similarity(low_bit.flatten(), expected.flatten(), dim=0) > 0.9
    for module in attention_layers(pipe.transformer).values():
        assert {plan.recipe for plan in record.last_plans(module)} == {"sage3"}


@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines_save_and_load_while_switched(name, tmp_path):
    make, arguments = PIPELINES[name]
    pipe = make()
    expected = generate(pipe, arguments)
    pipe.transformer.set_attn_processor(SageAttn3Processor())
    pipe.save_pretrained(tmp_path)
    loaded = type(pipe).from_pretrained(tmp_path)
    assert torch.equal(generate(loaded, arguments), expected)
