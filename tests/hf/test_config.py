"""Configurations: the rule that decides for a layer and a step, JSON, and entries that are refused."""

import json
import re

import pytest
import torch
from diffusers import CogVideoXTransformer3DModel, HunyuanVideoTransformer3DModel, MochiTransformer3DModel

from sage_hf.config import LayerRule, SageConfig, StepRule
from sage_hf.diffusers import attention_layers
from sage_kernels.spec.recipe import RECIPES

FULL = SageConfig(
    recipe="sage3",
    fallback="emulate",
    layers=(LayerRule("blocks.0.*", "exact"), LayerRule("blocks.*", "sage1")),
    steps=(StepRule(0, 2, "sage2"), StepRule(-1, None, "exact")),
    note="why: é",
    training="sage_bwd",
)


def test_json_round_trip_keeps_everything(tmp_path):
    assert SageConfig.from_json(FULL.to_json()) == FULL
    FULL.save(tmp_path / "config.json")
    assert SageConfig.from_file(tmp_path / "config.json") == FULL
    (tmp_path / "marked.json").write_text((tmp_path / "config.json").read_text(), encoding="utf-8-sig")
    assert SageConfig.from_file(tmp_path / "marked.json") == FULL
    assert SageConfig.from_dict({"recipe": "sage2"}) == SageConfig("sage2")
    assert SageConfig("sage2").to_dict() == {"recipe": "sage2"}


def test_first_matching_layer_rule_decides_at_every_step():
    assert [FULL.resolve("blocks.0.attn", step, 10) for step in range(10)] == ["exact"] * 10
    assert [FULL.resolve("blocks.7.attn", step, 10) for step in range(10)] == ["sage1"] * 10


def test_steps_are_python_slices_of_the_denoising_steps():
    steps = [FULL.resolve("head.attn", step, 5) for step in range(5)]
    assert steps == ["sage2", "sage2", "sage3", "sage3", "exact"]
    for start, stop in ((0, 1), (None, 3), (-2, None), (1, -1), (-3, -1), (2, 99), (-99, 2)):
        covered = [step for step in range(6) if StepRule(start, stop, "sage2").covers(step, 6)]
        assert covered == list(range(6)[start:stop]), (start, stop)


def test_first_matching_step_rule_decides_when_ranges_overlap():
    config = SageConfig("sage3", steps=(StepRule(0, 1, "sage2"), StepRule(-1, None, "exact")))
    assert config.resolve("any", 0, num_steps=1) == "sage2"


def test_steps_without_their_number_cannot_count_from_the_end():
    assert StepRule(1, 3, "sage2").covers(2, None) and not StepRule(1, 3, "sage2").covers(3, None)
    with pytest.raises(ValueError, match="count from the end"):
        FULL.resolve("head.attn", 5)


def test_layer_rules_win_over_the_recipe_of_training():
    assert FULL.training_recipe("head.attn") == "sage_bwd"
    assert FULL.training_recipe("blocks.0.attn") is None
    assert SageConfig("sage3").training_recipe("head.attn") is None
    shipped = SageConfig.from_name("train-int8-infer-fp4")
    assert (shipped.recipe, shipped.training) == ("sage3", "sage_bwd") and shipped.note


def test_patterns_match_whole_names_and_their_case():
    config = SageConfig("sage3", layers=(LayerRule("transformer_blocks.1.*", "exact"),))
    assert config.resolve("transformer_blocks.1.attn") == "exact"
    for other in ("single_transformer_blocks.1.attn", "transformer_blocks.11.attn", "Transformer_blocks.1.attn"):
        assert config.resolve(other) == "sage3"


@pytest.mark.parametrize(
    ("key", "rules"),
    [
        ("layers", LayerRule("a", "exact")),
        ("layers", ({"pattern": "a", "recipe": "exact"},)),
        ("layers", "abc"),
        ("steps", (LayerRule("a", "exact"),)),
    ],
)
def test_rules_that_are_none_are_refused_naming_what_is_expected(key, rules):
    with pytest.raises(ValueError, match=f"{key}: expected a tuple of .*Rule, got .*from_dict reads plain data"):
        SageConfig("sage3", **{key: rules})
    assert SageConfig("sage3", layers=[LayerRule("a", "exact")]).layers == (LayerRule("a", "exact"),)


