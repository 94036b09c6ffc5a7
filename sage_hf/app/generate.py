"""Render videos or images with low-bit attention, and with exact attention if asked, and write a report."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from huggingface_hub.utils import logging

from sage_hf.app.layer_errors import record_layer_errors
from sage_hf.app.pipelines import (
    TINY_VIDEO,
    folder_or_name,
    generation_defaults,
    load_pipeline,
    pick_device,
    tiny_video,
)
from sage_hf.app.processes import Processes
from sage_hf.app.report import Report, VideoReport, device_name
from sage_hf.app.video import side_by_side, write_video
from sage_hf.apply import apply
from sage_hf.bench.timing import synchronize
from sage_hf.config import SageConfig
from sage_hf.explain import Explanation, explain
from sage_hf.files import check_folder, writable_folder
from sage_hf.metrics import psnr, ssim
from sage_hf.targets import find_targets
from sage_kernels.dispatch.plan import KernelUnavailableError
from sage_kernels.spec.recipe import RECIPES

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FORMATS = {"nvfp4": "FP4", "int8": "INT8", "exact": "16 bit"}
"""Names of the formats of Q·Kᵀ in captions."""
LAYER_ERROR_STEPS = 4
RESERVED_SLUGS = ("exact", "side-by-side")
"""Names of the files that a comparison writes next to the low-bit video."""

logger = logging.get_logger(__name__)


@dataclass(frozen=True)
class GenerateOptions:
    """Options of a generation. Where an option is None, the pipeline (or the `generation.json` in its folder) chooses.

    Attributes:
        config: the recipe and its exceptions.
        label: name of the low-bit renderings in files and pictures.
        output: folder of the files, made if it does not exist.
        prompts: texts to render, one video or image each; empty: the first two prompts of `generation.json`.
        pretrained: folder of a pipeline or its name on the Hub; None: the tiny model of a checkout.
        compare: render with exact attention as well, from the same seed, and measure the difference.
        steps, height, width, frames, guidance_scale: arguments of the pipeline's call; sizes in pixels.
        seed: seed of every prompt.
        dtype: a name in DTYPES; None: bfloat16, on a CPU float32.
        device: a device's name for `torch.device`; None: the first GPU, else the CPU.
        cpu_offload, vae_tiling: see `load_pipeline`.
        fps: frames per second of the files.
        ulysses, ring: see `Processes`.

    Raises:
        ValueError: a number is out of range, dtype or device is unknown, a prompt is empty, there is no pipeline, or
            torchrun started another number of processes.
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
    ulysses: int = 1
    ring: int = 1

    @property
    def processes(self) -> Processes:
        """Return the processes that render."""
        return Processes(self.ulysses, self.ring)

    def __post_init__(self) -> None:
        for name in ("steps", "height", "width", "frames", "fps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}")
        if self.guidance_scale is not None and not 0 <= self.guidance_scale < float("inf"):
            raise ValueError(f"--guidance-scale must be 0 or more, got {self.guidance_scale}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed must be in 0…2**63 - 1, got {self.seed}")
        for prompt in self.prompts:
            if not prompt.strip():
                raise ValueError("--prompt must not be empty")
            if any("\ud800" <= character <= "\udfff" for character in prompt):
                raise ValueError(f"--prompt is not text in UTF-8: {prompt!r}")
        torch_dtype(self.dtype, self.processes.device_of(pick_device(self.device)))
        check_folder(self.output, "--output")
        if self.pretrained is None and tiny_video() is None:
            raise ValueError(
                "--pretrained is needed: give a pipeline's folder or its name on the Hub (in a checkout of sage-hf the "
                "default is examples/tiny_video)"
            )


