"""Rendering and comparing videos: files, reports, progress and errors."""

import functools
import json
import math
import shutil
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from diffusers import CogVideoXPipeline, DDPMPipeline, DDPMScheduler, StableDiffusionPipeline, UNet2DModel

from sage_hf.app import generate as module
from sage_hf.app import video
from sage_hf.app.generate import GenerateOptions, generate
from sage_hf.app.report import Report, VideoReport
from sage_hf.config import LayerRule, SageConfig, StepRule
from sage_hf.explain import Explanation, LayerRow
from sage_kernels.dispatch.plan import KernelUnavailableError
from tests.helpers import tiny_pipelines as tiny

QUICK = SageConfig("sage2")
"""Recipe whose error is seen and that a CPU emulates fastest: for what no format decides."""


def options(folder: Path, output: Path, config: SageConfig | None = None, **settings) -> GenerateOptions:
    settings = {"prompts": ("a red ball",), "steps": 2, "height": 64, "width": 64, "frames": 9, **settings}
    return GenerateOptions(config or SageConfig("sage3"), "sage3", output, pretrained=str(folder), **settings)


def test_comparison_writes_videos_side_by_side_and_report(folder, tmp_path):
    report = generate(options(folder, tmp_path, prompts=("a red ball", "a blue ball"), compare=True, fps=4))
    names = [f"0{i}-{name}.mp4" for i in (1, 2) for name in ("exact", "sage3", "side-by-side")]
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == sorted([*names, "report.json", "report.md"])
    for name in names:
        assert len(imageio.imread(tmp_path / name)) == 9
    data = json.loads((tmp_path / "report.json").read_text())
    assert [entry["prompt"] for entry in data["videos"]] == ["a red ball", "a blue ball"]
    for entry in data["videos"]:
        assert math.isfinite(entry["psnr"]) and 0 < entry["ssim"] < 1
        for label in ("exact", "sage3"):
            assert 0 < entry["denoiser_seconds"][label] < entry["seconds"][label]
    layers = [f"transformer_blocks.{i}.attn1" for i in range(tiny.LAYERS)]
    assert [(row["layer"], row["kernel"], row["recipe"], row["calls"]) for row in data["layers"]] == [
        (layer, "reference", "sage3", 4) for layer in layers
    ]
    assert [row["layer"] for row in data["layer_errors"]] == layers
    for row in data["layer_errors"]:
        assert 0 < row["rel_l1"] < 0.5 and 0.9 < row["cosine"] < 1 and row["calls"] == 2
        assert 0 < row["heaviest_key_share"] < 1 and row["heaviest_key"] >= 0 and row["loudest_channel"] > 1
        assert row["without_outlier_handling"] is None or 0 < row["without_outlier_handling"]["rel_l1"] < 1
    assert data["config"] == {"recipe": "sage3"} and data["versions"]["torch"] == torch.__version__
    text = (tmp_path / "report.md").read_text()
    assert "transformer_blocks.0-2.attn1  sage3" in text and "| transformer_blocks.2.attn1 | sage3 | 0.9" in text
    outcome = module.format_outcome(report)
    assert str(tmp_path / "01-side-by-side.mp4") in outcome and "PSNR" in outcome


def test_exact_recipe_with_exact_attention_is_the_same_video(folder, tmp_path):
    report = generate(options(folder, tmp_path, SageConfig("exact"), compare=True, steps=1))
    assert report.videos[0].psnr == math.inf and report.videos[0].ssim == 1
    assert json.loads((tmp_path / "report.json").read_text())["videos"][0]["psnr"] == "inf"
    assert all(layer.errors.rel_l1 < 1e-5 for layer in report.layer_errors)  # both float32


def test_the_exact_video_is_the_pipelines_own(folder, tmp_path, monkeypatch):
    written = {}
    monkeypatch.setattr(
        module, "write_video", lambda frames, path, fps: written.setdefault(path.name, frames) is None or path
    )
    generate(options(folder, tmp_path, QUICK, compare=True, seed=7))
    pipe = tiny.cogvideox()
    frames = pipe(
        "a red ball",
        num_inference_steps=2,
        height=64,
        width=64,
        num_frames=9,
        generator=torch.Generator().manual_seed(7),
        output_type="np",
    ).frames[0]
    assert np.array_equal(written["01-exact"], (frames * 255).round().astype(np.uint8))


def frames_of(path: Path) -> int:
    return len(imageio.imread(path))


class Stop(Exception):
    pass


