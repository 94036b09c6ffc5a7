"""The user's one line, on whole pipelines."""

from __future__ import annotations

import pytest
import torch

from sage_hf import SageAttn3Processor, SageAttnProcessor, record
from sage_hf.diffusers import attention_layers
from tests.helpers import tiny_pipelines as tiny

SMALL = {"height": 32, "width": 32, "max_sequence_length": 13}
TEMPLATE = {"prompt_template": {"template": "{}", "crop_start": 0}}
each_pipeline = pytest.mark.parametrize(
    ("make", "arguments"),
    [(tiny.cogvideox, {}), (tiny.hunyuan_video, SMALL | TEMPLATE), (tiny.mochi, SMALL | {"num_frames": 7})],
    ids=["cogvideox", "hunyuan-video", "mochi"],
)


@each_pipeline
def test_one_line_switches_a_pipeline(make, arguments):
    pipe = make()
    expected = tiny.latents(pipe, **arguments)
    assert expected.isfinite().all()

    pipe.transformer.set_attn_processor(SageAttnProcessor("exact"))
    assert torch.equal(tiny.latents(pipe, **arguments), expected)
    record.clear()
    pipe.transformer.set_attn_processor(SageAttn3Processor(fallback="emulate"))
    low_bit = tiny.latents(pipe, **arguments)
    assert not torch.equal(low_bit, expected)
    assert torch.cosine_similarity(low_bit.flatten(), expected.flatten(), dim=0) > 0.9
    for module in attention_layers(pipe.transformer).values():
        assert {plan.recipe for plan in record.last_plans(module)} == {"sage3"}


@each_pipeline
def test_pipelines_save_and_load_while_switched(make, arguments, tmp_path):
    pipe = make()
    expected = tiny.latents(pipe, **arguments)
    pipe.transformer.set_attn_processor(SageAttn3Processor())
    pipe.save_pretrained(tmp_path)
    loaded = type(pipe).from_pretrained(tmp_path)
    loaded.set_progress_bar_config(disable=True)
    assert torch.equal(tiny.latents(loaded, **arguments), expected)
