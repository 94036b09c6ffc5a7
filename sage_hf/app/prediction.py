"""Prediction of the kernels that a model's layers will run on this machine, from its configuration, without weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn

from sage_hf.app.pipelines import LOADING_ERRORS, folder_or_name
from sage_hf.apply import apply
from sage_hf.attention import default_fallback
from sage_hf.config import LayerRule, SageConfig
from sage_hf.explain import Explanation, LayerRow, explain
from sage_hf.nominal import NOMINAL_HEAD_DIM, NOMINAL_HEADS, nominal_request
from sage_hf.schedule import timestep_argument
from sage_hf.sparse.modelopt import settings_for
from sage_hf.targets import DENOISERS, denoises, find_targets
from sage_kernels.dispatch.plan import KernelUnavailableError
from sage_kernels.dispatch.select import select
from sage_kernels.spec.recipe import get_recipe


def predict(pretrained: str | Path, config: SageConfig, device: torch.device) -> Explanation:
    """Name the kernel that each layer of a pipeline or model will run, in calls of 16,384 tokens without a mask.

    Args:
        pretrained: folder, or name on the Hub, of a diffusers pipeline or model or of a transformers model.
        config: the recipe and its exceptions.
        device: the device to run on; only its type and compute capability matter.

    Raises:
        ValueError: nothing can be loaded from `pretrained`, or `sage_hf.apply` refuses the configuration.
    """
    model = _model_on_meta(folder_or_name(pretrained))
    if config.steps:
        for target in find_targets(model):
            timestep_argument(target.model)
    with apply(model, replace(config, steps=())):
        unasked_rows = {row.layer: row for row in explain(model).rows if not row.asked}
    rows: list[LayerRow] = []
    for target in find_targets(model):
        rules = config.of_model(target.name, target.layers)
        for name, layer in target.layers.items():
            label, rule = target.label(name), rules.layer_rule(name)
            rows += [unasked_rows[label]] if label in unasked_rows else _layer_rows(label, layer, config, rule, device)
    sparse = [
        (target.label("self-attention"), settings.describe())
        for target in find_targets(model)
        if (settings := settings_for(config.sparse, target.model, target.layers)) is not None
    ]
    return Explanation(tuple(rows), predicted=True, sparse=tuple(sparse))


def _layer_rows(
    label: str, layer: nn.Module, config: SageConfig, rule: LayerRule | None, device: torch.device
) -> Iterator[LayerRow]:
    recipes = [(rule or config).recipe, *(step.recipe for step in config.steps if rule is None)]
    calls = [(recipe, get_recipe(recipe).backward is not None, "") for recipe in dict.fromkeys(recipes)]
    if rule is None and config.training is not None and config.training not in recipes:
        calls.append((config.training, True, "in training mode"))
    heads, head_dim = _heads(layer)
    causal = bool(getattr(layer, "is_causal", False))
    softcap = getattr(getattr(layer, "config", None), "attn_logit_softcapping", None)
    for recipe, grad, when in calls:
        if softcap is not None and recipe != "exact":
            yield LayerRow(label, recipe, "exact", "sdpa", "exact", reason="the model caps its logits (softcap)")
            continue
        facts = {"heads": heads or NOMINAL_HEADS, "head_dim": head_dim or NOMINAL_HEAD_DIM, "grad": grad}
        try:
            chosen = select(
                nominal_request(recipe, device, is_causal=causal, **facts),
                config.fallback or default_fallback(),
            )
        except KernelUnavailableError as error:
            yield LayerRow(label, recipe, "none", reason=str(error))
            continue
        reason = chosen.reason or (
            "" if head_dim else f"predicted for head_dim {NOMINAL_HEAD_DIM}: the layer does not state its head_dim"
        )
        reason = "; ".join(part for part in (when, reason) if part)
        yield LayerRow(
            label,
            recipe,
            chosen.recipe,
            chosen.kernel,
            chosen.numerics,
            reason=reason,
            quantizer=chosen.quantizer,
            backward=chosen.backward,
        )


def _heads(layer: nn.Module) -> tuple[int | None, int | None]:
    """Return (heads, head_dim); None for a number that the module does not state."""
    config = getattr(layer, "config", None)
    heads = getattr(layer, "heads", None) or getattr(layer, "num_heads", None)
    heads = heads or getattr(config, "num_attention_heads", None)
    head_dim = getattr(layer, "head_dim", None) or getattr(config, "head_dim", None)
    query = getattr(layer, "to_q", None) or getattr(layer, "q_proj", None)
    if not head_dim and heads and isinstance(query, nn.Linear):
        head_dim = query.out_features // heads
    return heads, head_dim


def _model_on_meta(pretrained: str) -> nn.Module | SimpleNamespace:
    """Build the model without weights; for a pipeline, return a namespace with its denoisers."""
    folder = Path(pretrained)
    try:
        with torch.device("meta"):
            if (folder / "config.json").is_file() and not (folder / "model_index.json").is_file():
                index = json.loads((folder / "config.json").read_text(encoding="utf-8"))
                if "_class_name" in index:
                    return _diffusers_model(index["_class_name"], folder, None)
                return _transformers_model(pretrained)
            denoisers = _denoisers(pretrained)
            return SimpleNamespace(**denoisers) if denoisers else _transformers_model(pretrained)
    except LOADING_ERRORS as error:
        raise ValueError(
            f"cannot read a diffusers pipeline or a transformers model from {pretrained}: {error}"
        ) from error


def _denoisers(pretrained: str) -> dict[str, nn.Module]:
    """Build the denoisers of a diffusers pipeline, by name, without weights; return {} if `pretrained` is no such
    pipeline."""
    import diffusers

    if Path(pretrained).is_dir() and not (Path(pretrained) / "model_index.json").is_file():
        raise ValueError("the folder holds neither model_index.json nor config.json")
    try:
        index = diffusers.DiffusionPipeline.load_config(pretrained)
    except OSError:
        if Path(pretrained).is_dir():
            raise
        return {}
    parts = {name: part[1] for name, part in index.items() if isinstance(part, list | tuple) and len(part) == 2}
    classes = {name: getattr(diffusers, kind, None) for name, kind in parts.items() if isinstance(kind, str)}
    denoisers = [
        name
        for name, kind in classes.items()
        if name in DENOISERS or (isinstance(kind, type) and issubclass(kind, nn.Module) and denoises(kind))
    ]
    if not denoisers:
        raise ValueError(f"the pipeline {index.get('_class_name')} has no {', '.join(DENOISERS)}")
    return {name: _diffusers_model(parts[name], pretrained, name) for name in denoisers}


def _diffusers_model(class_name: str, pretrained: str | Path, subfolder: str | None) -> nn.Module:
    import diffusers

    model_class = getattr(diffusers, class_name)
    return model_class.from_config(model_class.load_config(str(pretrained), subfolder=subfolder))


def _transformers_model(pretrained: str) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.from_pretrained(pretrained)
    if not config.architectures:
        return transformers.AutoModel.from_config(config)
    return getattr(transformers, config.architectures[0])(config)
