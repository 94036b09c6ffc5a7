"""The studies of accuracy measure the recipes as they ship, and what their tensors' names say."""

import itertools
import json
from dataclasses import replace

import gradient_errors
import output_errors
import pages
import peaked_errors
import peaked_models
import peaked_tensors
import pooled_tail
import pytest
import sparse_quality
import sparse_quality_table
import sparse_video
import tensors
import torch
from peaked_tensors import Loud, Sinks

import sage_hf
from sage_hf.bench.providers import Provider
from sage_kernels.exact import sdpa
from sage_kernels.reference import forward as reference
from sage_kernels.spec.block_list import BlockList
from sage_kernels.spec.recipe import RECIPES, without_outlier_handling

CPU = torch.device("cpu")
QUALITY_RESULTS = sorted(pages.RESULTS.glob("nvidia-*-sparse_quality.json"))


def test_the_stored_output_errors_are_those_of_every_variant():
    rows = pages.read_result("cpu-output_errors")["rows"]
    assert [row["variant"] for row in rows] == list(output_errors.VARIANTS)
    triple = tensors.dit_like(1, 1, 140, 64)
    truth, _ = sdpa.attention(*triple)
    errors = [output_errors.relative_l1([triple], [truth], RECIPES[name]) for name in ("sage1", "sage2", "sage3")]
    assert errors == sorted(errors) and 0 < errors[0] < errors[2] < 0.3


@pytest.mark.parametrize("kv_heads", [2, 1])
@pytest.mark.parametrize("name", ["sage_bwd", "sage_bwd_int8"])
def test_the_gradients_of_a_recipe_are_those_that_the_recipe_ships_with(name, kv_heads):
    """Sums have another order, so that some elements are rounded to another bfloat16."""
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(1, heads, 140, 64, generator=generator).bfloat16() for heads in (2, kv_heads, kv_heads, 2))
    sample = tensors.Sample(*drawn, is_causal=True, scale=0.2)
    found = gradient_errors.quantized(sample, gradient_errors.VARIANTS[f"`{name}`"])
    leaves = [x.clone().requires_grad_() for x in sample[:3]]
    options = {"is_causal": True, "scale": 0.2, "enable_gqa": True, "recipe": name, "fallback": "emulate"}
    output = sage_hf.sage_attention(*leaves, **options)
    expected = (output.detach(), *torch.autograd.grad(output, leaves, sample.output_gradient))
    for one, other in zip(found, expected, strict=True):
        assert (one.double() - other.double()).abs().sum() <= 2**-8 * other.double().abs().sum()
    errors = gradient_errors.errors([sample], [gradient_errors.exact(sample)], gradient_errors.VARIANTS[f"`{name}`"])
    assert all(2**-9 < one["rel_l1"] < 0.1 for one in errors.values())


def test_the_stored_gradients_have_every_variant_and_result():
    rows = pages.read_result("cpu-gradient_errors")["rows"]
    assert [row["variant"] for row in rows] == list(gradient_errors.VARIANTS)
    sets = {name for name in rows[0] if name != "variant"}
    assert {"Gaussian σ=1", "Gaussian σ=3", "Gaussian σ=10", "tiny video"} <= sets
    assert all(set(row[name]) == set(gradient_errors.RESULTS) for row in rows for name in sets)


def mean_mass(case: Sinks, inputs: tensors.Inputs) -> float:
    """Weight of all sinks, averaged over the rows that see them all, in float64."""
    group = inputs.query.shape[1] // inputs.key.shape[1]
    scores = inputs.query.double() @ inputs.key.double().repeat_interleave(group, 1).mT * case.head_dim**-0.5
    scores = sdpa.apply_mask(scores, None, inputs.is_causal, 0, 0, inputs.causal_offset)
    weights = scores.softmax(-1)[..., case.positions].sum(-1)
    if inputs.is_causal:
        weights = weights[..., max(0, max(case.positions) - inputs.causal_offset) :]
    return weights.mean().item()


@pytest.mark.parametrize(
    "case",
    [
        Sinks(0.95, 2048),
        Sinks(0.8, 1024, 4, "behind"),
        Sinks(0.5, 512, place="middle", q_len=512, causal=True),
        *(pytest.param(case, marks=pytest.mark.audit) for case in peaked_tensors.CASES if isinstance(case, Sinks)),
    ],
    ids=lambda case: case.name,
)
def test_the_sinks_hold_their_mass(case):
    assert abs(mean_mass(case, case.draw().to(torch.bfloat16)) - case.mass) < 0.02


