"""The benchmark of block lists: what it draws and counts, and the result on file."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import run as benchmark
import sparse
import torch

from sage_hf.bench.cases import BenchCase
from sage_kernels import ops, training
from sage_kernels.exact.gradients import Gradients

CPU = torch.device("cpu")
RESULTS = sorted((Path(__file__).parents[2] / "benchmarks/results").glob("*-sparse.json"))


def small(tokens: int, skipped: float, trains: bool = False, **lists) -> sparse.Case:
    return sparse.Case(BenchCase.square("small", (1, 2, 2, tokens, 64), training=trains), skipped, **lists)


def test_lists_keep_the_same_number_of_tiles_in_each_block_of_rows():
    case = small(1024, 0.75, block_n=64)
    _, blocks = sparse.draw(case, CPU)
    assert blocks.tiles.shape == (1, 2, 8, 4) and case.share == 0.25
    assert (blocks.kept(1024).sum(-1) == 4).all()


def test_a_routers_lists_prefer_near_tiles_and_keep_as_many():
    case = small(4096, 0.75, lists=sparse.ROUTED)
    _, blocks = sparse.draw(case, CPU)
    kept = blocks.kept(4096)
    assert (kept.sum(-1) == case.places).all()
    number = torch.arange(32)
    near = (number[:, None] - number).abs() <= 4
    assert kept[..., near].float().mean() > 2 * kept[..., ~near].float().mean()


def test_the_error_is_measured_against_exact_attention_over_the_list():
    inputs, blocks = sparse.draw(small(512, 0.5), CPU)
    exactly, _ = ops.attention(*inputs.tensors, blocks=blocks, recipe="exact")
    densely, _ = ops.attention(*inputs.tensors, recipe="exact")
    assert sparse.errors_of(exactly, inputs, blocks)["rel_l1"] < 0.005
    assert sparse.errors_of(densely, inputs, blocks)["rel_l1"] > 0.1


def test_gradient_errors_are_measured_against_exact_attention_over_the_list():
    inputs, blocks = sparse.draw(small(512, 0.5, trains=True), CPU)
    for listed, low, high in ((blocks, 0.0, 0.03), (None, 0.1, 10.0)):
        output, _ = training.attention(*inputs.tensors, blocks=listed)
        found = Gradients(output.detach(), *torch.autograd.grad(output, inputs.tensors, inputs.gradient))
        errors = sparse.errors_of(found, inputs, blocks)
        assert set(errors) == {"rel_l1_dq", "rel_l1_dk", "rel_l1_dv"} and all(low < x < high for x in errors.values())


def test_flex_attention_gets_the_same_tiles():
    _, blocks = sparse.draw(small(512, 0.5), CPU)
    assert torch.equal(sparse.flex_mask(blocks, 512).to_dense().bool(), blocks.kept(512))


def test_a_result_of_the_same_commit_is_continued(tmp_path, monkeypatch):
    """So that it can be measured in parts."""
    measured = []

    def measure(case, device):
        measured.append(case)
        return [{**case.row, "provider": "sage_hf:sage2", "ms": 1.0}]

    cases = sparse.FORWARD + sparse.TRAINING
    monkeypatch.setattr(sparse, "measure", measure)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
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
    assert measured[len(cases) :] == sparse.FORWARD[3:] + sparse.TRAINING[1:]
    measured.clear()
    run("two")
    assert measured == cases


@pytest.mark.parametrize("trains", [False, True])
def test_each_provider_is_measured_over_the_tiles_that_it_attends_to(trains, monkeypatch):
    monkeypatch.setattr(sparse, "first_calls", lambda call: (call(), 0, 1))
    monkeypatch.setattr(sparse, "median_ms", lambda calls: dict.fromkeys(calls, 2.0))
    monkeypatch.setattr(sparse, "flex_attention", None)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    case = small(512, sparse.SKIPPED[0], trains)
    with torch.no_grad():
        ours, dense, flex = sparse.measure(case, CPU)
    assert ours["kept_tflops"] == case.call.operations * case.share / 2.0 * 1e-9
    assert (dense["skipped"], dense["kept_tflops"]) == (0.0, case.call.operations / 2.0 * 1e-9)
    assert max(value for name, value in ours.items() if name.startswith("rel_l1")) < 0.05
    assert not any(name.startswith("rel_l1") for name in dense) and "unavailable" in flex
    assert ours.get("direction") == ("forward_backward" if trains else None)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_cover_every_case_and_name_their_commit(path):
    result = json.loads(path.read_text())
    for table, cases, ours in (("rows", sparse.FORWARD, "sage2"), ("training", sparse.TRAINING, "sage_bwd")):
        for case in cases:
            rows = {row["provider"] for row in result[table] if case.row.items() <= row.items()}
            assert f"sage_hf:{ours}" in rows and (case.block_m != 128 or "flex_attention" in rows), case
            dense = replace(case, skipped=0.0)
            assert not case.measures_dense or any(dense.row.items() <= row.items() for row in result[table]), case
        assert all(("kept_tflops" in row) != ("unavailable" in row) for row in result[table])
    parts = {row["part"] for row in result["routing"]}
    assert parts > {"mean", "subblock", "share"} and any(part.startswith("reorder") for part in parts)
    assert len(result["commit"]) == 40
