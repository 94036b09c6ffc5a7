import pytest
import torch

import sage_hf
from sage_hf.app.layer_errors import record_layer_errors
from sage_hf.app.metrics import tensor_errors
from sage_hf.record import observe
from tests.helpers import tiny_pipelines as tiny

ROUNDING = 64 * torch.finfo(torch.float32).eps  # float32 attention against float32 attention, sums of about 80 terms


def run(model, padding: int = 0) -> torch.Tensor:
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[1, 80 - padding :] = 0
    tokens = torch.randint(32, (2, 80), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model(tokens, attention_mask=mask if padding else None).logits


@pytest.mark.parametrize("padding", [0, 9])
def test_exact_attention_has_no_error_whatever_the_mask_and_the_heads(padding):
    model = tiny.llama()
    with sage_hf.apply(model, "exact"), record_layer_errors(model) as recorder:
        run(model, padding)
    assert [(layer.layer, layer.calls) for layer in recorder.layers()] == [
        ("model.layers.0.self_attn", 1),
        ("model.layers.1.self_attn", 1),
    ]
    for layer in recorder.layers():
        assert layer.errors.rel_l1 < ROUNDING


def test_errors_are_those_of_low_bit_against_exact_attention_on_the_layers_own_inputs():
    model = tiny.llama()
    calls = []
    with sage_hf.apply(model, "sage3"), record_layer_errors(model) as recorder, observe(calls.append):
        run(model)
    for call, layer in zip(calls, recorder.layers(), strict=True):
        exact = torch.nn.functional.scaled_dot_product_attention(
            call.query.double(),
            call.key.double(),
            call.value.double(),
            is_causal=True,
            scale=call.scale,
            enable_gqa=True,
        )
        assert layer.errors.to_dict() == pytest.approx(tensor_errors(exact, call.output).to_dict(), rel=1e-3)
        assert layer.errors.rel_l1 > 100 * ROUNDING


def test_calls_add_up_and_other_models_are_passed_by():
    model, other = tiny.transformer(), tiny.transformer()
    sage_hf.apply(model, "sage2")
    sage_hf.apply(other, "sage2")
    with record_layer_errors(model) as recorder, torch.no_grad():
        for timestep in (900.0, 500.0):
            model(**tiny.transformer_inputs(timestep))
        other(**tiny.transformer_inputs())
    assert [layer.calls for layer in recorder.layers()] == [2] * tiny.LAYERS


def test_recording_changes_no_output():
    model = tiny.transformer()
    with sage_hf.apply(model, "sage3"), torch.no_grad():
        expected = model(**tiny.transformer_inputs()).sample
        with record_layer_errors(model):
            assert torch.equal(model(**tiny.transformer_inputs()).sample, expected)


def test_recording_cuts_no_gradient():
    model = tiny.transformer()
    with sage_hf.apply(model, "sage3"), record_layer_errors(model) as recorder:
        model(**tiny.transformer_inputs()).sample.sum().backward()
    assert model.transformer_blocks[0].attn1.to_q.weight.grad.abs().sum() > 0
    assert all(layer.errors.rel_l1 < ROUNDING for layer in recorder.layers())  # exact attention carried the gradient
