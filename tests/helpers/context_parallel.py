"""Cases of diffusers' context parallelism by its own plans: processes agree with one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import diffusers
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig

import sage_hf
from sage_hf import SageAttnProcessor
from sage_hf.diffusers import attention_layers
from tests.helpers.families import FAMILIES, Family, Inputs, family, run
from tests.helpers.processes import Case, degrees_of, with_heads

RECIPES = ("exact", "sage3")
MORE_RECIPES = {"wan-t2v": ("sage2",)}
"""Recipes that one family runs for all: how tokens are split does not depend on the format."""
ENTRY_POINTS: dict[str, Callable[[Any, str], object]] = {
    "set_attn_processor": lambda model, recipe: model.set_attn_processor(SageAttnProcessor(recipe, "emulate")),
    "set_attention_backend": lambda model, recipe: model.set_attention_backend(_backend(recipe)),
    "apply": lambda model, recipe: sage_hf.apply(model, sage_hf.SageConfig(recipe, fallback="emulate")),
}
FAILING_PLANS = ("ltx-2", "ltx-2-gated")
"""diffusers' plan splits the video but not the rotary embedding of its cross-attention: no backend gets there."""
OF_MORE_HEADS = ("wan-t2v", "flux", "qwen-image")
"""Families that more than two processes run: their number of heads is not repeated elsewhere in their configuration."""
ODD_LENGTHS = (5, 9, 13, 17)
"""Token counts of the families that an even number of processes cannot share alike; nothing else has such a size."""


def cases(processes: int, device: torch.device) -> dict[str, Case]:
    """Return the cases of models that diffusers has plans for."""
    modes = degrees_of(processes)
    found: dict[str, Case] = {}
    for case in FAMILIES:
        planned = getattr(getattr(diffusers, case.model_class, None), "_cp_plan", None) is not None
        if planned and case.name not in FAILING_PLANS and (processes == 2 or case.name in OF_MORE_HEADS):
            for name, degrees in modes.items():
                found[f"{case.name}-{name}"] = partial(agrees_with_one, with_heads(case, processes), degrees, device)
    flux, wan = (with_heads(family(name), processes) for name in ("flux", "wan-t2v"))
    for name in ("ulysses", "ring"):
        found[f"entry-points-{name}"] = partial(entry_points_agree, flux, modes[name], device)
        found[f"compiled-{name}"] = partial(compiles, flux, modes[name], device)
    found["restored"] = partial(restores, wan, modes["ulysses"], device)
    found["two-models"] = partial(shares_a_processor, wan, modes["ring"], device)
    return found


def _backend(recipe: str) -> str:
    return "sage_exact" if recipe == "exact" else f"{recipe}_emulate"


def _build(case: Family, device: torch.device) -> torch.nn.Module:
    return case.build(torch.bfloat16 if device.type == "cuda" else torch.float32).to(device)


def _inputs(case: Family, degrees: dict[str, Any], device: torch.device) -> Inputs:
    """Inputs that `degrees` can share: even numbers of tokens."""
    anything = any(name.endswith("anything") for name in degrees)

    def shared(name: str, value: Any) -> Any:
        if isinstance(value, int) and value in ODD_LENGTHS and not anything:
            return value - 1
        if not isinstance(value, torch.Tensor):
            return value
        for dim, size in enumerate(value.shape):
            if size in ODD_LENGTHS and not anything:
                value = value.narrow(dim, 0, size - 1)
        if case.name == "flux-2" and name.endswith("_ids"):
            value = value[None]  # as its pipeline has them, and as the plan expects them
        return value.to(device)

    inputs = case.make_inputs(torch.bfloat16 if device.type == "cuda" else torch.float32)
    return {name: shared(name, value) for name, value in inputs.items()}


def _distance(output: torch.Tensor, reference: torch.Tensor) -> float:
    return float((output.float() - reference.float()).norm() / reference.float().norm())


