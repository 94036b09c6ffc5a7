"""ModelOpt's `sparse_attention_config`: what is taken over from a model's config.json, and what is left out."""

import json

import pytest
import torch
from diffusers import WanTransformer3DModel

import sage_hf
from sage_hf.config import SageConfig
from sage_hf.diffusers.processor import sage_of
from sage_hf.sparse import Sparse, modelopt
from sage_hf.sparse.modelopt import sparse_of_model
from tests.helpers.families import family

LAYERS = ("blocks.0.attn1", "blocks.0.attn2", "blocks.1.attn1", "blocks.1.attn2")
CURVE = {"formula": "a * exp(b * target_sparsity)", "prefill": {"a": 7.9, "b": 8.6}}
GROUP = {
    "algorithm": "skip_softmax",
    "targets": ["WanAttention"],
    "ignore": ["blocks.0.attn1", "*.attn2"],
    "threshold_scale_factor": CURVE,
    "target_sparsity": 0.75,
}
PRODUCER = {"name": "modelopt", "version": "0.45.0"}


@pytest.fixture
def said(monkeypatch):
    found = []
    monkeypatch.setattr(modelopt.logger, "warning", found.append)
    return found


def shipped(**group):
    return {"sparse_attention_config": {"config_groups": {"group_0": {**GROUP, **group}}, "producer": PRODUCER}}


def test_share_layers_and_steps_are_taken_over(said):
    found = sparse_of_model(shipped(initial_disabled_steps=10), LAYERS)
    assert found == Sparse("subblock", 0.25, dense_steps=10, dense_layers=("blocks.0.attn1", "*.attn2"))
    assert len(said) == 1 and "threshold" in said[0]


@pytest.mark.parametrize("sparsity", [0.75, {"prefill": 0.75, "decode": 0.5}])
@pytest.mark.parametrize("name", ["target_sparsity", "target_sparse_ratio"])
def test_files_of_earlier_releases_have_the_fields_with_their_groups(said, sparsity, name):
    groups = {"group_0": {"sparse_algo": "softmax_skip", "targets": ["WanAttention"]}}
    config = {"config_groups": groups, "threshold_scale_factor": CURVE, name: sparsity, "producer": PRODUCER}
    assert sparse_of_model({"sparse_attention_config": config}, LAYERS) == Sparse(keep=0.25)


def test_ignored_settings_are_logged(said):
    config = shipped(disabled_until_timestep=0.86, ignore=["blocks.7.attn1"])
    config["sparse_attention_config"]["config_groups"]["group_1"] = {"algorithm": "sparse_softmax", "sparsity_n": 2}
    assert sparse_of_model(config, LAYERS) == Sparse(keep=0.25)
    for text in ("disabled_until_timestep", "'blocks.7.attn1'", "group_1 (sparse_softmax)", "threshold"):
        assert text in said[0]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "ships no sparse_attention_config"),
        ({"sparse_attention_config": "skip"}, "ships no sparse_attention_config"),
        ({"sparse_attention_config": {}}, "has no group"),
        (shipped(algorithm="sparse_softmax"), "has sparse_softmax, and sage_hf can use only skip_softmax"),
        (shipped(target_sparsity=None), "has no target_sparsity"),
        (shipped(target_sparsity=1.5), r"target_sparsity must be in \[0, 1\); got 1.5"),
    ],
)
def test_unsupported_settings_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        sparse_of_model(config, LAYERS)


def test_a_models_shipped_settings_are_used(tmp_path, said):
    family("wan-t2v").build().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | shipped()))
    model = WanTransformer3DModel.from_pretrained(tmp_path)
    config = SageConfig.from_dict({"recipe": "sage2", "sparse": "model"})
    assert SageConfig.from_json(config.to_json()) == config
    with sage_hf.apply(model, config):
        layers = {name: sage_of(model.get_submodule(name)).sparse for name in LAYERS}
        assert layers["blocks.1.attn1"].model.settings.keep == 0.25
        assert [name for name, one in layers.items() if not one.always_dense] == ["blocks.1.attn1"]
    with pytest.raises(ValueError, match="ships no sparse_attention_config"), torch.no_grad():
        sage_hf.apply(family("wan-t2v").build(), config)
