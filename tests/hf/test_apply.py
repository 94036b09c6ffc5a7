"""`apply` switches the layers that a configuration names, and `restore` puts back the same objects and bits."""

import copy
import gc
import pickle
import types
import weakref
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLCogVideoX
from torch import nn
from torch.optim.swa_utils import AveragedModel
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    EncoderDecoderModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaForCausalLM,
    LlamaModel,
)

import sage_hf
from sage_hf.config import LayerRule, SageConfig, StepRule
from sage_hf.schedule import timestep_argument
from sage_hf.sparse import Sparse
from sage_hf.transformers.layers import refusal
from sage_kernels.dispatch.plan import KernelUnavailableError
from tests.helpers import tiny_pipelines as tiny


class PoolingAttention(nn.Module):
    """By such a class transformers takes this file for one that does not use its attention interface."""


class OwnModel(LlamaModel):
    pass


class OwnLanguageModel(LlamaForCausalLM):
    pass


class OwnBloom(BloomForCausalLM):
    _supports_sdpa = True


def processors(model: nn.Module) -> list:
    return [module.processor for module in model.modules() if hasattr(module, "processor")]


def attributes(model: nn.Module) -> list[set[str]]:
    return [set(vars(module)) for module in model.modules()]


def run_llama(model) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(80)[None] % 32).logits


def test_the_fallback_argument_goes_before_the_configuration():
    model = tiny.transformer()
    handle = sage_hf.apply(model, SageConfig("sage3", fallback="emulate"), fallback="error")
    assert handle.config.fallback == "error"
    with pytest.raises(KernelUnavailableError, match="no native kernel for recipe 'sage3'"), torch.no_grad():
        model(**tiny.transformer_inputs())
    with pytest.raises(ValueError, match="fallback: 'maybe' is not one of native, emulate, error"):
        sage_hf.apply(model, "sage3", fallback="maybe")


def test_restore_gives_back_the_very_same_processors_and_the_same_bits():
    pipe = tiny.cogvideox()
    exact = tiny.latents(pipe)
    before, names = processors(pipe.transformer), attributes(pipe.transformer)
    handle = sage_hf.apply(pipe, SageConfig("sage3", steps=(StepRule(-1, None, "sage2"),)))
    low_bit = tiny.latents(pipe)
    assert not torch.equal(low_bit, exact)
    handle.restore()
    assert all(a is b for a, b in zip(processors(pipe.transformer), before, strict=True))
    assert attributes(pipe.transformer) == names
    assert not pipe.transformer._forward_pre_hooks
    assert torch.equal(tiny.latents(pipe), exact)
    handle.restore()
    assert torch.equal(tiny.latents(pipe), exact)


def test_context_manager_restores_also_after_an_error():
    pipe = tiny.cogvideox()
    before = processors(pipe.transformer)
    with pytest.raises(KeyError), sage_hf.apply(pipe, "sage3"):
        raise KeyError
    assert all(a is b for a, b in zip(processors(pipe.transformer), before, strict=True))


def test_layer_patterns_set_layers_apart():
    model = tiny.transformer()
    config = SageConfig("sage3", "error", layers=(LayerRule("transformer_blocks.1.*", "exact"),))
    with sage_hf.apply(model, config):
        assert [p.recipe for p in processors(model)] == ["sage3", "exact", "sage3"]
        assert [p.fallback for p in processors(model)] == ["error"] * 3


def test_a_file_and_a_name_are_applied_like_the_config(tmp_path):
    pipe = tiny.cogvideox(num_layers=30)
    config = SageConfig("sage2", layers=(LayerRule("*.0.*", "sage1"),))
    config.save(tmp_path / "mine.json")
    for given in (tmp_path / "mine.json", str(tmp_path / "mine.json")):
        with sage_hf.apply(pipe, given) as handle:
            assert handle.config == config
            assert [p.recipe for p in processors(pipe.transformer)] == ["sage1", *["sage2"] * 29]
    with sage_hf.apply(pipe, "cogvideox-2b"):
        assert [p.recipe for p in processors(pipe.transformer)] == ["sage2", *["sage3"] * 28, "sage2"]


