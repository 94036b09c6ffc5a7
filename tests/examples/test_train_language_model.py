"""The language-model experiment learns, compares like with like, resumes, and reports what it measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train_language_model
from accelerate import Accelerator
from source_text import held_out_windows, read_text, standard_library, training_windows
from train_language_model import SIZES, build_model, train, use_recipe
from training_loop import TrainingPlan, kernels_that_ran

pytestmark = pytest.mark.audit

EXAMPLES = Path(train_language_model.__file__).parent
PRETRAIN_STEPS, FINETUNE_STEPS, POINTS = 18, 9, 3


def run(command: str, base: Path, *options: str) -> dict:
    folders = ["--run-dir", str(base / "runs"), "--output", str(base / "results")]
    texts = ["--text", str(standard_library() / "email"), "--finetune-text", str(standard_library() / "asyncio")]
    steps = ["--pretrain-steps", str(PRETRAIN_STEPS), "--finetune-steps", str(FINETUNE_STEPS), "--points", str(POINTS)]
    train_language_model.main([command, "--size", "tiny", *folders, *texts, *steps, *options])
    return json.loads((base / "results" / "language_model.json").read_text())


@pytest.fixture(scope="module")
def everything(tmp_path_factory) -> tuple[Path, dict]:
    """The folder and the result of all commands, for exact and INT8 attention with two seeds."""
    base = tmp_path_factory.mktemp("language_model")
    return base, run("all", base, "--recipes", "exact", "sage_bwd", "--seeds", "0", "1")


def runs_of(result: dict) -> list[dict]:
    return [run for stage in ("pretrain", "finetune") for group in result[stage].values() for run in group["runs"]]


def test_the_held_out_loss_decreases_with_every_recipe_and_seed(everything):
    runs = runs_of(everything[1])
    # Two architectures and one fine-tuning, two recipes, two seeds.
    assert len(runs) == 3 * 2 * 2
    for run in runs:
        first, last = run["curve"][0]["held_out_loss"], run["curve"][-1]["held_out_loss"]
        # Uniform bytes cost ln 256 = 5.5; fine-tuning begins at what pre-training reached on similar text.
        assert last < first - (0.5 if run["settings"]["stage"] == "pretrain" else 0.02), run["settings"]


def test_every_run_has_its_settings_curve_kernels_speed_and_origin(everything):
    for run in runs_of(everything[1]):
        assert [row["step"] for row in run["curve"]] == [
            run["settings"]["steps"] * point // POINTS for point in range(POINTS + 1)
        ]
        for row in run["curve"][1:]:
            assert all(row[name] > 0 for name in ("train_loss", "largest_gradient_norm", "held_out_loss"))
        assert all(kernel.startswith(("PyTorch", run["settings"]["recipe"])) for kernel in run["kernels"])
        assert run["kernels"] and run["tokens_per_second"] > 0
        assert run["facts"]["torch"] == torch.__version__.split("+")[0] or run["facts"]["torch"] == torch.__version__
        assert run["settings"]["text"]["training_bytes"] > 0


def test_runs_of_one_seed_begin_at_the_same_loss_and_recipes_then_part(everything):
    base, result = everything
    for stage in ("pretrain", "finetune"):
        for group in result[stage].values():
            curves = {(run["settings"]["recipe"], run["settings"]["seed"]): run["curve"] for run in group["runs"]}
            for seed in (0, 1):
                assert curves["exact", seed][0] == curves["sage_bwd", seed][0]
    # By their weights: losses of so few steps may agree in all digits that a curve has.
    for folder in ("pretrain-llama", "pretrain-qwen3", "finetune-llama"):
        for seed in (0, 1):
            exact, low_bit = (
                (base / "runs" / folder / f"{recipe}-{seed}" / "model.safetensors").read_bytes()
                for recipe in ("exact", "sage_bwd")
            )
            assert exact != low_bit


def test_the_comparison_uses_the_final_losses(everything):
    for stage in ("pretrain", "finetune"):
        for group in everything[1][stage].values():
            last = {
                (run["settings"]["recipe"], run["settings"]["seed"]): run["curve"][-1]["held_out_loss"]
                for run in group["runs"]
            }
            differences = [last["sage_bwd", seed] - last["exact", seed] for seed in (0, 1)]
            # Both are rounded to six digits.
            assert group["comparison"]["sage_bwd"]["mean_difference"] == pytest.approx(sum(differences) / 2, abs=1e-5)


def test_every_fine_tuned_model_is_evaluated_with_every_recipe(everything):
    section = everything[1]["evaluate"]
    assert [row["trained_with"] for row in section["rows"]] == ["not fine-tuned", "exact", "sage_bwd"]
    for row in section["rows"]:
        assert set(row["perplexity"]) == {"exact", "sage_bwd", "sage2", "sage3"}
        for values in row["perplexity"].values():
            assert len(values) == (1 if row["trained_with"] == "not fine-tuned" else 2)
            assert all(1 < value < 256 for value in values)
    for recipe in ("sage_bwd", "sage2", "sage3"):
        assert all(kernel.startswith(recipe) for kernel in section["kernels"][recipe])


def test_fine_tuned_models_are_better_on_the_new_text(everything):
    before, *after = [row["perplexity"]["exact"] for row in everything[1]["evaluate"]["rows"]]
    assert all(value < before[0] for values in after for value in values)


def test_a_run_that_is_kept_is_not_repeated(everything, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("trained again")

    monkeypatch.setattr(train_language_model, "train", fail)
    again = run("finetune", everything[0], "--recipes", "exact", "sage_bwd", "--seeds", "0", "1")
    assert again == everything[1]


def test_runs_with_other_settings_are_not_mixed(everything):
    with pytest.raises(SystemExit, match=r"another pretrain_lr: delete it, or give another --run-dir|another lr"):
        run("finetune", everything[0], "--recipes", "exact", "--seeds", "0", "--pretrain-lr", "0.01")


def test_every_seed_fine_tunes_the_same_weights(everything, monkeypatch):
    """Also when each seed is run by a command of its own."""
    monkeypatch.delattr(train_language_model, "train")
    again = run("finetune", everything[0], "--recipes", "exact", "--seeds", "1")
    ((_, group),) = again["finetune"].items()
    (base,) = (run["settings"]["base"] for run in group["runs"])
    assert (base["recipe"], base["seed"]) == ("exact", 0)


def test_a_curve_has_a_point_at_each_step_if_more_are_asked_for():
    size, text = SIZES["tiny"], read_text(standard_library() / "json", "json")
    for steps in (1, 2):
        result = train(
            Accelerator(), build_model("llama", size, 0), text, size, 0, TrainingPlan("exact", 1e-3, steps, 3)
        )
        assert [row["step"] for row in result["curve"]] == list(range(steps + 1))
        assert result["tokens_per_second"] > 0
    with pytest.raises(SystemExit, match="0 steps and 3 points"):
        TrainingPlan("exact", 1e-3, 0, 3)


def test_an_unknown_recipe_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run("pretrain", tmp_path, "--recipes", "sage3")
    assert "invalid choice: 'sage3'" in capsys.readouterr().err


def test_exact_attention_in_place_of_the_recipe_is_refused():
    size = SIZES["tiny"]
    model = build_model("llama", size, 0)
    use_recipe(model, "sage3")
    # Forward only: with gradients it gives way to exact attention.
    model(torch.zeros(1, 64, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="asked for sage3, but this ran"):
        kernels_that_ran(model, "sage3")


def test_a_run_is_repeated_exactly_by_its_seed_and_another_seed_sees_other_data():
    size, text = SIZES["tiny"], read_text(standard_library() / "json", "json")

    def losses(seed: int) -> list[float]:
        model = build_model("llama", size, 0)
        plan = TrainingPlan("exact", 1e-3, 4, 2)
        return [row["held_out_loss"] for row in train(Accelerator(), model, text, size, seed, plan)["curve"]]

    assert losses(0) == losses(0)
    assert losses(0)[0] == losses(1)[0] and losses(0)[-1] != losses(1)[-1]


def test_the_two_architectures_differ_by_the_gains_of_qk_norm_alone():
    size = SIZES["tiny"]
    shapes = [{name: p.shape for name, p in build_model(a, size, 0).named_parameters()} for a in ("llama", "qwen3")]
    llama, qwen3 = shapes
    assert {name.rsplit(".", 2)[1] for name in qwen3.keys() - llama.keys()} == {"q_norm", "k_norm"}
    assert llama.items() <= qwen3.items()


def test_diffusers_is_not_needed(tmp_path):
    code = "import sys; sys.modules['diffusers'] = None; import train_language_model as t; t.main()"
    options = ["pretrain", "--size", "tiny", "--recipes", "sage_bwd", "--seeds", "0", "--pretrain-steps", "2"]
    where = ["--points", "1", "--text", str(standard_library() / "json"), "--run-dir", str(tmp_path)]
    command = [sys.executable, "-c", code, *options, *where, "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "language_model.json").exists()


def test_a_file_is_trained_on_or_held_out_and_none_is_lost():
    folder = standard_library() / "email"
    text = read_text(folder, "email")
    files = [path.read_bytes() + b"\0" for path in sorted(folder.rglob("*.py"))]
    parts = [bytes(part.numpy()) for part in (text.training, text.held_out)]
    assert sum(map(len, parts)) == sum(map(len, files))
    assert all((file in parts[0]) != (file in parts[1]) for file in files if len(file) > 100)
    assert text.facts["training_bytes"] == len(parts[0]) and text.facts["files"] == len(files)


def test_windows_lie_in_the_text_and_reach_both_of_its_ends():
    text = torch.arange(200, dtype=torch.uint8)
    drawn = training_windows(text, 32, 1000, seed=3)
    assert drawn.shape == (1000, 32) and torch.equal(drawn - drawn[:, :1], text[:32].expand(1000, 32))
    assert torch.equal(drawn, training_windows(text, 32, 1000, seed=3))
    # Each of 169 starts is missed with probability (1 - 1/169)^1000 = 0.3 %; this seed misses neither end.
    assert drawn.min() == 0 and drawn.max() == 199
    fixed = held_out_windows(text, 32, 5)
    assert torch.equal(fixed[0], text[:32]) and torch.equal(fixed[-1], text[-32:])


def test_a_text_shorter_than_a_window_and_a_folder_without_text_are_refused(tmp_path):
    with pytest.raises(ValueError, match="10 bytes, fewer than the 32 of a window"):
        training_windows(torch.zeros(10, dtype=torch.uint8), 32, 1, seed=0)
    with pytest.raises(ValueError, match="has 0 Python files outside of tests: at least 2"):
        read_text(tmp_path, "nothing")
