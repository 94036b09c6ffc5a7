"""The report of a generation, as JSON and Markdown: kernels, times, and the distance from exact attention."""

from __future__ import annotations

import json
import math
import platform
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sage_hf.app.layer_errors import LayerErrors
from sage_hf.app.layer_errors import table as layer_table
from sage_hf.config import SageConfig
from sage_hf.explain import Explanation
from sage_hf.files import replacing
from sage_hf.text import markdown_table, text_table

PACKAGES = ("sage-hf", "triton", "diffusers", "transformers", "accelerate")


@dataclass
class VideoReport:
    """Report about one prompt's videos.

    Attributes:
        prompt, seed: the rendered prompt and its seed.
        files: file name by label ("exact", "sage3", "side by side").
        seconds: wall time by label, from the prompt to the decoded frames.
        denoiser_seconds: the part of `seconds` that was spent in the denoiser.
        nan: fraction of the video that is NaN and shown black, by label.
        psnr, ssim: similarity of the low-bit video to the exact one, PSNR in dB; None without a comparison, or if one
            of the videos contains NaN. Equal videos have psnr inf.
    """

    prompt: str
    seed: int
    files: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    denoiser_seconds: dict[str, float] = field(default_factory=dict)
    nan: dict[str, float] = field(default_factory=dict)
    psnr: float | None = None
    ssim: float | None = None


@dataclass
class Report:
    """Report of a whole generation.

    Attributes:
        pretrained, pipeline: where the pipeline came from, and its class.
        config: the recipe and its exceptions.
        settings: arguments of the pipeline's call.
        device, dtype: the device it ran on, and the dtype of the weights.
        explanation: the kernels that ran in each layer.
        videos: one report for each prompt rendered so far.
        layer_errors: errors of each layer's attention on its own inputs; empty without a comparison.
        layer_error_steps: number of denoising steps in which the errors were measured.
        output: the folder of the files.
        complete: True if all that was asked for was rendered; False during the generation, and after an interruption.
        versions: versions of the packages, by name.
    """

    pretrained: str
    pipeline: str
    config: SageConfig
    settings: dict[str, Any]
    device: str
    dtype: str
    output: Path
    explanation: Explanation = field(default_factory=lambda: Explanation(()))
    videos: list[VideoReport] = field(default_factory=list)
    layer_errors: list[LayerErrors] = field(default_factory=list)
    layer_error_steps: int = 0
    complete: bool = False
    versions: dict[str, str] = field(default_factory=lambda: package_versions())

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data; numbers that are not finite are strings, such as the PSNR "inf"."""
        data = {
            "complete": self.complete,
            "pretrained": self.pretrained,
            "pipeline": self.pipeline,
            "device": self.device,
            "dtype": self.dtype,
            "versions": self.versions,
            "config": self.config.to_dict(),
            "settings": self.settings,
            "videos": self.videos,
            "layers": self.explanation.rows,
            "layer_errors": [
                {
                    "layer": layer.layer,
                    "calls": layer.calls,
                    **layer.errors.to_dict(),
                    "heaviest_key_share": layer.peaks.share,
                    "heaviest_key": layer.peaks.key,
                    "loudest_channel": layer.peaks.loudness,
                    "without_outlier_handling": layer.errors_without_outlier_handling,
                }
                for layer in self.layer_errors
            ],
            "layer_error_steps": self.layer_error_steps,
        }
        return {key: _plain(value) for key, value in data.items()}

    def save(self) -> list[Path]:
        """Write report.json and report.md into the output folder, each atomically, and return their paths."""
        data = json.dumps(self.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
        texts = {self.output / "report.json": data + "\n", self.output / "report.md": self.to_markdown()}
        for path, text in texts.items():
            with replacing(path) as part:
                part.write_text(text, encoding="utf-8")
        return list(texts)

    def summary(self) -> str:
        """Return a short table for the terminal, followed by the warnings."""
        labels = self._labels()
        compared = len(labels) > 1
        header = ["prompt", *(f"{label}, s" for label in labels), *(["PSNR, dB", "SSIM"] if compared else [])]
        rows = []
        for video in self.videos:
            row = [_one_line(video.prompt), *(_number(video.seconds.get(label), ".1f") for label in labels)]
            if compared:
                row += [_number(video.psnr, ".1f"), _number(video.ssim, ".3f")]
            rows.append(row)
        return "\n".join([text_table(header, rows), *self.warnings()])

    def warnings(self) -> list[str]:
        """Return a sentence for every video that contains NaN."""
        return [
            f"{part:.2%} of {label}, {video.prompt!r}, is NaN: shown black, and not compared."
            for video in self.videos
            for label, part in video.nan.items()
            if part
        ]

    def to_markdown(self) -> str:
        """Return the whole report as Markdown."""
        packages = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        lines = [f"# {self.pipeline}: {self.config.recipe}", ""]
        if not self.complete:
            lines += ["**Not complete: still running, or interrupted.**", ""]
        lines += [f"{self.pretrained} on {self.device}, {self.dtype}; {packages}.", ""]
        settings = ", ".join(f"{name} {value}" for name, value in self.settings.items())
        lines += [f"Settings: {settings}." if settings else "Settings: the pipeline's own.", "", "## Results", ""]
        labels = self._labels()
        header = ["prompt", "files", *(f"{label}, s (denoiser)" for label in labels), "PSNR, dB", "SSIM"]
        rows = []
        for video in self.videos:
            files = ", ".join(f"[{label}]({name})" for label, name in video.files.items())
            times = [
                f"{_number(video.seconds.get(label), '.2f')} ({_number(video.denoiser_seconds.get(label), '.2f')})"
                for label in labels
            ]
            quality = [_number(video.psnr, ".2f"), _number(video.ssim, ".4f")]
            rows.append([f"{_one_line(video.prompt)} (seed {video.seed})", files, *times, *quality])
        lines += [markdown_table(header, rows), "", "PSNR and SSIM: against exact attention with the same seed.", ""]
        for warning in self.warnings():
            lines += [f"**{warning}**", ""]
        lines += ["## Which kernel ran", "", "```", str(self.explanation), "```", ""]
        if self.layer_errors:
            lines += [f"## Errors of each layer, {self.layer_error_steps} denoising steps of the first prompt", ""]
            lines += ["Each layer's attention against exact attention in float32 on the same inputs.", ""]
            lines += [
                "Heaviest key: the largest share of its rows' weight that one key holds in one head, and its position. "
                "Loudest channel: of K in one head, without its mean, relative to the median channel.",
                "",
            ]
            header, rows = layer_table(self.layer_errors)
            lines += [markdown_table(header, rows), ""]
        return "\n".join(lines)

    def _labels(self) -> list[str]:
        """Return the labels of all videos that were rendered, of any prompt."""
        return list(dict.fromkeys(label for video in self.videos for label in video.seconds))


def package_versions() -> dict[str, str]:
    """Return the versions of Python, torch, CUDA and of the installed PACKAGES."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def device_name(device: torch.device) -> str:
    """Return a description of the device: the GPU's name and compute capability, or the CPU and its threads."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"{torch.cuda.get_device_name(device)} (sm_{major}{minor})"
    return f"{device.type} ({torch.get_num_threads()} threads)" if device.type == "cpu" else str(device)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _plain(value: Any) -> Any:
    """Return the value as data for strict JSON: dataclasses as objects, numbers that are not finite as strings."""
    if is_dataclass(value):
        value = {item.name: getattr(value, item.name) for item in fields(value)}
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
