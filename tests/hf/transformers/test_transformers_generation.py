"""Caches, packed sequences and generate(): the masks and lengths that generation brings."""

from __future__ import annotations

import inspect

import pytest
import torch
from transformers import DynamicCache, StaticCache
from transformers.masking_utils import causal_mask_function, sdpa_mask

from sage_hf import record
from sage_hf.transformers import attention_layers
from sage_hf.transformers.attention import sage_attention_forward
from sage_hf.transformers.masks import sage_mask
from tests.helpers import model_zoo
from tests.helpers.tiny_transformers import (
    DECODERS,
    IN_FLOAT64,
    MODELS,
    SERVED,
    TOKENS,
    WITH_STATIC_CACHE,
    TinyModel,
    run,
)

behind_a_cache = pytest.mark.skipif(
    "q_offset" not in inspect.signature(sdpa_mask).parameters,
    reason="before transformers 5, only a tensor on the device says how many keys are in the cache",
)
GENERATORS = [model for model in SERVED if model.kind in ("decoder", "t5", "whisper")]
BY_NAME = {"ids": lambda value: getattr(value, "name", value)}


def generate(tiny: TinyModel, implementation: str, padding: str = "none", **kwargs) -> torch.Tensor:
    inputs = {name: value for name, value in tiny.inputs(padding).items() if name != "decoder_input_ids"}
    with torch.no_grad():
        return tiny.build(implementation).generate(**inputs, max_new_tokens=12, do_sample=False, **kwargs)


@pytest.mark.parametrize("tiny", GENERATORS, **BY_NAME)
def test_generates_the_tokens_eager_generates(tiny: TinyModel) -> None:
    assert torch.equal(generate(tiny, "sage_exact"), generate(tiny, "eager"))


@pytest.mark.parametrize("tiny", [tiny for tiny in GENERATORS if tiny in WITH_STATIC_CACHE], **BY_NAME)
def test_generates_the_tokens_eager_generates_with_a_static_cache(tiny: TinyModel) -> None:
    ours, eager = (generate(tiny, name, cache_implementation="static") for name in ("sage_exact", "eager"))
    assert torch.equal(ours, eager)


@pytest.mark.parametrize("tiny", DECODERS, **BY_NAME)
def test_generates_the_tokens_eager_generates_after_left_padding(tiny: TinyModel) -> None:
    assert torch.equal(generate(tiny, "sage_exact", "left"), generate(tiny, "eager", "left"))


def test_the_prompt_runs_the_recipe_and_decoding_is_exact_and_recorded() -> None:
    tiny = MODELS["llama"]
    model = tiny.build("sage3")
    with torch.no_grad():
        model.generate(**tiny.inputs(), max_new_tokens=3, do_sample=False)
    for layer in attention_layers(model).values():
        prompt, *steps = record.last_plans(layer)
        assert (prompt.recipe, prompt.request.q_len) == ("sage3", TOKENS)
        assert [(plan.recipe, plan.request.q_len) for plan in steps] == [("exact", 1)] * 2
        assert all("too short" in plan.reason for plan in steps)


@pytest.mark.parametrize("tiny", [tiny for tiny in DECODERS if tiny in IN_FLOAT64], **BY_NAME)
def test_a_prompt_in_a_longer_static_cache_is_the_prompt(tiny: TinyModel, float64_softmax: None) -> None:
    def output(implementation: str, dtype: torch.dtype, cached: bool) -> torch.Tensor:
        model = tiny.build(implementation, dtype)
        cache = {"past_key_values": StaticCache(config=model.config, max_cache_len=TOKENS + 20)} if cached else {}
        return run(model, **tiny.inputs(), **cache).double()

    judge = output("eager", torch.float64, cached=False)
    rounding = 2 * (output("eager", torch.float32, cached=False) - judge).abs().max()
    error = (output("sage_exact", torch.float32, cached=True) - judge).abs().max()
    assert error <= rounding + torch.finfo(torch.float32).eps * judge.abs().max()


# GPT-OSS does not tell its masks of position_ids, whatever computes its attention.
@pytest.mark.parametrize(
    "tiny", [tiny for tiny in DECODERS if tiny in IN_FLOAT64 and tiny.name != "gpt_oss"], **BY_NAME
)
def test_packed_sequences_do_not_see_each_other(tiny: TinyModel) -> None:
    model, tokens = tiny.build("sage_exact"), tiny.inputs()["input_ids"][:1]
    positions = torch.cat([torch.arange(30), torch.arange(TOKENS - 30)])[None]
    packed = run(model, input_ids=tokens, position_ids=positions, use_cache=False)
    apart = torch.cat([run(model, input_ids=part, use_cache=False) for part in (tokens[:, :30], tokens[:, 30:])], dim=1)
    judge = run(tiny.build("eager", torch.float64), input_ids=tokens, position_ids=positions, use_cache=False)
    rounding = 2 * (apart - judge).abs().max() + torch.finfo(torch.float32).eps * judge.abs().max()
    assert (packed - judge).abs().max() <= rounding
    assert (run(model, input_ids=tokens, use_cache=False) - judge).abs().max() > 100 * rounding


