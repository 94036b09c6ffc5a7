"""Switch the attention of a pipeline or a model to a recipe, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from weakref import WeakSet

from torch import nn

from sage_hf import kv_record, record
from sage_hf.attributes import FALLBACK, IMPLEMENTATION, RECIPE, TRAINING
from sage_hf.changes import Change, Undo, changes_of, inner
from sage_hf.config import SageConfig
from sage_hf.names import NAMES, name_of
from sage_hf.schedule import StepSchedule, timestep_argument
from sage_hf.sparse.layer import SparseLayer, SparseModel
from sage_hf.sparse.modelopt import settings_for
from sage_hf.targets import Target, architecture_of, find_targets
from sage_hf.transformers.bridge import (
    configs_of,
    implementation_of,
    keep_implementation,
    set_implementation,
)
from sage_hf.transformers.inspection import swapped_in_readers
from sage_kernels.spec.recipe import get_recipe

MakeChange = Callable[[Undo], None]  # makes a change, and appends the functions that undo it

_transformers_models: WeakSet[nn.Module] = WeakSet()
"""Models of transformers that were switched at least once."""


class Handle:
    """Handle of an `apply`: `restore()`, or leaving a `with` block, puts back the original objects.

    Attributes:
        config: the configuration that was applied.
    """

    def __init__(self, config: SageConfig, changes: list[_Applied]) -> None:
        self.config = config
        self._changes = changes

    def restore(self) -> None:
        """Put back the objects that computed attention before `apply`, in models where this `apply` is in force.

        A model is left unchanged if a later `apply` replaced this one, or if this one was undone.
        """
        for change in self._changes:
            change.undo()

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()


class _Applied(Change):
    """Change that `apply` made to a model."""


def apply(
    pipe_or_model: object, config: SageConfig | str | Path, *, fallback: str | None = None, kv_cache: str | None = None
) -> Handle:
    """Switch the attention of a diffusers pipeline (its denoisers), a diffusers or a transformers model to low bits.

    Everything is checked before anything is changed. An earlier `apply` to the same model is undone first. Attention
    belongs to the model, so other pipelines that share a denoiser run the new attention too; step rules count the steps
    of the pipeline that is running.

    Args:
        pipe_or_model: the pipeline or model to switch; in a pipeline, every component that has attention and receives
            the timestep: denoisers, priors and ControlNets.
        config: a SageConfig, the name of a recipe ("sage3"), the name of a configuration that ships with sage-hf
            ("cogvideox-2b"), or the path of a JSON file.
        fallback: "native", "emulate" or "error"; None: the configuration's fallback.
        kv_cache: as in `SageConfig`; None: the configuration's KV cache.

    Returns:
        A handle that puts back the objects from before the first `apply`: `handle.restore()`, or
        `with sage_hf.apply(...):`. `sage_hf.restore(pipe_or_model)` needs no handle.

    Raises:
        TypeError: pipe_or_model is neither a pipeline nor a model.
        ValueError: the configuration is unknown or cannot be read, it is for another architecture, a pattern matches no
            layer, the model has no attention, an attention module is not recognised (a layer rule with "exact" does not
            change such a module), or there are step rules for a model without steps; the KV cache of a model cannot be
            quantised, or the model is not a transformers model; a transformers model shares its config, which names its
            attention, with another switched model; a module that was put into a transformers model reads its masks,
            and the recipe would change these masks.

    Example:
        >>> handle = sage_hf.apply(pipe, "sage3")
        >>> video = pipe(prompt).frames[0]
        >>> print(sage_hf.explain(pipe))
        >>> handle.restore()
    """
    if not isinstance(config, SageConfig):
        config = SageConfig.from_name(config)
    if fallback is not None:
        config = replace(config, fallback=fallback)
    if kv_cache is not None:
        config = replace(config, kv_cache=kv_cache)
    targets = find_targets(pipe_or_model)
    if config.kv_cache is not None and any(target.library == "diffusers" for target in targets):
        raise ValueError("kv_cache: a diffusers model has no KV cache")
    _check_architecture(config, targets)
    _check_patterns(config, targets)
    pipe = None if isinstance(pipe_or_model, nn.Module) or not hasattr(pipe_or_model, "scheduler") else pipe_or_model
    changes = [
        _diffusers_change(target, config.of_model(target.name, target.layers), pipe)
        if target.library == "diffusers"
        else _transformers_change(target, config)
        for target in targets
    ]
    made: list[_Applied] = []
    try:
        for target, make in zip(targets, changes, strict=True):
            for earlier in [change for change in changes_of(inner(target.model)) if isinstance(change, _Applied)]:
                earlier.undo()
            undo: Undo = []
            made.append(_Applied(inner(target.model), undo))
            _forget_plans(target, undo)
            make(undo)
    except BaseException:
        for change in made:
            change.undo()
        raise
    return Handle(config, made)


def restore(pipe_or_model: object) -> None:
    """Undo every change made by `apply`, `enable_vsa` and sage-hf's processors and backends; no handle is needed.

    A pipeline or a diffusers model then has diffusers' attention again. A transformers model has the
    `attn_implementation` from before the first `apply`. A model that was never switched is not changed.

    Raises:
        TypeError, ValueError: as for `apply`, if a pipeline or model has no attention.
    """
    for target in find_targets(pipe_or_model):
        model = inner(target.model)
        for change in changes_of(model)[:1]:  # which undoes later ones first
            change.undo()
        if target.library == "diffusers":
            from sage_hf.diffusers import remove_processors

            remove_processors(model)


def _forget_plans(target: Target, undo: Undo) -> None:
    """Forget the layers' plans and KV caches, now and when the change is undone."""
    for layer in target.layers.values():
        for module in (record, kv_record):
            module.forget(layer)
            undo.append(partial(module.forget, layer))


