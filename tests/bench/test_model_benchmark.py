"""The benchmark of whole models: what it builds, what it measures, and what it writes."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import sage_hf
from sage_hf.app.cli import main
from sage_hf.bench import measure_models, model_providers, model_tables, models, plots, results
from sage_hf.bench.cases import SHAPES, BenchCase
from sage_hf.bench.model_providers import MODEL_PROVIDERS, TRAINING_MODEL_PROVIDERS
from sage_hf.bench.models import MODELS, BenchModel
from sage_hf.sparse import Sparse
from sage_kernels import qk_norm_rope
from sage_kernels.dispatch import registry
from tests.helpers.kernels import registered_kernels

CPU = torch.device("cpu")
NAMED = {model.name: model for model in MODELS}
FACTS = {
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "cuda": "13.0",
    "commit": "0" * 40,
    "date": "today",
}


def tiny_inputs(batch):
    def inputs(draw):
        return {
            "hidden_states": draw.normal(batch, 3, 4, 16, 16),
            "encoder_hidden_states": draw.normal(batch, 8, 32),
            "timestep": draw.full(5, batch, dtype=torch.int64),
        }

    return inputs


TINY_COGVIDEOX = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "in_channels": 4}
TINY_COGVIDEOX |= {"out_channels": 4, "text_embed_dim": 32, "time_embed_dim": 16, "sample_width": 16}
TINY_COGVIDEOX |= {"sample_height": 16, "sample_frames": 9, "max_text_seq_length": 8}
TINY_LLAMA = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
TINY_LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}


def tiny(name: str) -> BenchModel:
    """One of MODELS, so small that a CPU runs it at once."""
    model = NAMED[name]
    if model.library == "diffusers":
        return replace(model, config=TINY_COGVIDEOX, inputs=tiny_inputs(1), layers_of_model=2, layers=None)
    tokens = 1 if model.kind == "decode" else 80
    inputs = models.token_batch(tokens, 97) if model.training else lambda draw: {"input_ids": draw.ids(97, 1, tokens)}
    return replace(
        model,
        config=TINY_LLAMA,
        inputs=inputs,
        layers_of_model=2,
        layers=None,
        cache_tokens=100 if model.kind == "decode" else 0,
    )


def calls_of(step) -> list[tuple[BenchCase, bool]]:
    """The attention calls of a step: sizes, with the keys' number of tokens; whether there is a mask."""
    calls, original = [], F.scaled_dot_product_attention

    def attend(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, **options):
        sizes = query.shape[0], query.shape[1], key.shape[1], key.shape[2], query.shape[3]
        calls.append((BenchCase.square("", sizes, causal=is_causal), attn_mask is not None))
        return original(query, key, value, attn_mask, dropout_p, is_causal, **options)

    with model_providers.replaced_sdpa(attend):
        step()
    return calls


@pytest.mark.audit
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_real_architecture_attends_over_the_documented_tokens(model):
    """Models have one block of each kind, and no data."""
    if model.name == "mochi":
        pytest.skip("finds the valid text tokens by their values; the next test runs it with data")
    if model.name == "sdxl":
        model = replace(model, config=dict(model.config) | {"transformer_layers_per_block": (1, 1, 1)})
    if model.name == "llama-3-training-8k":  # transformers reads the values of the mask.
        inputs = model.inputs
        model = replace(model, inputs=lambda draw: {**inputs(draw), "attention_mask": None})
    with FakeTensorMode(), torch.set_grad_enabled(model.training):
        loaded = models.load(model, CPU, layers=1)
        calls = calls_of(lambda: (loaded.step(), loaded.reset()))
        sage_hf.apply(loaded.module, "sage_bwd" if model.training else "sage2").restore()
    largest, masked = max(calls, key=lambda call: call[0].kv_len)
    if model.name == "llama-3-training-8k":  # Without values, transformers writes causality in a mask.
        largest, masked = replace(largest, kv_heads=8, mask="causal"), False
    assert replace(largest, name=model.name) == model.attention and masked == model.masked