@pytest.mark.parametrize("tiny", [MODELS["llama"], MODELS["mistral"]], ids=["llama", "mistral"])
def test_latest_keys_of_packed_sequences_stay_in_16_bits(tiny: TinyModel) -> None:
    """Each token of a sequence shorter than 64 sees no other keys, so that nothing is rounded to 4 bits."""
    positions = torch.cat([torch.arange(30), torch.arange(TOKENS - 30)])[None]
    packed = {"input_ids": tiny.inputs()["input_ids"][:1], "position_ids": positions, "use_cache": False}
    expected, found = (run(tiny.build(name), **packed) for name in ("sage_exact", "sage3_emulate"))
    assert (found - expected).norm() <= torch.finfo(torch.float16).eps * expected.norm()


def test_queries_dropped_after_masking_keep_their_causality() -> None:
    """Gemma 4 computes its last layers for the last tokens only, where it knows what the mask is."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("this transformers has no Gemma 4")
    config = model_zoo.make_small(transformers.Gemma4TextConfig())
    config.num_hidden_layers, config.num_kv_shared_layers, config.sliding_window = 4, 2, 128
    config.layer_types = ["sliding_attention", "full_attention"] * 2
    outputs = []
    for implementation in ("eager", "sage_exact"):
        torch.manual_seed(0)
        model = transformers.Gemma4ForCausalLM._from_config(config, attn_implementation=implementation).eval()
        outputs.append(run(model, **MODELS["llama"].inputs(), logits_to_keep=5))
    torch.testing.assert_close(*outputs)


@behind_a_cache
@pytest.mark.parametrize("pruned", [0, 1])
@pytest.mark.parametrize("implementation", ["sage_exact", "sage2", "sage2_emulate", "sage_bwd_emulate"])
def test_caches_that_lost_other_numbers_of_keys_in_each_layer_are_refused(implementation: str, pruned: int) -> None:
    """The mask is made for the first layer's keys; `sdpa` and eager attention raise too."""
    tiny = MODELS["llama"]
    model, tokens, cache = tiny.build(implementation), tiny.inputs()["input_ids"], DynamicCache()
    run(model, input_ids=tokens[:, :40], past_key_values=cache)
    layer = cache.layers[pruned]
    layer.keys, layer.values = layer.keys[:, :, 20:], layer.values[:, :, 20:]
    with pytest.raises(ValueError, match="does not broadcast"):
        run(model, input_ids=tokens[:, 40:], past_key_values=cache)


@torch.no_grad()
def prefill_in_two(model: torch.nn.Module, tokens: torch.Tensor, cache: object, **inputs: torch.Tensor) -> torch.Tensor:
    """Return the logits of the tokens after the 20th, which the model reads behind a cache of the first 20."""
    model(tokens[:, :20], past_key_values=cache, use_cache=True)
    return model(tokens[:, 20:], past_key_values=cache, use_cache=True, **inputs).logits


@behind_a_cache
@pytest.mark.parametrize("static", [False, True])
def test_queries_behind_a_cache_attend_causally_without_a_mask(static: bool) -> None:
    tiny = MODELS["llama"]
    model, tokens = tiny.build("sage2_emulate"), tiny.inputs()["input_ids"]
    later = tokens.shape[1] - 20

    def cache() -> object:
        return StaticCache(config=model.config, max_cache_len=tokens.shape[1] + 9) if static else DynamicCache()

    logits = prefill_in_two(model, tokens, cache())
    for layer in attention_layers(model).values():
        request = record.last_plans(layer)[-1].request
        assert (request.mask, request.is_causal, request.q_len, request.kv_len) == ("none", True, later, later + 20)
    exact = prefill_in_two(tiny.build("sage_exact"), tokens, cache())
    room = tokens.shape[1] + 9 * static
    seen = torch.ones(1, 1, later, room, dtype=torch.bool).tril(20).expand(tokens.shape[0], -1, -1, -1)
    masked = prefill_in_two(model, tokens, cache(), attention_mask=seen)
    assert {record.last_plans(layer)[-1].request.mask for layer in attention_layers(model).values()} == {"bool"}
    assert (logits - exact).abs().max() <= 2 * (masked - exact).abs().max()