def torch_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """Return the dtype of that name. Without a name: float32 on a CPU, else bfloat16. Raise ValueError if unknown."""
    if name is None:
        name = "float32" if device.type == "cpu" else "bfloat16"
    if name not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def generate(options: GenerateOptions, on_written: Callable[[Path], None] = lambda path: None) -> Report:
    """Render every prompt, write the files and the report into `options.output`, and return the report.

    Files: `01-<label>.mp4` for each prompt (gif if no encoder is installed, png of an image), with `compare` also
    `01-exact.mp4` and `01-side-by-side.mp4`; `report.json`, `report.md`. Each file is written
    atomically and as early as possible: after an error or Ctrl-C every existing file is finished, and the report says
    that it is not complete. A comparison goes prompt by prompt, so that the first videos can be seen early, and only
    one prompt's frames are kept in memory. If there are several processes, the first process writes.

    Args:
        options: prompts and settings.
        on_written: called with each file's path after the file was written for the first time.

    Raises:
        ValueError: the options do not fit the pipeline, the output folder is not writable, the checkpoint is damaged,
            the model has no attention, …; raised before anything is rendered.
        OSError: a file cannot be written, for example because the disk is full.
    """
    processes = options.processes
    device = processes.device_of(pick_device(options.device))
    folder = writable_folder(options.output, "--output") if processes.is_first else nullcontext()
    with folder, processes.joined(device):
        return _generate(options, device, on_written)


def _generate(options: GenerateOptions, device: torch.device, on_written: Callable[[Path], None]) -> Report:
    pretrained = str(tiny_video()) if options.pretrained is None else folder_or_name(options.pretrained)
    defaults = generation_defaults(pretrained)
    prompts = options.prompts or tuple(defaults.get("prompts", ())[:2])
    if not prompts:
        raise ValueError("--prompt is needed: say what to render")
    processes, dtype = options.processes, torch_dtype(options.dtype, device)
    pipe = load_pipeline(
        pretrained,
        dtype=dtype,
        device=device,
        cpu_offload=options.cpu_offload,
        vae_tiling=options.vae_tiling,
        split=processes.split,
    )
    settings = call_settings(pipe, options, defaults)
    job = _Job(pipe, settings, options.seed, device, processes.is_first)
    # diffusers' own attention across processes fails in a ring on some versions of PyTorch.
    baseline = nullcontext if processes.number == 1 else partial(apply, pipe, "exact")
    job.warm_up(prompts[0], partial(apply, pipe, options.config))  # before the exact run, so that errors show early
    if options.compare:
        job.warm_up(prompts[0], baseline)
    reserved = options.compare and _slug(options.label) in RESERVED_SLUGS
    label = f"sage {options.label}" if reserved else options.label
    report = Report(
        pretrained=str(TINY_VIDEO) if options.pretrained is None else pretrained,
        pipeline=type(pipe).__name__,
        config=options.config,
        settings=settings,
        device=device_name(device) + processes.remark,
        dtype=str(dtype).removeprefix("torch."),
        output=options.output,
    )
    files = _Files(report, options.fps or defaults.get("fps", 8), on_written, processes.is_first)
    for number, prompt in enumerate(prompts, 1):
        report.videos.append(VideoReport(prompt, options.seed))
        count = f"{number}/{len(prompts)}"
        if options.compare:
            with baseline():
                exact = job.render(prompt, "exact", count)
            files.add_video(exact)
        with apply(pipe, options.config):
            low_bit = job.render(prompt, label, count)
            report.explanation = report.explanation.joined(explain(pipe))
        files.add_video(low_bit)
        if options.compare:
            files.add_comparison(exact, low_bit)
    if options.compare:
        report.layer_error_steps = min(LAYER_ERROR_STEPS, settings.get("num_inference_steps", LAYER_ERROR_STEPS))
        with apply(pipe, options.config), record_layer_errors(pipe) as recorder:
            job.call("layer errors", prompts[0], num_inference_steps=report.layer_error_steps, output_type="latent")
        report.layer_errors = recorder.layers()
    report.complete = True
    files.save_report()
    return report


@dataclass
class _Rendering:
    label: str
    frames: np.ndarray  # uint8 (F, H, W, 3), black where NaN; an image has F = 1
    nan: float  # fraction of NaN
    seconds: float
    denoiser_seconds: float


