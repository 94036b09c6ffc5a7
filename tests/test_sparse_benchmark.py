"""The benchmark of block lists: what it draws and counts, and the result on file."""

import json
from pathlib import Path

import pytest
import run as benchmark
import sparse
import torch

from sage_kernels import ops
from sage_kernels.exact import sdpa

RESULTS = sorted((Path(__file__).parents[1] / "benchmarks/results").glob("*-sparse.json"))


def test_lists_keep_the_same_number_of_tiles_in_each_block_of_rows():
    case = sparse.Case(2, 1024, 64, 0.75, 128, 64)
    _, blocks = sparse.draw(case, torch.device("cpu"))
    assert blocks.tiles.shape == (1, 2, 8, 4)
    assert (blocks.kept(1024).sum(-1) == 4).all()
    assert case.operations == 4 * 2 * 1024 * 4 * 64 * 64 == case.dense_operations / 4


def test_a_routers_lists_prefer_near_tiles_and_keep_as_many():
    case = sparse.Case(2, 4096, 64, 0.75, lists=sparse.ROUTED)
    _, blocks = sparse.draw(case, torch.device("cpu"))
    kept = blocks.kept(4096)
    assert (kept.sum(-1) == case.places).all()
    number = torch.arange(32)
    near = (number[:, None] - number).abs() <= 4
    assert kept[..., near].float().mean() > 2 * kept[..., ~near].float().mean()


def test_the_error_is_that_against_exact_attention_over_the_list():
    case = sparse.Case(2, 512, 64, 0.5)
    inputs, blocks = sparse.draw(case, torch.device("cpu"))
    exactly, _ = ops.attention(*inputs, blocks=blocks, recipe="exact")
    densely, _ = ops.attention(*inputs, recipe="exact")
    assert sparse.error(exactly, inputs, blocks) < 0.005
    assert sparse.error(densely, inputs, blocks) > 0.1


def test_flex_attention_gets_the_same_tiles():
    case = sparse.Case(2, 512, 64, 0.5)
    _, blocks = sparse.draw(case, torch.device("cpu"))
    assert torch.equal(sparse.flex_mask(blocks, 512).to_dense().bool(), blocks.kept(512))


def test_a_result_of_the_same_commit_is_continued(tmp_path, monkeypatch):
    """So that it can be measured in parts."""
    measured = []

    def measure(case, device):
        measured.append(case)
        return [sparse.new_row(case, "sage_hf:sage2") | {"ms": 1.0, "kept_tflops": 1.0}]

    cases = sparse.CASES + sparse.TRAINING_CASES
    monkeypatch.setattr(sparse, "measure", measure)
    monkeypatch.setattr(sparse, "measure_training", measure)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(sparse, "compile_ahead", lambda: None)
    monkeypatch.setattr(sparse, "measure_routing", lambda device: [{"part": "mean", "ms": 1.0}])

    def run(commit):
        monkeypatch.setattr(sparse.results, "facts", lambda device: {"gpu": "A GPU", "commit": commit})
        benchmark.main(["sparse", "--output", str(tmp_path)])
        return json.loads((tmp_path / "a-gpu-sparse.json").read_text())

    whole = run("one")
    assert measured == cases
    parts = {"rows": whole["rows"][:3], "training": whole["training"][:1]}
    (tmp_path / "a-gpu-sparse.json").write_text(json.dumps(whole | parts))
    assert run("one") == whole
    assert measured[len(cases) :] == sparse.CASES[3:] + sparse.TRAINING_CASES[1:]
    measured.clear()
    run("two")
    assert measured == cases


def test_the_gradients_error_is_that_against_exact_attention_over_the_list():
    case = sparse.Case(2, 512, 64, 0.5)
    inputs, blocks = sparse.draw(case, torch.device("cpu"))
    gradient = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    leaves = [x.double().requires_grad_() for x in inputs]
    output, _ = sdpa.attention(*leaves, mask=blocks.mask(512, 0, 512))
    truths = torch.autograd.grad(output, leaves, gradient.double())
    for found, truth in zip(sparse.exact_gradients(inputs, gradient, blocks, 1), truths, strict=True):
        assert (found - truth[0, 1]).norm() <= 1e-5 * truth[0, 1].norm()


def test_training_is_measured_by_both_passes_of_each_provider(monkeypatch):
    monkeypatch.setattr(sparse, "first_calls", lambda call: (call(), 0, 1))
    monkeypatch.setattr(sparse, "median_ms", lambda calls: {name: call() and 2.0 for name, (call, _) in calls.items()})
    monkeypatch.setattr(sparse, "flex_attention", None)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    case = sparse.Case(2, 512, 64, sparse.SKIPPED[0])
    with torch.no_grad():
        ours, dense, flex = sparse.measure_training(case, torch.device("cpu"))
    assert ours["kept_tflops"] == 3.5 * case.operations / 2.0 * 1e-9
    assert max(ours[f"rel_l1_{name}"] for name in ("dq", "dk", "dv")) < 0.03
    assert (dense["skipped"], dense["kept_tflops"]) == (0.0, 3.5 * case.dense_operations / 2.0 * 1e-9)
    assert "unavailable" in flex


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_cover_every_case_and_name_their_commit(path):
    result = json.loads(path.read_text())
    names = ("q_len", "head_dim", "block_m", "lists", "provider", "skipped")
    found = {tuple(row[name] for name in names) for row in result["rows"]}
    for case in sparse.CASES:
        sizes = (case.tokens, case.head_dim, case.block_m, case.lists)
        assert (*sizes, "sage_hf:sage2", case.skipped) in found
        assert not case.measures_dense or (*sizes, sparse.DENSE, 0.0) in found
        assert case.block_m != 128 or (*sizes, "flex_attention", case.skipped) in found
    parts = {row["part"] for row in result["routing"]}
    assert parts > {"mean", "subblock", "share"} and any(part.startswith("reorder") for part in parts)
    training = result.get("training", [])
    trained = {(row["q_len"], row["head_dim"], row["block_m"], row["provider"]) for row in training}
    for case in sparse.TRAINING_CASES:
        assert not training or (case.tokens, case.head_dim, case.block_m, "sage_hf:sage_bwd") in trained
    assert all(("kept_tflops" in row) != ("unavailable" in row) for row in result["rows"] + training)
    assert len(result["commit"]) == 40
