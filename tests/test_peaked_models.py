"""The tiny Llama is what its page says, and trained models are measured with the recipes as they are shipped."""

import json
import math
from dataclasses import replace
from pathlib import Path

import peaked_models
import pytest
import torch
import train_tiny_llama
from peaked_models import Layer
from source_text import standard_library
from transformers import LlamaConfig, LlamaForCausalLM

from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.spec.recipe import RECIPES, without_outlier_handling

FOLDER = train_tiny_llama.DEFAULT_FOLDER
RESULT = Path(__file__).parents[1] / "benchmarks/results/cpu-peaked_models.json"


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


def windows(count: int, length: int) -> torch.Tensor:
    text = (standard_library() / "argparse.py").read_bytes()
    return torch.tensor([list(text[start : start + length]) for start in range(1000, 1000 + 999 * count, 999)]).byte()


def test_the_stored_llama_is_the_scripts_small_and_has_sinks(llama):
    assert (FOLDER / "model.safetensors").stat().st_size < 1.5 * 2**20
    built = train_tiny_llama.build_model(llama.config.max_position_embeddings)
    assert {name: x.shape for name, x in built.named_parameters()} == {
        name: x.shape for name, x in llama.named_parameters()
    }
    mass = train_tiny_llama.bos_mass(llama, windows(2, 255))
    assert len(mass) == 6 and {len(layer) for layer in mass} == {4}
    assert max(map(max, mass)) > 0.15
    # Uniform bytes cost ln 256 = 5.5 nats.
    tokens = train_tiny_llama.with_bos(windows(2, 255))
    assert peaked_models.losses_of(peaked_models.log_probabilities(llama, tokens), tokens).max() < 2.0


def test_bos_mass_is_read_off_the_layers_own_queries_and_keys(llama):
    tokens = train_tiny_llama.with_bos(windows(2, 63))
    layers = peaked_models.llama_layers(llama, tokens)
    mass = train_tiny_llama.bos_mass(llama, windows(2, 63))
    for layer, heads in zip(layers, mass, strict=True):
        scores = layer.query @ layer.key.mT * layer.scale
        weights = sdpa.apply_mask(scores, None, True, 0, 0).softmax(-1)
        assert weights[:, :, 16:, 0].mean((0, 2)).tolist() == pytest.approx(heads, abs=1e-4)
    (head, *_) = peaked_models.head_peaks(layers[0])
    weights = sdpa.mean_weights(layers[0].query, layers[0].key, is_causal=True, scale=layers[0].scale)[:, 0].mean(0)
    assert head["share"] == pytest.approx(weights.max().item(), abs=1e-3) and head["key"] == weights.argmax()
    assert head["loudest_channel"] > 1


def test_training_lowers_the_loss_and_writes_what_the_benchmark_reads(monkeypatch, tmp_path):
    argv = ["train_tiny_llama.py", "--steps", "12", "--points", "2", "--batch-size", "4", "--seq-len", "31"]
    argv += ["--device", "cpu", "--text", str(standard_library() / "email"), "--folder", str(tmp_path)]
    monkeypatch.setattr("sys.argv", argv)
    train_tiny_llama.main()
    report = json.loads((tmp_path / "training.json").read_text())
    first, last = report["curve"]
    assert last["step"] == 12 and last["held_out_loss"] < first["held_out_loss"] < math.log(256) + 0.2
    assert len(last["bos_mass"]) == 6 and report["settings"]["seq_len"] == 31
    model = LlamaForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert model.dtype == torch.bfloat16 and model.config.max_position_embeddings == 32


@pytest.fixture
def remedied(monkeypatch):
    """Give `sage2` the one remedy that exists on every branch, a rotation."""
    recipe = replace(without_outlier_handling(RECIPES["sage2"]), rotate=True)
    monkeypatch.setitem(RECIPES, "sage2", recipe)
    monkeypatch.setattr(peaked_models, "OURS", ("sage2", "sage3_paper"))
    return recipe


def test_errors_are_those_of_the_recipe_without_and_with_remedies(remedied):
    generator = torch.Generator().manual_seed(0)
    layers = [
        Layer(*(torch.randn(1, heads, 70, 32, generator=generator) for heads in (4, 2, 2)), is_causal=True, scale=0.3),
        Layer(*(torch.randn(1, 2, 70, 32, generator=generator) for _ in range(3))),
    ]
    rows = peaked_models.errors(layers)
    assert [(row["provider"], row["remedies"]) for row in rows] == [
        ("sage2", False),
        ("sage2", True),
        ("sage3_paper", False),
    ]
    for row, recipe in zip(rows, (without_outlier_handling(remedied), remedied, RECIPES["sage3_paper"]), strict=True):
        error = size = 0.0
        for layer in layers:
            options = {"is_causal": layer.is_causal, "scale": layer.scale}
            truth, _ = sdpa.attention(*layer[:3], **options)
            error += (reference.attention(*layer[:3], recipe, **options)[0] - truth).abs().sum().item()
            size += truth.abs().sum().item()
        assert row["rel_l1"] == pytest.approx(error / size, rel=1e-6)


def test_perplexity_is_measured_with_exactly_these_recipes(remedied):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)).eval()
    for parameter in model.model.layers.parameters():
        parameter.data *= 20  # far from uniform attention
    tokens = train_tiny_llama.with_bos(windows(2, 79))
    exactly, *rows = peaked_models.perplexities(model, tokens)
    assert RECIPES["sage2"] is remedied
    model.set_attn_implementation("sdpa")
    with torch.no_grad():
        losses = [model(window[None], labels=window[None]).loss.item() for window in tokens]
    assert exactly["perplexity"] == pytest.approx(math.exp(sum(losses) / 2), rel=1e-5)
    assert [(row["provider"], row["remedies"]) for row in rows] == [
        ("sage2", False),
        ("sage2", True),
        ("sage3_paper", False),
    ]
    assert len({row["perplexity"] for row in (exactly, *rows)}) == 4
    for row in rows:
        assert row["change"] == pytest.approx(row["perplexity"] / exactly["perplexity"] - 1, abs=1e-6)
        assert row["standard_error"] > 0 and row["divergence"] > 0
    # FP4 moves what the model predicts farther than 8 bits do.
    assert rows[2]["divergence"] > 2 * rows[1]["divergence"]


def test_the_stored_result_has_every_model_layer_head_and_recipe():
    result = json.loads(RESULT.read_text())
    models = {row["model"]: row for row in result["heads"]}
    assert {"tiny video", "tiny Llama"} <= models.keys() == {row["tensor"] for row in result["rows"]}
    llama_rows = [row for row in result["heads"] if row["model"] == "tiny Llama"]
    assert [row["layer"] for row in llama_rows] == list(range(6))
    assert all(len(row["heads"]) == 4 for row in llama_rows)
    for name in models:
        assert {row["provider"] for row in result["rows"] if row["tensor"] == name} == set(peaked_models.OURS)
    assert {row["provider"] for row in result["perplexity"]} == {"exact", *peaked_models.OURS}
    shown = peaked_models.peaks_markdown(result["heads"]), peaked_models.perplexity_markdown(result["perplexity"])
    assert [len(text.splitlines()) for text in shown] == [len(result["heads"]) + 2, 5 + 2]
