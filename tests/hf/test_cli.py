"""The commands of `sage-hf`: their output, their files, and their messages for wrong arguments."""

import errno
import json
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM, Gemma2Config, LlamaConfig, LlamaForCausalLM

import sage_hf
from sage_hf.app import generate as generation
from sage_hf.app import pipelines
from sage_hf.app.cli import main
from sage_hf.bench import measure
from sage_hf.config import SageConfig
from sage_kernels.spec.recipe import RECIPES
from tests.helpers import tiny_pipelines as tiny
from tests.helpers.cached_models import hands_on

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_example(monkeypatch, name: str, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return stop.value.code


def refused(capsys, *argv: object) -> str:
    """Return the message of a command that refuses: one line, no traceback, exit code 2."""
    assert main([str(argument) for argument in argv]) == 2
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert message.startswith("error: ")
    return message


def test_the_version_is_printed_without_a_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out == f"sage-hf {sage_hf.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["generate", "--help"], ["genrate"], ["generate", "--recipe", "sage9"], ["compare", "--config", "x"]],
)
def test_help_and_typos_are_answered_without_importing_torch(arguments):
    code = "import sys; from sage_hf.app.cli import main\ntry: main(sys.argv[1:])\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    modules = done.stdout.splitlines()[-1].split()
    assert "sage_hf.app.cli" in modules and not {"torch", "diffusers", "transformers", "numpy"} & set(modules)


def test_env_tells_versions_and_what_each_recipe_runs(capsys):
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert "torch" in text and "diffusers" in text
    rows = [line.split() for line in text.partition("cpu:")[2].splitlines()]
    ran = {row[0]: row[1:4] for row in rows if row and row[0] in RECIPES}
    assert ran["sage3"] == ["sage3", "reference", "emulated"] and ran["exact"] == ["exact", "sdpa", "exact"]
    assert set(ran) == set(RECIPES)


