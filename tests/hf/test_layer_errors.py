"""Errors of low-bit attention, recorded layer by layer while a model runs."""

from dataclasses import replace

import pytest
import torch

import sage_hf
from sage_hf.app.layer_errors import record_layer_errors, table
from sage_hf.app.peaks import find_peaks
from sage_hf.metrics import tensor_errors
from sage_hf.record import observe
from sage_kernels.dispatch.registry import forget_choices
from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.spec.recipe import RECIPES, without_outlier_handling
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


def test_errors_are_measured_on_the_layers_own_inputs():
    model = tiny.llama()
    calls = []
    with sage_hf.apply(model, "sage3_paper"), record_layer_errors(model) as recorder, observe(calls.append):
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


def test_the_recorder_prints_its_layers():
    model = tiny.llama()
    with sage_hf.apply(model, "sage3"), record_layer_errors(model) as recorder:
        run(model)
    header, _, *lines = str(recorder).splitlines()
    assert header.startswith("layer ") and "rel-L1 without outlier handling" in header and "heaviest key" in header
    for line, layer in zip(lines, recorder.layers(), strict=True):
        assert line.startswith(layer.layer) and f"{layer.errors.rel_l1:.4f}" in line


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


def test_forward_only_recipes_are_measured_with_gradients_enabled():
    model = tiny.transformer()
    with sage_hf.apply(model, "sage3"), record_layer_errors(model) as recorder:
        assert not model(**tiny.transformer_inputs()).sample.requires_grad
    assert model(**tiny.transformer_inputs()).sample.requires_grad
    assert all(layer.recipes == ("sage3",) and layer.errors.rel_l1 > 100 * ROUNDING for layer in recorder.layers())
    assert not recorder.never_ran()


def test_the_error_table_names_recipes_that_never_ran(caplog):
    model = tiny.transformer()
    with sage_hf.apply(model, "sage3"), record_layer_errors(model) as recorder, torch.enable_grad():
        model(**tiny.transformer_inputs()).sample.sum().backward()
    assert model.transformer_blocks[0].attn1.to_q.weight.grad.abs().sum() > 0
    assert all(layer.recipes == ("exact",) and layer.errors.rel_l1 < ROUNDING for layer in recorder.layers())
    (sentence,) = recorder.never_ran()
    assert sentence.startswith("sage3 never ran: these are the errors of exact attention (sage3 is forward only")
    assert str(recorder).endswith(sentence) and sentence in caplog.messages


def test_the_heaviest_key_and_the_loudest_channel_of_each_layer_are_told():
    model = tiny.llama()
    # Layer 1's K is loud in a channel.
    model.model.layers[1].self_attn.k_proj.weight.data[20] *= 30
    calls = []
    with sage_hf.apply(model, "sage2"), record_layer_errors(model) as recorder, observe(calls.append):
        run(model, padding=9)
    first, second = (layer.peaks for layer in recorder.layers())
    assert second.loudness > 10 > 5 > first.loudness > 1
    for call, peaks in zip(calls, (first, second), strict=True):
        # Samples differ by their padding; the largest share of both is told.
        samples = [(x[:1], x[1:]) for x in (call.query, call.key, call.attn_mask)]
        both = [find_peaks(q, k, mask=m, is_causal=call.is_causal) for q, k, m in zip(*samples, strict=True)]
        assert peaks == both[0].joined(both[1])
        assert peaks.key is not None and 0 < peaks.share < 1


@pytest.fixture
def handled(monkeypatch):
    """Give `sage2` the one step of outlier handling that exists on every branch, a rotation."""
    recipe = replace(without_outlier_handling(RECIPES["sage2"]), rotate=True)
    monkeypatch.setitem(RECIPES, "sage2", recipe)
    forget_choices()
    yield recipe
    forget_choices()


@pytest.mark.parametrize("padding", [0, 9])
def test_errors_without_outlier_handling_match_the_plain_recipe(handled, padding):
    model = tiny.llama()
    calls = []
    with sage_hf.apply(model, "sage2"), record_layer_errors(model) as recorder, observe(calls.append):
        run(model, padding)
    for call, layer in zip(calls, recorder.layers(), strict=True):
        options = {"mask": call.attn_mask, "is_causal": call.is_causal, "scale": call.scale}
        truth, _ = sdpa.attention(call.query, call.key, call.value, **options)
        plain, _ = reference.attention(call.query, call.key, call.value, without_outlier_handling(handled), **options)
        expected = tensor_errors(truth, plain).to_dict()
        assert layer.errors_without_outlier_handling.to_dict() == pytest.approx(expected, rel=1e-3)
        assert layer.errors_without_outlier_handling != layer.errors
    header, rows = table(recorder.layers())
    assert header.index("rel-L1 without outlier handling") == 4 and {len(row) for row in rows} == {len(header)}


def test_errors_without_outlier_handling_can_be_left_out_and_need_it(handled):
    model = tiny.llama()
    with sage_hf.apply(model, "sage2"), record_layer_errors(model, without_outlier_handling=False) as recorder:
        run(model)
    assert all(layer.errors_without_outlier_handling is None for layer in recorder.layers())
    with sage_hf.apply(model, "exact"), sage_hf.record_layer_errors(model) as recorder:
        run(model)
    assert all(layer.errors_without_outlier_handling is None for layer in recorder.layers())
    header, rows = table(recorder.layers())
    assert "rel-L1 without outlier handling" not in header and {len(row) for row in rows} == {len(header)}


def test_errors_of_sparse_calls_without_outlier_handling_are_over_the_same_tiles():
    """Without the tiles they would be those of dense attention, far less than a sparse call's."""
    model, inputs = tiny.transformer(), tiny.transformer_inputs()
    inputs["hidden_states"] = torch.randn(1, 3, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    config = sage_hf.SageConfig("sage2", sparse=sage_hf.Sparse(keep=0.3, from_tokens=0))
    with sage_hf.apply(model, config), record_layer_errors(model) as recorder:
        model(**inputs)
    for layer in recorder.layers():
        assert layer.errors.rel_l1 > 0.03
        assert layer.errors_without_outlier_handling.rel_l1 == pytest.approx(layer.errors.rel_l1, rel=0.1)
