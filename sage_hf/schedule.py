"""The current step of a denoiser, and the recipes of its layers at this step."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from huggingface_hub.utils import logging
from torch import Tensor, nn

from sage_hf.changes import inner
from sage_hf.config import SageConfig
from sage_hf.diffusers.bridge import follow_pipelines, running_pipeline
from sage_hf.transformers.bridge import is_pretrained_model
from sage_kernels.runtime import dynamo

TIMESTEP_ARGUMENTS = ("timestep", "t")

logger = logging.get_logger(__name__)


class Switchable(Protocol):
    """Attention processor whose recipe the schedule switches."""

    recipe: str


class StepSchedule:
    """Forward pre-hook of a denoiser that assigns `processor.recipe` when the denoising step changes.

    The step is the position of the denoiser's timestep among the timesteps of the running pipeline's scheduler. This
    handles calls that share a step (classifier-free guidance), schedules entered in the middle (video to video), two
    denoisers that share one schedule (Wan 2.2), and pipelines that share one denoiser, each with its own scheduler.
    If a pipeline's `current_timestep` is one of its scheduler's timesteps, it counts, whatever the denoiser gets:
    Cosmos 2 passes σ / (σ + 1), and Cosmos 2.5 passes another timestep for clean frames. If neither timestep is one of
    the scheduler's, or there is no pipeline, changes of the denoiser's timestep are counted instead; a change in the
    opposite direction starts a new generation. A second-order scheduler may have timesteps between two steps (KDPM2),
    which belong to the earlier step. Every other distinct timestep is a step, even if a scheduler has more timesteps
    than it was asked for (PNDM).

    The running pipeline is the pipeline whose call contains the denoiser's call, in the same thread. A call from
    elsewhere, such as a loop of your own, counts as a call of the pipeline given to `sage_hf.apply`, which is logged
    once. Pickling drops that pipeline: an unpickled schedule follows the pipeline that runs it, and raises if there is
    none. While the scheduler has no timesteps, changes are counted.

    Limits: a loop of your own inside the call of another pipeline counts as that pipeline's loop. Threads must not run
    one denoiser at the same time. A configuration holds for every pipeline that shares the denoiser; the last applied
    configuration is in force.

    A processor's recipe is assigned only when it changes, so a compiled layer guards on a string that rarely changes.
    """

    def __init__(
        self,
        config: SageConfig,
        processors: Mapping[str, Switchable],
        pipe: Any = None,
        on_step: Callable[[int], None] | None = None,
    ) -> None:
        """Create a schedule that is not attached to a denoiser yet.

        Args:
            config: the configuration with the step rules.
            processors: the processors to switch, by layer name.
            pipe: the pipeline whose `scheduler` is read while no other pipeline is running.
            on_step: called with the step of each call of the denoiser; 0 is the first.

        Raises:
            ValueError: a step rule counts from the end, but no pipeline knows the number of steps.
        """
        if pipe is None and any(rule.counts_from_end for rule in config.steps):
            raise ValueError(
                "step rules that count from the end need the number of steps: apply the configuration to the pipeline "
                "rather than to its denoiser, or count from the first step"
            )
        self._config = config
        self.processors = dict(processors)
        self._pipe = None if pipe is None else _PipelineReference(pipe)
        self._on_step = on_step
        self._generations = _Generations()
        self._counted = Generation()
        self._assumed = False
        self.step = 0
        self.num_steps: int | None = None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        follow_pipelines()  # also in a process that only loads a switched model

    def attach(self, denoiser: nn.Module) -> torch.utils.hooks.RemovableHandle:
        """Follow the calls of `denoiser` until `remove()` of the returned handle.

        Raises:
            ValueError: the denoiser's forward takes no timestep.
        """
        follow_pipelines()
        model = inner(denoiser)
        self._argument = timestep_argument(model)
        self._parameters = tuple(inspect.signature(type(model).forward).parameters)[1:]
        return denoiser.register_forward_pre_hook(self._follow, with_kwargs=True)

    @dynamo.disable
    def _follow(self, denoiser: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        place = self._parameters.index(self._argument)
        pipe = running_pipeline()
        if pipe is None and self._pipe is not None and not self._assumed:
            self._assumed = True
            logger.warning(
                f"{type(denoiser).__name__} is called from outside a pipeline: its denoising steps are read from the "
                "scheduler of the pipeline given to sage_hf.apply, so run the loop with that scheduler"
            )
        self.advance(args[place] if place < len(args) else kwargs[self._argument], pipe)

    def advance(self, timestep: Tensor | float, pipe: Any = None) -> None:
        """Move to the step of `timestep` and assign the recipes of that step.

        Args:
            timestep: timesteps of any shape; the largest counts.
            pipe: the running pipeline; None: the pipeline given to the constructor.

        Raises:
            RuntimeError: the pipeline given to the constructor no longer exists, so the step is unknown.
        """
        value = float(timestep.max()) if isinstance(timestep, Tensor) else float(timestep)
        generation = self._generation(pipe, value)
        generation.advance(value, None if pipe is None else pipeline_timestep(pipe))
        self.step, self.num_steps = generation.step, generation.num_steps
        if self._on_step is not None:
            self._on_step(self.step)
        for layer, processor in self.processors.items():
            recipe = self._config.resolve(layer, self.step, self.num_steps)
            if processor.recipe != recipe:
                processor.recipe = recipe

    def _generation(self, pipe: Any, value: float) -> Generation:
        """Return the generation that the timestep `value` belongs to: a new one after each `set_timesteps`."""
        if pipe is None:
            if self._pipe is None:
                return self._counted
            pipe = self._pipe()
            if pipe is None:
                raise RuntimeError(
                    "the pipeline given to sage_hf.apply is gone: keep it, or apply again to the new pipeline"
                )
        scheduler = pipe.scheduler
        if getattr(scheduler, "timesteps", None) is None:
            return self._counted
        generation = self._generations.get(scheduler)
        if generation is None or generation.timesteps is not scheduler.timesteps:
            generation = self._generations[scheduler] = Generation.of_scheduler(scheduler, value)
        return generation


class Generation:
    """A pass through a scheduler's timesteps, or through timesteps that are counted one by one.

    Attributes:
        timesteps: the scheduler's own tensor; None without a scheduler.
        step: the step of the latest timestep.
        num_steps: the number of steps; None if it is not known.
    """

    def __init__(self) -> None:
        self.timesteps: Tensor | None = None
        self.step = 0
        self.num_steps: int | None = None
        self._places: list[float] = []
        self._steps: list[int] = []  # of the places
        self._units: list[TimestepUnit] = []
        self._follows_pipeline = True  # whether all of the pipeline's timesteps so far are among the scheduler's
        self._place = 0
        self._last: float | None = None
        self._direction = 0

    @classmethod
    def of_scheduler(cls, scheduler: Any, first: float) -> Generation:
        """Return a generation with the scheduler's timesteps; `first` is the first timestep the denoiser is given."""
        generation = cls()
        generation.timesteps = scheduler.timesteps
        timesteps = scheduler.timesteps.tolist()
        generation._places = list(dict.fromkeys(timesteps))  # second-order schedulers repeat some timesteps
        generation._units = units(getattr(scheduler, "config", {}).get("num_train_timesteps", 1000))
        places_by_unit = generation._find(first)
        # 1.0 may be the first timestep in one unit and the last in another: the unit in which it comes earlier wins.
        generation._units = sorted(places_by_unit, key=places_by_unit.__getitem__)
        places = len(generation._places)
        generation.num_steps = steps = places
        if (order := getattr(scheduler, "order", 1)) > 1:
            generation.num_steps = steps = min(places, scheduler.num_inference_steps)
        generation._steps = [place * steps // places for place in range(places)]
        if order > 1 and len(begun := timesteps[::order]) == scheduler.num_inference_steps:
            # A timestep between two steps may equal the next step (KDPM2 with ancestral sampling).
            of_begun = {timestep: step for step, timestep in enumerate(begun)}
            generation._steps = [of_begun.get(place, timesteps.index(place) // order) for place in generation._places]
            generation.num_steps = len(begun)
        return generation

    def advance(self, value: float, current_timestep: float | None = None) -> None:
        """Move to the step of the timestep `value`; `current_timestep` is the pipeline's, or None."""
        self._count(value)
        self._follows_pipeline = self._follows_pipeline and current_timestep in self._places
        if current_timestep is not None and self._follows_pipeline:
            self._place = self._places.index(current_timestep)
        else:
            places_by_unit = self._find(value)
            self._units = list(places_by_unit)
            if places_by_unit:
                self._place = places_by_unit[self._units[0]]
        # A counted place may lie after the scheduler's last place.
        behind = self._place - len(self._steps)
        self.step = self._steps[self._place] if behind < 0 else (self.num_steps or 0) + behind

    def _find(self, value: float) -> dict[TimestepUnit, int]:
        """Return the place of `value` among the scheduler's timesteps, for each unit in which it is a timestep."""
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


def pipeline_timestep(pipe: Any) -> float | None:
    """Return the `current_timestep` of a running pipeline; None if it has none, or several at once."""
    timestep = getattr(pipe, "current_timestep", None)
    if isinstance(timestep, Tensor):
        return float(timestep) if timestep.numel() == 1 else None
    return float(timestep) if isinstance(timestep, (int, float)) else None


def timestep_argument(denoiser: nn.Module) -> str:
    """Return the name of the denoiser's forward argument that takes the timestep.

    Raises:
        ValueError: the forward has no such argument, or the denoiser is a model of transformers.
    """
    parameters = {} if is_pretrained_model(denoiser) else inspect.signature(type(denoiser).forward).parameters
    for name in TIMESTEP_ARGUMENTS:
        if name in parameters:
            return name
    raise ValueError(
        f"{type(denoiser).__name__} is no denoiser of diffusers that takes a timestep, so step rules do not apply to "
        "it: remove `steps` from the configuration"
    )


@dataclass(frozen=True)
class TimestepUnit:
    """Conversion of a denoiser's timestep to the scheduler's: scale · timestep + offset.

    Attributes:
        scale, offset: factor and summand of the conversion.
        relative, absolute: tolerance of the result: relative · |scheduler's timestep| + absolute.
    """

    scale: float
    offset: float
    relative: float
    absolute: float

    def place(self, timestep: float, places: list[float]) -> int | None:
        """Return the index in `places` of the denoiser's timestep; None if it is not among them."""
        scheduler_timestep = self.scale * timestep + self.offset
        nearest = min(range(len(places)), key=lambda place: abs(places[place] - scheduler_timestep))
        near = abs(places[nearest] - scheduler_timestep) <= self.relative * abs(places[nearest]) + self.absolute
        return nearest if near else None


def units(train_steps: int) -> list[TimestepUnit]:
    """Return the units in which pipelines pass a timestep: t, t/N or 1 − t/N, rounded to bfloat16 once or twice."""
    rounding = 2 * 2**-8
    return [
        TimestepUnit(1, 0, rounding, 0),
        TimestepUnit(train_steps, 0, rounding, 0),
        TimestepUnit(-train_steps, train_steps, 0, rounding * train_steps),
    ]


class _PipelineReference(weakref.ref):
    """Weak reference to a pipeline. A deep copy refers to the same pipeline, an unpickled reference to none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _PipelineReference:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (set(),)  # nothing else holds the set, so it is gone when loading ends


class _Generations(weakref.WeakKeyDictionary):
    """Generations by scheduler, referenced weakly. Pickling drops them."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()
