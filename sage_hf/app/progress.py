"""Progress bar within a denoising step, for steps that take long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from tqdm.auto import tqdm

from sage_hf.targets import find_targets

SHOWN_AFTER_SECONDS = 2.0


@contextmanager
def layer_progress(pipe_or_model: object) -> Iterator[None]:
    """Show a bar that counts the attention layers of each denoiser call, below the pipeline's bar of denoising steps.

    The bar is shown in a terminal only, once a call has taken two seconds, and is removed when the call ends. Layers
    inside a compiled graph do not advance it.

    Raises:
        TypeError: pipe_or_model is neither a pipeline with a denoiser nor a model.
        ValueError: a model has no attention layer that can be switched.
    """
    bars: list[tqdm] = []  # at most one: that of the running denoiser
    hooks = []

    def close(*_: Any) -> None:
        while bars:
            bars.pop().close()

    def advance(*_: Any) -> None:
        for bar in bars:
            bar.update()

    def start(layers: int, *_: Any) -> None:
        close()
        bars.append(tqdm(total=layers, desc="attention layers", leave=False, disable=None, delay=SHOWN_AFTER_SECONDS))

    for target in find_targets(pipe_or_model):
        layers = target.layers.values()
        hooks.append(target.model.register_forward_pre_hook(partial(start, len(layers))))
        hooks.append(target.model.register_forward_hook(close))
        hooks += [layer.register_forward_hook(advance) for layer in layers]
    try:
        yield
    finally:
        close()
        for hook in hooks:
            hook.remove()
