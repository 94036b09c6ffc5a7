"""The tiny Llama is what its page says, and is trained by its script."""

import json
import math

import peaked_models
import pytest
import torch
import train_tiny_llama
from source_text import standard_library
from transformers import LlamaForCausalLM

from sage_kernels.exact import sdpa

FOLDER = train_tiny_llama.DEFAULT_FOLDER


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
