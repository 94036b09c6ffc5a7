"""Nodes that put sage-hf's attention into a ComfyUI model, and that report the kernels that ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import sage_hf
from sage_hf import record
from sage_hf.explain import Explanation, LayerRow
from sage_hf.sparse.config import Sparse

RECIPES = ("sage2", "sage3", "sage1", "exact")
OVERRIDE = "optimized_attention_override"
KNOWN_KEYWORDS = frozenset(
    [
        "q",
        "k",
        "v",
        "heads",
        "mask",
        "attn_precision",
        "skip_reshape",
        "skip_output_reshape",
        "transformer_options",
        "scale",
        "enable_gqa",
        "low_precision_attention",
        "_inside_attn_wrapper",
    ]
)

Attention = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Settings:
    """Settings of the node.

    Attributes:
        recipe: a recipe of sage-hf.
        keep: share of tiles that long self-attention without a mask computes; 1: all.
        first_step, last_step: the sampling steps, counted from 0, in which the recipe runs; -1 as last: to the end.
        kept: numbers of the blocks that keep ComfyUI's attention.
    """

    recipe: str = "sage2"
    keep: float = 1.0
    first_step: int = 0
    last_step: int = -1
    kept: frozenset[int] = frozenset()


def read_blocks(text: str) -> frozenset[int]:
    """Return the numbers in a text such as "0-1, 29".

    Raises:
        ValueError: a part is neither a number nor a range, or a range that holds no number.
    """
    numbers: set[int] = set()
    for part in filter(None, (part.strip() for part in text.split(","))):
        first, dash, last = part.partition("-")
        try:
            found = range(int(first), int(last if dash else first) + 1)
        except ValueError:
            found = range(0)
        if not found:
            raise ValueError(f"kept_blocks: {part!r} is no block number or range, as in '0-1, 29'")
        numbers.update(found)
    return frozenset(numbers)


class SageOverride:
    """Attention override of ComfyUI's models, which runs a recipe of sage-hf where the settings allow it.

    An earlier override stays in force around this override: it gets this attention, or ComfyUI's attention, as the
    function to call.
    """

    def __init__(self, settings: Settings, previous: Attention | None = None) -> None:
        self.settings = settings
        self.previous = previous
        self._layers: dict[str, nn.Module] = {}
        self._passed: Counter[tuple[str, str]] = Counter()
        self._sigmas: object = None
        self._step: int | None = None
        sparse = Sparse(keep=settings.keep)
        self._router = sparse.make_router() if settings.keep < 1 else None
        self._from_tokens = sparse.from_tokens

    def __call__(self, func: Attention, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attend as ComfyUI's override; `func` is the attention that would run without it."""

        def attend(*args: Any, **kwargs: Any) -> torch.Tensor:
            options = kwargs.get("transformer_options") or {}
            name, number = block_of(options)
            reason = self._why_not(number, options, kwargs)
            if reason:
                self._passed[name, reason] += 1
                return func(*args, **kwargs)
            layer = self._layers.setdefault(name, nn.Identity())
            return record.run_in_layer(layer, self._attend, *args, **kwargs)

        return attend(*args, **kwargs) if self.previous is None else self.previous(attend, *args, **kwargs)

    def _why_not(self, number: int | None, options: Mapping[str, Any], kwargs: Mapping[str, Any]) -> str:
        """Return the reason why ComfyUI's own attention runs a call; "" if the recipe runs."""
        settings = self.settings
        if number in settings.kept:
            return "a kept block"
        if kwargs.get("low_precision_attention") is False or kwargs.get("attn_precision") == torch.float32:
            return "the model asks for full precision"
        for name, value in kwargs.items():
            if name not in KNOWN_KEYWORDS and value is not None and value is not False:
                return f"{name} is not known"
        if settings.first_step > 0 or settings.last_step >= 0:
            step = self._find_step(options)
            if step is None:
                return "the sampler does not say its step"
            if step < settings.first_step or 0 <= settings.last_step < step:
                return "another step"
        return ""

    def _find_step(self, options: Mapping[str, Any]) -> int | None:
        """Return the current step; the host waits for the sampler's noise level once per step."""
        sigmas, schedule = options.get("sigmas"), options.get("sample_sigmas")
        if sigmas is None or schedule is None:
            return None
        if sigmas is not self._sigmas:
            self._sigmas = sigmas
            self._step = int((schedule[:-1].float().cpu() - sigmas.flatten()[0].float().cpu()).abs().argmin())
        return self._step

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        heads: int,
        mask: torch.Tensor | None = None,
        attn_precision: torch.dtype | None = None,
        skip_reshape: bool = False,
        skip_output_reshape: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend by the recipe.

        Args:
            q, k, v: (batch, tokens, heads · head_dim); (batch, heads, tokens, head_dim) with skip_reshape. With
                enable_gqa k and v may have fewer heads.
            heads: number of heads of q.
            mask: bool (True: may attend) or additive, (q_len, kv_len), (batch, q_len, kv_len) or (batch, heads, q_len,
                kv_len).
            attn_precision: None or a 16-bit dtype.
            skip_reshape: see above. skip_output_reshape: return (batch, heads, tokens, head_dim), not (batch, tokens,
                heads · head_dim).
            kwargs: `scale` of the scores, `enable_gqa`, and keywords that change nothing.
        """
        if not skip_reshape:
            head_dim = q.shape[-1] // heads
            q, k, v = (x.unflatten(-1, (-1, head_dim)).transpose(1, 2) for x in (q, k, v))
        if mask is not None and mask.ndim == 3:
            mask = mask.unsqueeze(1)
        scale = kwargs.get("scale")
        tokens = q.shape[2]
        blocks = None
        if self._router is not None and mask is None and tokens == k.shape[2] >= self._from_tokens:
            blocks = self._router.route(q, k, scale)
        enable_gqa = bool(kwargs.get("enable_gqa"))
        output = sage_hf.sage_attention(
            q, k, v, mask, scale=scale, enable_gqa=enable_gqa, recipe=self.settings.recipe, blocks=blocks
        )
        return output if skip_output_reshape else output.transpose(1, 2).flatten(2)

    def explain(self) -> str:
        """Return a table of the kernels that ran in each block, and of the calls that ComfyUI's own attention ran."""
        rows = []
        for name, layer in self._layers.items():
            for outcome, calls in Counter(plan.outcome for plan in record.last_plans(layer)).items():
                facts = (outcome.asked, outcome.recipe, outcome.kernel, outcome.numerics, calls, outcome.reason)
                rows.append(LayerRow(name, *facts, outcome.quantizer, outcome.backward))
        rows += [LayerRow(name, "", reason=f"{reason}, in {n} calls") for (name, reason), n in self._passed.items()]
        if not rows:
            return "no attention call has reached sage-hf yet: run the sampler first; another override may take them"
        return str(Explanation(tuple(sorted(rows, key=lambda row: row.layer))))


