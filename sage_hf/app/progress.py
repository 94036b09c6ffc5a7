"""A progress bar within a denoising step, for steps that take long."""

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
    """Count the attention layers of each call of a denoiser, below the pipeline's own bar of denoising steps.

    The bar is shown in a terminal only, once a call has taken two seconds, and removed at the call's end. Layers inside
    a compiled graph do not move it.

    Raises:
        TypeError, ValueError: as `sage_hf.apply`.
    """
    bars: list[tqdm] = []  # of the denoiser that is running
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
