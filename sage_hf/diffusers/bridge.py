"""All uses of names of diffusers that are private or depend on its version.

If a version lacks a name, speed is lost, but results never change. Importing this file imports neither diffusers nor
torch.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

IP_ADAPTER_METHODS = "_load_ip_adapter_weights", "unload_ip_adapter"
"""Methods of loaders that create every processor again from its class."""


# Running pipelines


class _BridgeState(threading.local):
    """Pipelines whose calls are running in this thread, the innermost last."""

    def __init__(self) -> None:
        self.pipelines: list[Any] = []


_thread = _BridgeState()


def running_pipeline() -> Any:
    """Return the running pipeline of this thread whose scheduler has timesteps; None if there is none.

    Only calls after the first `follow_pipelines` are seen.
    """
    has_timesteps = (pipeline for pipeline in reversed(_thread.pipelines) if _has_timesteps(pipeline))
    return next(has_timesteps, None)


def _has_timesteps(pipe: Any) -> bool:
    return getattr(getattr(pipe, "scheduler", None), "timesteps", None) is not None


@functools.cache
def follow_pipelines() -> None:
    """Let `running_pipeline` see the calls of diffusers' pipelines, including modular pipelines, and of derived
    classes.

    Their `__call__` is wrapped, in later subclasses as well.
    """
    import diffusers

    for base in (diffusers.DiffusionPipeline, getattr(diffusers, "ModularPipeline", None)):
        if base is not None:
            for_each_subclass(base, _follow_calls)


def _follow_calls(pipeline_class: Any) -> None:
    if (call := vars(pipeline_class).get("__call__")) is None:
        return

    @functools.wraps(call)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        _thread.pipelines.append(self)
        try:
            return call(self, *args, **kwargs)
        finally:
            _thread.pipelines.pop()

    pipeline_class.__call__ = wrapper


def for_each_subclass(base: Any, complete: Callable[[Any], None]) -> None:
    """Call `complete` with a class and every subclass of it, now and whenever a subclass is defined."""
    earlier_hook = vars(base).get("__init_subclass__")

    def init_subclass(cls: type, **kwargs: Any) -> None:
        super(base, cls).__init_subclass__(**kwargs) if earlier_hook is None else earlier_hook.__func__(cls, **kwargs)
        complete(cls)

    waiting, seen = [base], {base}
    for cls in waiting:
        complete(cls)
        more = [subclass for subclass in cls.__subclasses__() if subclass not in seen]
        waiting += more
        seen.update(more)
    base.__init_subclass__ = classmethod(init_subclass)


# Attention backends

DISPATCH = "dispatch_attention_fn"
"""Name of diffusers' function through which processors attend."""


def add_backend(dispatch: ModuleType, name: str, backend: Callable[..., Any]) -> Any:
    """Register an attention backend, and return its member of AttentionBackendName.

    There is no public way to add a member, so this writes the internals of `Enum`.

    Args:
        dispatch: diffusers.models.attention_dispatch.
        name: the name, in lower case.
        backend: function of (batch, tokens, heads, head_dim) tensors.
    """
    enum, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry
    member = str.__new__(enum, name)
    member._name_, member._value_, member.__objclass__ = name.upper(), name, enum
    member._sort_order_ = len(enum._member_names_)
    setattr(enum, member._name_, member)
    enum._member_names_.append(member._name_)
    enum._member_map_[member._name_] = member
    enum._value2member_map_[name] = member
    parallel = "supports_context_parallel" in inspect.signature(registry.register).parameters
    registry.register(member, **({"supports_context_parallel": True} if parallel else {}))(backend)
    return member


def choose_backend(dispatch: ModuleType, choose: Callable[[], Any]) -> None:
    """Let `choose` return the backend for a processor that names none; None: the backend that diffusers would use."""
    registry = dispatch._AttentionBackendRegistry
    get_active_backend = registry.get_active_backend.__func__

    @functools.wraps(get_active_backend)
    def wrapper(cls: Any) -> Any:
        chosen = choose()
        return get_active_backend(cls) if chosen is None else (chosen, cls._backends[chosen])

    registry.get_active_backend = classmethod(wrapper)


