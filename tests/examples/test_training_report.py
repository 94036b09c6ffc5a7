"""Comparisons over seeds say what the losses say, and a diverged run is never averaged away."""

import json

import pytest
from training_report import compare, comparison_table, finite, mean_and_spread, resume_or_run, update_result


def test_differences_are_taken_seed_by_seed():
    table = compare({"exact": {0: 1.0, 1: 2.0, 2: 3.0}, "sage_bwd": {0: 1.1, 1: 2.2, 2: 3.3}})
    assert table["exact"] == {"diverged": 0, "mean": 2.0, "spread": 1.0}
    assert table["sage_bwd"]["differences"] == pytest.approx({"0": 0.1, "1": 0.2, "2": 0.3})
    assert table["sage_bwd"]["mean_difference"] == pytest.approx(0.2)
    assert table["sage_bwd"]["difference_spread"] == pytest.approx(0.1)
    assert table["sage_bwd"]["within_seed_noise"] is True


@pytest.mark.parametrize("shift", [-0.5, 0.5])
def test_a_difference_beyond_the_spread_over_seeds_is_not_called_noise(shift):
    exact = {0: 1.0, 1: 1.1, 2: 1.2}
    table = compare({"exact": exact, "sage_bwd": {seed: loss + shift for seed, loss in exact.items()}})
    assert table["sage_bwd"]["within_seed_noise"] is False


def test_undecidable_comparisons_are_left_open():
    single = compare({"exact": {0: 1.0}, "sage_bwd": {0: 1.1}})["sage_bwd"]
    assert single["mean_difference"] == pytest.approx(0.1)
    assert single["spread"] is None and single["within_seed_noise"] is None
    assert "mean_difference" not in compare({"exact": {0: 1.0}, "sage_bwd": {1: 1.1}})["sage_bwd"]
    assert "mean_difference" not in compare({"sage_bwd": {1: 1.1}})["sage_bwd"]


def test_a_diverged_run_is_counted_and_leaves_no_mean():
    table = compare({"exact": {0: 1.0, 1: 1.1}, "sage_bwd": {0: 1.0, 1: None}})
    row = table["sage_bwd"]
    assert (row["diverged"], row["mean"], row["mean_difference"], row["within_seed_noise"]) == (1, None, None, None)
    assert "sage_bwd (1 diverged)" in comparison_table(table)


def test_numbers_that_are_not_finite_become_null():
    assert [finite(value) for value in (float("nan"), float("inf"), 1 / 3)] == [None, None, 0.333333]


def test_means_are_written_with_their_spread():
    assert mean_and_spread([1.0, 2.0, 3.0], 2) == "2.00 ± 1.00"
    assert mean_and_spread([1.0], 2) == "1.00"
    assert mean_and_spread([1.0, None]) == "–"


def test_a_kept_part_serves_only_equal_settings(tmp_path):
    path = tmp_path / "runs" / "part.json"
    made = resume_or_run(path, {"steps": 3, "betas": (1, 2)}, lambda: {"loss": 1.0})
    assert made == json.loads(path.read_text()) == {"settings": {"steps": 3, "betas": [1, 2]}, "loss": 1.0}
    assert resume_or_run(path, {"steps": 3, "betas": (1, 2)}, lambda: {"loss": 2.0}) == made
    with pytest.raises(SystemExit, match=r"part.json was made with another steps: delete it"):
        resume_or_run(path, {"steps": 4, "betas": (1, 2)}, lambda: {"loss": 2.0})


def test_an_interrupted_part_leaves_nothing_that_could_be_taken_for_one(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        resume_or_run(tmp_path / "part.json", {}, lambda: {"loss": float("nan")})
    assert not (tmp_path / "part.json").exists()


def test_a_section_of_a_result_leaves_the_others_alone(tmp_path):
    path = tmp_path / "results" / "result.json"
    update_result(path, "pretrain", {"a": 1})
    update_result(path, "finetune", {"b": 2})
    update_result(path, "pretrain", {"a": 3})
    assert json.loads(path.read_text()) == {"pretrain": {"a": 3}, "finetune": {"b": 2}}