def test_mochi_takes_its_inputs_and_attends_over_the_documented_tokens():
    model = NAMED["mochi"]
    inputs = model.inputs(models.Draw(torch.device("meta")))
    _, _, frames, height, width = inputs["hidden_states"].shape
    assert frames * (height // 2) * (width // 2) + inputs["encoder_attention_mask"].shape[1] == model.attention.kv_len

    def small(draw):
        return {
            "hidden_states": draw.normal(2, 12, 2, 12, 12),
            "encoder_hidden_states": draw.normal(2, 9, 32),
            "timestep": draw.full(500, 2, dtype=torch.int64),
            "encoder_attention_mask": draw.padding(2, 9, 9),
        }

    config = {**model.config, "num_attention_heads": 2, "attention_head_dim": 32, "text_embed_dim": 32}
    config |= {"pooled_projection_dim": 64, "time_embed_dim": 16}
    with torch.no_grad():
        loaded = models.load(replace(model, config=config, inputs=small), CPU, layers=1)
        calls = calls_of(loaded.step)
    assert [case.kv_len for case, _ in calls[-2:]] == [2 * 6 * 6 + 9] * 2


def test_names_are_unique_and_calls_match_the_other_benchmark():
    assert len(NAMED) == len(MODELS) == len({model.label for model in MODELS})
    shapes = {shape.name: shape for shape in SHAPES}
    for name, other in (("cogvideox-2b", "cogvideox-2b"), ("mochi", "mochi"), ("flux-1024", "flux")):
        assert replace(NAMED[name].attention, name=other) == shapes[other]
    assert replace(NAMED["llama-3-prefill-32k"].attention, name="llama-3-prefill") == shapes["llama-3-prefill"]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_a_configuration_has_the_layers_of_the_model_and_shrinks_evenly(model):
    if model.depths:
        assert sum(model.config[name] for name in model.depths) == model.layers_of_model
    _, layers = model.shortened()
    assert layers == (model.layers or model.layers_of_model)
    config, layers = model.shortened(1)
    assert layers == (len(model.depths) or model.layers_of_model)
    assert all(config[name] == 1 for name in model.depths)
    assert model.shortened(10**6) == (dict(model.config), model.layers_of_model)


@pytest.mark.audit
def test_a_cpu_measures_every_kind_of_step(monkeypatch):
    monkeypatch.setattr(measure_models, "SECONDS", 1e-3)
    lines, written = [], []
    names = ("cogvideox-2b", "llama-3-decode-8k", "cogvideox-2b-training", "llama-3-training-8k")
    result = measure_models.run(
        CPU, [tiny(name) for name in names], progress=lines.append, write=lambda now: written.append(len(now["rows"]))
    )
    rows = {(row["name"], row["provider"]): row for row in result["rows"]}
    assert [name for name, _ in dict.fromkeys((row["name"], "") for row in result["rows"])] == list(names)
    assert len(written) == 4 and written == sorted(set(written)) and len(lines) == 2 * 4 + len(result["rows"])
    for name in names:
        training = name.endswith(("training", "training-8k"))
        ours = rows[name, "sage_hf:sage_bwd" if training else "sage_hf:sage2"]
        exact = rows[name, "default"]
        assert min(ours["ms"], exact["ms"]) > 0 and ours["layers"] == ours["layers_of_model"] == 2
        assert exact["rel_l1"] == 0 and (exact["attention_share"] is None) == training
        if name == "llama-3-decode-8k":  # Few queries run exactly, and on the same cache.
            assert ours["kernels"] == {"sdpa": 2} and ours["rel_l1"] == 0
        else:
            assert all(kernel.startswith("reference") for kernel in ours["kernels"]) and 0 < ours["rel_l1"] < 0.02
        # With checkpointing, the forward pass runs twice.
        assert sum(ours["kernels"].values()) == (4 if name == "cogvideox-2b-training" else 2)
    assert "not installed" in rows["cogvideox-2b", "sageattention2"]["unavailable"]
    assert json.loads(results.to_json(result)) == result
    assert "Not measured:\n" in model_tables.model_text(result) and "| `sage_bwd` |" in model_tables.model_gain(result)


def test_a_step_is_measured_without_each_part_of_ours_and_all_is_as_before(monkeypatch):
    """FlashAttention 3 is not installed on a CPU: the provider that leaves it out says so."""
    monkeypatch.setattr(measure_models, "SECONDS", 1e-3)
    kernels = registered_kernels()
    providers = [one for one in MODEL_PROVIDERS if one.name == "default" or one.name.startswith("sage_hf:sage2")]
    rows = measure_models.run(CPU, [tiny("cogvideox-2b")], providers, progress=lambda line: None)["rows"]
    found = {row["provider"]: row for row in rows}
    assert found["sage_hf:sage2"]["kernels"] == {"reference": 2}
    for name in ("sage_hf:sage2, no low bits", "sage_hf:sage2, no low bits, no norms"):
        assert found[name]["kernels"] == {"sdpa": 2} and found[name]["rel_l1"] == 0
    assert "not installed" in found["sage_hf:sage2, no fa3"]["unavailable"]
    assert found["sage_hf:sage2"]["qk_norm_rope"] == 0 and found["sage_hf:sage2"]["fa3_installed"] is False
    assert "qk_norm_rope" not in found["default"] and registered_kernels() == kernels
    (gain,) = model_tables.model_gains({**FACTS, "rows": rows})
    assert len(gain.saved_ms) == 3 and sum(gain.saved_ms) == pytest.approx(gain.before_ms - gain.after_ms)


def test_a_switch_for_measurements_leaves_kernels_and_norms_out(monkeypatch):
    monkeypatch.setattr(qk_norm_rope.cache, "is_plain", lambda x: True)
    x = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    assert qk_norm_rope.is_served(x)
    qk_norm_rope.set_enabled(False)
    assert not qk_norm_rope.is_served(x)
    qk_norm_rope.set_enabled(True)
    before = list(registry.forwards), list(registry.exacts)
    with registry.without("fa3", "int8_forward"):
        assert "fa3" not in registry.exacts and "int8_forward" not in registry.forwards
    assert (list(registry.forwards), list(registry.exacts)) == before


def test_decoding_goes_on_behind_a_cache_that_grows(monkeypatch):
    """First steps have one length, so their outputs can be compared; those that are timed have one token more each."""
    monkeypatch.setattr(measure_models, "SECONDS", 1e-3)
    attended, attend = [], F.scaled_dot_product_attention
    monkeypatch.setattr(
        F,
        model_providers.PYTORCH,
        lambda query, key, *rest, **options: attended.append(key) or attend(query, key, *rest, **options),
    )
    default = [one for one in MODEL_PROVIDERS if one.name == "default"]
    measure_models.run(CPU, [tiny("llama-3-decode-8k")], default, progress=lambda line: None)
    timed = 2 * measure_models.MIN_TURNS
    of_first_layer = attended[::2]
    assert [key.shape[2] for key in of_first_layer] == [101, 101, *range(102, 102 + timed)]


def test_sparse_attention_has_a_column_of_its_own_and_is_no_gain(monkeypatch):
    """It computes something else, and only where the grid of tokens is known and calls are long enough."""
    monkeypatch.setattr(measure_models, "SECONDS", 1e-3)
    (ours,) = (one for one in MODEL_PROVIDERS if one.name == "sage_hf:sage2 keep .25")
    eager = replace(ours, use=model_providers.ours_sparse("sage2", Sparse("mean", 0.5, from_tokens=1)))
    providers = [one for one in MODEL_PROVIDERS if one.name in ("default", "sage_hf:sage2")]
    video, text = tiny("cogvideox-2b"), tiny("llama-3-prefill-1k")
    (short,) = measure_models.run(CPU, [video], [ours], progress=lambda line: None)["rows"]
    assert "none of this model's attention calls is sparse" in short["unavailable"]
    monkeypatch.setattr(measure_models, "MODEL_PROVIDERS", [*providers, eager])
    result = measure_models.run(CPU, [video, text], [*providers, eager], progress=lambda line: None)
    rows = {row["name"]: row for row in result["rows"] if row["provider"] == ours.name}
    assert rows["cogvideox-2b"]["ms"] > 0 and sum(rows["cogvideox-2b"]["kernels"].values()) == 2
    assert "grid of video tokens is unknown" in rows["llama-3-prefill-1k"]["unavailable"]
    assert "| sage2 keep .25 |" in model_tables.model_speed(result)
    assert {gain.recipe for gain in model_tables.model_gains(result)} == {"sage2"}


def test_a_failure_is_a_row_and_a_line_and_the_rest_is_measured(monkeypatch):
    monkeypatch.setattr(measure_models, "SECONDS", 1e-3)

    def out_of_memory(draw):
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    lines = []
    good = tiny("llama-3-prefill-1k")
    too_old = replace(tiny("cogvideox-2b"), class_name="NoSuchTransformer")
    providers = [one for one in MODEL_PROVIDERS if one.name == "default"]
    broken = [replace(good, inputs=out_of_memory), too_old, good]
    first, second, third = measure_models.run(CPU, broken, providers, progress=lines.append)["rows"]
    assert first["unavailable"] == "OutOfMemoryError: CUDA out of memory." and "ms" not in first
    assert "NoSuchTransformer" in second["unavailable"] and third["ms"] > 0
    assert "default, eager, 2 of 2 layers: failed: OutOfMemoryError: CUDA out of memory." in lines[1]


def test_the_replacement_of_sdpa_serves_only_calls_without_masks(monkeypatch):
    def theirs(query, key, value, is_causal, scale):
        seen.append((tuple(query.shape), is_causal, scale))
        return torch.zeros_like(query)

    seen = []
    use = model_providers.in_place_of_pytorch("theirs", lambda: theirs)
    q, mask = torch.randn(1, 2, 8, 16, dtype=torch.bfloat16), torch.ones(8, 8, dtype=torch.bool)
    original = F.scaled_dot_product_attention
    model = tiny("cogvideox-2b")
    with use(model, torch.nn.Module()) as observe:

        def step():
            masked = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
            F.scaled_dot_product_attention(q[:, :, :1], q, q, is_causal=True)  # PyTorch aligns it at the first key.
            return masked + F.scaled_dot_product_attention(query=q, key=q, value=q, is_causal=True, scale=0.5)

        output, kernels = observe(step)
        with pytest.raises(RuntimeError, match="serves none of this model's attention calls"):
            observe(lambda: F.scaled_dot_product_attention(q.float(), q.float(), q.float()))
    assert F.scaled_dot_product_attention is original
    assert seen == [((1, 2, 8, 16), True, 0.5)] and kernels == {"theirs": 1, "scaled_dot_product_attention": 2}
    assert torch.equal(output, F.scaled_dot_product_attention(q, q, q))
    with pytest.raises(RuntimeError, match="takes no mask"), use(replace(model, masked=True), torch.nn.Module()):
        pass


def test_a_result_that_only_the_provider_breaks_has_no_time(monkeypatch):
    monkeypatch.setattr(measure_models, "SECONDS", 1e-3)
    broken = model_providers.in_place_of_pytorch("broken", lambda: lambda query, *rest: query * torch.nan)
    providers = (model_providers.DEFAULT, model_providers.ModelProvider("broken", "Broken", broken))
    monkeypatch.setattr(measure_models, "MODEL_PROVIDERS", providers)
    rows = measure_models.run(CPU, [tiny("cogvideox-2b")], providers, progress=lambda line: None)["rows"]
    assert rows[0]["ms"] > 0 and "holds NaN or infinity" in rows[1]["unavailable"] and "ms" not in rows[1]


def row(name, provider, **values):
    return {"model": name.upper(), "name": name, "mode": "eager", "provider": provider, **values}


def test_the_tables_tell_how_many_layers_ran_and_leave_out_what_failed():
    part = {"layers": 3, "layers_of_model": 60}
    rows = [row("a", "default", ms=9.0, attention_share=0.875, **part), row("a", "sage_hf:sage2", ms=4.5, **part)]
    rows += [row("a", "fa3", unavailable="RuntimeError: no", **part), row("b", "default", ms=1.0)]
    result = {**FACTS, "rows": rows}
    assert "| 3 of 60 layers of A | 9 | 4.5 | `sage2` | 2.00× |" in model_tables.model_gain(result)
    lines = model_tables.model_speed(result).splitlines()
    assert lines[0] == "| model, eager | baseline | sage2 | share of attention |"
    assert lines[2:] == ["| 3 of 60 layers of A | 9 | 4.5 | 88% |", "| B | 1 | – | – |"]
    compiled = {**result, "rows": [*rows, {**rows[0], "mode": "compiled"}]}
    assert "| 3 of 60 layers of A | compiled | 9 |" in model_tables.model_speed(compiled)
    assert "fa3: RuntimeError: no (a, eager)" in model_tables.model_text(result)


def test_the_picture_shows_every_model_that_was_measured_with_both(tmp_path):
    rows = [row("a", "default", ms=9.0), row("a", "sage_hf:sage2", ms=4.5), row("b", "default", ms=1.0)]
    rows += [{**one, "mode": "compiled"} for one in rows[:2]]
    result = {**FACTS, "rows": rows}
    gains = [(one.label, one.mode, one.ratio, one.recipe) for one in model_tables.model_gains(result)]
    assert gains == [("A", mode, 2.0, "sage2") for mode in ("eager", "compiled")]
    assert plots.plot_models(result, tmp_path / "models.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing to plot"):
        plots.plot_models({**FACTS, "rows": rows[2:3]}, tmp_path / "none.png")


def test_the_command_refuses_what_it_cannot_measure(monkeypatch, capsys):
    def refused(*argv):
        assert main(["bench", *argv]) == 2
        return capsys.readouterr().err

    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert "--device cuda: the benchmark times GPU kernels and needs a CUDA device" in refused("--model", "all")
    unknown = refused("--model", "flux-1024", "sd1.5")
    assert "--model: unknown sd1.5; choose from: " in unknown and all(name in unknown for name in NAMED)
    assert "--providers: unknown fa9; choose from: default, cudnn, " in refused("--model", "all", "--providers", "fa9")
    assert "--model takes no --training" in refused("--model", "all", "--training")
    assert "--layers 0" in refused("--model", "all", "--layers", "0")
    assert "a benchmark of shapes takes no --layers" in refused("--layers", "2")


def test_the_command_writes_the_results_of_the_models_and_providers_asked_for(monkeypatch, tmp_path, capsys):
    asked = {}

    def run(device, models, providers, progress, layers, compiled, write):
        asked.update(models=[one.name for one in models], providers={one.name for one in providers}, layers=layers)
        result = {**FACTS, "rows": [row(models[0].name, "default", ms=2.0)]}
        write(result)
        return result

    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(results, "facts", lambda device: FACTS)
    monkeypatch.setattr(measure_models, "run", run)
    for name in ("sdxl", "mochi"):
        arguments = ["--providers", "default", "sage_hf:sage_bwd", "--layers", "4", "--output", str(tmp_path)]
        assert main(["bench", "--model", name, *arguments]) == 0
    assert asked == {"models": ["mochi"], "providers": {"default", "sage_hf:sage_bwd"}, "layers": 4}
    assert main(["bench", "--model", "sdxl", "mochi", "flux-512", "--output", str(tmp_path / "more")]) == 0
    assert asked["models"] == ["sdxl", "mochi", "flux-512"]  # in this order, however long there is time
    path = tmp_path / "nvidia-h200-models.json"
    assert [one["name"] for one in json.loads(path.read_text())["rows"]] == ["mochi", "sdxl"]
    assert list(tmp_path.glob("*.*")) == [path] and "MOCHI" in capsys.readouterr().out


def test_attention_time_sums_its_calls():
    attention = measure_models.AttentionTime(CPU)
    q = torch.randn(1, 1, 8, 16)
    output = attention.measure(lambda: F.scaled_dot_product_attention(q, q, q))
    assert 0 < attention.seconds() < math.inf and output.shape == q.shape


def test_only_the_providers_of_a_kind_of_step_measure_it():
    training = {one.name for one in TRAINING_MODEL_PROVIDERS}
    assert "sage_hf:sage_bwd" in training and training.isdisjoint({"fa3", "sageattention2", "sage_hf:sage2"})
    assert next(iter(MODEL_PROVIDERS)).name == next(iter(TRAINING_MODEL_PROVIDERS)).name == "default"


def test_results_name_the_commit_that_the_environment_tells(monkeypatch):
    monkeypatch.setenv("SAGE_HF_COMMIT", "abc")
    assert results.facts(CPU)["commit"] == "abc"
