"""LoRA adapters of PEFT take part in attention as they do without us, and learn through it."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import sage_hf
from sage_hf import record
from sage_hf.diffusers import attention_layers
from tests.helpers.families import family, run

peft = pytest.importorskip("peft")

PROJECTIONS = ["to_q", "to_k", "to_v", "q_proj", "k_proj", "v_proj"]


def lora() -> "peft.LoraConfig":
    """Adapters that change the result from the start."""
    return peft.LoraConfig(r=4, target_modules=PROJECTIONS, init_lora_weights=False)


@pytest.mark.parametrize("name", ["cogvideox-1.5", "mochi", "wan-i2v", "flux", "sd3", "unet", "lumina2"])
def test_an_adapter_of_a_denoiser_counts_whether_loaded_before_or_after_the_switch(name):
    model, inputs = family(name).draw()
    base = run(model, inputs)

    handle = sage_hf.apply(model, "exact")
    torch.manual_seed(2)
    model.add_adapter(lora())
    loaded_after = run(model, inputs)
    handle.restore()
    expected = run(model, inputs)
    assert not torch.equal(expected, base)
    assert torch.equal(loaded_after, expected)

    handle = sage_hf.apply(model, "exact")
    assert torch.equal(run(model, inputs), expected)
    model.disable_adapters()
    assert torch.equal(run(model, inputs), base)
    model.enable_adapters()
    model.fuse_lora()
    torch.testing.assert_close(run(model, inputs), expected, rtol=1e-5, atol=1e-5)
    handle.restore()


def test_an_adapter_of_a_denoiser_learns_by_the_recipe_with_gradients():
    case = family("cogvideox-1.5")
    model, inputs = case.build().train(), case.make_inputs()
    torch.manual_seed(2)
    model.add_adapter(lora())
    sage_hf.apply(model, "sage_bwd")
    model(**inputs, return_dict=False)[0].square().sum().backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.requires_grad}
    assert len(gradients) == 2 * 3 * len(attention_layers(model))  # A and B of Q, K and V
    assert all(gradient is not None and gradient.isfinite().all() and gradient.any() for gradient in gradients.values())
    plans = [plan for layer in attention_layers(model).values() for plan in record.last_plans(layer)]
    assert {plan.recipe for plan in plans} == {"sage_bwd"}


def test_a_language_model_in_a_peft_model_is_switched_and_explained():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, head_dim=16
    )
    model = peft.get_peft_model(AutoModelForCausalLM.from_config(config), lora()).eval()
    tokens = torch.randint(0, 97, (1, 80))
    with torch.no_grad():
        expected = model(tokens).logits
        handle = sage_hf.apply(model, "exact")
        torch.testing.assert_close(model(tokens).logits, expected)
        handle.restore()
        handle = sage_hf.apply(model, "sage1")
        output = model(tokens).logits
    assert 0 < (output - expected).norm() / expected.norm() < 0.01
    assert "sage1" in str(sage_hf.explain(model))
    handle.restore()
    assert torch.equal(model(tokens).logits, expected)