def test_patterns_may_be_names_as_explain_prints_them():
    config = SageConfig("sage3", layers=(LayerRule("blocks.0-3.attn1", "exact"), LayerRule("b.1-2.c.10-11.*", "sage2")))
    layers = [f"blocks.{i}.attn1" for i in range(6)] + ["b.2.c.11.d", "b.2.c.1.d", "b.1.c.10.d"]
    exact = ["exact"] * 4 + ["sage3"] * 2
    assert [config.resolve(layer) for layer in layers] == [*exact, "sage2", "sage3", "sage2"]
    assert not config.unmatched_patterns(layers)
    assert SageConfig(layers=(LayerRule("blocks.[0-3].attn1", "exact"),)).resolve("blocks.2.attn1") == "exact"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"recipe": "sage9"}, "recipe: unknown recipe 'sage9'.*exact.*sage3"),
        ({"recipe": 3}, "recipe: expected the name of a recipe"),
        ({"recipe": "sage3", "training": "sage9"}, "training: unknown recipe 'sage9'"),
        ({"recipe": "sage3", "training": 1}, "training: expected the name of a recipe"),
        ({}, "'recipe' is missing"),
        (
            {"recipe": "sage3", "layer": []},
            "unknown key 'layer'; keys are recipe, fallback, layers, steps, training, note",
        ),
        ({"recipe": "sage3", "fallback": "maybe"}, "fallback: 'maybe' is not one of native, emulate, error"),
        ({"recipe": "sage3", "kv_cache": ["int4"]}, r"KV cache: \['int4'\] is not one of int8, int4, nvfp4"),
        ({"recipe": "sage3", "layers": {}}, "layers: expected a list"),
        ({"recipe": "sage3", "layers": ["a"]}, r"layers\[0\]: expected an object"),
        ({"recipe": "sage3", "layers": [{"pattern": "a"}]}, r"layers\[0\]: the key 'recipe' is missing"),
        ({"recipe": "sage3", "layers": [{"pattern": "", "recipe": "sage2"}]}, r"layers\[0\].pattern"),
        ({"recipe": "sage3", "layers": [{"pattern": "a", "recipe": "fp8"}]}, r"layers\[0\].recipe: unknown recipe"),
        ({"recipe": "sage3", "steps": [{"recipe": "sage2"}]}, r"steps\[0\]: give start, stop or both"),
        ({"recipe": "sage3", "steps": [{"start": "0", "recipe": "sage2"}]}, r"steps\[0\].start: expected an integer"),
        ({"recipe": "sage3", "steps": [{"start": True, "recipe": "sage2"}]}, r"steps\[0\].start: expected an integer"),
        ({"recipe": "sage3", "steps": [{"start": 3, "stop": 3, "recipe": "sage2"}]}, "3:3 holds no step"),
        ({"recipe": "sage3", "steps": [{"start": -1, "stop": -2, "recipe": "sage2"}]}, "-1:-2 holds no step"),
        ({"recipe": "sage3", "steps": [{"start": -1, "stop": 0, "recipe": "sage2"}]}, "-1:0 holds no step"),
        ({"recipe": "sage3", "note": 1}, "note: expected a string"),
        (["sage3"], "the configuration: expected an object"),
    ],
)
def test_inconsistent_file_is_refused_naming_file_and_key(tmp_path, data, message):
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: .*{message}"):
        SageConfig.from_file(path)


def test_a_rule_for_all_steps_is_saved_and_read(tmp_path):
    config = SageConfig("sage3", steps=(StepRule(None, None, "sage2"),))
    config.save(tmp_path / "config.json")
    assert SageConfig.from_file(tmp_path / "config.json") == config


def test_unreadable_file_is_refused_naming_it(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(ValueError, match=re.escape(f"cannot read the configuration {path}")):
        SageConfig.from_name(path)
    path.write_text('{"recipe": "sage3",}')
    with pytest.raises(ValueError, match=r"not valid JSON.*line 1"):
        SageConfig.from_name(path)
    path.write_text('{"recipe": "sage3", "recipe": "sage2"}')
    with pytest.raises(ValueError, match="a key appears twice"):
        SageConfig.from_name(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=re.escape(str(path))):
        SageConfig.from_name(path)
    with pytest.raises(ValueError, match="cannot read"):
        SageConfig.from_name(tmp_path)


def test_names_are_recipes_and_shipped_configurations():
    assert SageConfig.from_name("sage2") == SageConfig("sage2")
    video = {"cogvideox-2b", "cogvideox-5b", "hunyuanvideo", "mochi", "wan-14b-sparse"}
    assert set(SageConfig.names()) == {*video, "train-int8-infer-fp4"}
    assert not set(SageConfig.names()) & set(RECIPES)
    with pytest.raises(ValueError, match=r"'sage4' is neither a recipe .*sage3.*cogvideox-2b.*JSON"):
        SageConfig.from_name("sage4")


@pytest.mark.parametrize(
    ("name", "model_class", "settings", "last", "layers"),
    [
        ("cogvideox-2b", CogVideoXTransformer3DModel, {"num_layers": 30}, "transformer_blocks.29", 30),
        ("cogvideox-5b", CogVideoXTransformer3DModel, {"num_layers": 42}, "transformer_blocks.41", 42),
        ("hunyuanvideo", HunyuanVideoTransformer3DModel, {}, "single_transformer_blocks.39", 62),
        ("mochi", MochiTransformer3DModel, {}, "transformer_blocks.47", 48),
    ],
)
def test_shipped_configurations_fit_the_real_models(name, model_class, settings, last, layers):
    with torch.device("meta"):
        names = list(attention_layers(model_class(**settings)))
    config = SageConfig.from_name(name)
    assert len(names) == layers
    assert config.unmatched_patterns(names) == []
    excepted = [layer for layer in names if config.layer_rule(layer)]
    blocks = [layer.rpartition(".")[0] for layer in excepted if not layer.startswith("context_embedder.")]
    assert blocks == ["transformer_blocks.0", last]
    middle = [config.resolve(names[layers // 2], step, 50) for step in range(50)]
    assert middle == ["sage2", *["sage3"] * 48, "sage2"]
    assert config.note
