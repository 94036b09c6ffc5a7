"""QuantizedKVCache through `generate` and `forward`: right, or refused with a reason."""

import copy
import inspect
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import sage_hf
from sage_hf.transformers import kv_cache

DECODER = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.05,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
NEW = inspect.signature(LlamaForCausalLM.forward).parameters.keys() & {"cache"}
NAME = "cache" if NEW else "past_key_values"
hands_on = pytest.mark.skipif(not NEW, reason="this transformers does not hand a cache's keywords to attention")
PROMPT = 150


def build(implementation: str = "sage_exact", **config) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**DECODER | config)).eval()
    model.set_attn_implementation(implementation)
    return model


def prompt(padding: int = 13) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 97, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def logits(model, cache, chunks: tuple[int, ...], inputs=None) -> torch.Tensor:
    """The logits of all tokens, which come in chunks."""
    inputs = prompt() if inputs is None else inputs
    found, start = [], 0
    with torch.no_grad():
        for size in chunks:
            part = inputs["input_ids"][:, start : start + size]
            mask = inputs["attention_mask"][:, : start + size]
            places = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)[:, start : start + size]
            found.append(model(part, attention_mask=mask, position_ids=places, use_cache=True, **{NAME: cache}).logits)
            start += size
    return torch.cat(found, 1)[inputs["attention_mask"].bool()]


def new_cache(model, format: str = "int8"):
    return sage_hf.QuantizedKVCache(model.config, format)


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    return ((x - y).norm() / y.norm()).item()


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    with torch.no_grad():
        inputs = prompt()
        places = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
        return build("eager")(**inputs, position_ids=places).logits[inputs["attention_mask"].bool()]


@pytest.mark.parametrize("implementation", ["sage_exact", "sage1", "sdpa", "eager"])
@pytest.mark.parametrize("chunks", [(140, *[1] * 10), (130, 7, 13), (30, 70, 50), (64, *[16] * 5, 6)], ids=str)
@pytest.mark.parametrize(("format", "bound"), [("int8", 0.01), ("int4", 0.08), ("nvfp4", 0.08)])
def test_logits_behind_the_cache_are_the_models(format, bound, chunks, implementation, expected):
    """Bounds: steps of the format, 1/255 and 1/15 of the range, half of which a code is off, through two layers."""
    model = build(implementation)
    assert distance(logits(model, new_cache(model, format), chunks), expected) < bound


@hands_on
def test_explain_shows_format_tokens_bytes_and_kernel():
    model = build()
    cache = new_cache(model, "int4")
    logits(model, cache, (140, *[1] * 10))
    text = str(sage_hf.explain(model))
    size = sum(layer.cache.bytes for layer in cache.layers)
    assert f"KV cache: int4 in 2 layers, 150 tokens, {size:,} bytes; decoded by " in text
    assert "reference (emulated)" in text


@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3, "eos_token_id": 1}, {"prefill_chunk_size": 60}]
)
def test_generate_gives_the_default_caches_tokens(options):
    model = build()
    inputs = prompt() if "prompt_lookup_num_tokens" not in options else {"input_ids": prompt(0)["input_ids"][:1]}
    kwargs = {**inputs, "max_new_tokens": 12, "do_sample": False, **options}
    expected = model.generate(**kwargs)
    assert torch.equal(model.generate(**kwargs, **{NAME: new_cache(model)}), expected)


def test_a_compiled_model_sees_its_padding_and_is_causal(expected):
    model = build()
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, backend="eager")
    assert distance(logits(model, new_cache(model), (140, 10)), expected) < 0.01


def test_a_second_turn_goes_on_with_the_cache():
    model = build()
    caches = [new_cache(model), transformers.DynamicCache(config=model.config)]
    turns = []
    for cache in caches:
        ids = model.generate(**prompt(0), max_new_tokens=5, do_sample=False, **{NAME: cache})
        ids = torch.cat((ids, prompt(0)["input_ids"][:, :40]), 1)
        mask = torch.ones_like(ids)
        turns.append(model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, **{NAME: cache}))
    assert torch.equal(*turns)


def test_a_model_copied_or_switched_between_steps_keeps_the_past(expected):
    model = build()
    cache = new_cache(model)
    inputs = prompt()
    logits(model, cache, (140,), {name: x[:, :140] for name, x in inputs.items()})
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        places = (inputs["attention_mask"].cumsum(1) - 1)[:, 140:]
        last = model(inputs["input_ids"][:, 140:], attention_mask=inputs["attention_mask"], position_ids=places,
                     **{NAME: cache}).logits  # fmt: skip
    whole = torch.zeros(2, PROMPT, 97)
    whole[inputs["attention_mask"].bool()] = expected
    assert distance(last, whole[:, 140:]) < 0.01


@hands_on
def test_an_attention_that_ignores_the_cache_gets_whole_k_and_v(expected):
    """The config says ours, the model's layers run another one: the prompt shows it."""
    model, told = build("sdpa"), copy.deepcopy(build().config)
    told._attn_implementation = "sage_exact"
    cache = sage_hf.QuantizedKVCache(told, "int8")
    assert distance(logits(model, cache, (140, 4, 6)), expected) < 0.01
    assert not cache.layers[0].is_handed_on