def test_explain_plans_a_pipeline_without_loading_weights(folder, tmp_path, capsys):
    weightless = tmp_path / "pipeline"
    (weightless / "transformer").mkdir(parents=True)
    for name in ("model_index.json", "transformer/config.json"):
        (weightless / name).write_text((folder / name).read_text())
    config = {
        "recipe": "sage3",
        "layers": [{"pattern": "*.1.*", "recipe": "exact"}],
        "steps": [{"start": -1, "recipe": "sage2"}],
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["--pretrained", str(weightless), "--config", str(tmp_path / "config.json"), "--device", "cpu"]
    assert main(["explain", *arguments]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["transformer_blocks.0.attn1", "sage3", "sage3", "reference", "emulated"] in lines
    assert ["sage2", "sage2", "reference", "emulated"] in lines
    assert ["transformer_blocks.1.attn1", "exact", "exact", "sdpa", "exact"] in lines


def test_explain_plans_every_denoiser_of_a_pipeline(folder, tmp_path, capsys):
    index = json.loads((folder / "model_index.json").read_text())
    index["unconditional_transformer"] = index["transformer"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    for name in ("transformer", "unconditional_transformer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text((folder / "transformer/config.json").read_text())
    assert main(["explain", "--pretrained", str(tmp_path), "--recipe", "sage2", "--device", "cpu"]) == 0
    assert "unconditional_transformer.transformer_blocks" in capsys.readouterr().out


def test_explain_plans_diffusers_and_transformers_models(folder, tmp_path, capsys):
    assert main(["explain", "--pretrained", str(folder / "transformer"), "--recipe", "sage2", "--device", "cpu"]) == 0
    assert "transformer_blocks.0-2.attn1  sage2  sage2  reference" in capsys.readouterr().out
    tiny.llama().save_pretrained(tmp_path)
    assert main(["explain", "--pretrained", str(tmp_path), "--device", "cpu", "--fallback", "error"]) == 0
    text = capsys.readouterr().out
    assert "model.layers.0-1.self_attn  sage3  none" in text and "no native kernel for recipe 'sage3'" in text


def test_explain_refuses_what_it_cannot_plan(tmp_path, capsys):
    assert "neither model_index.json nor config.json" in refused(capsys, "explain", "--pretrained", tmp_path)
    (tmp_path / "model_index.json").write_text("{")
    assert str(tmp_path) in refused(capsys, "explain", "--pretrained", tmp_path)
    BloomForCausalLM(BloomConfig(vocab_size=8, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(tmp_path / "bloom")
    assert "BloomForCausalLM" in refused(capsys, "explain", "--pretrained", tmp_path / "bloom")


def test_generate_and_compare_write_their_files_and_say_where(folder, tmp_path, capsys):
    arguments = ["--pretrained", str(folder), "--prompt", "a red ball", "--steps", "1", "--frames", "9"]
    arguments += ["--height", "64", "--width", "64", "--device", "cpu", "--recipe", "sage2"]
    assert main(["generate", *arguments, "--output", str(tmp_path / "one")]) == 0
    assert str(tmp_path / "one" / "01-sage2.mp4") in capsys.readouterr().out
    assert main(["compare", *arguments, "--output", str(tmp_path / "two")]) == 0
    assert str(tmp_path / "two" / "01-side-by-side.mp4") in capsys.readouterr().out


def test_compare_writes_images_side_by_side(tmp_path, capsys):
    tiny.image_pipeline().save_pretrained(tmp_path / "pipeline")
    arguments = ["--steps", "2", "--device", "cpu", "--recipe", "sage2", "--guidance-scale", "1"]
    arguments += ["--prompt", "a red ball", "--output", str(tmp_path / "out")]
    assert main(["compare", "--pretrained", str(tmp_path / "pipeline"), *arguments]) == 0
    for name in ("01-exact", "01-sage2", "01-side-by-side"):
        assert (tmp_path / "out" / f"{name}.png").is_file()
    (video,) = json.loads((tmp_path / "out" / "report.json").read_text())["videos"]
    assert 20 < video["psnr"] < 100 and 0.9 < video["ssim"] <= 1
    assert "PSNR" in capsys.readouterr().out
    pipeline = tmp_path / "pipeline"
    told = refused(capsys, "compare", "--pretrained", pipeline, "--prompt", "a", "--frames", "9", "--output", tmp_path)
    assert "StableDiffusionPipeline takes no num_frames: leave --frames out" in told


@pytest.fixture(scope="module")
def language_model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny.llama().save_pretrained(path)
    tiny.tokenizer().save_pretrained(path)
    return path


def test_compare_tells_how_a_language_models_predictions_change(language_model, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("a red ball rolls a blue ball " * 60, encoding="utf-8-sig")  # as Windows' editors save it
    found = {}
    for recipe in ("exact", "sage1", "sage3_paper"):
        arguments = ["--pretrained", str(language_model), "--text", str(text), "--recipe", recipe, "--device", "cpu"]
        assert main(["compare", *arguments]) == 0
        printed = capsys.readouterr().out
        rows = {line.split()[0]: line.split()[1:] for line in printed.splitlines()[2:4]}
        assert f"model.layers.1.self_attn  {recipe}" in printed and "418 tokens predicted" in printed
        found[recipe] = float(rows[recipe][2])
    model, ids = tiny.llama(), torch.tensor(tiny.tokenizer()(text.read_text("utf-8-sig")).input_ids)
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(model(window[None]).logits[0, :-1], window[1:], reduction="sum")
            for window in ids.split(256)
        ]
    assert float(rows["exact"][0]) == pytest.approx((sum(losses) / 418).exp().item(), abs=1e-4)
    assert 0 == found["exact"] <= found["sage1"] < found["sage3_paper"]


@hands_on
def test_compare_predicts_through_the_configurations_kv_cache(tmp_path, capsys):
    text, config, model_config = tmp_path / "text.txt", tmp_path / "kv.json", tiny.llama().config
    model_config.head_dim = 64
    LlamaForCausalLM(model_config).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    text.write_text("a red ball rolls a blue ball " * 60)
    found = {}
    for format in ("int8", "int4"):
        config.write_text(json.dumps({"recipe": "exact", "kv_cache": format}))
        arguments = ["--pretrained", str(tmp_path), "--text", str(text), "--config", str(config)]
        assert main(["compare", *arguments, "--device", "cpu"]) == 0
        printed = capsys.readouterr().out
        assert f"KV cache: {format} in 2 layers" in printed and "208 tokens predicted" in printed
        found[format] = abs(float(printed.splitlines()[3].split()[2].rstrip("%")))
    assert 0 < found["int8"] < found["int4"]
    text.write_text("a red")
    assert "fewer than three tokens: give a longer text" in refused(capsys, "compare", *arguments, "--device", "cpu")


@pytest.mark.parametrize("config", [[], {"model_type": "llama", "hidden_size": "wide"}], ids=["a list", "a wrong type"])
def test_a_damaged_language_model_is_reported_without_a_traceback(tmp_path, capsys, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "cannot read" in refused(capsys, "explain", "--pretrained", tmp_path, "--device", "cpu")
    arguments = ["--pretrained", tmp_path, "--text", __file__, "--device", "cpu"]
    assert "cannot load a causal language model" in refused(capsys, "compare", *arguments)


def test_what_is_no_language_model_or_no_text_is_refused(folder, language_model, tmp_path, capsys):
    text = tmp_path / "text.txt"
    assert "cannot read" in refused(capsys, "compare", "--pretrained", language_model, "--text", text)
    text.write_text("")
    assert "fewer than two tokens: give a longer text" in refused(
        capsys, "compare", "--pretrained", language_model, "--text", text
    )
    assert "is a diffusers pipeline" in refused(capsys, "compare", "--pretrained", folder, "--text", text)
    assert "needs --pretrained" in refused(capsys, "compare", "--text", text)
    assert "--steps is for renderings" in refused(capsys, "compare", "--text", text, "--steps", "2")
    assert "--frames is for renderings" in refused(capsys, "compare", "--text", text, "--frames", "0")
    assert "--ulysses is for renderings" in refused(capsys, "compare", "--text", text, "--ulysses", "2")
    assert "--output is for renderings" in refused(capsys, "compare", "--text", text, "--output", tmp_path)
    calibrate = "calibrate", "--pretrained", language_model, "--text", text
    for given in (["--steps", "2"], ["--seed", "1"], ["--cpu-offload"], ["--guidance-scale", "3"]):
        assert f"{given[0]} is for renderings" in refused(capsys, *calibrate, *given)
    assert "give one of them" in refused(capsys, "compare", "--text", text, "--prompt", "a")
    message = refused(capsys, "compare", "--pretrained", language_model, "--prompt", "a", "--output", tmp_path)
    assert "sage-hf compare --text FILE" in message


def test_the_tiny_model_is_found_from_a_checkout_that_the_package_does_not_lie_in(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(pipelines, "__file__", str(tmp_path / "site-packages/sage_hf/app/pipelines.py"))
    monkeypatch.chdir(EXAMPLES.parent)
    assert (pipelines.tiny_video() / "generation.json").is_file()
    monkeypatch.chdir(tmp_path)
    assert "--pretrained is needed" in refused(capsys, "generate")


def test_keep_makes_self_attention_sparse(folder, tmp_path, capsys):
    arguments = ["--pretrained", str(folder), "--recipe", "sage2", "--device", "cpu", "--keep", "0.5"]
    assert main(["explain", *arguments]) == 0
    assert (
        "self-attention: the 50% of tiles with the best scores by subblock, in calls of 4096" in capsys.readouterr().out
    )
    arguments += ["--prompt", "a", "--steps", "1", "--frames", "9", "--height", "64", "--width", "64"]
    assert main(["generate", *arguments, "--output", str(tmp_path / "one")]) == 0
    assert "fewer than 4096 tokens" in (tmp_path / "one" / "report.md").read_text() + capsys.readouterr().out


def test_keep_may_follow_what_the_model_ships(folder, tmp_path, capsys):
    shutil.copytree(folder, tmp_path / "pipeline")
    path = tmp_path / "pipeline" / "transformer" / "config.json"
    group = {"algorithm": "skip_softmax", "target_sparsity": 0.7}
    shipped = {"sparse_attention_config": {"config_groups": {"group_0": group}}}
    path.write_text(json.dumps(json.loads(path.read_text()) | shipped))
    arguments = ["--recipe", "sage2", "--device", "cpu", "--keep", "model"]
    assert main(["explain", "--pretrained", str(tmp_path / "pipeline"), *arguments]) == 0
    assert "self-attention: the 30% of tiles with the best scores by subblock" in capsys.readouterr().out
    assert "ships no sparse_attention_config" in refused(capsys, "explain", "--pretrained", folder, *arguments)


@pytest.fixture
def write_one(monkeypatch):
    """Writes the first video, and ends as given from then on."""

    def prepare(end):
        write = generation.write_video

        def write_first(frames, path, fps):
            if path.name != "01-exact":
                end()
            return write(frames, path, fps)

        monkeypatch.setattr(generation, "write_video", write_first)

    return prepare


def interrupt(*_, **__):
    raise KeyboardInterrupt


def compare_two(folder: Path, output: Path) -> int:
    arguments = ["--pretrained", str(folder), "--prompt", "a", "--prompt", "b", "--steps", "1", "--frames", "9"]
    arguments += ["--recipe", "sage2"]
    return main(["compare", *arguments, "--height", "64", "--width", "64", "--device", "cpu", "--output", str(output)])


def test_interrupting_ends_on_one_line_that_says_what_is_written(folder, tmp_path, capsys, write_one):
    write_one(interrupt)
    assert compare_two(folder, tmp_path) == 130
    printed = capsys.readouterr()
    told = f"interrupted; written: 01-exact.mp4, report.json, report.md in {tmp_path}"
    assert printed.err.splitlines()[-1] == told and "Traceback" not in printed.err and not printed.out
    assert {path.name for path in tmp_path.iterdir()} == {"01-exact.mp4", "report.json", "report.md"}


def test_interrupting_before_anything_is_written_leaves_nothing(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(generation, "load_pipeline", interrupt)
    assert compare_two(folder, tmp_path / "new") == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted; written: nothing"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError("all"),
    ],
)
def test_lack_of_room_is_reported_without_a_traceback(folder, tmp_path, capsys, write_one, error):
    def end():
        raise error

    write_one(end)
    assert compare_two(folder, tmp_path) == 2
    lines = capsys.readouterr().err.splitlines()
    assert f"wrote {tmp_path / '01-exact.mp4'}" in lines and f"error: {error}" in lines


@pytest.mark.parametrize("command", ["explain", "generate"])
@pytest.mark.parametrize(
    ("pretrained", "message"),
    [
        ("/nonexistent", "/nonexistent does not exist: give the folder"),
        ("./x", "./x does not exist: give the folder"),
        ("~/nowhere", "~/nowhere does not exist: give the folder"),
        ("a/b/c", "a/b/c does not exist: give the folder"),
        (__file__, "is a file: give the folder"),
        ("", "--pretrained must not be empty"),
    ],
)
def test_a_missing_model_is_named_in_the_error(tmp_path, capsys, command, pretrained, message):
    arguments = ["--prompt", "a", "--output", tmp_path / "out"] if command == "generate" else []
    assert message in refused(capsys, command, "--pretrained", pretrained, *arguments)


def test_a_home_folder_that_the_shell_left_alone_is_found(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(folder.parent))
    pretrained = f"--pretrained=~/{folder.name}"
    assert main(["explain", pretrained, "--device", "cpu"]) == 0
    monkeypatch.chdir(tmp_path)
    arguments = ["--prompt", "a", "--steps", "1", "--frames", "9", "--height", "64", "--width", "64", "--device", "cpu"]
    assert main(["generate", pretrained, *arguments, "--output=~/videos"]) == 0
    assert (folder.parent / "videos" / "01-sage3.mp4").is_file() and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "sage9"], "unknown recipe 'sage9'; recipes are: exact, "),
        (["--config", "missing.json"], "cannot read the configuration missing.json"),
        (["--output", "/proc/sage-hf"], "--output /proc/sage-hf cannot be written"),
        (["--fallback", "maybe"], "fallback: 'maybe' is not one of native, emulate, error"),
        (["--config", "mochi"], "'transformer_blocks.47.*' matches no attention layer"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--fallback", "error", "--device", "cpu"], "no native kernel for recipe 'sage3'"),
        (["--keep", "2"], "sparse.keep: expected a share in (0, 1], got 2.0"),
    ],
)
def test_errors_of_the_user_are_one_line_and_exit_code_2(folder, tmp_path, capsys, arguments, message):
    base = ["generate", "--pretrained", folder, "--prompt", "a", "--steps", "1", "--frames", "9", "--width", "64"]
    assert message in refused(capsys, *base, "--height", "64", "--output", tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "--seconds=-1"], "--seconds: must be 0 or more, got -1"),
        (["check", "--seconds", "nan"], "--seconds: must be 0 or more, got nan"),
        (["check", "--json", "."], "--json: . is a folder: name a file"),
        (["check", "--json", "none/a.json"], "--json: there is no folder none to write a.json into"),
        (["compare", "--html", "none/a.html"], "--html: there is no folder none to write a.html into"),
        (["tune", "--output", "none/a.json"], "--output: there is no folder none to write a.json into"),
        (
            ["calibrate", "--pretrained", "x", "--text", "x", "--output", "none/a.json"],
            "--output: there is no folder none to write a.json into",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_work_that_would_be_in_vain_does_not_begin(tmp_path, monkeypatch, capsys, arguments, message):
    """A check without an end, or with less than no time, is a slip; a result whose file cannot be written is lost."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2 and message in capsys.readouterr().err


def test_recipe_and_config_exclude_each_other(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["generate", "--recipe", "sage3", "--config", "mochi"])
    assert stop.value.code == 2 and "not allowed with" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["generate_cogvideox.py", "generate_hunyuanvideo.py", "generate_mochi.py"])
def test_scripts_for_large_models_refuse_a_cpu_before_downloading(monkeypatch, tmp_path, capsys, name):
    code = run_example(monkeypatch, name, "--prompt", "a", "--device", "cpu", "--output", str(tmp_path / "out"))
    assert code == 2 and "--no-cpu-offload" in capsys.readouterr().err


def test_generate_video_script_renders_and_recipe_goes_before_its_default(monkeypatch, folder, tmp_path, capsys):
    arguments = ["--pretrained", str(folder), "--prompt", "a red ball", "--steps", "1", "--frames", "9", "--no-compare"]
    arguments += ["--height", "64", "--width", "64", "--device", "cpu", "--output", str(tmp_path), "--recipe", "sage1"]
    assert run_example(monkeypatch, "generate_video.py", *arguments) == 0
    assert "01-sage1.mp4" in capsys.readouterr().out


def test_every_example_explains_itself(monkeypatch, capsys):
    for script in EXAMPLES.glob("generate_*.py"):
        assert run_example(monkeypatch, script.name, "--help") == 0
        assert "--pretrained" in capsys.readouterr().out


def test_the_example_has_the_tiny_model_wherever_it_is_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    chosen = {}
    monkeypatch.setattr(generation, "generate", lambda options, _: chosen.update(options=options) or sys.exit(0))
    assert run_example(monkeypatch, "generate_video.py") == 0
    assert (Path(chosen["options"].pretrained) / "model_index.json").is_file()


def test_env_and_explain_follow_the_processs_default_fallback(capsys):
    sage_hf.set_default_fallback("error")
    try:
        assert main(["env"]) == 0
    finally:
        sage_hf.set_default_fallback("native")
    table = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert next(line for line in table if line[:1] == ["sage3"])[1] == "none"


@pytest.mark.parametrize(
    ("head_dim", "softcap", "ran", "reason"),
    [(8, None, "exact", "head_dim outside 16...256"), (64, 30.0, "exact", "softcap")],
)
def test_explain_plans_what_a_transformers_model_will_really_do(tmp_path, capsys, head_dim, softcap, ran, reason):
    config = Gemma2Config(num_hidden_layers=1, head_dim=head_dim, attn_logit_softcapping=softcap)
    config.architectures = ["Gemma2Model"]
    config.save_pretrained(tmp_path)
    assert main(["explain", "--pretrained", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    (line,) = (line.split() for line in printed.splitlines() if line.startswith("layers.0"))
    assert line[2] == ran
    assert reason in printed


def test_explain_refuses_step_rules_for_a_model_without_steps(tmp_path, capsys):
    (tmp_path / "steps.json").write_text('{"recipe": "sage3", "steps": [{"start": 0, "stop": 2, "recipe": "exact"}]}')
    config = Gemma2Config(num_hidden_layers=1)
    config.architectures = ["Gemma2Model"]
    config.save_pretrained(tmp_path / "model")
    code = main(["explain", "--pretrained", str(tmp_path / "model"), "--config", str(tmp_path / "steps.json")])
    assert code == 2
    assert "is no denoiser of diffusers that takes a timestep" in capsys.readouterr().err


def test_explain_plans_training_with_inference(tmp_path, capsys):
    LlamaConfig(num_hidden_layers=1, architectures=["LlamaModel"]).save_pretrained(tmp_path / "model")
    for training, ran, why in (("sage_bwd", "sage_bwd", ""), ("sage2", "exact", "; sage2 is forward only")):
        SageConfig("sage3", training=training).save(tmp_path / "config.json")
        arguments = ["explain", "--pretrained", str(tmp_path / "model"), "--config", str(tmp_path / "config.json")]
        assert main([*arguments, "--device", "cpu"]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert lines[2][1:5] == ["sage3", "sage3", "reference", "emulated"]
        assert lines[3][:2] == [training, ran]
        assert " ".join(lines[4]).startswith(f"[1] in training mode{why}")


def test_bench_explains_itself_and_refuses_a_machine_without_the_gpu_it_measures(monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--help"])
    assert stop.value.code == 0 and "hunyuanvideo-720p" in capsys.readouterr().out
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for device in ("cuda", "cpu"):
        assert f"--device {device}: the benchmark times GPU kernels" in refused(capsys, "bench", "--device", device)
    assert "--shapes: unknown 5k; choose from: " in refused(capsys, "bench", "--shapes", "5k")


def test_bench_measures_prints_and_writes_what_was_asked_for(monkeypatch, tmp_path, capsys):
    asked = {}

    def run(device, shapes, providers, progress):
        asked.update(shapes=[shape.name for shape in shapes], providers={one.name for one in providers})
        row = measure.new_row(shapes[0], providers[0]) | {"tflops": 500.0, "ms": 1.0, "compile_s": 0.0}
        row |= {"rel_l1": 0.01, "rel_l1_biased": 0.01, "peak_extra_bytes": 0}
        facts = {"gpu": "NVIDIA RTX 5090", "torch": "2", "triton": "3", "cuda": "13", "commit": "", "date": "today"}
        return {**facts, "rows": [row]}

    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(measure, "run", run)
    assert main(["bench", "--shapes", "flux", "--providers", "fa3", "cudnn", "--output", str(tmp_path / "new")]) == 0
    assert asked == {"shapes": ["flux"], "providers": {"cudnn", "fa3"}}
    assert "1×24×4608×128" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "new").iterdir()} == {
        "nvidia-rtx-5090-forward.json",
        "nvidia-rtx-5090-forward.png",
        "nvidia-rtx-5090-forward-errors.png",
    }
