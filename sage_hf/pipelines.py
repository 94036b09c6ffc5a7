"""Loading a pipeline, with errors that say which file is at fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from packaging.version import Version
from safetensors import SafetensorError, safe_open

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

TINY_VIDEO = Path(__file__).resolve().parent.parent / "examples" / "tiny_video"
"""The small trained pipeline of a checkout; a wheel does not hold it."""


def load_pipeline(
    pretrained: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    cpu_offload: bool = False,
    vae_tiling: bool = False,
) -> DiffusionPipeline:
    """A diffusers pipeline from a folder or the Hub, on its device.

    Args:
        pretrained: folder, or name on the Hub.
        dtype: of all weights.
        device: where it runs.
        cpu_offload: keep on the GPU only the model that runs.
        vae_tiling: decode in tiles, which takes less memory.

    Raises:
        ValueError: no such pipeline, a damaged file (the message names it), offloading without a GPU, a VAE without
            tiling.
    """
    import diffusers

    if cpu_offload and device.type == "cpu":
        raise ValueError("CPU offload keeps models off a GPU, and the device is the CPU: use --no-cpu-offload")
    folder = Path(pretrained)
    if not folder.exists() and (
        folder.is_absolute() or str(pretrained).startswith((".", "~")) or len(folder.parts) > 2
    ):
        raise ValueError(
            f"{pretrained} does not exist: give the folder of a diffusers pipeline, or its name on the Hub"
        )
    dtype_argument = "dtype" if Version(diffusers.__version__) >= Version("0.40") else "torch_dtype"
    try:
        pipe = diffusers.DiffusionPipeline.from_pretrained(str(pretrained), **{dtype_argument: dtype})
    except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        damage = "; ".join(damaged_files(folder)) if folder.is_dir() else ""
        raise ValueError(f"cannot load the pipeline {pretrained}: {damage or error}") from error
    if vae_tiling:
        if not hasattr(getattr(pipe, "vae", None), "enable_tiling"):
            raise ValueError(f"the VAE of {type(pipe).__name__} does not tile: leave --vae-tiling out")
        pipe.vae.enable_tiling()
    if cpu_offload:
        pipe.enable_model_cpu_offload(device=device)
    else:
        pipe.to(device)
    return pipe


def pick_device(name: str | None) -> torch.device:
    """The device of that name ("cpu", "cuda", "cuda:1"); without a name the first GPU, else the CPU.

    Raises:
        ValueError: unknown, or not present.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name!r} is not a device: use cpu, cuda or cuda:1") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"--device {name}: there are {torch.cuda.device_count()} CUDA devices here")
    return device


def damaged_files(folder: Path) -> list[str]:
    """Files of a pipeline or model folder that cannot be read, each with the reason."""
    damaged = []
    for path in sorted(folder.rglob("*.json")):
        try:
            index = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, OSError) as error:
            damaged.append(f"{path} is damaged ({error})")
            continue
        if path.name.endswith(".safetensors.index.json"):
            shards = sorted(set(index.get("weight_map", {}).values()))
            damaged += [f"{path.parent / shard} is missing" for shard in shards if not (path.parent / shard).exists()]
    for path in sorted(folder.rglob("*.safetensors")):
        try:
            with safe_open(path, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            damaged.append(f"{path} is damaged ({error}); download or copy it again")
    return damaged


def generation_defaults(pretrained: str | Path) -> dict:
    """What `generation.json` beside a pipeline says about generating with it; {} where there is none.

    Raises:
        ValueError: the file cannot be read.
    """
    path = Path(pretrained) / "generation.json"
    if not path.is_file():
        return {}
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
