"""QuantizedKVCache through `generate` and `forward`: right, or refused with a reason."""

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import transformers

import sage_hf
import sage_kernels.kv_cache
from sage_hf import kv_record
from sage_hf.transformers import kv_layer
from tests.helpers import model_zoo
from tests.helpers.cached_models import (
    DECODER,
    NAME,
    NEW,
    PROMPT,
    build,
    distance,
    half_windowed,
    hands_on,
    new_cache,
    prompt,
    windowed,
)


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
    return torch.cat(found, 1)[inputs["attention_mask"][:, :start].bool()]


IMPLEMENTATIONS = ("sage_exact", "sage1", "sdpa", "eager")


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    with torch.no_grad():
        inputs = prompt()
        places = (inputs["attention_mask"].cumsum(1) - 1).clamp_min(0)
        return build("eager")(**inputs, position_ids=places).logits[inputs["attention_mask"].bool()]


@pytest.mark.parametrize(
    ("format", "bound", "implementation"),
    [
        *(("int4", 0.08, one) for one in IMPLEMENTATIONS),
        *(("int8", 0.01, "sage_exact"), ("nvfp4", 0.08, "sage_exact")),
        *(
            pytest.param(*case, one, marks=pytest.mark.audit)
            for case in (("int8", 0.01), ("nvfp4", 0.08))
            for one in IMPLEMENTATIONS[1:]
        ),
    ],
)
@pytest.mark.parametrize("chunks", [(140, *[1] * 10), (130, 7, 13), (30, 70, 50), (64, *[16] * 5, 6)], ids=str)
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
    "options",
    [
        {},
        {"num_beams": 3},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "num_return_sequences": 2},
        {"prompt_lookup_num_tokens": 3, "eos_token_id": 1},
        {"prefill_chunk_size": 60},
    ],
)
def test_generate_gives_the_default_caches_tokens(options):
    model = build()
    inputs = prompt() if "prompt_lookup_num_tokens" not in options else {"input_ids": prompt(0)["input_ids"][:1]}
    kwargs = {"max_new_tokens": 12, "do_sample": False, **inputs, **options}
    torch.manual_seed(2)
    expected = model.generate(**kwargs)
    torch.manual_seed(2)
    assert torch.equal(model.generate(**kwargs, **{NAME: new_cache(model)}), expected)


@pytest.mark.parametrize("format", ["int8", "int4", "nvfp4"])
def test_returned_sequences_match_repeated_prompts(format):
    model = build()
    kwargs = {"max_new_tokens": 12, "do_sample": True}
    torch.manual_seed(2)
    repeated = {name: x.repeat_interleave(2, 0) for name, x in prompt().items()}
    expected = model.generate(**repeated, **kwargs, **{NAME: new_cache(model, format)})
    torch.manual_seed(2)
    found = model.generate(**prompt(), **kwargs, num_return_sequences=2, **{NAME: new_cache(model, format)})
    assert torch.equal(found, expected)


HELP = ("itself", "a worse model", "a worse model with a cache", "windows", "the prompt")


