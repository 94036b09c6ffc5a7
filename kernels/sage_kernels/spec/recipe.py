"""Recipes: the formats and transforms of an attention, independent of any machine."""

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Recipe:
    """Formats and transforms with which attention is computed.

    Attributes:
        name: the name that users pass.
        qk: format of Q and K in S = Q·Kᵀ. "nvfp4": groups of 16 along head_dim; "int8": a scale for each token of Q,
            and a bfloat16 scale for 16 tokens of K: of 64 tokens, the 16 that one thread of the MMA instruction
            holds (`layout.thread_order`); "exact": 16 bits, by PyTorch's scaled_dot_product_attention (then `pv` is
            "exact").
        pv: format of P and V in O = P·V. "nvfp4": groups of 16 along tokens; "fp8": e4m3, V with a scale per channel,
            rounded so that sums over tokens are preserved (`formats.fp8.round_keeping_sums`); "int8": P with a scale
            per row of a tile, V with a scale per channel; "fp16".
        smooth_q, smooth_k, smooth_v: subtract means (transforms.smooth); Q's mean per 128 rows.
        rotate: rotate Q and K along head_dim (transforms.rotate).
        equalize: divide K's channels and multiply Q's by powers of two before `rotate`, so that both have similar
            magnitudes in a channel (transforms.equalize).
        heavy_keys: number of keys of a sequence that are attended to in the caller's dtype. If sinks, keys that hold
            much of every row's weight, are among them, P of the other keys has a separate scale. A call has no heavy
            keys if it has no more keys than this number, or a block list. Not with `backward`.
        heavy_choice: which keys are heavy. "first": the first keys. "heaviest": the first keys, but keys with much
            larger scores take the places of some (transforms.heavy_places); with causality, of a few, for rows that see
            such a key (transforms.late_keys). Not with an attention bias.
        recent_keys: least number of the latest keys of a causal row that are attended to in the caller's dtype: whole
            tiles, the same for each block of rows (`call.recent_start`). Rows of language models give so much weight to
            the key of the same token and its neighbours that rounding these keys causes most of the error. Not with a
            block list, nor with `backward`.
        tensor_scale: NVFP4 keeps a float32 scale next to the e4m3 scales of the groups: one per 128 tokens of Q and K,
            one per (batch, head) of V.
        scale_steps: NVFP4 group-scale search in Q and V: steps in codes from amax/6 to each further scale that is tried
            (formats.nvfp4.search_groups); empty: no search. Only with `tensor_scale`, which keeps elements within the
            search's float16.
        key_scale_steps: the same for K, whose error grows most if scales are left out.
        denominator: divide rows by the sum of P before ("p") or after ("quantized_p") quantisation.
        backward: format of the products dV = Pᵀ·dO, dQ = dS·K and dK = dSᵀ·Q of the backward pass (arXiv 2505.11594,
            section 4), with S of the forward pass; None: the recipe has no gradients. "16bit": the dtype of the
            caller's tensors, K and Q being the values of the forward's codes. "int8": P and dS with a scale per row of
            a tile along the sum, dO with a scale per 64 rows, K and Q as the forward's codes. The product dP = dO·Vᵀ
            stays in 16 bits: dS contains the difference of dP and its mean, δ = rowsum(dO∘O), so errors of dP weigh
            most.
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

    def uses_only(self, *names: str) -> bool:
        """Return whether every field except the named fields has its default, if it has one.

        A kernel that honours only the named fields serves such a recipe if it computes the recipe's formats.
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
        ValueError: there is no such recipe; the message lists all recipes.
    """
    if not isinstance(name, str) or name not in RECIPES:
        raise ValueError(f"unknown recipe {name!r}; recipes are: {', '.join(sorted(RECIPES))}")
    return RECIPES[name]


def without_outlier_handling(recipe: Recipe) -> Recipe:
    """Return the recipe without features for peaked attention only: 16-bit keys, equalizing, and INT8's rotation.

    A recipe without these features is returned unchanged. NVFP4's rotation stays: it serves every attention.
    """
    names = {"heavy_keys", "heavy_choice", "recent_keys", "equalize", *(["rotate"] if recipe.qk == "int8" else [])}
    defaults: dict[str, Any] = {field.name: field.default for field in fields(recipe) if field.name in names}
    return replace(recipe, **defaults)