def test_whole_k_and_v_are_said_once(monkeypatch):
    said = []
    monkeypatch.setattr(kv_cache, "_warned", set())
    monkeypatch.setattr(kv_cache.logger, "warning", said.append)
    model = build("sdpa")
    logits(model, new_cache(model), (140, *[1] * 10))
    assert len(said) == 1 and "dequantised at every step" in said[0]


def test_apply_makes_a_cache_for_each_generate_and_restore_takes_it_away():
    model = build("eager")
    kwargs = {**prompt(), "max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True}
    expected = model.generate(**kwargs).sequences
    with sage_hf.apply(model, "exact", kv_cache="int8"):
        found = model.generate(**kwargs)
        assert type(found[NAME]) is sage_hf.QuantizedKVCache
        assert torch.equal(found.sequences, expected)
        copied = copy.deepcopy(model)
        assert copied.generate.model is copied
        assert type(model.generate(**kwargs, use_cache=False).sequences) is torch.Tensor
        off = transformers.GenerationConfig(max_new_tokens=2, use_cache=False, return_dict_in_generate=True)
        assert model.generate(prompt()["input_ids"], off).get(NAME) is None
        with pytest.raises(ValueError, match="not offloaded"):
            model.generate(**kwargs, cache_implementation="offloaded")
    assert "generate" not in vars(model)
    assert type(model.generate(**kwargs)[NAME]) is transformers.DynamicCache


def test_layers_with_a_sliding_window_stay_in_16_bits_and_say_so():
    config = transformers.Gemma3TextConfig(
        **DECODER | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(config).eval()
    model.set_attn_implementation("sage_exact")
    cache = new_cache(model)
    assert [type(layer).__name__ for layer in cache.layers] == ["DynamicSlidingWindowLayer", "QuantizedLayer"]
    assert cache.note.kept == {"sliding window": [0]}
    kwargs = {**prompt(), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(**kwargs, **{NAME: cache}), model.generate(**kwargs))
    assert "16 bits in layers 0 (sliding window)" in str(cache.note)


@pytest.mark.parametrize("head_dim", [32, 256])
def test_other_head_dims_stay_in_16_bits_and_say_so(head_dim):
    model = build(head_dim=head_dim)
    cache = new_cache(model)
    kwargs = {**prompt(), "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(**kwargs, **{NAME: cache}), model.generate(**kwargs))
    assert cache.note.kept == {f"head_dim {head_dim} is outside 64…128": [0, 1]}


def test_v_of_another_head_dim_stays_in_16_bits():
    """Multi-head latent attention hands K of 192 and V of 128 channels to its cache."""
    cache = new_cache(build())
    key, value = torch.randn(1, 2, 9, 96), torch.randn(1, 2, 9, 64)
    assert torch.equal(cache.update(key, value, 0)[1], value)
    assert cache.note.kept == {"V has head_dim 64, K 96": [0]}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.T5Config(), "encoder-decoder"),
        (SimpleNamespace(num_kv_shared_layers=2), "share keys and values"),
        (SimpleNamespace(kv_sharing_modes=["provide", "reuse"]), "share keys and values"),
    ],
)
def test_models_that_cannot_be_served_are_refused(config, reason):
    if isinstance(config, SimpleNamespace):
        config.get_text_config = lambda decoder: config
    with pytest.raises(ValueError, match=reason):
        sage_hf.QuantizedKVCache(config)


def test_sinks_as_parameters_and_a_softcap_are_honoured():
    tiny = dict(DECODER, num_local_experts=2, num_experts_per_tok=1, layer_types=["full_attention"] * 2)
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**tiny)).eval()
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.sinks, 2.0)
    model.set_attn_implementation("sage_exact")
    kwargs = {**prompt(0), "max_new_tokens": 6, "do_sample": False}
    cache = new_cache(model)
    assert torch.equal(model.generate(**kwargs, **{NAME: cache}), model.generate(**kwargs))
    assert kv_cache.WHOLE in cache.note.kernels


@pytest.mark.parametrize("implementation", ["sage_exact", "sdpa"])
@pytest.mark.parametrize("batch", [1, 3])
def test_tokens_of_another_number_of_sequences_are_refused_and_leave_the_cache(implementation, batch):
    model = build(implementation)
    cache = new_cache(model)
    logits(model, cache, (PROMPT,))
    with pytest.raises(ValueError, match=rf"of 2 sequences, .* got \({batch}, 2, 1, 64\)"), torch.no_grad():
        model(torch.ones(batch, 1, dtype=torch.long), use_cache=True, **{NAME: cache})
    cache.crop(-1)
    assert cache.get_seq_length() == PROMPT - 1


def test_offloading_gradients_and_unknown_formats_are_refused():
    model = build()
    with pytest.raises(ValueError, match="not offloaded"):
        sage_hf.QuantizedKVCache(model.config, offloading=True)
    with pytest.raises(ValueError, match="not offloaded"):
        new_cache(model).layers[0].offload()
    with pytest.raises(ValueError, match="'int3' is not one of"):
        new_cache(model, "int3")
    with pytest.raises(ValueError, match="no gradients"):
        model(prompt()["input_ids"], **{NAME: new_cache(model)})


def test_kv_cache_needs_a_transformers_model_that_generates():
    model = build()
    with pytest.raises(ValueError, match="does not generate"):
        sage_hf.apply(model.model, "sage2", kv_cache="int4")
    with pytest.raises(ValueError, match="'int3' is not one of"):
        sage_hf.apply(model, "sage2", kv_cache="int3")
    assert model.config._attn_implementation == "sage_exact"
