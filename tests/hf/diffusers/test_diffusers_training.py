"""Every family trains with the gradients of the recipe or with exact ones, and the mode may choose the recipe."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import sage_hf
from sage_hf import SageAttnProcessor, SageBwdProcessor, SageConfig, record
from sage_hf.config import LayerRule, StepRule
from sage_hf.diffusers import attention_layers
from sage_kernels.spec.recipe import RECIPES
from tests.helpers.families import Family, each_family, family, run

TRAINABLE = [name for name, recipe in RECIPES.items() if recipe.backward is not None]


def output_of(model: torch.nn.Module, inputs: dict) -> torch.Tensor:
    output = model(**inputs, return_dict=False)
    while not isinstance(output, torch.Tensor):
        output = output[0]
    return output


def gradient_of(model: torch.nn.Module, inputs: dict) -> torch.Tensor:
    """Return the gradient of a sum of squares, over all parameters, as one vector."""
    model.zero_grad()
    output_of(model, inputs).square().sum().backward()
    return torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])


def gradients_in_attention(model: torch.nn.Module, inputs: dict) -> dict[str, torch.Tensor]:
    """Return `gradient_of` for each parameter of the attention layers, without parameters that change nothing."""
    gradient_of(model, inputs)
    found = {
        f"{name}.{parameter}": value.grad.flatten().clone()
        for name, layer in attention_layers(model).items()
        for parameter, value in layer.named_parameters()
        if value.grad is not None
    }
    # The bias of K is one of them, whose gradient is nothing but rounding errors.
    largest = max(gradient.norm() for gradient in found.values())
    return {name: gradient for name, gradient in found.items() if gradient.norm() > 1e-5 * largest}


def in_training(case: Family) -> torch.nn.Module:
    """The model in training mode, its dropout off."""
    model = case.build().train()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def recipes(model: torch.nn.Module) -> list[str]:
    return [plan.recipe for layer in attention_layers(model).values() for plan in record.last_plans(layer)]


@each_family
def test_gradients_of_every_family_point_where_exact_ones_do(case: Family):
    """Each on its own: the gradients of Q and K are small, compared with the others."""
    model, inputs = in_training(case), case.make_inputs()
    exactly = gradients_in_attention(model, inputs)
    model.set_attn_processor(SageBwdProcessor(fallback="emulate"))
    ours = gradients_in_attention(model, inputs)

    assert exactly.keys() <= ours.keys()
    for name, gradient in exactly.items():
        assert torch.cosine_similarity(ours[name], gradient, dim=0) > 0.99, name
    found, expected = (torch.cat([some[name] for name in exactly]) for some in (ours, exactly))
    for name, layer in attention_layers(model).items():
        for plan in record.last_plans(layer):
            masked = plan.recipe == "exact" and plan.request.mask != "none" and "the same for all" in plan.reason
            assert (plan.recipe, plan.numerics) == ("sage_bwd", "emulated") or masked, name
    assert not torch.equal(found, expected) or "sage_bwd" not in recipes(model)


def test_padding_of_the_text_trains_in_few_bits():
    case = family("lumina2")
    model = in_training(case)
    model.set_attn_processor(SageBwdProcessor())
    gradient_of(model, case.make_inputs())
    plans = [plan for layer in attention_layers(model).values() for plan in record.last_plans(layer)]
    assert {plan.recipe for plan in plans} == {"sage_bwd"} and any(plan.request.mask == "keys" for plan in plans)


@pytest.mark.parametrize("recipe", TRAINABLE)
def test_training_lowers_the_loss_in_few_bits(recipe: str):
    case = family("cogvideox")
    model, inputs = in_training(case), case.make_inputs()
    target = torch.randn(output_of(model, inputs).shape, generator=torch.Generator().manual_seed(2))
    model.set_attn_processor(SageAttnProcessor(recipe))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(8):
        loss = (output_of(model, inputs) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert set(recipes(model)) - {"exact"} == {recipe}


@pytest.mark.parametrize("switch", ["processor", "backend", "apply"])
@pytest.mark.parametrize("name", ["cogvideox", "flux"])
def test_every_switch_trains_with_the_same_gradients(switch: str, name: str):
    case = family(name)
    model, inputs = in_training(case), case.make_inputs()
    model.set_attn_processor(SageBwdProcessor())
    expected = gradient_of(model, inputs)
    model = in_training(case)
    if switch == "processor":
        model.set_attn_processor(SageAttnProcessor("sage3", training="sage_bwd"))
    elif switch == "backend":
        model.set_attention_backend("sage_bwd")
    else:
        sage_hf.apply(model, "sage_bwd")
    assert torch.equal(gradient_of(model, inputs), expected)


@pytest.mark.parametrize("name", ["cogvideox", "flux"])  # our own function; diffusers' dispatch
def test_the_mode_chooses_the_recipe_and_rules_win(name: str):
    model, inputs = family(name).draw()
    expected, first = run(model, inputs), next(iter(attention_layers(model)))
    config = SageConfig(
        "sage3", "emulate", (LayerRule(first, "sage2"),), (StepRule(0, 1, "sage1"),), training="sage_bwd"
    )
    with sage_hf.apply(model, config):
        assert [row.asked for row in sage_hf.explain(model).rows[:2]] == ["sage2", "sage3, training: sage_bwd"]
        model.train()
        gradient_of(model, inputs)
        trained = recipes(model)
        model.eval()
        run(model, inputs)
        ran = [[plan.recipe for plan in record.last_plans(layer)] for layer in attention_layers(model).values()]
        assert [row.asked for row in sage_hf.explain(model).rows if row.layer == first] == ["sage2", "sage2"]
    assert trained == ["exact", *["sage_bwd"] * (len(trained) - 1)]
    assert ran == [["exact", "sage2"], *[["sage_bwd", "sage1"]] * (len(ran) - 1)]
    assert torch.equal(run(model, inputs), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(reentrant: bool):
    case = family("cogvideox")
    model, inputs = in_training(case), case.make_inputs()
    model.set_attn_processor(SageBwdProcessor())
    inputs["hidden_states"].requires_grad_()  # what reentrant checkpointing needs
    expected = gradient_of(model, inputs)
    checkpoint = torch.utils.checkpoint.checkpoint
    model.enable_gradient_checkpointing(lambda function, *args: checkpoint(function, *args, use_reentrant=reentrant))
    # Reentrant checkpointing adds up the gradients of what the blocks share in another order.
    difference = gradient_of(model, inputs) - expected
    assert difference.abs().sum() <= (1e-6 if reentrant else 0.0) * expected.abs().sum()


@pytest.mark.audit
def test_a_compiled_model_trains_as_the_model_does():
    case = family("cogvideox")
    model, inputs = in_training(case), case.make_inputs()
    model.set_attn_processor(SageBwdProcessor())
    expected = gradient_of(model, inputs)
    torch._dynamo.reset()
    try:
        model.compile(backend="aot_eager", fullgraph=True)
        found = gradient_of(model, inputs)
    finally:
        torch._dynamo.reset()
    assert {outcome.recipe for outcome in record.outcomes_outside_layers()} == {"sage_bwd"}
    assert (found - expected).abs().sum() <= 1e-4 * expected.abs().sum()


def test_a_processor_is_copied_and_shown_with_its_recipe_for_training():
    processor = SageAttnProcessor("sage3", "emulate", training="sage_bwd")
    for some in (processor, copy.deepcopy(processor), pickle.loads(pickle.dumps(processor))):
        assert (some.recipe, some.fallback, some.training) == ("sage3", "emulate", "sage_bwd")
    assert repr(processor) == "SageAttnProcessor(recipe='sage3', fallback='emulate', training='sage_bwd')"
    assert SageBwdProcessor().recipe == "sage_bwd" and SageBwdProcessor().training is None
    with pytest.raises(ValueError, match="unknown recipe 'sage9'"):
        SageAttnProcessor(training="sage9")
