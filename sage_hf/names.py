"""Names for a recipe with a fallback, for places where diffusers and transformers take only a name.

A low-bit recipe's own name ("sage3") stands for the process's default fallback; "_native", "_emulate" or "_error" is
appended for another fallback. "sage_exact" is exact attention through sage-hf.
"""

from __future__ import annotations

from sage_kernels.spec.options import FALLBACKS
from sage_kernels.spec.recipe import RECIPES


def name_of(recipe: str, fallback: str | None) -> str:
    """Return the name for a recipe with a fallback; fallback None is the process's default."""
    if recipe == "exact":
        return "sage_exact"
    return recipe if fallback is None else f"{recipe}_{fallback}"


# name -> (recipe, fallback), as `sage_attention` takes them
NAMES: dict[str, tuple[str, str | None]] = {
    name_of(recipe, fallback): (recipe, None if recipe == "exact" else fallback)
    for recipe in RECIPES
    for fallback in (None, *FALLBACKS)
}