@pytest.mark.parametrize(
    ("after", "videos"),
    [
        pytest.param("01-exact.mp4", [], marks=pytest.mark.audit),
        pytest.param("01-sage3.mp4", [], marks=pytest.mark.audit),
        ("02-exact.mp4", ["01-side-by-side.mp4"]),
    ],
)
def test_what_is_finished_survives_an_error(folder, tmp_path, after, videos):
    written = []

    def stop(path):
        written.append(path.name)
        if path.name == after:
            raise Stop

    with pytest.raises(Stop):
        generate(options(folder, tmp_path, QUICK, prompts=("a red ball", "a"), compare=True, steps=1), stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(written)
    assert all(name in written for name in videos) and written[-1] == after
    assert all(frames_of(path) == 9 for path in tmp_path.glob("*.mp4"))


def test_progress_names_files_in_the_order_of_rendering(folder, tmp_path):
    written, reports = [], []

    def note(path):
        written.append(path.name)
        if (tmp_path / "report.json").exists():
            reports.append(json.loads((tmp_path / "report.json").read_text()))

    report = generate(options(folder, tmp_path, QUICK, prompts=("a red ball", "a"), compare=True, steps=1), note)
    first = ["01-exact.mp4", "report.json", "report.md", "01-sage3.mp4", "01-side-by-side.mp4"]
    assert written == [*first, "02-exact.mp4", "02-sage3.mp4", "02-side-by-side.mp4"]
    assert not any(data["complete"] for data in reports)
    assert [list(data["videos"][-1]["files"]) for data in (reports[0], reports[-1])] == [["exact"], ["exact", "sage3"]]
    assert report.complete and json.loads((tmp_path / "report.json").read_text())["complete"]
    assert "Not complete" not in (tmp_path / "report.md").read_text()


def test_a_report_on_the_way_is_told_without_what_is_not_there_yet(tmp_path):
    report = Report("tiny", "Pipeline", SageConfig("sage3"), {}, "cpu", "float32", tmp_path)
    times = {"exact": 1.0, "sage3": 2.0}
    report.videos.append(VideoReport("a", 0, {}, times, times, psnr=30.0, ssim=0.9))
    report.videos.append(VideoReport("b", 0, {}, {"exact": 1.0}, {"exact": 1.0}))
    assert [line.split() for line in report.summary().splitlines()[-2:]] == [
        ["a", "1.0", "2.0", "30.0", "0.900"],
        ["b", "1.0", "–", "–", "–"],
    ]
    text = report.to_markdown()
    assert "**Not complete" in text and "| b (seed 0) |  | 1.00 (1.00) | – (–) | – | – |" in text


def test_an_output_that_cannot_be_written_is_refused_before_the_pipeline_is_loaded(folder, monkeypatch):
    monkeypatch.setattr(module, "load_pipeline", lambda *_, **__: pytest.fail("loaded"))
    with pytest.raises(ValueError, match="--output /proc/sage-hf cannot be written"):
        generate(options(folder, Path("/proc/sage-hf")))


def test_a_prompt_of_any_text_is_rendered_and_told_on_one_line(folder, tmp_path):
    prompt = "a red | ball\nпо-русски 日本語"
    report = generate(options(folder, tmp_path, QUICK, prompts=(prompt,), compare=True, steps=1))
    assert report.videos[0].prompt == prompt
    assert "| a red \\| ball по-русски 日本語 (seed 0) |" in (tmp_path / "report.md").read_text()
    assert len(report.summary().splitlines()) == 3


def test_without_comparison_one_video_is_written(folder, tmp_path):
    config = SageConfig("sage3", layers=(LayerRule("*.1.*", "sage2"),), steps=(StepRule(0, 1, "exact"),))
    report = generate(options(folder, tmp_path / "new" / "folder", config, steps=3))
    assert list(report.videos[0].files) == ["sage3"] and report.videos[0].psnr is None
    ran = [(row.recipe, row.calls) for row in report.explanation.rows]
    assert ran == [("exact", 1), ("sage3", 2), ("sage2", 3), ("exact", 1), ("sage3", 2)]


def test_generation_json_gives_the_defaults_and_options_go_before_it(folder, tmp_path):
    own = tmp_path / "pipeline"
    shutil.copytree(folder, own)
    defaults = {"num_frames": 9, "height": 64, "width": 64, "num_inference_steps": 2, "guidance_scale": 1.0}
    (own / "generation.json").write_text(json.dumps({**defaults, "fps": 4, "prompts": ["a blue ball", "a", "b"]}))
    report = generate(GenerateOptions(SageConfig("sage2"), "sage2", tmp_path / "out", pretrained=str(own), steps=1))
    assert report.settings == {**defaults, "num_inference_steps": 1}
    assert [entry.prompt for entry in report.videos] == ["a blue ball", "a"]
    assert len(imageio.imread(tmp_path / "out" / "01-sage2.mp4")) == 9


def refuse_constant(name: str):
    raise AssertionError(f"{name} is not JSON")


@pytest.mark.parametrize(
    "broken",
    [pytest.param("vae.decoder.conv_out.conv.bias", marks=pytest.mark.audit), "transformer.patch_embed.proj.bias"],
)
def test_nan_is_reported(folder, tmp_path, monkeypatch, caplog, broken):
    load = module.load_pipeline

    def load_broken(*args, **kwargs):
        pipe = load(*args, **kwargs)
        torch.nn.init.constant_(attrgetter(broken)(pipe), math.nan)
        return pipe

    monkeypatch.setattr(module, "load_pipeline", load_broken)
    report = generate(options(folder, tmp_path, compare=True, steps=1))
    assert "sage3: 100.00% of 'a red ball' is NaN" in caplog.text
    data = json.loads((tmp_path / "report.json").read_text(), parse_constant=refuse_constant)
    assert data["videos"][0]["nan"] == {"exact": 1.0, "sage3": 1.0}
    assert data["videos"][0]["psnr"] is data["videos"][0]["ssim"] is None
    if broken.startswith("transformer"):
        assert {row["cosine"] for row in data["layer_errors"]} == {"nan"}
    for text in ((tmp_path / "report.md").read_text(), module.format_outcome(report)):
        assert "100.00% of sage3, 'a red ball', is NaN" in text and "–" in text


def test_a_finite_video_is_not_reported_as_nan(folder, tmp_path):
    report = generate(options(folder, tmp_path, QUICK, steps=1))
    assert report.videos[0].nan == {"sage3": 0.0} and "NaN" not in module.format_outcome(report)


@pytest.mark.parametrize(
    ("label", "compare", "name"),
    [
        ("Exact", True, "sage-exact"),
        pytest.param("side by side", True, "sage-side-by-side", marks=pytest.mark.audit),
        pytest.param("exact", False, "exact", marks=pytest.mark.audit),
        pytest.param("шесть", True, "sage", marks=pytest.mark.audit),
    ],
)
def test_no_file_takes_the_place_of_another(folder, tmp_path, label, compare, name):
    job = replace(options(folder, tmp_path, QUICK, compare=compare, steps=1), label=label)
    report = generate(job)
    compared = ["01-exact.mp4", "01-side-by-side.mp4"] if compare else []
    assert sorted(path.name for path in tmp_path.glob("*.mp4")) == sorted([*compared, f"01-{name}.mp4"])
    assert len(report.videos[0].files) == len(compared) + 1


def test_without_an_encoder_gifs_are_written_with_a_message(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(video, "can_write_mp4", lambda: False)
    report = generate(options(folder, tmp_path, QUICK, steps=1))
    assert (tmp_path / "01-sage3.gif").is_file()
    assert "the videos are gifs: pip install" in module.format_outcome(report)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"steps": 0}, "--steps must be at least 1, got 0"),
        ({"frames": -1}, "--frames must be at least 1, got -1"),
        ({"height": 0}, "--height must be at least 1"),
        ({"width": 0}, "--width must be at least 1"),
        ({"fps": 0}, "--fps must be at least 1"),
        ({"guidance_scale": -1.0}, "--guidance-scale must be 0 or more"),
        ({"guidance_scale": math.nan}, "--guidance-scale must be 0 or more"),
        ({"seed": -1}, "--seed must be in"),
        ({"prompts": ("a", " ")}, "--prompt must not be empty"),
        ({"prompts": ("a\udcff",)}, "--prompt is not text in UTF-8"),
        ({"dtype": "int8"}, "--dtype must be one of float32, bfloat16, float16, got 'int8'"),
        ({"device": "cuda:99"}, "CUDA devices here"),
    ],
)
def test_options_out_of_range_are_refused_naming_the_flag(tmp_path, setting, message):
    with pytest.raises(ValueError, match=message):
        options(tmp_path, tmp_path, **setting)


