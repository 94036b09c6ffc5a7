"""The main job: render prompts with low-bit attention, beside exact attention if asked, and report."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from huggingface_hub.utils import logging

from sage_hf.apply import apply
from sage_hf.config import SageConfig
from sage_hf.explain import Explanation, explain
from sage_hf.layer_errors import record_layer_errors
from sage_hf.metrics import psnr, ssim
from sage_hf.pipelines import TINY_VIDEO, generation_defaults, load_pipeline, pick_device
from sage_hf.report import Report, VideoReport, device_name
from sage_hf.targets import find_targets
from sage_hf.video import can_write_mp4, contact_sheet, side_by_side, write_video

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LAYER_ERROR_STEPS = 4
RESERVED_SLUGS = ("exact", "side-by-side")
"""Names of the files that a comparison writes beside the low-bit video."""

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class GenerateOptions:
    """What to render, and how. None leaves the choice to the pipeline (or to the `generation.json` in its folder).

    Attributes:
        config: recipe and exceptions.
        label: what to call it in files and pictures.
        output: folder of the files, made if need be.
        prompts: one video each; none: the first two prompts of `generation.json`.
        pretrained: pipeline folder or name on the Hub; None: the tiny model of a checkout.
        compare: render with exact attention as well, from the same seed, and measure the difference.
        steps, height, width, frames, guidance_scale: of the pipeline's call.
        seed: of every prompt.
        dtype: a name in DTYPES; None: bfloat16, on a CPU float32.
        device: as `torch.device` takes it; None: the first GPU, else the CPU.
        cpu_offload, vae_tiling: see `load_pipeline`.
        fps: frames per second of the files.

    Raises:
        ValueError: a number out of range, an unknown dtype or device, an empty prompt, no pipeline.
    """

    config: SageConfig
    label: str
    output: Path
    prompts: tuple[str, ...] = ()
    pretrained: str | None = None
    compare: bool = False
    steps: int | None = None
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    guidance_scale: float | None = None
    seed: int = 0
    dtype: str | None = None
    device: str | None = None
    cpu_offload: bool = False
    vae_tiling: bool = False
    fps: int | None = None

    def __post_init__(self) -> None:
        for name in ("steps", "height", "width", "frames", "fps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        if self.guidance_scale is not None and not 0 <= self.guidance_scale < float("inf"):
            raise ValueError(f"--guidance-scale must be 0 or more, got {self.guidance_scale}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed must be in 0…2**63 - 1, got {self.seed}")
        if any(not prompt.strip() for prompt in self.prompts):
            raise ValueError("--prompt must not be empty")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        for path in (self.output, *self.output.parents):
            if path.exists() and not path.is_dir():
                raise ValueError(f"--output must be a folder, and {path} is a file")
        if self.pretrained is None and not (TINY_VIDEO / "model_index.json").is_file():
            raise ValueError(
                "--pretrained is needed: give a pipeline's folder or its name on the Hub (a checkout of sage-hf has a "
                "tiny one in examples/tiny_video, which is the default there)"
            )
        pick_device(self.device)

    def torch_dtype(self) -> torch.dtype:
        """Of all weights."""
        return DTYPES[self.dtype or ("float32" if pick_device(self.device).type == "cpu" else "bfloat16")]


def generate(options: GenerateOptions) -> Report:
    """Render every prompt, write the videos and the report into `options.output`.

    Files: `01-<label>.mp4` for each prompt (gif where no encoder is installed), with `compare` also `01-exact.mp4`,
    `01-side-by-side.mp4` and `contact-sheet.png`; `report.json`, `report.md`.

    Raises:
        ValueError: options that do not fit the pipeline, a damaged checkpoint, a model without attention, …; before
            anything is rendered.
    """
    pretrained = options.pretrained or str(TINY_VIDEO)
    defaults = generation_defaults(pretrained)
    prompts = options.prompts or tuple(defaults.get("prompts", ())[:2])
    if not prompts:
        raise ValueError("--prompt is needed: say what to render")
    device, dtype = pick_device(options.device), options.torch_dtype()
    pipe = load_pipeline(
        pretrained, dtype=dtype, device=device, cpu_offload=options.cpu_offload, vae_tiling=options.vae_tiling
    )
    settings = _call_settings(pipe, options, defaults)
    job = _Job(pipe, prompts, settings, options.seed, device)
    job.warm_up(lambda: apply(pipe, options.config))  # before the exact run: what does not fit shows now
    options.output.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[_Rendering]] = {}
    if options.compare:
        job.warm_up(nullcontext)
        runs["exact"], _ = job.render("exact")
    reserved = options.compare and _slug(options.label) in RESERVED_SLUGS
    label = f"sage {options.label}" if reserved else options.label
    with apply(pipe, options.config):
        runs[label], explanation = job.render(label)
    report = Report(
        pretrained=pretrained if options.pretrained else "examples/tiny_video",
        pipeline=type(pipe).__name__,
        config=options.config,
        settings=settings,
        device=device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        explanation=explanation,
        output=options.output,
    )
    if options.compare:
        report.layer_error_steps = min(LAYER_ERROR_STEPS, settings.get("num_inference_steps", LAYER_ERROR_STEPS))
        with apply(pipe, options.config), record_layer_errors(pipe) as recorder:
            job.call("layer errors", prompts[0], num_inference_steps=report.layer_error_steps, output_type="latent")
        report.layer_errors = recorder.layers()
    _write(report, job, runs, options.fps or defaults.get("fps", 8))
    report.save()
    return report


@dataclass
class _Rendering:
    frames: np.ndarray  # uint8 (F, H, W, 3), black where NaN
    nan: float  # the part that was NaN
    seconds: float
    denoiser_seconds: float


class _Job:
    """The same prompts and seed, rendered as often as asked."""

    def __init__(
        self,
        pipe: DiffusionPipeline,
        prompts: tuple[str, ...],
        settings: dict[str, Any],
        seed: int,
        device: torch.device,
    ) -> None:
        self.pipe, self.prompts, self.settings, self.seed, self.device = pipe, prompts, settings, seed, device

    def call(self, description: str, prompt: str, **settings: Any) -> Any:
        """The pipeline's output for a prompt; `settings` go before the job's own."""
        self.pipe.set_progress_bar_config(desc=description)
        generator = torch.Generator("cpu").manual_seed(self.seed)
        return self.pipe(prompt=prompt, generator=generator, **{**self.settings, **settings})

    def warm_up(self, attention: Callable[[], AbstractContextManager]) -> None:
        """Two steps with `attention()` in force, so that nothing is compiled or loaded while time is taken."""
        with attention():
            self.call("warm-up", self.prompts[0], num_inference_steps=2, output_type="latent")

    def render(self, label: str) -> tuple[list[_Rendering], Explanation]:
        """Every prompt's video with the attention now in force, and what ran."""
        renderings = []
        for number, prompt in enumerate(self.prompts, 1):
            with _denoiser_clock(self.pipe, self.device) as denoiser_seconds:
                start = _now(self.device)
                output = self.call(f"{label}: {number}/{len(self.prompts)}", prompt, output_type="np")
                seconds = _now(self.device) - start
            frames = np.asarray(output.frames[0], dtype=np.float32)
            if nan := float(np.isnan(frames).mean()):
                logger.warning(f"{label}: {nan:.2%} of {prompt!r} is NaN, shown black")
            frames = (np.nan_to_num(frames).clip(0, 1) * 255).round().astype(np.uint8)
            renderings.append(_Rendering(frames, nan, seconds, sum(denoiser_seconds)))
        return renderings, explain(self.pipe)