class _Job:
    """Renderer of prompts with the same settings and seed."""

    def __init__(
        self, pipe: DiffusionPipeline, settings: dict[str, Any], seed: int, device: torch.device, shows_progress: bool
    ) -> None:
        self.pipe, self.settings, self.seed, self.device = pipe, settings, seed, device
        self.shows_progress = shows_progress

    def call(self, description: str, prompt: str, **settings: Any) -> Any:
        """Return the pipeline's output for a prompt; `settings` override the job's settings. A terminal shows
        progress."""
        self.pipe.set_progress_bar_config(desc=description, disable=None if self.shows_progress else True)
        generator = torch.Generator("cpu").manual_seed(self.seed)
        return self.pipe(prompt=prompt, generator=generator, **{**self.settings, **settings})

    def warm_up(self, prompt: str, attention: Callable[[], AbstractContextManager]) -> None:
        """Run two steps with `attention()` in force, so that nothing is compiled or loaded while time is measured.

        Raises:
            ValueError: the pipeline fails, for example with an unsupported size; the message names the settings.
        """
        with attention():
            try:
                output = self.call("warm-up", prompt, num_inference_steps=2, output_type="latent")
            except (torch.OutOfMemoryError, KernelUnavailableError):
                raise
            except (ArithmeticError, RuntimeError) as error:
                settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
                raise ValueError(
                    f"{type(self.pipe).__name__} fails with {settings or 'its own settings'}: "
                    f"{type(error).__name__}: {error}"
                ) from error
        if _pictures(output) is None:
            raise ValueError(f"{type(self.pipe).__name__} makes neither videos nor images")

    def render(self, prompt: str, label: str, count: str) -> _Rendering:
        """Render the prompt with the current attention; `label` and `count` describe it in the progress bar."""
        with _denoiser_clock(self.pipe, self.device) as denoiser_seconds:
            start = synchronize(self.device)
            output = self.call(f"{label}: {count}", prompt, output_type="np")
            seconds = synchronize(self.device) - start
        frames = np.asarray(_pictures(output), dtype=np.float32)
        if nan := float(np.isnan(frames).mean()):
            logger.warning(f"{label}: {nan:.2%} of {prompt!r} is NaN, shown black")
        frames = (np.nan_to_num(frames).clip(0, 1) * 255).round().astype(np.uint8)
        return _Rendering(label, frames, nan, seconds, sum(denoiser_seconds))


def _pictures(output: Any) -> Any:
    """Return the frames of a pipeline's first video, or its first image as one frame; None if there is neither."""
    if hasattr(output, "frames"):
        return output.frames[0]
    images = getattr(output, "images", getattr(output, "image", None))  # Kandinsky 5 names its images "image"
    return None if images is None else images[:1]


class _Files:
    """Writer of a report's files, each as early as possible; in a process that does not write, it writes nothing."""

    def __init__(self, report: Report, fps: int, on_written: Callable[[Path], None], writes: bool) -> None:
        self._report, self._fps, self._on_written, self._writes = report, fps, on_written, writes
        self._written: set[Path] = set()

    def add_video(self, rendering: _Rendering) -> None:
        """Write a rendering of the latest prompt, and the report."""
        video, label = self._report.videos[-1], rendering.label
        self._write_video(label, _slug(label), rendering.frames)
        video.seconds[label] = rendering.seconds
        video.denoiser_seconds[label] = rendering.denoiser_seconds
        video.nan[label] = rendering.nan
        self.save_report()

    def add_comparison(self, exact: _Rendering, low_bit: _Rendering) -> None:
        """Write the latest prompt's renderings side by side, and the report."""
        video = self._report.videos[-1]
        if not any(video.nan.values()):
            video.psnr = psnr(exact.frames, low_bit.frames, data_range=255)
            video.ssim = ssim(exact.frames, low_bit.frames, data_range=255)
        captions = captions_of([exact.label, low_bit.label], self._report.explanation)
        quality = "" if video.psnr is None else f", {video.psnr:.1f} dB"
        captions[low_bit.label] += f"\n{format_shares(self._report.explanation)}{quality}"
        captioned = {captions[rendering.label]: rendering.frames for rendering in (exact, low_bit)}
        self._write_video("side by side", "side-by-side", side_by_side(captioned, video.prompt))
        self.save_report()

    def save_report(self) -> None:
        """Write the report in its current state."""
        for path in self._report.save() if self._writes else ():
            self._note(path)

    def _write_video(self, label: str, slug: str, frames: np.ndarray) -> None:
        if not self._writes:
            return
        report = self._report
        path = write_video(frames, report.output / f"{len(report.videos):02d}-{slug}", self._fps)
        report.videos[-1].files[label] = path.name
        self._note(path)

    def _note(self, path: Path) -> None:
        if path not in self._written:
            self._written.add(path)
            self._on_written(path)


