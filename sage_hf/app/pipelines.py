"""Loading of pipelines, with errors that name the file at fault."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from huggingface_hub.errors import StrictDataclassError
from packaging.version import Version
from safetensors import SafetensorError, safe_open
from torch import nn

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

LOADING_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    LookupError,
    TypeError,
    AttributeError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)
"""Errors that loaders of diffusers and transformers raise for missing or damaged files, or for a wrong kind of file."""
TINY_VIDEO = Path("examples", "tiny_video")
"""Folder of the small trained pipeline in a checkout."""


def tiny_video() -> Path | None:
    """Return the folder of the small trained pipeline; None outside of a checkout.

    The package lies in the checkout if it was installed editable; otherwise the current folder may be a checkout.
    """
    for checkout in (Path(__file__).resolve().parents[2], Path()):
        if (checkout / TINY_VIDEO / "model_index.json").is_file():
            return checkout / TINY_VIDEO
    return None


def load_pipeline(
    pretrained: str | Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    cpu_offload: bool = False,
    vae_tiling: bool = False,
    split: Callable[[DiffusionPipeline], None] = lambda pipe: None,
) -> DiffusionPipeline:
    """Load a diffusers pipeline from a folder or the Hub and move it to the device.

    Args:
        pretrained: folder of the pipeline, or its name on the Hub.
        dtype: dtype of all weights.
        device: device that the pipeline runs on.
        cpu_offload: keep only the running model on the GPU.
        vae_tiling: decode in tiles, which takes less memory.
        split: called with the pipeline before it is moved, because after each call, offloading removes later hooks.

    Raises:
        ValueError: there is no such pipeline, a file is damaged or a tensor is missing (the message names it),
            offloading was asked for without a GPU, or tiling with a VAE that cannot tile.
    """
    import diffusers

    if cpu_offload and device.type == "cpu":
        raise ValueError("CPU offload keeps models off a GPU, and the device is the CPU: use --no-cpu-offload")
    pretrained = folder_or_name(pretrained)
    folder = Path(pretrained)
    dtype_argument = "dtype" if Version(diffusers.__version__) >= Version("0.40") else "torch_dtype"
    try:
        pipe = diffusers.DiffusionPipeline.from_pretrained(str(pretrained), **{dtype_argument: dtype})
    except LOADING_ERRORS as error:
        if (folder / "config.json").is_file() and not (folder / "model_index.json").is_file():
            raise ValueError(
                f"{pretrained} is a model and no diffusers pipeline: give the pipeline's folder; a language model is "
                "compared with `sage-hf compare --text FILE`"
            ) from error
        damage = "; ".join(damaged_files(folder)) if folder.is_dir() else ""
        raise ValueError(f"cannot load the pipeline {pretrained}: {damage or error}") from error
    _check_complete(pipe, folder)
    if vae_tiling:
        if not hasattr(getattr(pipe, "vae", None), "enable_tiling"):
            raise ValueError(f"the VAE of {type(pipe).__name__} does not tile: leave --vae-tiling out")
        pipe.vae.enable_tiling()
    split(pipe)
    if cpu_offload:
        pipe.enable_model_cpu_offload(device=device)
    else:
        pipe.to(device)
    return pipe


def folder_or_name(pretrained: str | Path) -> str:
    """Return the folder of a pipeline or model, with `~` expanded, or its name on the Hub.

    Raises:
        ValueError: `pretrained` is a folder that does not exist, a file, or empty.
    """
    if not str(pretrained).strip():
        raise ValueError("--pretrained must not be empty: give the folder of a model, or its name on the Hub")
    folder = Path(os.path.expanduser(pretrained))
    if folder.is_dir():
        return str(folder)
    wrong = ""
    if folder.exists():
        wrong = "is a file"
    elif folder.is_absolute() or str(pretrained).startswith((".", "~")) or len(folder.parts) > 2:
        wrong = "does not exist"
    if wrong:
        raise ValueError(f"{pretrained} {wrong}: give the folder of a pipeline or model, or its name on the Hub")
    return str(pretrained)


def _check_complete(pipe: DiffusionPipeline, folder: Path) -> None:
    """Raise ValueError if the files lack a tensor, which diffusers then leaves on the meta device."""
    for component, model in pipe.components.items():
        if not isinstance(model, nn.Module):
            continue
        tensors = itertools.chain(model.named_parameters(), model.named_buffers())
        if missing := [name for name, tensor in tensors if tensor.is_meta]:
            others_text = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ValueError(
                f"cannot load the pipeline {folder}: the files of {folder / component} lack {missing[0]}{others_text}"
                "; download or copy them again"
            )


def pick_device(name: str | None) -> torch.device:
    """Return the device of that name ("cpu", "cuda", "cuda:1", "mps"); without a name the first GPU, else the CPU.

    Raises:
        ValueError: the name is unknown, or the device is not present.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name!r} is not a device: use cpu, cuda, cuda:1 or mps") from error
    counts = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if device.type not in counts:
        raise ValueError(f"--device {name} is not supported: use cpu, cuda, cuda:1 or mps")
    if (device.index or 0) >= (count := counts[device.type]):
        raise ValueError(f"--device {name}: there are {count} {device.type.upper()} devices here")
    return device


def damaged_files(folder: Path) -> list[str]:
    """Return a sentence for each file of a pipeline's or model's folder that is damaged or missing."""
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
    """Return the defaults for generating with a pipeline, from `generation.json` in its folder; {} without one.

    Raises:
        ValueError: the file cannot be read, or is not an object whose `prompts` are strings and whose `fps` is an
            integer of at least 1.
    """
    path = Path(pretrained) / "generation.json"
    if not path.is_file():
        return {}
    try:
        defaults = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    if not isinstance(defaults, dict):
        raise ValueError(f"{path}: expected an object, got {defaults!r}")
    prompts, fps = defaults.get("prompts", []), defaults.get("fps", 1)
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) and prompt.strip() for prompt in prompts):
        raise ValueError(f"{path}: prompts: expected a list of strings that are not empty, got {prompts!r}")
    if not isinstance(fps, int) or isinstance(fps, bool) or fps < 1:
        raise ValueError(f"{path}: fps: expected an integer of at least 1, got {fps!r}")
    return defaults