def active_backend(dispatch: ModuleType) -> str:
    """Return the name of the backend of `with attention_backend(...)`, or of the process; "" if it is not known."""
    active = getattr(getattr(dispatch, "_AttentionBackendRegistry", None), "_active_backend", None)
    return getattr(active, "value", "")


# Processors


class Overlay:
    """An object with some attributes replaced during one call; all other attributes are the original object's.

    A compiled call finds the original as it was traced, because replaced attributes are not written to it.
    """

    def __init__(self, original: Any, replaced: Mapping[str, Any]) -> None:
        for name, value in {"_original": original, **replaced}.items():
            object.__setattr__(self, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """Return the original object's class, so that `super()` works in its methods."""
        return type(vars(self).get("_original", self))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            object.__setattr__(self, name, value)
        else:
            setattr(self._original, name, value)


class ParallelProcessor:
    """Base of our processors: it holds the attribute that diffusers assigns in `enable_parallelism`."""

    @property
    def parallel_config(self) -> Any:
        """Return the ParallelConfig of this processor; None if it has none."""
        return vars(self).get("parallel")

    @parallel_config.setter
    def parallel_config(self, config: Any) -> None:
        vars(self)["parallel"] = config

    @property
    def _parallel_config(self) -> Any:
        return self.parallel_config

    @_parallel_config.setter
    def _parallel_config(self, config: Any) -> None:
        self.parallel_config = config


class BackendProcessor(ParallelProcessor):
    """Base of our processors that attend by a recipe: diffusers sees their backend, and models make masks for it.

    A model's `set_attention_backend` assigns a backend to all its processors; our processors keep their own.
    """

    @property
    def attention_backend(self) -> Any:
        """Return the member of AttentionBackendName by which this processor attends."""
        raise NotImplementedError

    @property
    def _attention_backend(self) -> Any:
        return self.attention_backend

    @_attention_backend.setter
    def _attention_backend(self, backend: object) -> None:
        pass


def takes_backend(processor: Any) -> bool:
    """Return whether a processor of diffusers attends by the backend that is assigned to it."""
    return hasattr(processor, "_attention_backend")


def backend_of(processor: Any) -> str:
    """Return the name of the backend that is assigned to a processor of diffusers; "" if there is none."""
    backend = getattr(processor, "_attention_backend", None)
    return str(getattr(backend, "value", backend) or "")


def with_backend(processor: Any, backend: Any, parallel: Any = None) -> Overlay:
    """Return an overlay of a processor that attends by another backend, and passes `parallel` to it if given."""
    replaced = {"_attention_backend": backend}
    return Overlay(processor, replaced if parallel is None else replaced | {"_parallel_config": parallel})


def fixed_backends(processor: Any) -> tuple[str, ...]:
    """Return the only backends that a processor accepts; () if it does not restrict them."""
    return tuple(getattr(processor, "_SUPPORTED_BACKENDS", None) or ())


def passes_parallel_config(processor: Any) -> bool:
    """Return whether a processor's code passes its ParallelConfig to diffusers' dispatch."""
    return "_parallel_config" in type(processor).__call__.__code__.co_names


def leaves_groups(processor: Any) -> bool:
    """Return whether a processor's code leaves it to diffusers' dispatch to group queries."""
    constants = inspect.unwrap(type(processor).__call__).__code__.co_consts
    return any(isinstance(names, tuple) and "enable_gqa" in names for names in constants)


# Offloading


def is_offloaded_in_groups(model: Any) -> bool:
    """Check whether hooks of `enable_group_offload` move the weights that a model had when they were added."""
    from diffusers.hooks import group_offloading

    check: Callable[[Any], bool] = getattr(group_offloading, "_is_group_offload_enabled", lambda model: False)
    return check(model)


# Context parallelism


def parallel_config_of(model_or_processor: Any) -> Any:
    """Return the ParallelConfig that `enable_parallelism` gave to a model or a processor; None if there is none."""
    return getattr(model_or_processor, "_parallel_config", None)


def set_parallel_config(processor: Any, config: Any) -> None:
    """Assign a ParallelConfig to a processor of diffusers."""
    processor._parallel_config = config


def cp_plan_of(model: Any) -> Any:
    """Return diffusers' context-parallel plan of a model, or None if there is none."""
    return getattr(model, "_cp_plan", None)


def split_tokens(dim: int, dims: int, *, output: bool = False) -> Any:
    """Return the part of a context-parallel plan that splits a tensor of `dims` dimensions along `dim`.

    Args:
        output: whether the tensor is an output of the module, not an argument.
    """
    from diffusers.models._modeling_parallel import ContextParallelInput

    return ContextParallelInput(split_dim=dim, expected_dims=dims, split_output=output)


def gathered_tokens() -> Any:
    """Return the part of a context-parallel plan that gathers a module's output, (batch, tokens, channels)."""
    from diffusers.models._modeling_parallel import ContextParallelOutput

    return ContextParallelOutput(gather_dim=1, expected_dims=3)


@dataclass(frozen=True)
class Shards:
    """Split of a model's tokens among processes, read from diffusers' ContextParallelConfig.

    Attributes:
        ring: number of processes in ring attention.
        ulysses: number of processes that exchange tokens for heads.
        uneven: whether processes may have different numbers of tokens.
    """

    ring: int
    ulysses: int
    uneven: bool
    _config: Any

    @classmethod
    def of(cls, config: Any) -> Shards:
        """Read a ParallelConfig or a ContextParallelConfig."""
        config = getattr(config, "context_parallel_config", None) or config
        uneven = getattr(config, "ulysses_anything", False) or getattr(config, "ring_anything", False)
        return cls(config.ring_degree, config.ulysses_degree, uneven, config)

    @property
    def group(self) -> Any:
        """Return the group of processes that exchange tokens for heads."""
        return self._config._ulysses_mesh.get_group()

    @property
    def rank(self) -> int:
        """Return this process's place in `group`."""
        rank: int = self._config._ulysses_local_rank
        return rank

    @property
    def ring_group(self) -> Any:
        """Return the group of processes that gather each other's keys."""
        return self._config._ring_mesh.get_group()

    @property
    def all_group(self) -> Any:
        """Return the group of all processes, in the order in which diffusers splits tokens."""
        return self._config._flattened_mesh.get_group()

    @property
    def near(self) -> slice:
        """Return the places, among all processes, of the processes that exchange tokens for heads with this process."""
        start = self.part - self.rank
        return slice(start, start + self.ulysses)

    @property
    def part(self) -> int:
        """Return this process's place among all processes, in the order in which diffusers splits tokens."""
        part: int = self._config._ring_local_rank * self.ulysses + self.rank
        return part


# Layer skip (skip-layer and perturbed-attention guidance)

score_skip_modes: list[type] = []
"""The function mode in which diffusers skips attention's scores, once it is imported."""


def function_modes_are_active() -> bool:
    """Return whether any mode replaces PyTorch's functions, as a layer skip does."""
    from sage_kernels.runtime import torch_private

    return bool(torch_private.function_modes())


def scores_are_skipped(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether this attention, of (B, H, N, D) tensors, runs inside diffusers' `AttentionScoreSkipFunctionMode`.

    That mode replaces torch's scaled_dot_product_attention, but not ours. As in diffusers, attention with different
    numbers of queries and keys is not skipped.
    """
    from sage_kernels.runtime import torch_private

    modes = torch_private.function_mode_stack()
    return (
        bool(modes)
        and any(isinstance(mode, tuple(score_skip_modes)) for mode in modes)
        and query.shape[2] == value.shape[2]
    )


def skip_as_original(helpers: ModuleType, ours: tuple[type, ...], original_of: Callable[[Any], Any]) -> None:
    """Let diffusers skip the attention of layers with our processors as it does with the original processors.

    Args:
        helpers: diffusers.hooks._helpers.
        ours: the classes of our processors.
        original_of: function of an attention module that returns the processor of diffusers for it.
    """
    registry = helpers.AttentionProcessorRegistry
    get = registry.get

    def skip_attention(module: Any, *args: Any, **kwargs: Any) -> Any:
        return get(type(original_of(module))).skip_processor_output_fn(module, *args, **kwargs)

    def get_metadata(cls: type, processor_class: type) -> Any:
        if issubclass(processor_class, ours):
            return helpers.AttentionProcessorMetadata(skip_processor_output_fn=skip_attention)
        return get(processor_class)

    registry.get = classmethod(get_metadata)