def test_every_denoiser_of_a_pipeline_is_switched():
    pipe = types.SimpleNamespace(transformer=tiny.transformer(), transformer_2=tiny.transformer(), unet=None)
    before = processors(pipe.transformer) + processors(pipe.transformer_2)
    with sage_hf.apply(pipe, "sage2"):
        assert {p.recipe for p in processors(pipe.transformer) + processors(pipe.transformer_2)} == {"sage2"}
        layers = [row.layer for row in sage_hf.explain(pipe).rows]
        assert layers[0] == "transformer.transformer_blocks.0.attn1"
        assert layers[-1] == "transformer_2.transformer_blocks.2.attn1"
    after = processors(pipe.transformer) + processors(pipe.transformer_2)
    assert all(a is b for a, b in zip(after, before, strict=True))


def test_a_model_that_a_pipeline_has_twice_is_switched_once():
    model = tiny.transformer()
    pipe = types.SimpleNamespace(transformer=model, transformer_2=model)
    before = processors(model)
    with pytest.raises(ValueError, match="matches no attention layer"):
        sage_hf.apply(pipe, SageConfig("sage2", layers=(LayerRule("transformer.transformer_blocks.0.*", "exact"),)))
    with sage_hf.apply(pipe, SageConfig("sage2", layers=(LayerRule("transformer_blocks.0.*", "exact"),))):
        assert [one.recipe for one in processors(model)] == ["exact", "sage2", "sage2"]
        assert sage_hf.explain(pipe).rows[0].layer == "transformer_blocks.0.attn1"
    assert all(a is b for a, b in zip(processors(model), before, strict=True))


@pytest.mark.parametrize(
    "pattern",
    ["transformer*.transformer_blocks.0.attn1", "[t]ransformer*.0.*", "*.0-0.attn1", "transformer*blocks.0.*"],
)
def test_a_pattern_whose_wildcard_is_in_a_models_name_names_layers_of_each(pattern):
    pipe = types.SimpleNamespace(transformer=tiny.transformer(), transformer_2=tiny.transformer())
    config = SageConfig("sage2", layers=(LayerRule(pattern, "exact"),))
    with sage_hf.apply(pipe, config):
        for model in (pipe.transformer, pipe.transformer_2):
            assert [one.recipe for one in processors(model)] == ["exact", "sage2", "sage2"]
    one = SageConfig("sage2", layers=(LayerRule("transformer_2.*.0.*", "exact"),))
    with sage_hf.apply(pipe, one):
        found = [[one.recipe for one in processors(model)] for model in (pipe.transformer, pipe.transformer_2)]
        assert found == [["sage2"] * 3, ["exact", "sage2", "sage2"]]
    sparse = Sparse("mean", 0.5, dense_layers=(pattern,), from_tokens=1)
    assert SageConfig("sage2", sparse=sparse).of_model("transformer_2", ["transformer_blocks.0.attn1", "x"]).sparse == (
        replace(sparse, dense_layers=("transformer_blocks.0.attn1",))
    )


@pytest.mark.parametrize("original", ["sdpa", "eager"])
def test_restore_gives_a_transformers_model_its_implementation_and_bits_back(original):
    model = tiny.llama()
    model.set_attn_implementation(original)
    names, exact = attributes(model), run_llama(model)
    config = SageConfig("sage3", layers=(LayerRule("model.layers.0.*", "exact"),))
    with sage_hf.apply(model, config):
        assert model.config._attn_implementation == "sage3"
        assert not torch.equal(run_llama(model), exact)
        recipes = [layer.sage_recipe for layer in model.modules() if hasattr(layer, "sage_recipe")]
        assert recipes == ["exact", "sage3"]
    assert model.config._attn_implementation == original
    assert attributes(model) == names
    assert torch.equal(run_llama(model), exact)


ORDERS = [
    ["apply sage1", "apply sage3", "restore last"],
    ["apply sage1", "apply sage3", "restore first", "restore last"],
    ["apply sage1", "apply sage3", "restore last", "restore first"],
    ["apply sage1", "apply sage1", "apply sage1", "restore all"],
    ["apply sage1", "restore all", "apply sage3", "restore first", "restore last"],
    ["apply sage1", "by hand", "apply sage3", "restore last"],
    ["apply sage1", "by hand", "restore all", "restore all"],
    ["by hand", "by hand", "restore all"],
    ["by backend", "by backend", "restore all"],
    ["by backend", "apply sage1", "by hand", "restore all"],
    ["sparse", "sparse", "apply sage1", "restore first", "restore last"],
]