@pytest.mark.parametrize(
    ("make", "format", "help_of"),
    [
        *((build, "int4", one) for one in ("itself", "a worse model", "the prompt")),
        *((half_windowed, "int4", one) for one in ("a worse model with a cache", "windows")),
        *(pytest.param(build, "int4", one, marks=pytest.mark.audit) for one in HELP[2:4]),
        *(pytest.param(half_windowed, "int4", HELP[index], marks=pytest.mark.audit) for index in (0, 1, 4)),
        *(pytest.param(build, "int8", one, marks=pytest.mark.audit) for one in HELP),
    ],
)
def test_assisted_decoding_gives_the_tokens_of_the_same_cache_without_assistance(make, format, help_of, monkeypatch):
    """Greedy tokens, all of them: those of several tokens a step, some cropped again, and of one token a step."""
    if (make is half_windowed or help_of == "windows") and not NEW:
        pytest.skip("this transformers cannot crop a layer with a window")
    model, removed = make(), []
    crop = sage_hf.QuantizedKVCache.crop

    def count(cache, tokens):
        before = cache.get_seq_length()
        crop(cache, tokens)
        removed.append(before - cache.get_seq_length())

    monkeypatch.setattr(sage_hf.QuantizedKVCache, "crop", count)
    ids = prompt(0)["input_ids"][:1, :100].repeat(1, 2)
    kwargs = {"input_ids": ids, "max_new_tokens": 24, "do_sample": False}
    if help_of == "the prompt":
        kwargs["eos_token_id"] = 1  # transformers 4.56 asks for one
    expected = model.generate(**kwargs, **{NAME: new_cache(model, format)})
    assert not removed
    if help_of == "the prompt":
        found = model.generate(**kwargs, prompt_lookup_num_tokens=4, **{NAME: new_cache(model, format)})
    else:
        worse = windowed if help_of == "windows" else build
        assistant = copy.deepcopy(model) if help_of == "itself" else worse(num_hidden_layers=1)
        assistant.generation_config.num_assistant_tokens = 5
        if help_of in ("a worse model with a cache", "windows"):
            sage_hf.apply(assistant, "exact", kv_cache="int4")
        found = model.generate(**kwargs, assistant_model=assistant, **{NAME: new_cache(model, format)})
    assert torch.equal(found, expected)
    assert removed and (help_of in ("itself", "the prompt") or max(removed) > 0)


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_tokens_that_were_cropped_leave_no_trace(format):
    model, inputs = build(), prompt()
    caches = [new_cache(model, format) for _ in range(2)]
    for cache in caches:
        logits(model, cache, (130, 10), inputs)
    with torch.no_grad():
        model(torch.ones(2, 5, dtype=torch.long), **{NAME: caches[0]})
        caches[0].crop(-5)
        assert caches[0].record.tokens == caches[0].get_seq_length() == 140
        last = [model(inputs["input_ids"][:, 140:], **{NAME: cache}).logits for cache in caches]
    assert torch.equal(*last)


@hands_on
@pytest.mark.parametrize("number", [100, -5])
def test_a_crop_that_a_window_refuses_changes_nothing(number):
    model = half_windowed()
    cache = new_cache(model)
    logits(model, cache, (PROMPT,))
    before = [layer.keys for layer in cache.layers]
    with pytest.raises(RuntimeError, match="does not track past states"):
        cache.crop(number)
    assert [layer.get_seq_length() for layer in cache.layers] == [PROMPT, PROMPT]
    assert all(one is two for one, two in zip(before, (layer.keys for layer in cache.layers), strict=True))


def test_a_positive_crop_keeps_so_many_tokens_in_all_layers():
    model = half_windowed(sliding_window=200)
    cache = new_cache(model)
    logits(model, cache, (PROMPT,))
    cache.crop(PROMPT + 1)
    cache.crop(100)
    assert [layer.get_seq_length() for layer in cache.layers] == [100, 100]


@pytest.mark.parametrize("format", ["int8", "int4", "nvfp4"])
def test_a_prefilled_cache_is_copied_for_each_answer(format):
    model, ids = build(), prompt(0)["input_ids"]
    kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    prefilled = new_cache(model, format)
    with torch.no_grad():
        model(ids[:, :140], **{NAME: prefilled})
    whole = [x for layer in prefilled.layers for x in sage_kernels.kv_cache.read_all(layer.cache)]
    copies = [copy.deepcopy(prefilled) for _ in range(2)]
    found = [model.generate(ids, **kwargs, **{NAME: cache}) for cache in copies]
    assert torch.equal(*found)
    assert prefilled.get_seq_length() == prefilled.record.tokens == 140
    assert copies[0].record is not prefilled.record and copies[0].record.tokens == PROMPT + 11
    after = [x for layer in prefilled.layers for x in sage_kernels.kv_cache.read_all(layer.cache)]
    assert all(torch.equal(one, two) for one, two in zip(whole, after, strict=True))
    assert torch.equal(model.generate(ids, **kwargs, **{NAME: prefilled}), found[0])


