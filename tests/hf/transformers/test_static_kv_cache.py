"""QuantizedKVCache with static shapes: transformers compiles decoding, in one graph, and the tokens stay the same."""

import copy
import pickle

import pytest
import torch
import transformers

import sage_hf
from tests.helpers.cached_models import NEW, PROMPT, build, distance, half_windowed, new_cache, prompt

pytestmark = pytest.mark.skipif(not NEW, reason="this transformers does not hand a cache's keywords to attention")


def static(model, format: str = "int8", length: int = 300) -> sage_hf.QuantizedKVCache:
    return sage_hf.QuantizedKVCache(model.config, format, max_cache_len=length)


def compiling(backend: str = "eager", **options) -> transformers.CompileConfig:
    """Compile on a CPU too, and let nothing break the graph."""
    config = transformers.CompileConfig(backend=backend, mode=None, **{"fullgraph": True} | options)
    config._compile_all_devices = True
    return config


@pytest.fixture(autouse=True)
def graphs():
    """Count compiled graphs."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch.compiler.reset()


def greedy(model, cache, inputs=None, **options) -> torch.Tensor:
    kwargs = {**(prompt() if inputs is None else inputs), "max_new_tokens": 20, "do_sample": False}
    return model.generate(**kwargs | options, cache=cache)


def step(model, cache, token: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(token, cache=cache).logits


@pytest.mark.parametrize(
    ("format", "backend", "padding"),
    [
        ("int4", "aot_eager", 13),
        *(
            pytest.param(one, "eager", padding, marks=pytest.mark.audit)
            for one in ("int8", "nvfp4")
            for padding in (0, 13)
        ),
    ],
)
def test_generate_compiles_decoding_once_and_gives_the_growing_caches_tokens(format, backend, padding, graphs):
    """`explain` shows the device's count, the capacity's bytes and the kernel."""
    model = build()
    expected = greedy(model, new_cache(model, format), prompt(padding))
    for _ in range(2):
        cache = static(model, format)
        assert torch.equal(greedy(model, cache, prompt(padding), compile_config=compiling(backend)), expected)
        assert graphs() == 1
    assert int(cache.get_seq_length()) == PROMPT + 19
    size, text = sum(layer.cache.bytes for layer in cache.layers), str(sage_hf.explain(model))
    assert f"KV cache: {format} in 2 layers, 169 tokens, {size:,} bytes; decoded by reference (emulated)" in text


@pytest.mark.audit
@pytest.mark.parametrize("format", ["int4", "nvfp4"])
def test_generate_compiles_decoding_by_inductor(format, graphs):
    model = build()
    expected = greedy(model, new_cache(model, format))
    assert torch.equal(greedy(model, static(model, format), compile_config=compiling("inductor")), expected)
    assert graphs() == 1


@pytest.mark.audit
def test_layers_behind_a_step_see_the_length_before_it():
    """Inductor computes positions and the mask anew in each layer, where the device has counted the step already.

    Some 4 sums of at most 150 terms in each of 3 layers are off by 2^-24 of the terms; another position costs 0.7 %.
    """
    model = build(num_hidden_layers=3)
    one, two = new_cache(model), static(model)
    for cache in (one, two):
        step(model, cache, prompt(0)["input_ids"])
    compiled = torch.compile(model.forward, fullgraph=True)
    for number in range(4):
        token = torch.full((2, 1), 7 + number)
        with torch.no_grad():
            found = compiled(token, cache=two).logits
        assert distance(found, step(model, one, token)) < 150 * 12 * 2**-24


@pytest.mark.parametrize("format", ["int4", *(pytest.param(one, marks=pytest.mark.audit) for one in ("int8", "nvfp4"))])
def test_logits_are_the_growing_caches_token_by_token(format):
    """From a prompt of one token, over the first and the newest tokens in 16 bits, to the first codes: equal to the
    bit, for the reference computes both."""
    model, tokens = build(num_hidden_layers=1), prompt(0)["input_ids"]
    one, two = new_cache(model, format), static(model, format)
    for number in range(PROMPT):
        part = tokens[:, number : number + 1]
        assert torch.equal(step(model, two, part), step(model, one, part)), number


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_beams": 3}, marks=pytest.mark.audit),
        {"num_beams": 3, "num_return_sequences": 2},
        pytest.param({"prefill_chunk_size": 60}, marks=pytest.mark.audit),
        {"disable_compile": True},
    ],
)
def test_generate_with_options_gives_the_growing_caches_tokens(options):
    model = build()
    expected = greedy(model, new_cache(model), **options)
    assert torch.equal(greedy(model, static(model), compile_config=compiling(fullgraph=False), **options), expected)


def test_a_second_turn_and_a_reset_compile_nothing_anew(graphs):
    model, caches, turns = build(), [], []
    for make in (new_cache, static):
        cache = make(model)
        caches.append(cache)
        ids = greedy(model, cache, prompt(0), compile_config=compiling())
        ids = torch.cat((ids, prompt(0)["input_ids"][:, :40]), 1)
        turns.append(greedy(model, cache, {"input_ids": ids}, compile_config=compiling()))
    assert torch.equal(*turns) and graphs() == 1
    memory = [layer.cache.key_codes.data_ptr() for layer in caches[1].layers]
    caches[1].reset()
    assert caches[1].get_seq_length() == 0
    other = {"input_ids": prompt(0)["input_ids"].flip(1)}
    found = greedy(model, caches[1], other, compile_config=compiling())
    assert torch.equal(found, greedy(model, new_cache(model), other)) and graphs() == 1
    assert [layer.cache.key_codes.data_ptr() for layer in caches[1].layers] == memory


def test_a_compiled_forward_makes_its_own_mask_and_positions(graphs):
    model = build()
    one, two = new_cache(model), static(model)
    with torch.no_grad():
        for cache in (one, two):
            model(prompt(0)["input_ids"], cache=cache)
        compiled = torch.compile(model.forward, backend="eager", fullgraph=True)
        for _ in range(5):
            token = torch.full((2, 1), 7)
            assert torch.equal(compiled(token, cache=two).logits, step(model, one, token))
    assert graphs() == 1


def test_there_is_no_token_behind_the_end():
    model = build()
    with pytest.raises(ValueError, match="600 tokens behind 0 do not fit into a cache of 512"):
        step(model, static(model), torch.ones(1, 600, dtype=torch.long))
    cache = static(model)
    step(model, cache, torch.ones(1, 511, dtype=torch.long))
    with pytest.raises(ValueError, match="2 tokens behind 511 do not fit"):
        step(model, cache, torch.ones(1, 2, dtype=torch.long))
    step(model, cache, torch.ones(1, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="513 tokens do not fit into a cache of 512"):
        step(model, cache, torch.ones(1, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="max_cache_len must be 1 token at least, got 0"):
        static(model, length=0)


def test_cropped_tokens_leave_no_trace_and_copies_go_on_by_themselves():
    model, ids = build(), prompt(0)["input_ids"]
    cache, other = static(model), static(model)
    for one in (cache, other):
        step(model, one, ids[:, :140])
    for _ in range(3):
        step(model, cache, ids[:, :1])
    cache.crop(-3)
    copied, loaded = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    found = [step(model, one, ids[:, 140:141]) for one in (cache, other, copied, loaded)]
    assert all(torch.equal(found[0], one) for one in found[1:])
    assert [int(one.record.tokens[0]) for one in (cache, other, copied, loaded)] == [141] * 4
    step(model, copied, ids[:, :1])
    assert (int(cache.get_seq_length()), int(copied.get_seq_length())) == (141, 142)
    assert (int(cache.record.tokens[0]), int(copied.record.tokens[0])) == (141, 142)


def test_a_number_of_sequences_is_kept():
    model = build()
    cache = static(model)
    step(model, cache, prompt(0)["input_ids"])
    for change in (lambda: cache.batch_repeat_interleave(2), lambda: cache.batch_select_indices(torch.tensor([0]))):
        with pytest.raises(ValueError, match="keeps its 2 sequences"):
            change()
    with pytest.raises(ValueError, match="of 2 sequences"):
        step(model, cache, torch.ones(3, 1, dtype=torch.long))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("when", ["prompt", "step"])
def test_an_attention_that_is_not_ours_is_refused_at_once(implementation, when):
    model = build()
    cache = static(model)
    if when == "step":
        step(model, cache, prompt(0)["input_ids"])
    model.set_attn_implementation(implementation)
    with pytest.raises(ValueError, match=f"'{implementation}' cannot read a quantised cache; leave max_cache_len out"):
        step(model, cache, prompt(0)["input_ids"] if when == "prompt" else torch.ones(2, 1, dtype=torch.long))


def test_a_model_with_sinks_is_refused_with_its_reason():
    config = {
        "vocab_size": 97, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "pad_token_id": 0,
        "num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"],
    }  # fmt: skip
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**config)).eval()
    model.set_attn_implementation("sage_exact")
    with pytest.raises(ValueError, match="s_aux given by the model; leave max_cache_len out"):
        step(model, static(model), prompt(0)["input_ids"])


@pytest.mark.parametrize("make", [pytest.param(half_windowed, marks=pytest.mark.audit), lambda: build(head_dim=256)])
def test_layers_in_16_bits_are_transformers_static_ones(make):
    model = make()
    cache = static(model, "int4")
    expected = greedy(model, new_cache(model, "int4"))
    options = {"compile_config": compiling()} if make is half_windowed else {"disable_compile": True}
    assert torch.equal(greedy(model, cache, **options), expected)
    kinds = {"StaticQuantizedLayer", "StaticSlidingWindowLayer"} if make is half_windowed else {"StaticLayer"}
    assert {type(layer).__name__ for layer in cache.layers} == kinds
    assert cache.is_compileable


def test_a_window_that_was_left_is_not_cropped():
    model = half_windowed()
    cache = static(model)
    step(model, cache, prompt(0)["input_ids"])
    with pytest.raises(RuntimeError, match="does not track past states"):
        cache.crop(-1)
    assert int(cache.get_seq_length()) == PROMPT


@pytest.mark.parametrize("where", ["call", "given config", "model's config"])
def test_apply_makes_a_static_cache_of_the_length_that_is_needed(where):
    model = build("eager")
    two = transformers.StoppingCriteriaList([lambda ids, *_, **__: torch.full((2,), ids.shape[1] == PROMPT + 2)])
    kwargs = {**prompt(), "do_sample": False, "return_dict_in_generate": True, "stopping_criteria": two}
    options = {"cache_implementation": "static", "max_new_tokens": 400}
    if where == "given config":
        options = {"generation_config": transformers.GenerationConfig(**options)}
    elif where == "model's config":
        model.generation_config.cache_implementation = "static"
        options = {"max_new_tokens": 400}
    with sage_hf.apply(model, "exact", kv_cache="int8"):
        found = model.generate(**kwargs, **options)
        assert found.cache.is_compileable and found.cache.get_max_length() == 1024
        shorter = model.generate(prompt()["input_ids"], cache_implementation="static", max_cache_len=300,
                                 max_new_tokens=2, return_dict_in_generate=True)  # fmt: skip
        assert shorter.cache.get_max_length() == 1024  # of another length, decoding would be compiled anew
        if where == "call":
            with pytest.raises(ValueError, match="set max_new_tokens or max_cache_len, or pass cache="):
                model.generate(**kwargs, cache_implementation="static")
    assert found.sequences.shape == (2, PROMPT + 2)


def test_a_bfloat16_model_decodes_as_with_the_growing_cache():
    model = build().bfloat16()
    one, two = new_cache(model, "int4"), static(model, "int4")
    for cache in (one, two):
        step(model, cache, prompt(0)["input_ids"])
    token = torch.full((2, 1), 7)
    assert distance(step(model, two, token).float(), step(model, one, token).float()) == 0