@pytest.mark.parametrize("order", ORDERS, ids=", ".join)
def test_cells_that_run_in_any_order_can_be_undone(order):
    pipe = tiny.cogvideox()
    latents = partial(tiny.latents, pipe, guidance_scale=1.0)
    exact, before, names = latents(), processors(pipe.transformer), attributes(pipe.transformer)
    handles = []
    for cell in order:
        match cell.split():
            case ["apply", recipe]:
                handles.append(sage_hf.apply(pipe, recipe))
            case ["sparse"]:
                config = SageConfig("sage2", sparse=sage_hf.Sparse(keep=0.5, dense_steps=1, from_tokens=1))
                handles.append(sage_hf.apply(pipe, config))
            case ["by", "hand"]:
                pipe.transformer.set_attn_processor(sage_hf.SageAttn2Processor())
            case ["by", "backend"]:
                pipe.transformer.set_attention_backend("sage2")
            case ["restore", "all"]:
                sage_hf.restore(pipe)
            case ["restore", which]:
                in_force = processors(pipe.transformer)
                handles[0 if which == "first" else -1].restore()
                if which == "first":  # which a later one has replaced
                    assert processors(pipe.transformer) == in_force
        if cell != order[-1] and not cell.startswith("restore"):
            assert not torch.equal(latents(), exact)
    assert all(a is b for a, b in zip(processors(pipe.transformer), before, strict=True))
    assert attributes(pipe.transformer) == names and not pipe.transformer._forward_pre_hooks
    assert torch.equal(latents(), exact)


def test_a_pipeline_and_one_of_its_models_are_applied_to_apart():
    pipe = types.SimpleNamespace(transformer=tiny.transformer(), transformer_2=tiny.transformer())
    before = processors(pipe.transformer) + processors(pipe.transformer_2)
    both = sage_hf.apply(pipe, "sage1")
    one = sage_hf.apply(pipe.transformer, "sage3")
    both.restore()
    assert {processor.recipe for processor in processors(pipe.transformer)} == {"sage3"}
    assert not any(isinstance(one, sage_hf.SageAttnProcessor) for one in processors(pipe.transformer_2))
    one.restore()
    after = processors(pipe.transformer) + processors(pipe.transformer_2)
    assert all(a is b for a, b in zip(after, before, strict=True))


def test_a_language_model_applied_twice_is_restored_without_a_handle():
    model = tiny.llama()
    implementation, names = model.config._attn_implementation, attributes(model)
    sage_hf.apply(model, "sage2")
    sage_hf.apply(model, SageConfig("sage3", layers=(LayerRule("model.layers.0.*", "exact"),)))
    sage_hf.restore(model)
    sage_hf.restore(model)
    assert model.config._attn_implementation == implementation
    assert attributes(model) == names


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_layers_that_read_another_config_than_their_model_are_switched(implementation):
    """An EncoderDecoderModel gives its encoder a new config; transformers switches that, and not the layers' own."""
    sizes = {"vocab_size": 97, "n_embd": 64, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1}
    configs = GPT2Config(**sizes), GPT2Config(**sizes, is_decoder=True, add_cross_attention=True)
    encoder, decoder = (
        kind._from_config(config, attn_implementation=implementation)
        for kind, config in zip((GPT2Model, GPT2LMHeadModel), configs, strict=True)
    )
    model = EncoderDecoderModel(encoder=encoder, decoder=decoder).eval()
    tokens = torch.arange(160).reshape(2, 80) % 97
    inputs = {"attention_mask": torch.ones_like(tokens), "decoder_input_ids": tokens}
    inputs["attention_mask"][0, 20:] = 0
    torch.nn.init.normal_(model.encoder.h[0].attn.c_attn.weight, std=0.2)

    def run() -> torch.Tensor:
        with torch.no_grad():
            return model(tokens, **inputs).logits

    before = run()
    with sage_hf.apply(model, "exact"):
        torch.testing.assert_close(run(), before)
        assert {row.recipe for row in sage_hf.explain(model).rows} == {"exact"}
    assert torch.equal(run(), before)
    assert {row.asked for row in sage_hf.explain(model).rows} == {""}


@pytest.mark.parametrize("model_class", [OwnModel, OwnLanguageModel])
def test_a_class_of_your_own_is_switched_as_the_model_that_it_is_derived_from(model_class):
    model = model_class(copy.deepcopy(tiny.llama().config)).eval()
    implementation = model.config._attn_implementation
    with sage_hf.apply(model, "sage2"), torch.no_grad():
        model(torch.arange(80)[None] % 32)
        assert {row.recipe for row in sage_hf.explain(model).rows} == {"sage2"}
    assert model.config._attn_implementation == implementation
    assert "modeling_bloom does not use transformers' attention interface" in str(refusal(OwnBloom))


