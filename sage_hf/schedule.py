"""Which denoising step a denoiser is at, and the recipes of its layers at that step."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
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
    those before it starts a new generation. A second-order scheduler may have timesteps between two steps (KDPM2):
    these belong to the step before them. Every other distinct timestep is a step, also where a scheduler has more of
    them than it was asked for (PNDM).

    Pickled, the pipeline is gone: `advance` says so in what is loaded.

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
        self._pipe = None if pipe is None else _PipelineReference(pipe)
        self._timesteps: Tensor | None = None
        self._places: list[float] = []
        self._units: list[Unit] = []
        self._place = 0
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
        self._count(value)
        found = self._find(value)
        self._units = list(found)
        if found:
            self._place = found[self._units[0]]
        self.step = self._place
        if self.num_steps is not None:
            self.step = self._place * self.num_steps // len(self._places)
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
            self._units = units(scheduler.config.get("num_train_timesteps", 1000))
            found = self._find(value)  # 1.0 may be the first timestep in one unit and the last in another: the first
            self._units = sorted(found, key=found.__getitem__)
            self._last, self._direction = None, 0
            self._place, self.num_steps = 0, len(self._places)
            if scheduler.order > 1:
                self.num_steps = min(self.num_steps, scheduler.num_inference_steps)

    def _find(self, value: float) -> dict[Unit, int]:
        """The place of `value` in each of the units in which it is one of the scheduler's timesteps."""
        places = {unit: unit.place(value, self._places) for unit in self._units}
        return {unit: place for unit, place in places.items() if place is not None}

    def _count(self, value: float) -> None:
        if self._last is not None and value != self._last:
            direction = 1 if value > self._last else -1
            if self._direction in (0, direction):
                self._place, self._direction = self._place + 1, direction
            else:
                self._place, self._direction = 0, 0
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


@dataclass(frozen=True)
class Unit:
    """How a denoiser's timestep becomes the scheduler's: scale · timestep + offset.

    Attributes:
        relative, absolute: how far it may be off, as a part of the scheduler's timestep and of all.
    """

    scale: float
    offset: float
    relative: float
    absolute: float

    def place(self, timestep: float, places: list[float]) -> int | None:
        """Where in `places` the denoiser's timestep is; None if it is not among them."""
        given = self.scale * timestep + self.offset
        nearest = min(range(len(places)), key=lambda place: abs(places[place] - given))
        near = abs(places[nearest] - given) <= self.relative * abs(places[nearest]) + self.absolute
        return nearest if near else None


def units(train_steps: int) -> list[Unit]:
    """What pipelines pass: t, t/N or 1 − t/N, rounded to bfloat16 on its way once or twice."""
    rounding = 2 * 2**-8
    return [
        Unit(1, 0, rounding, 0),
        Unit(train_steps, 0, rounding, 0),
        Unit(-train_steps, train_steps, 0, rounding * train_steps),
    ]


class _PipelineReference(weakref.ref):
    """Does not keep the pipeline alive. A deep copy refers to the same one; what a pickle brings refers to none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _PipelineReference:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (set(),)  # nothing else holds the set, so that it is gone when loading ends