def _check_architecture(config: SageConfig, targets: list[Target]) -> None:
    if config.architecture and config.architecture != architecture_of(targets):
        raise ValueError(
            f"the configuration was made for {config.architecture}, and this is {architecture_of(targets)}: calibrate "
            "this model, or use a configuration without `architecture`"
        )


def _check_patterns(config: SageConfig, targets: list[Target]) -> None:
    names = [target.label(name) for target in targets for name in target.layers]
    bare = [name for target in targets for name in target.layers]
    if unmatched := config.unmatched_patterns([*names, *bare]):
        some = ", ".join(names if len(names) <= 4 else [*names[:2], "…", *names[-2:]])
        raise ValueError(f"the pattern {unmatched[0]!r} matches no attention layer; the {len(names)} layers are {some}")


def _diffusers_change(target: Target, config: SageConfig, pipe: object | None) -> MakeChange:
    """Return the change of a diffusers model: a processor for each layer, and a hook that follows denoising steps."""
    from sage_hf.diffusers import (
        FixedBackendError,
        UnsupportedAttentionError,
        VSALayer,
        bind,
        check_parallelism,
        exchange_processor,
        layer_of,
        log_kept,
        naming,
    )

    processors, backend_error = {}, None
    for name, layer in target.layers.items():
        with naming(name):
            try:
                processor = bind(layer, _recipe(config, name), config.fallback, config.training_recipe(name))
                check_parallelism(inner(target.model), layer, layer_of(layer))
                processors[name] = processor
            except FixedBackendError as error:
                backend_error = error
                log_kept(layer, error)
            except UnsupportedAttentionError:
                if (rule := config.layer_rule(name)) is None or rule.recipe != "exact":
                    raise
    if not processors and backend_error is not None:
        raise backend_error
    schedule = sparse = None
    denoiser = inner(target.model)
    settings = settings_for(config.sparse, denoiser, target.layers)
    if settings is not None:
        for name in processors or target.layers:  # sparse attention of no layer is refused too
            layer = target.layers[name]
            with naming(name):
                check_parallelism(denoiser, layer, layer_of(layer), is_sparse=True)
        sparse = SparseModel(settings, denoiser)
        for name, processor in processors.items():
            layer = target.layers[name]
            if isinstance(layer_of(layer), VSALayer):
                raise ValueError(f"sparse: {name} has VSA, which chooses its tiles itself: apply a recipe alone")
            crosses = bool(getattr(layer, "is_cross_attention", False))
            processor.sparse = SparseLayer(sparse, settings.is_dense(name), crosses)
    if config.steps or (settings is not None and settings.dense_steps):
        timestep_argument(denoiser)
        follow = {name: processor for name, processor in processors.items() if config.layer_rule(name) is None}
        schedule = StepSchedule(config, follow, pipe, None if sparse is None else sparse.set_step)

    def change(undo: Undo) -> None:
        for name, processor in processors.items():
            undo.append(exchange_processor(target.layers[name], processor))
        if schedule is not None:
            undo.append(schedule.attach(target.model).remove)
        if sparse is not None:
            undo.append(sparse.attach(target.model))

    return change