@pytest.mark.parametrize("output", ["file", "file/below", "file/far/below"])
def test_an_output_that_is_a_file_or_below_one_is_refused(tmp_path, output):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=f"--output must be a folder, and {tmp_path / 'file'} is a file"):
        options(tmp_path, tmp_path / output)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prompts": ()}, "--prompt is needed"),
        ({"config": SageConfig("sage3", "error"), "device": "cpu"}, "no native kernel for recipe 'sage3'"),
        ({"height": 60}, "divisible by 8"),
        ({"height": 8, "width": 8}, "fails with .*height 8, width 8.*: RuntimeError"),
        ({"device": "cpu", "cpu_offload": True}, "--no-cpu-offload"),
        ({"config": SageConfig(layers=(LayerRule("block.9", "exact"),))}, "'block.9' matches no attention layer"),
    ],
)
def test_options_that_do_not_fit_the_pipeline_are_refused_first(folder, tmp_path, settings, message):
    with pytest.raises((ValueError, KernelUnavailableError), match=message):
        generate(options(folder, tmp_path / "out", compare=True, **settings))
    assert not (tmp_path / "out").exists()


def test_a_pipeline_that_makes_no_video_is_refused(tmp_path):
    unet = UNet2DModel(
        8,
        block_out_channels=(8,),
        down_block_types=("AttnDownBlock2D",),
        up_block_types=("AttnUpBlock2D",),
        norm_num_groups=4,
        layers_per_block=1,
    )
    DDPMPipeline(unet, DDPMScheduler()).save_pretrained(tmp_path / "images")
    with pytest.raises(ValueError, match="DDPMPipeline takes no prompt; use a text-to-video or text-to-image pipeline"):
        generate(options(tmp_path / "images", tmp_path / "out"))