def _call_settings(pipe: DiffusionPipeline, options: GenerateOptions, defaults: dict) -> dict[str, Any]:
    """Arguments of the pipeline's call that are given, and that it takes."""
    parameters = inspect.signature(type(pipe).__call__).parameters
    if "num_frames" not in parameters or "prompt" not in parameters:
        raise ValueError(f"{type(pipe).__name__} does not make a video from a prompt; use a text-to-video pipeline")
    needed = [
        name
        for name, parameter in list(parameters.items())[1:]
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if inputs := [name for name in needed if name != "prompt"]:
        raise ValueError(f"{type(pipe).__name__} needs {', '.join(inputs)} too; use a text-to-video pipeline")
    given = {
        "num_inference_steps": options.steps,
        "height": options.height,
        "width": options.width,
        "num_frames": options.frames,
        "guidance_scale": options.guidance_scale,
    }
    given = {name: value for name, value in given.items() if value is not None}
    if foreign := [name for name in given if name not in parameters]:
        raise ValueError(f"{type(pipe).__name__} takes no {foreign[0]}: leave it out")
    return {name: value for name, value in defaults.items() if name in parameters} | given


@contextmanager
def _denoiser_clock(pipe: DiffusionPipeline, device: torch.device) -> Iterator[list[float]]:
    """Collects the seconds of every call of the denoisers."""
    seconds: list[float] = []
    started: list[float] = []
    hooks = []
    for target in find_targets(pipe):
        hooks.append(target.model.register_forward_pre_hook(lambda *_: started.append(_now(device))))
        hooks.append(target.model.register_forward_hook(lambda *_: seconds.append(_now(device) - started.pop())))
    try:
        yield seconds
    finally:
        for hook in hooks:
            hook.remove()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _write(report: Report, job: _Job, runs: dict[str, list[_Rendering]], fps: int) -> None:
    sheet = []
    for number, prompt in enumerate(job.prompts):
        video = VideoReport(prompt, job.seed)
        videos = {label: run[number].frames for label, run in runs.items()}
        for label, run in runs.items():
            path = write_video(run[number].frames, report.output / f"{number + 1:02d}-{_slug(label)}", fps)
            video.files[label] = path.name
            video.seconds[label] = run[number].seconds
            video.denoiser_seconds[label] = run[number].denoiser_seconds
            video.nan[label] = run[number].nan
        if len(runs) > 1:
            exact, low_bit = videos.values()
            if not any(video.nan.values()):
                video.psnr = psnr(exact, low_bit, data_range=255)
                video.ssim = ssim(exact, low_bit, data_range=255)
            captions = _captions(list(videos), report.explanation)
            captioned = {captions[label]: frames for label, frames in videos.items()}
            both = side_by_side(captioned, prompt)
            video.files["side by side"] = write_video(both, report.output / f"{number + 1:02d}-side-by-side", fps).name
            sheet.append((prompt, captioned))
        report.videos.append(video)
    if sheet:
        contact_sheet(sheet).save(report.output / "contact-sheet.png")


def _captions(labels: list[str], explanation: Explanation) -> dict[str, str]:
    """Labels that do not claim more than ran: "sage3 (emulated)", "sage3 (ran sage2)"."""
    low_bit = [row for row in explanation.rows if row.recipe and row.asked != "exact"]
    others = sorted({row.recipe for row in low_bit if row.recipe != row.asked})
    remark = ""
    if others:
        remark = f" (ran {', '.join(others)})"
    elif any(row.numerics == "emulated" for row in low_bit):
        remark = " (emulated)"
    return {label: label if label == "exact" else label + remark for label in labels}


def _slug(text: str) -> str:
    """What a file can be called: ASCII letters and digits."""
    return re.sub(r"[^a-z0-9_]+", "-", text.lower()).strip("-") or "sage"


def format_outcome(report: Report) -> str:
    """What to print when all is done: the table, the kernels, where the files are."""
    lines = [report.summary(), "", str(report.explanation), ""]
    if not can_write_mp4():
        lines += ['No mp4 encoder is installed, so the videos are gifs: pip install "sage-hf[video]"', ""]
    names = [name for video in report.videos for name in video.files.values()]
    if any("side by side" in video.files for video in report.videos):
        names.append("contact-sheet.png")
    lines += ["Files:", *(f"  {report.output / name}" for name in [*names, "report.md", "report.json"])]
    return "\n".join(lines)
