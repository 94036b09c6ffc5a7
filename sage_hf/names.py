"""The names that stand for a recipe and a fallback where diffusers and transformers take nothing but a name.

Low-bit recipes by their own name ("sage3"), each also with "_native", "_emulate" or "_error" for the fallback (without
one, the process's default); "sage_exact" for exact attention through our plumbing.
"""

from __future__ import annotations

from sage_kernels.recipe import RECIPES
from sage_kernels.registry import FALLBACKS


def name_of(recipe: str, fallback: str | None) -> str:
    """The name that stands for this recipe and fallback."""
    if recipe == "exact":
        return "sage_exact"
    return recipe if fallback is None else f"{recipe}_{fallback}"


# name -> (recipe, fallback), as `sage_attention` takes them
NAMES: dict[str, tuple[str, str | None]] = {
    name_of(recipe, fallback): (recipe, None if recipe == "exact" else fallback)
    for recipe in RECIPES
    for fallback in (None, *FALLBACKS)
}