def call_settings(pipe: DiffusionPipeline, options: GenerateOptions, defaults: dict) -> dict[str, Any]:
    """Return the arguments of the pipeline's call: the `defaults` that it takes, and the `options`.

    Raises:
        ValueError: the pipeline does not render a prompt alone, or does not take an argument of `options`.
    """
    parameters = inspect.signature(type(pipe).__call__).parameters
    if "prompt" not in parameters:
        raise ValueError(f"{type(pipe).__name__} takes no prompt; use a text-to-video or text-to-image pipeline")
    needed = [
        name
        for name, parameter in list(parameters.items())[1:]
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if inputs := [name for name in needed if name != "prompt"]:
        raise ValueError(
            f"{type(pipe).__name__} needs {', '.join(inputs)} too; use a text-to-video or text-to-image pipeline"
        )
    settings = {
        "num_inference_steps": options.steps,
        "height": options.height,
        "width": options.width,
        "num_frames": options.frames,
        "guidance_scale": options.guidance_scale,
    }
    settings = {name: value for name, value in settings.items() if value is not None}
    if foreign := [name for name in settings if name not in parameters]:
        flag = {"num_inference_steps": "steps", "num_frames": "frames"}.get(foreign[0], foreign[0].replace("_", "-"))
        raise ValueError(f"{type(pipe).__name__} takes no {foreign[0]}: leave --{flag} out")
    return {name: value for name, value in defaults.items() if name in parameters} | settings


@contextmanager
def _denoiser_clock(pipe: DiffusionPipeline, device: torch.device) -> Iterator[list[float]]:
    """Yield a list that collects the seconds of every call of the denoisers."""
    seconds: list[float] = []
    started: list[float] = []
    hooks = []
    for target in find_targets(pipe):
        hooks.append(target.model.register_forward_pre_hook(lambda *_: started.append(synchronize(device))))
        hooks.append(
            target.model.register_forward_hook(
                lambda *_: seconds.append(synchronize(device) - started.pop()),
            )
        )
    try:
        yield seconds
    finally:
        for hook in hooks:
            hook.remove()


def captions_of(labels: list[str], explanation: Explanation) -> dict[str, str]:
    """Return captions by label that name the attention that really ran: "sage3 (emulated)", "sage3 (ran sage2)"."""
    low_bit = [row for row in explanation.rows if row.recipe and row.asked != "exact"]
    run_recipes = sorted({row.recipe for row in low_bit if row.recipe != row.asked})
    remark = ""
    if run_recipes:
        remark = f" (ran {', '.join(run_recipes)})"
    elif any(row.numerics == "emulated" for row in low_bit):
        remark = " (emulated)"
    return {label: label if label == "exact" else label + remark for label in labels}


def format_shares(explanation: Explanation) -> str:
    """Return the share of calls by the format of Q·Kᵀ that ran: "79% FP4, 21% INT8"."""
    calls: Counter[str] = Counter()
    for row in explanation.rows:
        if row.recipe in RECIPES:
            calls[FORMATS[RECIPES[row.recipe].qk]] += row.calls
    return ", ".join(f"{count / calls.total():.0%} {name}" for name, count in calls.most_common() if count)


def _slug(text: str) -> str:
    """Return the text as a file name of lower-case ASCII letters, digits, "_" and "-"."""
    return re.sub(r"[^a-z0-9_]+", "-", text.lower()).strip("-") or "sage"


def format_outcome(report: Report) -> str:
    """Return the text to print at the end: the table, the kernels and the paths of the files."""
    lines = [report.summary(), "", str(report.explanation), ""]
    names = [name for video in report.videos for name in video.files.values()]
    if any(name.endswith(".gif") for name in names):
        lines += ['No mp4 encoder is installed, so the videos are gifs: pip install "sage-hf[video]"', ""]
    lines += ["Files:", *(f"  {report.output / name}" for name in [*names, "report.md", "report.json"])]
    return "\n".join(lines)