def test_loud_channels_are_loud_and_scores_are_not():
    calls = {name: Loud(name, 2048, head_dim=64).draw() for name in ("×10", "Gaussian")}
    loudness = calls["×10"].key.square().mean(2).sqrt()
    assert (loudness.amax(-1) / loudness.median(-1).values).mean().item() == pytest.approx(10, rel=0.25)
    spread = {name: (call.query @ call.key.mT).std().item() for name, call in calls.items()}
    assert spread["×10"] == pytest.approx(spread["Gaussian"], rel=0.1)


def test_peaked_errors_have_every_recipe_with_and_without_outlier_handling():
    case = Sinks(0.8, 512, causal=True)
    inputs = case.draw()
    options = {"is_causal": True, "causal_offset": 512 - peaked_tensors.QUERIES}
    truth, _ = sdpa.attention(*inputs[:3], **options)

    def absent(inputs):
        raise ModuleNotFoundError("No module named 'absent'\nmore")

    rows = peaked_errors.run(CPU, [case, Sinks(0.8, 300)], [Provider("absent", "Absent", absent, "kernel")])
    unavailable = {row["unavailable"] for row in rows if row["provider"] == "absent"}
    assert unavailable == {"ModuleNotFoundError: No module named 'absent'", "causal attention of the last queries only"}
    rows = [row for row in rows if row["tensor"] == case.name and row["provider"] != "absent"]
    assert {row["provider"] for row in rows} == set(peaked_errors.OURS)
    for row in rows:
        recipe = RECIPES[row["provider"]]
        output, _ = reference.attention(
            *inputs[:3], recipe if row["outlier_handling"] else without_outlier_handling(recipe), **options
        )
        assert row["rel_l1"] == pytest.approx(((output - truth).abs().sum() / truth.abs().sum()).item(), rel=1e-6)
    assert not any("without" in name for name in RECIPES)


def test_a_table_of_peaked_errors_shows_them_without_and_with_outlier_handling():
    rows = [
        {"tensor": "a", "provider": "fa3_fp8", "rel_l1": 0.5},
        {"tensor": "a", "provider": "sage2", "outlier_handling": False, "rel_l1": 0.25},
        {"tensor": "a", "provider": "sage2", "outlier_handling": True, "rel_l1": 0.125},
        {"tensor": "b", "provider": "fa3_fp8", "unavailable": "no"},
        {"tensor": "b", "provider": "sage2", "outlier_handling": False, "rel_l1": 0.0625},
    ]
    assert peaked_errors.markdown(rows).splitlines()[2:] == ["| a | 0.5000 | 0.2500 → 0.1250 |", "| b | – | 0.0625 |"]


def test_layer_errors_match_the_recipe_with_and_without_outlier_handling(monkeypatch):
    recipe = replace(without_outlier_handling(RECIPES["sage2"]), rotate=True)
    monkeypatch.setitem(RECIPES, "sage2", recipe)
    monkeypatch.setattr(peaked_models, "OURS", ("sage2",))
    layer = tensors.Inputs(*torch.randn(3, 1, 2, 70, 32, generator=torch.Generator().manual_seed(0)))
    truth, _ = sdpa.attention(*layer[:3])
    rows = peaked_models.errors([layer])
    assert [row["outlier_handling"] for row in rows] == [False, True]
    for row, tried in zip(rows, (without_outlier_handling(recipe), recipe), strict=True):
        error = (reference.attention(*layer[:3], tried)[0] - truth).abs().sum() / truth.abs().sum()
        assert row["rel_l1"] == pytest.approx(error.item(), rel=1e-6)


def test_the_stored_errors_of_models_have_every_recipe():
    result = pages.read_result("cpu-peaked_models")
    models = {row["model"] for row in result["heads"]}
    assert {"tiny video", "tiny Llama"} <= models == {row["tensor"] for row in result["rows"]}
    for name in models:
        assert {row["provider"] for row in result["rows"] if row["tensor"] == name} == set(peaked_models.OURS)
    assert {row["provider"] for row in result["perplexity"]} == {"exact", *peaked_models.OURS}


@pytest.fixture(scope="module")
def quality(tmp_path_factory):
    """The study of sparse attention at toy size."""
    folder = tmp_path_factory.mktemp("quality")
    scenes = sparse_video.held_out_scenes()[::12]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_quality, "shown_scenes", lambda: scenes)
        patch.setattr(sparse_quality, "SHOWN", 2)
        sparse_quality.main(["--toy", "--seeds", "0", "--steps", "3", "--sampling-steps", "4", "--output", str(folder)])
    (path,) = folder.glob("*.json")
    assert path.with_suffix(".png").is_file()
    return json.loads(path.read_text())