def test_a_copied_cache_still_knows_the_models_attention():
    model = build()
    cache = new_cache(model)
    logits(model, cache, (140,), prompt(0))
    copied, (other_model, other) = copy.deepcopy(cache), copy.deepcopy((model, cache))
    assert all(layer.config is other_model.config for layer in other.layers)
    model.set_attn_implementation("sdpa")
    other_model.set_attn_implementation("eager")
    with torch.no_grad():
        last = [
            one(prompt(0)["input_ids"][:, 140:], **{NAME: its}).logits
            for one, its in ((model, cache), (model, copied), (other_model, other))
        ]
    assert torch.equal(last[0], last[1]) and distance(last[2], last[0]) < 1e-4


@pytest.mark.parametrize("copied", [False, True])
def test_a_cache_that_was_filled_in_inference_mode_goes_on_outside(copied):
    model, ids = build(), prompt(0)["input_ids"]
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        cache = new_cache(model, "nvfp4")
        with mode():
            model(ids[:, :140], **{NAME: cache})
            cache = copy.deepcopy(cache) if copied else cache
        found.append(model.generate(ids, max_new_tokens=4, do_sample=False, **{NAME: cache}))
    assert torch.equal(*found)


@pytest.mark.parametrize("format", ["int8", "int4", "nvfp4"])
def test_a_cache_is_saved_and_loaded(format):
    model, inputs, file = build(), prompt(0), io.BytesIO()
    cache = new_cache(model, format)
    logits(model, cache, (140,), inputs)
    torch.save(cache, file)
    file.seek(0)
    caches = [cache, pickle.loads(pickle.dumps(cache)), torch.load(file, weights_only=False)]
    first, *others = (model.generate(**inputs, max_new_tokens=5, do_sample=False, **{NAME: one}) for one in caches)
    assert all(torch.equal(first, one) for one in others)


@hands_on
def test_a_cache_of_another_models_config_is_refused_before_the_step_ends():
    """Its layers hand their codes to an attention that does not know them, and would see the newest token alone."""
    ids, cache = prompt(0)["input_ids"], new_cache(build())
    with torch.no_grad():
        build()(ids, **{NAME: cache})
        for _ in range(2):
            with pytest.raises(RuntimeError, match="attention did not take the KV cache"):
                build("sdpa")(ids[:, :1], **{NAME: cache})


