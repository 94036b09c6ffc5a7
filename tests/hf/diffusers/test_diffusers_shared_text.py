"""Plans of ours for context parallelism, by which all processes have the text: what they refuse, and for which."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

import sage_hf
from sage_hf import SageConfig, Sparse
from sage_hf.diffusers import UnsupportedAttentionError, attention_layers, parallel_plans
from tests.helpers.families import family

pytestmark = pytest.mark.skipif(not hasattr(diffusers, "ContextParallelConfig"), reason="this diffusers has none")


def enable(model: Any, **degrees: int) -> None:
    config = diffusers.ContextParallelConfig(**degrees)
    model.enable_parallelism(config=config, cp_plan=sage_hf.context_parallel_plan(model))


def refused(model: Any, match: str, **degrees: int) -> None:
    """Check that nothing is changed by a plan that is refused."""
    processors = [layer.processor for layer in attention_layers(model).values()]
    with pytest.raises(UnsupportedAttentionError, match=match):
        enable(model, **degrees)
    assert model._parallel_config is None
    assert [layer.processor for layer in attention_layers(model).values()] == processors


def test_more_processes_than_heads_are_refused():
    refused(family("mochi").build(), r"transformer_blocks\.0\.attn1: ulysses_degree 4 .* 2 heads", ulysses_degree=4)


def test_sparse_attention_is_refused_in_a_ring():
    model = family("cogvideox").build()
    sage_hf.apply(model, SageConfig("sage2", sparse=Sparse(keep=0.5)))
    refused(model, r"transformer_blocks\.0\.attn1.*tiles", ring_degree=2)


def test_a_processor_that_is_not_known_is_refused():
    class OfAUser:
        def __call__(self, attn: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
            return hidden_states

    model = family("sd3").build()
    model.transformer_blocks[0].attn.set_processor(OfAUser())
    refused(model, r"transformer_blocks\.0\.attn: .*OfAUser", ring_degree=2)


def test_a_processor_with_a_backend_of_its_own_is_refused():
    class Fixed:
        _SUPPORTED_BACKENDS = ("flex",)

        def __call__(self, attn: torch.nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
            return dispatch_attention_fn(hidden_states, hidden_states, hidden_states)

    model = family("sd3").build()
    model.transformer_blocks[0].attn.set_processor(Fixed())
    refused(model, r"transformer_blocks\.0\.attn: Fixed works with", ring_degree=2)


@pytest.mark.parametrize("switch", [False, True])
def test_a_processor_that_would_see_the_tokens_of_one_process_is_refused(switch):
    class Local:
        def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None):
            states = dispatch_attention_fn(*[attn.to_v(hidden_states).unflatten(2, (attn.heads, -1))] * 3)
            return states.flatten(2), encoder_hidden_states

    model = family("sd3").build()
    model.transformer_blocks[0].attn.set_processor(Local())
    if switch:
        sage_hf.apply(model, "sage2")
    refused(model, r"transformer_blocks\.0\.attn: .*Local does not support it", ring_degree=2)


def test_a_first_frame_with_a_modulation_of_its_own_is_refused():
    case = family("hunyuan-video")
    case = replace(case, config=case.config | {"image_condition_type": "token_replace"})
    refused(case.build(), "token_replace", ulysses_degree=2)


def test_a_plan_for_another_model_is_refused():
    plan = sage_hf.context_parallel_plan(family("mochi").build())
    with pytest.raises(UnsupportedAttentionError, match="another model than WanTransformer3DModel"):
        family("wan-t2v").build().enable_parallelism(
            config=diffusers.ContextParallelConfig(ulysses_degree=2), cp_plan=plan
        )


def test_diffusers_plan_is_taken_where_it_has_one():
    model = family("wan-t2v").build()
    assert sage_hf.context_parallel_plan(model) is type(model)._cp_plan


def test_a_subclass_whose_forward_pass_is_not_diffusers_has_no_plan():
    class Other(diffusers.MochiTransformer3DModel):
        pass

    assert set(parallel_plans.FAMILIES) <= set(dir(diffusers))
    with pytest.raises(UnsupportedAttentionError, match="Other"):
        sage_hf.context_parallel_plan(Other(**family("mochi").config))