@pytest.mark.audit
def test_every_way_to_run_sparsely_is_judged_and_compared_with_the_same_weights(quality):
    names = [(one.trained, one.run) for one in sparse_quality.variants()]
    assert sorted((row["trained"], row["run"]) for row in quality["rows"]) == sorted(names)
    assert len(quality["training"]) == 2 and all(row["steps"] == 3 for row in quality["training"])
    for row in quality["rows"]:
        assert "unavailable" not in row and set(row["score"]) == {"colour", "shape", "direction", "all"}
        assert ("psnr" in row and 0 < row["ssim"] <= 1) == (row["run"] not in ("exact", "VSA"))
        assert ("flicker" in row and row["flicker"] > 0) == ("psnr" in row)
        assert ("mass" in row) == any(router in row["run"] for router in sparse_quality.ROUTERS)
        if "mass" in row:
            assert 0 < row["least_head_mass"] <= row["least_layer_mass"] <= row["mass"] <= 1
    assert sparse_quality_table.markdown(quality).count("\n| ") == 2 + 2 + 2 + len(names)


def test_both_kinds_of_training_begin_alike():
    """From the same weights, and the same batches."""
    size = sparse_quality.TOY
    dense, vsa = sparse_video.Denoiser(size, 5), sparse_video.Denoiser(size, 5)
    sparse_quality.sage_hf.enable_vsa(vsa.transformer, 0.75)
    for name, parameter in dense.named_parameters():
        assert torch.equal(parameter, vsa.get_parameter(name))
    clips = sparse_video.Clips.held_out(size, CPU)
    for one, other in zip(*(sparse_video.draw_batch(clips, size, 5, 7) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("listed", ["all", "some"])
def test_a_pooled_tail_adds_what_the_tiles_left_out_hold_if_their_keys_are_equal(listed):
    """The last tile is partial: each counts by its number of keys, and listed tiles count once."""
    query, key, value = tensors.dit_like(2, 2, 300, 32)
    key = key[:, :, ::64].repeat_interleave(64, 2)[:, :, :300]
    kept = torch.ones(2, 2, 5, 5, dtype=torch.bool)
    if listed == "some":
        kept = torch.rand(2, 2, 5, 5, generator=torch.Generator().manual_seed(0)) < 0.4
    found = pooled_tail.pooled_tail(query.float(), key.float(), value.float(), BlockList.of_kept(kept, 64, 64), 0.3)
    expected = sdpa.attention(query, key, value, scale=0.3)[0].float()
    assert torch.allclose(found, expected, atol=1e-5)


def test_a_clip_keeps_its_frames_though_the_first_is_repeated_for_the_model():
    size = sparse_quality.TOY
    clips = sparse_video.Clips.held_out(size, CPU)
    seen = clips.take(slice(0, 2))
    assert seen.shape[2] == size.frames + 1 == size.grid[0] * size.patch[0]
    assert torch.equal(seen[:, :, 0], seen[:, :, 1])
    made = sparse_video.generate(
        sparse_video.Denoiser(size, 0), sparse_video.held_out_scenes()[:1], size, steps=1, guidance=1.0, device=CPU
    )
    assert made.shape == (1, size.frames, 3, size.pixels, size.pixels)


def test_flicker_is_the_growth_of_the_differences_of_successive_frames():
    reference = torch.rand(2, 3, 3, 16, 16, generator=torch.Generator().manual_seed(0)) / 2
    assert sparse_quality.distances(reference, reference * 1.5)["flicker"] == pytest.approx(1.5)
    assert sparse_quality.distances(reference, reference + 0.1)["flicker"] == pytest.approx(1)


@pytest.mark.parametrize("path", QUALITY_RESULTS, ids=lambda path: path.stem)
def test_the_stored_quality_of_sparse_attention_compares_like_with_like(path):
    """At least 4k tokens; all models that count took as many steps, and were judged in all ways.

    The dense model learned its task: what it loses in few bits or by sparsity means something.
    """
    found = json.loads(path.read_text(encoding="utf-8"))
    whole = [row for row in found["training"] if sparse_quality_table.is_whole(found, row)]
    assert found["size"]["tokens"] >= 4096 and any(row["trained"] == "dense" for row in whole)
    assert len({row["steps"] for row in whole}) == 1
    runs = {(row["trained"], row["run"], row["seed"]) for row in found["rows"] if "score" in row}
    for one, row in itertools.product(sparse_quality.variants(), whole):
        assert one.trained != row["trained"] or (one.trained, one.run, row["seed"]) in runs
    assert all(row["score"]["all"] >= 40 for row in found["rows"] if (row["trained"], row["run"]) == ("dense", "exact"))
    cut = {**found, "rows": found["rows"] + [{**row, "seed": 99} for row in found["rows"][:3]]}
    assert sparse_quality_table.markdown(cut) == sparse_quality_table.markdown(found)