@pytest.mark.parametrize("kind", ["prefix", "blocks"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_prompt_with_a_mask_of_its_own_is_stored(kind, dtype):
    """Let tokens of the prompt see each other, as those of an image do."""
    ids = prompt(0)["input_ids"]
    allowed = torch.ones(PROMPT + 1, PROMPT + 1, dtype=torch.bool).tril()
    if kind == "prefix":
        allowed[:20, :20] = True
    else:
        allowed[40:75, :30] = False
    seen = allowed.expand(2, 1, -1, -1) & (torch.arange(PROMPT + 1) >= torch.tensor([5, 0])[:, None])[:, None, None]
    masks = [torch.where(seen, 0.0, torch.finfo(torch.float32).min), seen]
    model, cache = build(), new_cache(build())
    with torch.no_grad():
        expected = build("eager")(torch.cat((ids, ids[:, :1]), 1), attention_mask=masks[0]).logits
        mask = masks[dtype == torch.bool]
        first = model(ids, attention_mask=mask[..., :-1, :-1], **{NAME: cache}).logits
        last = model(ids[:, :1], attention_mask=mask[..., -1:, :], **{NAME: cache}).logits
    found = torch.cat((first, last), 1)
    assert distance(found[0, 5:], expected[0, 5:]) < 0.01 and distance(found[1], expected[1]) < 0.01
    if NEW and dtype == torch.bool:
        assert cache.layers[0].cache.start.tolist() == [5, 0]


def test_threads_that_generate_with_one_model_keep_their_own_notes():
    model = build()
    kwargs = {"max_new_tokens": 8, "do_sample": False, **prompt()}
    formats = ["int8", "int4", "nvfp4"]
    alone, together = ([new_cache(model, format) for format in formats] for _ in range(2))
    expected = [model.generate(**kwargs, **{NAME: cache}) for cache in alone]
    with ThreadPoolExecutor(3) as threads:
        found = threads.map(lambda cache: model.generate(**kwargs, **{NAME: cache}), together)
        assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    assert [cache.record for cache in together] == [cache.record for cache in alone]


def test_a_note_is_read_while_another_thread_writes_it():
    record = kv_record.KVRecord("int4")

    class Writing(str):
        def __format__(self, specification: str) -> str:
            record.kernels[f"kernel {len(record.kernels)}"] = ""
            record.exact_layers[f"reason {len(record.exact_layers)}"] = [1]
            return "written"

    record.kernels[Writing()], record.exact_layers[Writing()] = "", [0]
    assert "decoded by written; 16 bits in layers 0 (written)" in str(record)


@pytest.mark.audit
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
    assert cache.layers[0].whole_reason


def test_whole_k_and_v_are_said_once(monkeypatch):
    said = []
    monkeypatch.setattr(kv_layer, "_warned", set())
    monkeypatch.setattr(kv_layer.logger, "warning", said.append)
    model = build("sdpa")
    logits(model, new_cache(model), (140, *[1] * 10))
    assert len(said) == 1 and "dequantised at every step" in said[0]


def test_a_users_own_generate_is_called_and_comes_back():
    model, own = build("eager"), []
    model.generate = mine = lambda *args, **kwargs: (
        own.append(kwargs[NAME]) or type(model).generate(model, *args, **kwargs)
    )
    with sage_hf.apply(model, "exact", kv_cache="int8") as handle:
        model.generate(**prompt(), max_new_tokens=2)
        assert [type(cache) for cache in own] == [sage_hf.QuantizedKVCache]
        del model.generate
        handle.restore()
    assert model.generate is mine


@hands_on
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
        model.generation_config.use_cache = False
        assert model.generate(**kwargs, generation_config=transformers.GenerationConfig()).get(NAME) is None
        model.generation_config.use_cache = True
    assert "generate" not in vars(model)
    assert type(model.generate(**kwargs)[NAME]) is transformers.DynamicCache


@hands_on
def test_a_cache_of_an_earlier_switch_is_not_explained():
    model = build("eager")
    handle = sage_hf.apply(model, "sage2", kv_cache="int8")
    model.generate(**prompt(), max_new_tokens=3)
    assert "KV cache: int8" in str(sage_hf.explain(model))
    handle.restore()
    assert "KV cache" not in str(sage_hf.explain(model))
    with sage_hf.apply(model, "sage2", kv_cache="int4"):
        model.generate(**prompt(), max_new_tokens=3)
        sage_hf.apply(model, "sage2")
        model.generate(**prompt(), max_new_tokens=3)
        assert "KV cache" not in str(sage_hf.explain(model))


@pytest.mark.parametrize("where", ["call", "given config", "model's config"])
@pytest.mark.parametrize("name", ["offloaded", "offloaded_static", "dynamic", "quantized"])
def test_a_cache_implementation_is_refused_where_generate_makes_a_quantised_cache(name, where):
    model = build("eager")
    kwargs = {**prompt(), "max_new_tokens": 3, "do_sample": False}
    options = {"cache_implementation": name}
    if where == "given config":
        options = {"generation_config": transformers.GenerationConfig(**options)}
    elif where == "model's config":
        model.generation_config.cache_implementation = name
        options = {}
    with sage_hf.apply(model, "exact", kv_cache="int4"):
        with pytest.raises(ValueError, match=f"cache_implementation='{name}' and kv_cache='int4' name two caches"):
            model.generate(**kwargs, **options)
        model.generation_config.cache_implementation = None
        own = transformers.StaticCache(model.config, max_cache_len=PROMPT + 3)
        expected = model.generate(**kwargs, use_cache=False)
        assert torch.equal(model.generate(**kwargs, **{NAME: own}), expected)
    with pytest.raises(ValueError, match="Passing both"):
        model.generate(**kwargs, cache_implementation=name, **{NAME: new_cache(model)})


def test_the_default_cache_of_older_files_is_replaced():
    model = build("eager")
    model.generation_config.cache_implementation = "hybrid"
    with sage_hf.apply(model, "exact", kv_cache="int4"):
        found = model.generate(**prompt(), max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    assert type(found[NAME]) is sage_hf.QuantizedKVCache


@hands_on
def test_generate_does_not_compile_decoding_with_a_quantised_cache(monkeypatch):
    model = build("eager")
    monkeypatch.setattr(type(model), "get_compiled_call", lambda *args: pytest.fail("compiled"))
    compiled = transformers.CompileConfig(backend="eager")
    compiled._compile_all_devices = True
    kwargs = {**prompt(), "max_new_tokens": 3, "do_sample": False, "compile_config": compiled}
    with sage_hf.apply(model, "exact", kv_cache="int8"):
        assert torch.equal(model.generate(**kwargs), model.generate(**kwargs, use_cache=False))
    linear = sage_hf.QuantizedKVCache(transformers.MambaConfig(num_hidden_layers=1))
    assert transformers.DynamicCache(config=transformers.MambaConfig(num_hidden_layers=1)).is_compileable
    assert not linear.is_compileable


def test_a_model_of_windows_alone_generates_in_16_bits_and_says_so(monkeypatch):
    said = []
    monkeypatch.setattr(kv_layer, "_warned", set())
    monkeypatch.setattr(kv_layer.logger, "warning", said.append)
    model = windowed()
    kwargs = {**prompt(), "max_new_tokens": 8, "do_sample": False}
    expected = model.generate(**kwargs)
    with sage_hf.apply(model, "exact", kv_cache="int4"):
        assert torch.equal(model.generate(**kwargs), expected)
    assert torch.equal(model.generate(**kwargs, **{NAME: new_cache(model)}), expected)
    assert said == ["KV cache: layers 0, 1 stay in 16 bits: sliding window"]


def test_layers_with_a_sliding_window_stay_in_16_bits_and_say_so():
    model = half_windowed()
    cache = new_cache(model)
    assert cache.record.exact_layers == {"sliding window": [1]}
    kwargs = {**prompt(), "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(**kwargs, **{NAME: cache}), model.generate(**kwargs))
    assert "16 bits in layers 1 (sliding window)" in str(cache.record)
    assert cache.layers[0].cache.length == PROMPT + 7


@pytest.mark.parametrize("head_dim", [32, 256])
def test_other_head_dims_stay_in_16_bits_and_say_so(head_dim):
    model = build(head_dim=head_dim)
    cache = new_cache(model)
    kwargs = {**prompt(), "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(model.generate(**kwargs, **{NAME: cache}), model.generate(**kwargs))
    cache.reset()
    assert torch.equal(model.generate(**kwargs, **{NAME: cache}), model.generate(**kwargs))
    assert cache.record.exact_layers == {f"head_dim {head_dim} is outside 64…128": [0, 1]}


def test_v_of_another_head_dim_stays_in_16_bits():
    """Multi-head latent attention hands K of 192 and V of 128 channels to its cache."""
    cache = new_cache(build())
    key, value = torch.randn(1, 2, 9, 96), torch.randn(1, 2, 9, 64)
    assert torch.equal(cache.update(key, value, 0)[1], value)
    assert cache.record.exact_layers == {"V has head_dim 64, K 96": [0]}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.T5Config(), "encoder-decoder"),
        (SimpleNamespace(cross_attention_layers=[1]), "cross-attention"),
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
    assert kv_layer.WHOLE in cache.record.kernels


@pytest.mark.parametrize("name", ["jetmoe", "diffllama", "doge"])
@pytest.mark.parametrize("implementation", ["sage_exact", "sage_bwd"])
def test_attention_that_computes_with_k_v_or_its_mask_decodes_from_whole_k_and_v(name, implementation, monkeypatch):
    """JetMoe repeats K and V behind the cache, DiffLlama attends twice, and Doge makes a bias of V."""
    if name not in model_zoo.NAMES:
        pytest.skip(f"this transformers has no {name}")
    for key in ("kv_channels", "head_dim"):
        monkeypatch.setitem(model_zoo.SIZES, key, 64)
    monkeypatch.setitem(model_zoo.SIZES, "hidden_size", 256)
    model = model_zoo.build(name, implementation)
    expected = logits(model, transformers.DynamicCache(config=model.config), (140, 1, 1, 8))
    cache = new_cache(model)
    assert distance(logits(model, cache, (140, 1, 1, 8)), expected) < 0.01
    assert list(cache.record.kernels) == [kv_layer.WHOLE] and all(layer.cache for layer in cache.layers)


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