def test_images_are_written_where_the_output_calls_them_image(tmp_path, monkeypatch):
    """Kandinsky 5's text-to-image pipeline does."""
    tiny.image_pipeline().save_pretrained(tmp_path / "pipeline")
    call = StableDiffusionPipeline.__call__

    @functools.wraps(call)
    def renamed(self, *args, **settings):
        return SimpleNamespace(image=call(self, *args, **settings).images)

    monkeypatch.setattr(StableDiffusionPipeline, "__call__", renamed)
    sizes = {"height": 16, "width": 16, "frames": None}
    generate(options(tmp_path / "pipeline", tmp_path / "out", SageConfig("exact"), **sizes))
    assert imageio.imread(tmp_path / "out" / "01-sage3.png").shape == (16, 16, 3)


class ImageToVideo(CogVideoXPipeline):
    def __call__(self, image, prompt=None, num_frames=9, **settings):
        raise AssertionError("not to be called without an image")


def test_a_pipeline_that_needs_more_than_a_prompt_is_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "load_pipeline", lambda *_, **__: ImageToVideo(**tiny.cogvideox().components))
    with pytest.raises(ValueError, match="ImageToVideo needs image too; use a text-to-video or text-to-image pipeline"):
        generate(options(folder, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("transformer/diffusion_pytorch_model.safetensors", lambda data: data[: len(data) // 2]),
        ("vae/diffusion_pytorch_model.safetensors", lambda data: b"\xff" * 64 + data[64:]),
        ("text_encoder/model.safetensors", lambda data: b""),
        ("transformer/config.json", lambda data: data[:20]),
        ("model_index.json", lambda data: b"<html>404</html>"),
    ],
)
def test_a_damaged_checkpoint_is_refused_naming_the_file(folder, tmp_path, name, damage):
    own = tmp_path / "pipeline"
    shutil.copytree(folder, own)
    (own / name).write_bytes(damage((own / name).read_bytes()))
    with pytest.raises(ValueError, match=f"cannot load the pipeline .*{own / name} is damaged"):
        generate(options(own, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_missing_weight_file_is_refused(folder, tmp_path):
    own = tmp_path / "pipeline"
    shutil.copytree(folder, own)
    (own / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"cannot load the pipeline .*vae"):
        generate(options(own, tmp_path / "out"))


@pytest.mark.parametrize(
    ("recipe", "numerics", "caption"),
    [("sage3", "native", "sage3"), ("sage3", "emulated", "sage3 (emulated)"), ("sage2", "native", "sage3 (ran sage2)")],
)
def test_captions_claim_no_more_than_ran(recipe, numerics, caption):
    explanation = Explanation((LayerRow("layer", "sage3", recipe, "kernel", numerics, 1),))
    assert module.captions_of(["exact", "sage3"], explanation) == {"exact": "exact", "sage3": caption}


@pytest.mark.audit
def test_the_trained_tiny_model_keeps_its_picture_in_four_bits(tmp_path):
    prompts = ("a red circle moving left",)
    options = {"compare": True, "steps": 1, "frames": 9}
    report = generate(GenerateOptions(SageConfig("sage3"), "sage3", tmp_path, prompts, **options))
    assert report.videos[0].ssim > 0.5
    for layer in report.layer_errors:
        assert layer.errors.cosine > 0.9
