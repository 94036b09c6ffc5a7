"""Which denoising step a denoiser is at, and the recipes of its layers at that step."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sage_hf.config import SageConfig

TIMESTEP_ARGUMENTS = ("timestep", "t")


class Switchable(Protocol):
    """What the schedule switches: an attention processor with a recipe."""

    recipe: str


class StepSchedule:
    """Assigns `processor.recipe` when the denoising step changes; a forward pre-hook of the denoiser.

    The step is the place of the timestep that the denoiser is called with in the timesteps of the pipeline's scheduler,
    so calls that share a step (classifier-free guidance), schedules entered in the middle (video to video) and two
    denoisers that share one schedule (Wan 2.2) are told apart. Where the denoiser is given something else than the
    scheduler's timesteps, or there is no pipeline, changes of the timestep are counted; one against the direction of
    those before it starts a new generation.

    A processor's recipe is assigned only where it changes, so a compiled layer guards on a string that rarely changes.
    """

    def __init__(self, config: SageConfig, processors: Mapping[str, Switchable], pipe: Any = None) -> None:
        """Args: config; processors by layer name; pipe, whose `scheduler` is read at every generation.

        Raises:
            ValueError: a step rule counts from the end, and there is no pipeline to tell the number of steps.
        """
        if pipe is None and any(rule.counts_from_end for rule in config.steps):
            raise ValueError(
                "step rules that count from the end need the number of steps: apply the configuration to the pipeline "
                "rather than to its denoiser, or count from the first step"
            )
        self._config = config
        self._processors = dict(processors)
        self._pipe = None if pipe is None else weakref.ref(pipe)
        self._timesteps: Tensor | None = None
        self._places: list[float] = []
        self._unit: tuple[float, float] | None = None
        self._last: float | None = None
        self._direction = 0
        self.step = 0
        self.num_steps: int | None = None

    def attach(self, denoiser: nn.Module) -> torch.utils.hooks.RemovableHandle:
        """Follow `denoiser`; the returned handle's `remove()` undoes it.

        Raises:
            ValueError: its forward takes no timestep.
        """
        model = getattr(denoiser, "_orig_mod", denoiser)
        self._argument = timestep_argument(model)
        self._parameters = tuple(inspect.signature(type(model).forward).parameters)[1:]
        return denoiser.register_forward_pre_hook(self._follow, with_kwargs=True)

    @torch.compiler.disable
    def _follow(self, denoiser: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        place = self._parameters.index(self._argument)
        self.advance(args[place] if place < len(args) else kwargs[self._argument])

    def advance(self, timestep: Tensor | float) -> None:
        """Move to the step of `timestep` (of any shape: the largest counts) and assign the recipes of that step.

        Raises:
            RuntimeError: the pipeline is gone, and with it the number of steps.
        """
        value = float(timestep.max()) if isinstance(timestep, Tensor) else float(timestep)
        if self._pipe is not None:
            self._read_scheduler(self._pipe(), value)
        if self._unit is not None:
            scale, offset = self._unit
            place = scale * value + offset
            self.step = min(range(len(self._places)), key=lambda step: abs(self._places[step] - place))
        else:
            self._count(value)
        for layer, processor in self._processors.items():
            recipe = self._config.resolve(layer, self.step, self.num_steps)
            if processor.recipe != recipe:
                processor.recipe = recipe

    def _read_scheduler(self, pipe: Any, value: float) -> None:
        if pipe is None:
            raise RuntimeError(
                "the pipeline given to sage_hf.apply is gone: keep it, or apply again to what is used now"
            )
        scheduler = pipe.scheduler
        if scheduler.timesteps is not self._timesteps:  # set_timesteps was called: a new generation
            self._timesteps = scheduler.timesteps
            self._places = list(dict.fromkeys(self._timesteps.tolist()))  # second-order schedulers repeat timesteps
            self._unit = _unit(value, self._places, scheduler.config.get("num_train_timesteps", 1000))
            self._last, self._direction = None, 0
            self.step, self.num_steps = 0, len(self._places)

    def _count(self, value: float) -> None:
        if self._last is not None and value != self._last:
            direction = 1 if value > self._last else -1
            if self._direction in (0, direction):
                self.step, self._direction = self.step + 1, direction
            else:
                self.step, self._direction = 0, 0
        self._last = value


def timestep_argument(denoiser: nn.Module) -> str:
    """The name of the argument by which its forward takes the timestep.

    Raises:
        ValueError: there is none.
    """
    parameters = inspect.signature(type(denoiser).forward).parameters
    for name in TIMESTEP_ARGUMENTS:
        if name in parameters:
            return name
    raise ValueError(
        f"{type(denoiser).__name__} takes no timestep, so step rules do not apply to it: remove `steps` from the "
        "configuration, or apply it to a denoiser"
    )


def _unit(value: float, places: list[float], train_steps: int) -> tuple[float, float] | None:
    """scale and offset from the denoiser's timestep to the scheduler's: pipelines pass t, t/N or 1 − t/N.

    A timestep may have been rounded to bfloat16 on its way. None: it is none of these.
    """
    rounding = 2**-8
    for scale, offset in ((1, 0), (train_steps, 0), (-train_steps, train_steps)):
        given = scale * value + offset
        if any(abs(given - place) <= rounding * (train_steps if offset else abs(place)) for place in places):
            return scale, offset
    return None