def agrees_with_one(case: Family, degrees: dict[str, Any], device: torch.device) -> str:
    """Two processes err as much as one does, recipe by recipe."""
    inputs = _inputs(case, degrees, device)
    in_float32 = {
        name: value.float() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    reference = run(case.build().to(device), in_float32)
    model = _build(case, device)
    recipes = RECIPES + MORE_RECIPES.get(case.name, ())
    alone = {}
    for recipe in recipes:
        model.set_attention_backend(_backend(recipe))
        alone[recipe] = _distance(run(model, inputs), reference)
    model.enable_parallelism(config=ContextParallelConfig(**degrees))
    wrong = []
    for recipe in recipes:
        model.set_attention_backend(_backend(recipe))
        together = _distance(run(model, inputs), reference)
        # Each process quantises its share by itself: as many bits, so as large an error.
        rounding = 32 * torch.finfo(torch.float32).eps
        if not alone[recipe] / 1.5 <= together <= 1.5 * alone[recipe] + rounding:
            wrong.append(f"{recipe}: error {together:.2e}, of one process {alone[recipe]:.2e}")
    return "; ".join(wrong)


def entry_points_agree(case: Family, degrees: dict[str, Any], device: torch.device) -> str:
    """Every way to set a recipe, before and after `enable_parallelism`, computes the same."""
    inputs = _inputs(case, degrees, device)
    outputs = {}
    for entry_point, enter in ENTRY_POINTS.items():
        for order in ("before", "after"):
            model = _build(case, device)
            if order == "before":
                handle = enter(model, "sage3")
            model.enable_parallelism(config=ContextParallelConfig(**degrees))
            if order == "after":
                handle = enter(model, "sage3")
            outputs[f"{entry_point} {order}"] = run(model, inputs)
            del handle
    first = next(iter(outputs.values()))
    return ", ".join(name for name, output in outputs.items() if not torch.equal(output, first))


def compiles(case: Family, degrees: dict[str, Any], device: torch.device) -> str:
    """Blocks compiled as whole graphs attend across processes too."""
    inputs = _inputs(case, degrees, device)
    model = _build(case, device)
    sage_hf.apply(model, "exact")
    model.enable_parallelism(config=ContextParallelConfig(**degrees))
    expected = run(model, inputs)
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    distance = _distance(run(model, inputs), expected)
    return "" if distance < (1e-6 if device.type == "cpu" else 1e-2) else f"distance {distance:.2e}"


def restores(case: Family, degrees: dict[str, Any], device: torch.device) -> str:
    """Check that what `restore` puts back attends across processes, though it was not in place when they joined."""
    inputs = _inputs(case, degrees, device)
    model = _build(case, device)
    expected = run(model, inputs)
    originals = {name: layer.processor for name, layer in attention_layers(model).items()}
    handle = sage_hf.apply(model, "sage3_paper")
    model.enable_parallelism(config=ContextParallelConfig(**degrees))
    handle.restore()
    if any(layer.processor is not originals[name] for name, layer in attention_layers(model).items()):
        return "another processor came back"
    distance = _distance(run(model, inputs), expected)
    return "" if distance < (1e-6 if device.type == "cpu" else 1e-2) else f"distance {distance:.2e}"


def shares_a_processor(case: Family, degrees: dict[str, Any], device: torch.device) -> str:
    """One processor serves a model of two processes and a model of one, whose inputs the other does not see."""
    inputs = _inputs(case, degrees, device)
    processor = SageAttnProcessor("sage3", "emulate")
    alone, together = _build(case, device), _build(case, device)
    alone.set_attn_processor(processor)
    own_inputs = inputs | {"hidden_states": inputs["hidden_states"].roll(dist.get_rank(), dims=-1)}
    expected = run(alone, own_inputs)
    together.set_attn_processor(processor)
    together.enable_parallelism(config=ContextParallelConfig(**degrees))
    run(together, inputs)
    return "" if torch.equal(run(alone, own_inputs), expected) else "the model of one process sees the other's inputs"
