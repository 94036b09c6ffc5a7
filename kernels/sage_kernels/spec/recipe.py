"""Recipes: the formats and transforms of an attention, independent of any machine."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Recipe:
    """Formats and transforms with which attention is computed.

    Attributes:
        name: the name that users pass.
        qk: format of Q and K in S = Q·Kᵀ. "nvfp4": groups of 16 along head_dim; "int8": a scale for each token of Q
            and a bfloat16 one for 16 tokens of K: those of 64 that one thread of the matrix instruction holds
            (`layout.thread_order`); "exact": 16 bit, by PyTorch's scaled_dot_product_attention (then `pv` is "exact").
        pv: format of P and V in O = P·V. "nvfp4": groups of 16 along tokens; "fp8": e4m3, V with a scale per channel,
            rounded so that sums over tokens are preserved (`formats.fp8.round_keeping_sums`); "int8": P with a scale
            per row of a tile, V with one per channel; "fp16".
        smooth_q, smooth_k, smooth_v: subtract means (transforms.smooth); Q's per 128 rows.
        rotate: rotate Q and K along head_dim (transforms.rotate).
        equalize: divide K's channels and multiply Q's by powers of two before `rotate`, so that their
            magnitudes in a channel are alike (transforms.equalize).
        heavy_keys: number of keys of a sequence that are attended to in the caller's dtype. If sinks, keys that hold
            much of every row's weight, are among them, P of the other keys has a scale of its own. A call without more
            keys than that has none, nor has one with a block list. Not with `backward`.
        heavy_choice: which they are. "first": the first ones. "heaviest": those, but keys with much larger scores take
            the places of some (transforms.heavy_places), and with causality of a few, for rows that see such a key
            (transforms.late_keys); not with an attention bias.
        recent_keys: least number of keys, the latest that a causal row sees, that are attended to in the caller's
            dtype: whole tiles, the same for each block of rows (`call.recent_start`). Rows of language models give
            their own key and its neighbours so much weight that the rounding of these carries most of the error. Not
            with a block list, nor with `backward`.
        tensor_scale: NVFP4 keeps a float32 scale next to the e4m3 scales of the groups: one per 128 tokens of Q and K,
            one per (batch, head) of V.
        scale_steps: NVFP4 group-scale search in Q and V: codes from amax/6 to each further scale that is tried
            (formats.nvfp4.search_groups); empty: no search. Not without `tensor_scale`, which keeps elements within
            the search's float16.
        key_scale_steps: likewise in K, whose error grows most where scales are left out.
        denominator: divide rows by the sum of P before ("p") or after ("quantized_p") quantisation.
        backward: format of the products dV = Pᵀ·dO, dQ = dS·K and dK = dSᵀ·Q of the backward pass (arXiv 2505.11594,
            section 4), whose S is the forward's; None: the recipe has no gradients. "16bit": the dtype of the
            caller's tensors, K and Q being the values of the forward's codes. "int8": P and dS with a scale per row of
            a tile along the sum, dO with one per 64 rows, K and Q as the forward's codes. The product dP = dO·Vᵀ stays
            in 16 bit: dS contains a difference of dP and its mean, δ = rowsum(dO∘O), so errors of dP weigh most.
    """

    name: str
    qk: Literal["nvfp4", "int8", "exact"]
    pv: Literal["nvfp4", "fp8", "int8", "fp16", "exact"]
    smooth_q: bool = False
    smooth_k: bool = False
    smooth_v: bool = False
    rotate: bool = False
    equalize: bool = False
    heavy_keys: int = 0
    heavy_choice: Literal["first", "heaviest"] = "first"
    recent_keys: int = 0
    tensor_scale: bool = True
    scale_steps: tuple[int, ...] = ()
    key_scale_steps: tuple[int, ...] = ()
    denominator: Literal["p", "quantized_p"] = "p"
    backward: Literal["16bit", "int8"] | None = None

    def is_plain_but_for(self, *names: str) -> bool:
        """Return whether every field that has a default, but those named, has it.

        A kernel that honours those fields, and no others, serves such a recipe if it computes its formats.
        """
        defaults = {field.name: field.default for field in fields(self) if field.default is not MISSING}
        return all(getattr(self, name) == default for name, default in defaults.items() if name not in names)


RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "sage3",
            qk="nvfp4",
            pv="nvfp4",
            smooth_q=True,
            smooth_k=True,
            smooth_v=True,
            rotate=True,
            equalize=True,
            scale_steps=(-1, 1, 4, 5, 6),
            key_scale_steps=(-1, 1, 2, 3, 4, 5, 6),
            denominator="quantized_p",
            heavy_keys=64,
            heavy_choice="heaviest",
            recent_keys=64,
        ),
        Recipe("sage3_paper", qk="nvfp4", pv="nvfp4", smooth_q=True, smooth_k=True, tensor_scale=False),
        Recipe(
            "sage2",
            qk="int8",
            pv="fp8",
            smooth_k=True,
            smooth_v=True,
            rotate=True,
            equalize=True,
            heavy_keys=64,
            heavy_choice="heaviest",
        ),
        Recipe(
            "sage1",
            qk="int8",
            pv="fp16",
            smooth_k=True,
            rotate=True,
            equalize=True,
            heavy_keys=64,
            heavy_choice="heaviest",
        ),
        Recipe("sage_bwd", qk="int8", pv="fp16", smooth_k=True, rotate=True, equalize=True, backward="16bit"),
        Recipe(
            "sage_bwd_int8",
            qk="int8",
            pv="int8",
            smooth_k=True,
            smooth_v=True,
            rotate=True,
            equalize=True,
            backward="int8",
        ),
        Recipe("exact", qk="exact", pv="exact"),
    )
}


def get_recipe(name: str) -> Recipe:
    """Return the recipe of that name.

    Raises:
        ValueError: there is none; the message lists those that exist.
    """
    if not isinstance(name, str) or name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; recipes are: {', '.join(sorted(RECIPES))}")
    return RECIPES[name]


def without_outlier_handling(recipe: Recipe) -> Recipe:
    """Return the recipe without what serves peaked attention only: 16-bit keys, equalizing, and INT8's rotation.

    It is equal to the recipe if that has none of these. NVFP4's rotation stays: it serves every attention.
    """
    names = {"heavy_keys", "heavy_choice", "recent_keys", "equalize", *(["rotate"] if recipe.qk == "int8" else [])}
    defaults: dict[str, Any] = {field.name: field.default for field in fields(recipe) if field.name in names}
    return replace(recipe, **defaults)