@pytest.mark.parametrize("static", [False, pytest.param(True, marks=behind_a_cache)])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_causality_and_padding_are_said_apart_and_attend_as_one_mask_does(
    padding: str, mode: type, static: bool
) -> None:
    """So the latest keys of a row are in 16 bits in padded batches too."""
    tiny = MODELS["llama"]
    inputs = tiny.inputs(padding)
    exists = inputs["attention_mask"].bool()
    one_mask = exists[:, None, None] & torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    model = tiny.build("sage3_emulate")
    outputs = []
    for mask, request in ((inputs["attention_mask"], ("keys", True)), (one_mask, ("bool", False))):
        cache = {"past_key_values": StaticCache(config=model.config, max_cache_len=TOKENS + 20)} if static else {}
        if static and request[0] == "bool":
            mask = torch.nn.functional.pad(mask, (0, 20))
        with mode():
            outputs.append(model(**inputs | cache | {"attention_mask": mask}).logits[exists])
        plans = [record.last_plans(layer)[-1] for layer in attention_layers(model).values()]
        assert {(plan.request.mask, plan.request.is_causal) for plan in plans} == {request}
    exact = run(tiny.build("sage_exact"), **inputs)[exists]
    said, materialised = ((output - exact).abs().mean() for output in outputs)
    assert said < materialised


@behind_a_cache
@pytest.mark.parametrize(("recipe", "said"), [("sage3", True), ("sage2", False)])
def test_the_mask_of_a_window_is_known_to_be_causal(recipe: str, said: bool) -> None:
    """`sage3` attends in 16 bits to the latest keys, which are all of this window; other recipes would gain nothing."""
    tiny = MODELS["mistral"]
    model, tokens = tiny.build(f"{recipe}_emulate"), tiny.inputs()["input_ids"]
    logits = prefill_in_two(model, tokens, DynamicCache(config=model.config))
    requests = [record.last_plans(layer)[-1].request for layer in attention_layers(model).values()]
    assert {(request.mask, request.is_causal) for request in requests} == {("bool", said)}
    exact = prefill_in_two(tiny.build("sage_exact"), tokens, DynamicCache(config=model.config))
    assert ((logits - exact).abs().max() < 1e-4) == said


@behind_a_cache
def test_a_hidden_key_or_a_changed_mask_behind_a_cache_is_honoured() -> None:
    tiny = MODELS["llama"]
    model, tokens = tiny.build("sage2_emulate"), tiny.inputs()["input_ids"]
    key_mask = torch.ones_like(tokens)
    key_mask[:, 7] = 0
    hidden = prefill_in_two(model, tokens, DynamicCache(), attention_mask=key_mask)
    for layer in attention_layers(model).values():
        request = record.last_plans(layer)[-1].request
        assert (request.mask, request.is_causal) == ("keys", True)
    assert (hidden - prefill_in_two(model, tokens, DynamicCache())).abs().max() > 0.01

    arguments = {"batch_size": 1, "q_length": 4, "kv_length": 10, "q_offset": 6, "mask_function": causal_mask_function}
    mask = sage_mask(**arguments)
    query, key = torch.randn(1, 2, 4, 32), torch.randn(1, 2, 10, 32)
    layer = torch.nn.Module()

    def attend(mask: torch.Tensor) -> torch.Tensor:
        return sage_attention_forward(layer, query, key, key, mask, recipe="sage2", fallback="emulate")[0]

    before = attend(mask)
    mask[..., 3] = False
    torch.testing.assert_close(attend(mask), attend(mask.clone()), rtol=0, atol=0)
    assert (attend(mask) - before).abs().max() > 0.01


@behind_a_cache
@pytest.mark.parametrize("fallback", ["native", "emulate"])
def test_a_position_bias_is_added_where_the_mask_is_known_to_be_causal(fallback: str) -> None:
    arguments = {"batch_size": 1, "q_length": 20, "kv_length": 90, "q_offset": 70}
    mask = sage_mask(**arguments, mask_function=causal_mask_function)
    query, key, bias = (torch.randn(1, 2, *sizes) for sizes in ((20, 32), (90, 32), (20, 90)))

    def attend(mask: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        options = {"position_bias": bias, "recipe": "sage1", "fallback": fallback}
        return sage_attention_forward(torch.nn.Module(), query, key, key, mask, **options)[0]

    torch.testing.assert_close(attend(mask, bias), attend(mask.clone(), bias), rtol=0, atol=0)
    assert (attend(mask, bias) - attend(mask, torch.zeros_like(bias))).abs().max() > 0.01
