"""The trained proof of sparse attention runs unattended at toy size, and its table shows what it measured."""

import json
from pathlib import Path

import pytest
import sparse_quality
import sparse_quality_table
import sparse_video
import torch

STEPS = 4
RESULTS = sorted((Path(__file__).parents[1] / "benchmarks/results").glob("nvidia-*-sparse_quality.json"))


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("quality")
    scenes = sparse_video.held_out_scenes()[::12]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparse_quality, "shown_scenes", lambda: scenes)
        patch.setattr(sparse_quality, "SHOWN", 2)
        sparse_quality.main(
            ["--toy", "--seeds", "1", "--steps", "3", "--sampling-steps", str(STEPS), "--output", str(folder)]
        )
    (path,) = folder.glob("*.json")
    assert path.with_suffix(".png").is_file()
    return json.loads(path.read_text())


def test_every_way_to_run_is_judged_for_every_seed(result):
    names = [(one.trained, one.run) for one in sparse_quality.variants("emulate")]
    assert [(row["trained"], row["run"]) for row in result["rows"]] == names
    assert all("unavailable" not in row for row in result["rows"])
    assert all(set(row["score"]) == {"colour", "shape", "direction", "all"} for row in result["rows"])
    assert len(result["training"]) == 2 and all(row["steps"] == 3 for row in result["training"])


def test_what_is_sparse_is_compared_with_what_is_not(result):
    for row in result["rows"]:
        assert ("psnr" in row and 0 < row["ssim"] <= 1) == (row["run"] not in ("exact", "VSA"))
        assert ("mass" in row) == any(router in row["run"] for router in sparse_quality.ROUTERS)
        if "0.25" in row["run"]:
            assert row["tiles"] == pytest.approx(0.25, abs=0.13)
        if "mass" in row:
            assert 0 < row["least_head_mass"] <= row["least_layer_mass"] <= row["mass"] <= 1


def test_both_kinds_of_training_begin_alike():
    """From the same weights, and the same batches."""
    size = sparse_quality.TOY
    dense, vsa = sparse_video.Denoiser(size, 5), sparse_video.Denoiser(size, 5)
    sparse_quality.sage_hf.enable_vsa(vsa.transformer, 0.75)
    for name, parameter in dense.named_parameters():
        assert torch.equal(parameter, vsa.get_parameter(name))
    clips = sparse_video.Clips.held_out(size, torch.device("cpu"))
    for one, other in zip(*(sparse_video.draw_batch(clips, size, 5, 7) for _ in range(2)), strict=True):
        assert torch.equal(one, other)


def test_the_output_has_unit_variance_at_every_level():
    """Where the transformer's output is 0, the error of the velocity, in units of its factor, is about 1."""
    size = sparse_video.Size(frames=4, pixels=16, held_out=48)
    clean = sparse_video.Clips.held_out(size, torch.device("cpu")).take(slice(None))
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    denoiser = sparse_video.Denoiser(sparse_quality.TOY, 0)
    torch.nn.init.zeros_(denoiser.transformer.proj_out.weight)
    torch.nn.init.zeros_(denoiser.transformer.proj_out.bias)
    words = sparse_video.word_ids(sparse_video.held_out_scenes())
    for level in (0.05, 0.5, 0.95):
        with torch.no_grad():
            loss = sparse_video.flow_loss(denoiser, clean, noise, torch.full((48,), level), words)
        assert 0.8 < float(loss) < 1.2


def test_a_run_whose_time_is_over_keeps_what_it_has(tmp_path):
    options = ["--toy", "--seeds", "2", "--steps", "1", "--sampling-steps", "1", "--output", str(tmp_path)]
    sparse_quality.main([*options, "--no-apart", "--minutes", "0.02"])
    (path,) = tmp_path.glob("*.json")
    result = json.loads(path.read_text())
    assert result["training"]
    assert len(result["rows"]) < 2 * len(sparse_quality.variants())


@pytest.mark.audit
def test_processes_of_their_own_tell_the_same(result, tmp_path):
    options = ["--toy", "--seeds", "1", "--steps", "3", "--sampling-steps", str(STEPS), "--output", str(tmp_path)]
    sparse_quality.main([*options, "--apart", "--minutes", "10"])
    (path,) = tmp_path.glob("*.json")
    apart = json.loads(path.read_text())
    losses = [[(row["trained"], row["held_out_loss"]) for row in one["training"]] for one in (apart, result)]
    assert losses[0] == losses[1]
    assert [row["run"] for row in apart["rows"]] == [row["run"] for row in result["rows"]]
    assert path.with_suffix(".png").is_file()


def test_the_tables_have_a_line_for_each_training_and_each_way_to_run(result):
    text = sparse_quality_table.markdown(result)
    assert text.count("\n| ") == 2 + 2 + 2 + len(sparse_quality.variants())
    assert "not measured" not in text
    partly = {**result, "rows": [row for row in result["rows"] if row["run"] != "sage2"]}
    assert text.count("\n| ") == sparse_quality_table.markdown(partly).count("\n| ") + 1


def test_a_seed_that_was_cut_does_not_count(result):
    cut = [{**row, "seed": 1} for row in result["rows"][:3]]
    both = [{**row, "seed": 1} for row in result["training"]]
    partly = {**result, "rows": result["rows"] + cut, "training": result["training"] + both}
    assert sparse_quality_table.whole_seeds(partly) == [0]
    assert sparse_quality_table.markdown(partly) == sparse_quality_table.markdown(result)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_result_on_file_compares_like_with_like(path):
    """At least 4k tokens; both trainings of each seed that counts took as many steps, and all ways were judged."""
    found = json.loads(path.read_text(encoding="utf-8"))
    seeds = sparse_quality_table.whole_seeds(found)
    assert found["size"]["tokens"] >= 4096 and seeds
    assert len({row["steps"] for row in found["training"] if row["seed"] in seeds}) == 1
    trained = {(row["trained"], row["seed"]) for row in found["training"]}
    assert trained >= {(trained, seed) for trained in ("dense", "vsa") for seed in seeds}
    runs = {(row["trained"], row["run"], row["seed"]) for row in found["rows"] if "score" in row}
    assert runs >= {(one.trained, one.run, seed) for one in sparse_quality.variants() for seed in seeds}