class Attends(torch.nn.Module):
    """Attention of a user's own, in place of a Llama's; it takes masks as `sdpa` gets them, or as `eager` does."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base, self.additive = base, base.config._attn_implementation == "eager"

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, **kwargs):
        base = self.base
        states = (project(hidden_states) for project in (base.q_proj, base.k_proj, base.v_proj))
        query, key, value = (x.unflatten(2, (-1, base.head_dim)).transpose(1, 2) for x in states)
        mask = None if attention_mask is None else attention_mask.float() if self.additive else attention_mask
        out = F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None, enable_gqa=True)
        return base.o_proj(out.transpose(1, 2).flatten(2)), None


class HandsOn(torch.nn.Module):
    """A user's module around a Llama's attention."""

    def __init__(self, base: torch.nn.Module) -> None:
        super().__init__()
        self.base = base

    def forward(self, hidden_states, attention_mask=None, **kwargs):
        return self.base(hidden_states, attention_mask=attention_mask, **kwargs)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_masks_of_a_users_own_attention_stay_as_they_are(implementation):
    model = tiny.llama()
    model.set_attn_implementation(implementation)
    layer = model.model.layers[0]
    inputs = {"input_ids": torch.arange(144).reshape(12, 12) % 32, "attention_mask": torch.ones(12, 12)}
    inputs["attention_mask"][0, 9:] = 0
    attention, layer.self_attn = layer.self_attn, Attends(layer.self_attn)

    @torch.no_grad()
    def run() -> torch.Tensor:
        return model(**inputs).logits[inputs["attention_mask"].bool()]

    expected = run()
    for recipe in ("exact", "sage2", "sage_bwd"):
        if implementation == "sdpa" and recipe != "sage_bwd":
            with sage_hf.apply(model, recipe, fallback="emulate"):
                assert (run() - expected).norm() < 0.02 * expected.norm()
        else:
            with pytest.raises(ValueError, match=r"layers\.0\.self_attn, a Attends, was put into"):
                sage_hf.apply(model, recipe)
        assert torch.equal(run(), expected)
    layer.self_attn = HandsOn(attention)
    expected = run()
    for recipe in ("sage2", "sage_bwd"):
        with sage_hf.apply(model, recipe, fallback="emulate"):
            assert (run() - expected).norm() < 0.02 * expected.norm()


def test_two_models_of_one_config_are_not_switched_at_once():
    """The config names the attention of both: to restore one would restore the other in silence."""
    first = tiny.llama()
    second = type(first)(first.config)
    with sage_hf.apply(first, "sage2"), pytest.raises(ValueError, match=r"shares its config with a LlamaForCausalLM"):
        sage_hf.apply(second, "sage3")
    with sage_hf.apply(second, "sage3"):
        assert second.config._attn_implementation == "sage3"
    own = type(first)(copy.deepcopy(first.config))
    with sage_hf.apply(first, "sage2"), sage_hf.apply(own, "sage3"):
        assert (first.config._attn_implementation, own.config._attn_implementation) == ("sage2", "sage3")


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_a_copy_of_an_applied_model_is_switched_and_restored_as_the_original_is(copied):
    model = tiny.llama()
    sage_hf.apply(model, "sage2")
    twin = copied(model)
    sage_hf.apply(twin, "sage3").restore()
    assert (model.config._attn_implementation, twin.config._attn_implementation) == ("sage2", "sdpa")
    assert not any(name.startswith("sage") for layer in twin.modules() for name in vars(layer))

    model = tiny.transformer()
    sage_hf.apply(model, SageConfig("sage2", steps=(StepRule(0, 1, "sage3"),), sparse=Sparse(dense_steps=1)))
    twin = copied(model)
    sage_hf.restore(twin)
    hooks = [(*one._forward_pre_hooks, *one._forward_hooks) for one in twin.modules()]
    assert not any(hooks) and any(one._forward_hooks for one in model.modules())
    assert not any(isinstance(one, sage_hf.SageAttnProcessor) for one in processors(twin))
    assert {processor.recipe for processor in processors(model)} == {"sage2"}


def test_a_handle_that_was_dropped_stays_in_force_and_keeps_nothing_alive():
    pipe = tiny.cogvideox()
    sage_hf.apply(pipe, SageConfig("sage3", steps=(StepRule(-1, None, "sage2"),)))
    tiny.latents(pipe)
    assert {row.recipe for row in sage_hf.explain(pipe).rows} == {"sage3", "sage2"}
    with sage_hf.apply(pipe, "sage1"):
        pass
    alive = weakref.ref(pipe.transformer)
    del pipe
    gc.collect()
    assert alive() is None


def test_processors_set_by_hand_are_what_restore_gives_back():
    pipe = tiny.cogvideox()
    shared = sage_hf.SageAttn2Processor()
    pipe.transformer.set_attn_processor(shared)
    before = tiny.latents(pipe)
    with sage_hf.apply(pipe, "sage3"):
        assert not torch.equal(tiny.latents(pipe), before)
    assert all(processor is shared for processor in processors(pipe.transformer))
    assert torch.equal(tiny.latents(pipe), before)


class ForeignProcessor:
    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, image_rotary_emb=None):
        return hidden_states, encoder_hidden_states


def foreign(model):
    model.transformer_blocks[-1].attn1.processor = ForeignProcessor()
    return model


BAD = [
    (tiny.transformer, "sage9", r"'sage9' is neither a recipe \(exact, sage1, .*sage_bwd_int8\)"),
    (tiny.transformer, "nowhere.json", "cannot read the configuration nowhere.json"),
    (tiny.transformer, SageConfig(layers=(LayerRule("no.*", "exact"),)), r"'no.\*' matches no attention layer.*s.0"),
    (tiny.transformer, SageConfig(steps=(StepRule(-1, None, "exact"),)), "count from the end"),
    (lambda: foreign(tiny.transformer()), "sage3", "ForeignProcessor"),
]


@pytest.mark.parametrize(("build", "config", "message"), BAD)
def test_what_cannot_be_applied_is_refused_before_anything_is_changed(build, config, message):
    model = build()
    before, names = processors(model), attributes(model)
    with pytest.raises(ValueError, match=message):
        sage_hf.apply(model, config)
    assert all(a is b for a, b in zip(processors(model), before, strict=True))
    assert attributes(model) == names and not model._forward_pre_hooks


def test_an_unrecognised_layer_with_an_exact_rule_keeps_its_own_processor():
    model = foreign(tiny.transformer())
    before = processors(model)
    (odd,) = (
        name for name, processor in model.attn_processors.items() if type(processor).__name__ == "ForeignProcessor"
    )
    pattern = odd.removesuffix(".processor")
    with sage_hf.apply(model, SageConfig("sage3", layers=(LayerRule(pattern, "exact"),))):
        switched = [name for name, now in model.attn_processors.items() if isinstance(now, sage_hf.SageAttnProcessor)]
        assert switched == [name for name in model.attn_processors if name != odd]
    assert all(a is b for a, b in zip(processors(model), before, strict=True))


def test_a_second_denoiser_that_cannot_be_switched_leaves_the_first_alone():
    pipe = types.SimpleNamespace(transformer=tiny.transformer(), transformer_2=foreign(tiny.transformer()))
    before = processors(pipe.transformer)
    with pytest.raises(ValueError, match="ForeignProcessor"):
        sage_hf.apply(pipe, "sage3")
    assert all(a is b for a, b in zip(processors(pipe.transformer), before, strict=True))


@pytest.fixture
def process_group():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("wrap", [nn.parallel.DistributedDataParallel, nn.DataParallel, AveragedModel])
def test_a_wrappers_inner_model_is_switched(wrap):
    wrapped = wrap(tiny.transformer())
    before = processors(wrapped.module)
    steps = (StepRule(0, 1, "sage1"),)
    config = SageConfig("sage2", steps=steps, sparse=Sparse("mean", keep=0.5, from_tokens=64))
    with sage_hf.apply(wrapped, config), torch.no_grad():
        wrapped(**tiny.transformer_inputs())
        rows = sage_hf.explain(wrapped)
        assert {row.layer for row in rows.rows} == {f"transformer_blocks.{i}.attn1" for i in range(tiny.LAYERS)}
        assert {row.recipe for row in rows.rows} == {"sage1"}
        assert all("4×4×4 order" in kept for _, kept in rows.sparse)
    assert all(a is b for a, b in zip(processors(wrapped.module), before, strict=True))
    with sage_hf.apply(llama := wrap(tiny.llama()), "sage_bwd"):
        assert llama.module.config._attn_implementation == "sage_bwd"


def test_models_without_attention_are_refused():
    for model in (nn.Linear(2, 2), nn.Sequential()):
        with pytest.raises(ValueError, match=f"{type(model).__name__} has no attention layer"):
            sage_hf.apply(model, "sage3")
    convolutional = AutoencoderKLCogVideoX(
        block_out_channels=(8, 8, 8, 8), latent_channels=4, layers_per_block=1, norm_num_groups=4
    )
    with pytest.raises(ValueError, match="AutoencoderKLCogVideoX has no attention layer"):
        sage_hf.apply(convolutional, "sage3")


def test_objects_that_are_no_model_are_refused_with_advice():
    for given in ("cogvideox", None, types.SimpleNamespace(vae=nn.Linear(1, 1))):
        with pytest.raises(TypeError, match="expected a diffusers pipeline with a denoiser"):
            sage_hf.apply(given, "sage3")


def test_a_model_that_ignores_the_attention_interface_is_refused():
    model = BloomForCausalLM(BloomConfig(vocab_size=8, hidden_size=16, n_layer=1, n_head=2))
    implementation = model.config._attn_implementation
    with pytest.raises(ValueError, match="BloomForCausalLM"):
        sage_hf.apply(model, "sage3")
    assert model.config._attn_implementation == implementation


def test_step_rules_are_refused_for_a_model_without_steps():
    model = tiny.llama()
    with pytest.raises(ValueError, match="LlamaForCausalLM is no denoiser"):
        sage_hf.apply(model, SageConfig("sage3", steps=(StepRule(0, 1, "exact"),)))
    assert model.config._attn_implementation != "sage3"


def test_step_rules_are_refused_for_a_transformers_model_with_steps_of_its_own():
    class Flow(LlamaForCausalLM):
        def forward(self, timestep=None, **kwargs):
            return super().forward(**kwargs)

    with pytest.raises(ValueError, match="Flow is no denoiser of diffusers"):
        timestep_argument(Flow(tiny.llama().config))


def test_an_error_half_way_undoes_what_was_done(monkeypatch):
    model = tiny.transformer()
    before = processors(model)
    last = model.transformer_blocks[-1].attn1
    set_processor = type(last).set_processor

    def failing(module, processor):
        if module is last and processor is not before[-1]:
            raise RuntimeError("no")
        set_processor(module, processor)

    monkeypatch.setattr(type(last), "set_processor", failing)
    with pytest.raises(RuntimeError, match="no"):
        sage_hf.apply(model, "sage3")
    assert all(a is b for a, b in zip(processors(model), before, strict=True))


def test_a_copy_of_an_applied_model_follows_its_own_steps():
    model = tiny.transformer()
    with sage_hf.apply(model, SageConfig("sage3", steps=(StepRule(0, 1, "sage2"),))), torch.no_grad():
        twin = copy.deepcopy(model)
        for timestep in (900.0, 500.0):
            twin(**tiny.transformer_inputs(timestep))
            assert {p.recipe for p in processors(twin)} == {"sage2" if timestep == 900.0 else "sage3"}
        assert {p.recipe for p in processors(model)} == {"sage3"}


def test_restore_leaves_an_attention_backend_as_removable_as_it_was():
    model = tiny.transformer()
    before = processors(model)
    model.set_attention_backend("sage2")
    sage_hf.apply(model, "sage3").restore()
    assert {processor.recipe for processor in processors(model)} == {"sage2"}
    model.reset_attention_backend()
    assert all(a is b for a, b in zip(processors(model), before, strict=True))


@pytest.mark.parametrize(
    ("later", "asked"), [("sage2", "sage2"), ("sage3_emulate", "sage3"), ("sdpa", ""), ("eager", "")]
)
def test_the_later_switch_of_transformers_wins_and_explain_knows(later, asked):
    model = tiny.llama()
    sage_hf.apply(model, SageConfig("sage1", layers=(LayerRule("model.layers.0.*", "exact"),)))
    model.set_attn_implementation(later)
    run_llama(model)
    row = sage_hf.explain(model).rows[0]
    assert row.asked == asked
    assert row.recipe == asked
    if not asked:
        assert later in row.reason


@pytest.mark.parametrize("config", [{"recipe": "sage3"}, None, 3])
def test_what_is_neither_config_nor_name_nor_path_is_refused(config):
    with pytest.raises(TypeError, match="expected a SageConfig, a name or a path"):
        sage_hf.apply(tiny.transformer(), config)
