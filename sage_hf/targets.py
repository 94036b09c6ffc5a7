"""The models of a pipeline whose attention can be switched, and their attention layers."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from sage_hf import diffusers, transformers
from sage_hf.changes import inner
from sage_hf.transformers.bridge import is_pretrained_model

DENOISERS = ("transformer", "transformer_2", "unet")
"""Names of a pipeline's main denoisers, which come first."""


@dataclass(frozen=True)
class Target:
    """A model whose attention can be switched.

    Attributes:
        name: the model's name in the pipeline if several of its models are switched, else "".
        model: the model as given, possibly compiled; for a wrapper of PEFT or PyTorch (DDP), the model inside.
        library: "diffusers" or "transformers".
        layers: the attention layers, by dotted name in the (uncompiled) model.
    """

    name: str
    model: nn.Module
    library: str
    layers: dict[str, Any]

    def label(self, layer: str) -> str:
        """Return the layer's name, prefixed with the model's name if several models of the pipeline are switched."""
        return f"{self.name}.{layer}" if self.name else layer


def find_targets(pipe_or_model: object) -> list[Target]:
    """Return a diffusers pipeline's denoisers and other models that attend in every step, or the model itself.

    A model that a pipeline has under several names is one target, with the first name.

    Raises:
        TypeError: the argument is neither a pipeline with a denoiser nor a model.
        ValueError: a model has no attention layer that can be switched.
    """
    if isinstance(pipe_or_model, nn.Module):
        return [_target("", pipe_or_model)]
    parts_by_name = {name: getattr(pipe_or_model, name, None) for name in DENOISERS}
    parts = getattr(pipe_or_model, "__dict__", {})
    parts_by_name |= {
        name: model for name, model in parts.items() if name not in parts_by_name and _attends_in_steps(model)
    }
    models: dict[str, nn.Module] = {}
    for name, model in parts_by_name.items():
        if isinstance(model, nn.Module) and all(inner(model) is not inner(known) for known in models.values()):
            models[name] = model
    if not models:
        raise TypeError(
            f"expected a diffusers pipeline with a denoiser ({', '.join(DENOISERS)}, or another model with attention "
            f"that gets the timestep), or a diffusers or transformers model, got {type(pipe_or_model).__name__}"
        )
    return [_target(name if len(models) > 1 else "", model) for name, model in models.items()]


def architecture_of(targets: Sequence[Target]) -> str:
    """Return the classes of the models, with the numbers of their attention layers."""
    return ", ".join(f"{type(inner(target.model)).__name__} ({len(target.layers)} layers)" for target in targets)


def _attends_in_steps(model: object) -> bool:
    """Check whether a pipeline's component has attention and gets the timestep: a denoiser, a prior or a ControlNet.

    Text encoders and autoencoders do not get the timestep; decoders that denoise do, although diffusers counts them
    among autoencoders.
    """
    plain = inner(model)
    if not isinstance(plain, nn.Module) or is_pretrained_model(plain) or not diffusers.attention_layers(plain):
        return False
    return denoises(type(plain))


def denoises(model_class: type) -> bool:
    """Check whether models of a class get the timestep: denoisers, priors and ControlNets, but not autoencoders."""
    if any(base.__module__.startswith("diffusers.models.autoencoders.") for base in model_class.__mro__):
        return False
    return any("time" in name for name in inspect.signature(model_class.forward).parameters)  # type: ignore[attr-defined]


def _target(name: str, model: nn.Module) -> Target:
    plain = inner(model)
    if hasattr(plain, "get_base_model"):  # PEFT's wrapper; its adapters are in the model inside
        return _target(name, plain.get_base_model())
    # PyTorch's wrappers (DDP, FSDP, DataParallel, AveragedModel) take any argument.
    if isinstance(module := getattr(plain, "module", None), nn.Module):
        return _target(name, module)
    library = "transformers" if is_pretrained_model(plain) else "diffusers"
    if library == "transformers":
        if reason := transformers.unsupported(plain):
            raise ValueError(f"{type(plain).__name__} cannot be switched: {reason}")
        layers = transformers.attention_layers(plain)
    else:
        layers = diffusers.attention_layers(plain)
    if not layers:
        raise ValueError(
            f"{type(plain).__name__} has no attention layer that sage_hf can switch; if it is a wrapper, pass the "
            "model inside"
        )
    return Target(name, model, library, layers)