def _transformers_change(target: Target, config: SageConfig) -> MakeChange:
    """Return the change of a transformers model: its `attn_implementation`, each layer's recipe, and its `generate`."""
    model = inner(target.model)
    if config.sparse is not None:
        raise ValueError(f"sparse: {type(model).__name__} is no diffusers model: remove `sparse`")
    if config.steps:
        timestep_argument(model)
    _check_config_is_its_own(model)
    # The implementation's name decides which masks transformers makes. If a layer's recipe has gradients, it needs
    # masks for gradients.
    recipes = [config.training or config.recipe, config.recipe, *(rule.recipe for rule in config.layers)]
    with_gradients = (recipe for recipe in recipes if get_recipe(recipe).backward is not None)
    implementation = name_of(next(with_gradients, recipes[0]), None)

    _check_masks(model, implementation)

    generate = None
    if config.kv_cache is not None:
        from sage_hf.transformers.kv_cache import GenerateWithCache

        if not hasattr(model, "generate"):
            raise ValueError(f"kv_cache: {type(model).__name__} does not generate")
        generate = GenerateWithCache(model, config.kv_cache)

    def change(undo: Undo) -> None:
        _transformers_models.add(model)
        undo.append(partial(_restore_files, model))
        if generate is not None:
            generate.before = vars(model).get("generate")
            _set_attribute(model, "generate", generate, undo)
        read = [getattr(layer, "config", layer) for layer in target.layers.values() if implementation_of(layer)]
        for model_config in {id(any_config): any_config for any_config in [*configs_of(model), *read]}.values():
            undo.append(keep_implementation(model_config))
        model.set_attn_implementation(implementation)
        for layer_config in read:  # transformers skips classes whose source it cannot read, such as a notebook's
            set_implementation(layer_config, implementation)
        for name, layer in target.layers.items():
            _set_attribute(layer, RECIPE, _recipe(config, name), undo)
            _set_attribute(layer, TRAINING, config.training_recipe(name), undo)
            _set_attribute(layer, FALLBACK, config.fallback, undo)
            _set_attribute(layer, IMPLEMENTATION, implementation, undo)

    return change


def _check_masks(model: nn.Module, implementation: str) -> None:
    """Raise ValueError if a module that was put into the model reads masks, and the implementation changes them."""

    def kind(name: str | None) -> str | None:  # recipes without gradients have the masks of sdpa
        return "sdpa" if name in NAMES and get_recipe(NAMES[name][0]).backward is None else name

    before = {kind(implementation_of(model_config)) for model_config in configs_of(model)}
    if before != {kind(implementation)} and (readers := swapped_in_readers(model)):
        name, module = next(iter(readers.items()))
        raise ValueError(
            f"{name}, a {type(module).__name__}, was put into the model and reads its masks, and "
            f'attn_implementation="{implementation}" changes these masks: apply a recipe without gradients to a model '
            'with attn_implementation="sdpa", whose masks stay as they are'
        )


def _check_config_is_its_own(model: nn.Module) -> None:
    """Raise ValueError if the model shares a config, which names its attention, with a switched model."""
    config_ids = set(map(id, configs_of(model)))
    for other in list(_transformers_models):
        if other is not model and changes_of(other) and not config_ids.isdisjoint(map(id, configs_of(other))):
            raise ValueError(
                f"{type(model).__name__} shares its config with a {type(other).__name__} that is switched: restore "
                "that model first, or give each model its own config (copy.deepcopy)"
            )


def _restore_files(model: nn.Module) -> None:
    """Put back the original objects of transformers' modelling files, if this was the last switched model."""
    from sage_hf.transformers.rotary import forget_model

    if not any(implementation_of(model_config) in NAMES for model_config in configs_of(model)):
        forget_model(model)


def _recipe(config: SageConfig, layer: str) -> str:
    """Return the layer's recipe in evaluation mode, at steps that no step rule covers."""
    rule = config.layer_rule(layer)
    return config.recipe if rule is None else rule.recipe


def _set_attribute(module: nn.Module, name: str, value: object, undo: Undo) -> None:
    earlier_attribute = {name: vars(module)[name]} if name in vars(module) else {}
    undo.append(partial(_put_back, module, name, earlier_attribute))
    setattr(module, name, value)


def _put_back(module: nn.Module, name: str, earlier_attribute: dict[str, object]) -> None:
    """Restore a module's own attribute; delete it if it had none."""
    vars(module).pop(name, None)
    vars(module).update(earlier_attribute)
