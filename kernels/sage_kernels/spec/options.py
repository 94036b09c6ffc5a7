"""Options of an attention call, and the choices of its fallback; this file does not import torch."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Fallback = Literal["native", "emulate", "error"]
FALLBACKS: tuple[Fallback, ...] = ("native", "emulate", "error")


class Options(NamedTuple):
    """Options of a call, as the caller gave them: all arguments except tensors.

    Attributes:
        is_causal: row i attends to keys 0…i + causal_offset.
        causal_offset: 0 aligns causality upper left, as PyTorch's SDPA.
        scale: finite factor of the scores; None: head_dim ** -0.5.
        enable_gqa: query may have more heads than key.
        dropout_p: probability of dropping a weight.
        recipe: name of the requested recipe.
        fallback: what may run if the recipe has no native kernel; see `select.select`.
        return_lse: whether the log-sum-exp of each row's scores is wanted.
        tokens_first: whether query, key, value and the output are (batch, tokens, heads, channels).
    """

    is_causal: bool = False
    causal_offset: int = 0
    scale: float | None = None
    enable_gqa: bool = True
    dropout_p: float = 0.0
    recipe: str = "sage3"
    fallback: Fallback = "native"
    return_lse: bool = False
    tokens_first: bool = False

    @classmethod
    def of_operator(
        cls,
        is_causal: bool,
        causal_offset: int,
        scale: float | None,
        recipe: str,
        fallback: Fallback,
        return_lse: bool = False,
    ) -> Options:
        """Return the options of a call of an operator: grouped heads, no dropout, heads before tokens."""
        # A default of type float would become an input of compiled graphs.
        return cls(is_causal, causal_offset, scale, True, 0.0, recipe, fallback, return_lse)

    def replace(self, **fields: Any) -> Options:
        """Return the options with other values of some fields, as `_replace` does, which Dynamo 2.8 cannot trace."""
        values: Any = [fields.get(name, value) for name, value in zip(Options._fields, self, strict=True)]
        return Options(*values)


def check_fallback(fallback: str) -> Fallback:
    """Return `fallback` if it is one of the choices.

    Raises:
        ValueError: it is not; the message lists the choices.
    """
    for known in FALLBACKS:
        if fallback == known:
            return known
    raise ValueError(f"unknown fallback {fallback!r}; choose from: {', '.join(FALLBACKS)}")
