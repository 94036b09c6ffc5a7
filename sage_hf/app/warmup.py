"""Compilation of a configuration's kernels before the first render needs them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from sage_hf.bench.cases import BenchCase, MaskName
from sage_hf.config import SageConfig
from sage_hf.nominal import nominal_request
from sage_hf.tune.cases import compile_kernels
from sage_kernels.dispatch.registry import exacts
from sage_kernels.dispatch.select import select

HEAD_DIMS = (64, 128)
LENGTHS = (1024, 4096, 16384)
"""Lengths that may have different kernels."""
MASKS: tuple[MaskName, ...] = ("none", "causal", "lengths")
EXACT_MASKS: tuple[MaskName, ...] = (*MASKS, "documents", "bias")
EXACT_LENGTH = 1024


def warm_up(config: SageConfig, device: torch.device, head_dims: Sequence[int] = HEAD_DIMS) -> int:
    """Compile, in several processes, the kernels of all recipes of a configuration, and keep them in the caches.

    Args:
        config: the recipes. If a recipe is not native, the kernels of its substitute are compiled. Kernels of exact
            attention are compiled for short calls, masks and decoding.
        device: a CUDA device.
        head_dims: head dimensions of the models that will run.

    Returns:
        The number of calls that ran in order to compile: for each recipe, calls without a mask, causal calls and calls
        with padded keys; and calls for each kernel of exact attention.

    Raises:
        ValueError: device is no CUDA device.
    """
    if device.type != "cuda":
        raise ValueError(
            f"kernels are compiled on the GPU that runs them, and {device} is not a GPU: pass --device cuda"
        )
    excepted = [*(rule.recipe for rule in config.layers), *(rule.recipe for rule in config.steps)]
    named_recipes = dict.fromkeys([config.recipe, config.training or config.recipe, *excepted])
    native = dict.fromkeys(select(nominal_request(recipe, device)).recipe for recipe in named_recipes)
    recipes = [recipe for recipe in native if recipe != "exact"]
    cases = [
        BenchCase("warmup", 1, 2, 2, tokens, tokens, head_dim, mask)
        for mask, tokens, head_dim in itertools.product(MASKS, LENGTHS, head_dims)
    ]
    exactly = [name for name, kernel in exacts.items() if kernel.traceable]
    short = [
        BenchCase("warmup", 1, 2, 2, queries, EXACT_LENGTH, head_dim, _aligned(mask, queries))
        for queries, mask, head_dim in itertools.product((1, EXACT_LENGTH), EXACT_MASKS, head_dims)
    ]
    return compile_kernels(device, [*itertools.product(recipes, cases), *itertools.product(exactly, short)])


def _aligned(mask: MaskName, queries: int) -> MaskName:
    """Return the mask for queries at the end of EXACT_LENGTH keys."""
    return "lower_right" if mask == "causal" and queries < EXACT_LENGTH else mask