def block_of(options: Mapping[str, Any]) -> tuple[str, int | None]:
    """Return the running block's name and number, as ComfyUI's models give them."""
    if "block" in options:  # UNets
        kind, number, *_ = options["block"]
        return f"{kind}.{number}", int(number)
    if "block_index" in options:
        return f"{options.get('block_type', 'blocks')}.{options['block_index']}", int(options["block_index"])
    return "attention", None


class SageAttention:
    """Node that gives a model sage-hf's attention."""

    CATEGORY = "sage-hf"
    FUNCTION = "apply"
    RETURN_TYPES = ("MODEL",)
    DESCRIPTION = "Run the model's attention in 4 or 8 bits. Works with other attention overrides before it."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Return the inputs: the model, and the fields of `Settings`."""
        steps = {"max": 10_000}
        return {
            "required": {
                "model": ("MODEL",),
                "recipe": (list(RECIPES), {"default": "sage2"}),
                "keep": ("FLOAT", {"default": 1.0, "min": 0.05, "max": 1.0, "step": 0.05}),
                "start_step": ("INT", {"default": 0, "min": 0, **steps}),
                "end_step": ("INT", {"default": -1, "min": -1, **steps}),
                "kept_blocks": ("STRING", {"default": ""}),
            }
        }

    def apply(
        self, model: Any, recipe: str, keep: float, start_step: int, end_step: int, kept_blocks: str
    ) -> tuple[Any]:
        """Return a copy of the model whose attention follows the settings."""
        patched = model.clone()
        options = dict(patched.model_options.get("transformer_options", {}))
        settings = Settings(recipe, keep, start_step, end_step, read_blocks(kept_blocks))
        options[OVERRIDE] = SageOverride(settings, options.get(OVERRIDE))
        patched.model_options = {**patched.model_options, "transformer_options": options}
        return (patched,)


class SageReport:
    """Node that reports the kernels that ran in a model's attention."""

    CATEGORY = "sage-hf"
    FUNCTION = "report"
    RETURN_TYPES = ("LATENT", "STRING")
    OUTPUT_NODE = True
    DESCRIPTION = (
        "Show which kernel ran in each block, and why. Give it the sampler's latent, so that it runs after it."
    )

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Return the inputs: the model, and its sampler's latent."""
        return {"required": {"model": ("MODEL",), "latent": ("LATENT",)}}

    @classmethod
    def IS_CHANGED(cls, **inputs: Any) -> float:
        """Return NaN, which equals nothing, so that the report never comes from the cache."""
        return float("nan")

    def report(self, model: Any, latent: Any) -> dict[str, Any]:
        """Return the unchanged latent and the report."""
        override = model.model_options.get("transformer_options", {}).get(OVERRIDE)
        while override is not None and not isinstance(override, SageOverride):
            override = getattr(override, "previous", None)
        text = "the model has no sage-hf attention" if override is None else override.explain()
        return {"ui": {"text": [text]}, "result": (latent, text)}


NODE_CLASS_MAPPINGS = {"SageHfAttention": SageAttention, "SageHfReport": SageReport}
NODE_DISPLAY_NAME_MAPPINGS = {
    "SageHfAttention": "Sage attention (sage-hf)",
    "SageHfReport": "Sage attention report (sage-hf)",
}
