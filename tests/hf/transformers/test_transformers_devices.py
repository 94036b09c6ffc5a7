"""Models of transformers on several devices: layers on different ones, or the heads of each layer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import sage_hf
from tests.helpers import tensor_parallel
from tests.helpers.tensor_parallel import RECIPES, computed
from tests.helpers.tiny_transformers import MODELS

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    MODELS["llama"].build("sage_exact").save_pretrained(path / "model")
    return path


def distance(output: torch.Tensor, expected: torch.Tensor) -> float:
    return float((output - expected).norm() / expected.norm())


@pytest.mark.audit
def test_heads_that_processes_share_out_compute_what_one_process_does(folder: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*command, "-m", tensor_parallel.__name__, str(folder)], cwd=ROOT, check=True, timeout=120)
    together = torch.load(folder / "computed.pt")
    alone = {recipe: computed(MODELS["llama"].build(recipe)) for recipe in RECIPES}
    for recipe, found in together.items():
        assert found["heads"] == 2
        # A head has its own scales, so its codes are those of one process, but for those that a rounding turns.
        error = distance(alone[recipe]["logits"], alone["sage_exact"]["logits"])
        assert distance(found["logits"], alone[recipe]["logits"]) <= max(1e-5, 0.1 * error), recipe
        assert recipe == "sage_exact" or error > 1e-3
        assert torch.equal(found["tokens"], alone[recipe]["tokens"]), recipe


@pytest.mark.parametrize("recipe", ["sage2", "sage3"])
def test_layers_that_wait_on_disk_compute_what_they_do_in_memory(recipe: str, folder: Path, tmp_path: Path):
    expected = computed(MODELS["llama"].build(recipe))
    size = sum(parameter.nbytes for parameter in MODELS["llama"].build(recipe).model.layers.parameters())
    model = LlamaForCausalLM.from_pretrained(
        folder / "model",
        attn_implementation=recipe,
        device_map="auto",
        max_memory={"cpu": size},
        offload_folder=tmp_path,
    )
    assert "disk" in model.hf_device_map.values()
    found = computed(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    rows = sage_hf.explain(model).rows  # steps of decoding are exact
    assert [row.layer for row in rows if row.recipe == recipe] == [
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    ]
