"""SageConfig: one recipe, and its exceptions by layer, by denoising step and in training, read and written as JSON."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from sage_hf.patterns import matches
from sage_hf.sparse.config import Sparse
from sage_kernels.spec.kv_format import get_format
from sage_kernels.spec.options import FALLBACKS
from sage_kernels.spec.recipe import RECIPES, get_recipe


@dataclass(frozen=True)
class LayerRule:
    """Rule: layers whose name matches `pattern` (shell style, case-sensitive: `transformer_blocks.0.*`) run `recipe`.

    Names are as `sage_hf.explain` prints them, including ranges (`blocks.0-3.attn1`): relative to the model or to the
    denoiser of a pipeline. If a pipeline has several denoisers, the denoiser's name comes first.
    """

    pattern: str
    recipe: str


@dataclass(frozen=True)
class StepRule:
    """Rule: denoising steps `range(num_steps)[start:stop]` run `recipe`: `0, 2` means the first two, `-1, None` the
    last.

    A step is a distinct timestep of the pipeline's scheduler; timesteps that a second-order scheduler puts between two
    steps (KDPM2) belong to the earlier step. If a scheduler has more timesteps than it was asked for (PNDM: 23 for 20),
    each of them is a step.
    """

    start: int | None
    stop: int | None
    recipe: str

    @property
    def counts_from_end(self) -> bool:
        """Check whether the rule's steps depend on the total number of steps."""
        return (self.start or 0) < 0 or (self.stop or 0) < 0

    def covers(self, step: int, num_steps: int | None) -> bool:
        """Check whether the rule covers `step` (0 is the first) of `num_steps`.

        Raises:
            ValueError: the rule counts from the end and `num_steps` is None.
        """
        if num_steps is None:
            if self.counts_from_end:
                raise ValueError(
                    f"steps {self.start}:{self.stop} count from the end, and the number of steps is unknown"
                )
            return (self.start or 0) <= step and (self.stop is None or step < self.stop)
        return step in range(num_steps)[self.start : self.stop]


@dataclass(frozen=True)
class SageConfig:
    """Configuration of the recipe that each attention layer runs at each denoising step.

    The first layer rule that matches a layer always decides for it. Layers without a rule run `training`, if given,
    while they are in training mode (`model.train()`). Otherwise the first step rule that covers the step decides; if no
    rule covers it, layers run `recipe`.

    Attributes:
        recipe: name of the recipe that runs where no exception applies.
        fallback: "native", "emulate", "error", or None for the process default (`sage_hf.set_default_fallback`).
        layers: exceptions by layer name; the first match wins.
        steps: exceptions by denoising step; the first match wins.
        training: name of the recipe of layers in training mode; None: the same as in evaluation mode.
        note: comment for human readers; it has no effect.
        architecture: the only architecture to which the configuration applies (`sage_hf.targets.architecture_of`); "":
            any.
        sparse: the choice of tiles that self-attention of a diffusers model computes; "model": as in the
            `sparse_attention_config` of NVIDIA ModelOpt that the model ships; None: all tiles.
        kv_cache: the name of a format in `sage_kernels.spec.kv_format.FORMATS`, such as "int4": each `generate()` of a
            transformers model without a given cache makes a `QuantizedKVCache` of that format, and refuses a
            `cache_implementation`; None: the model's own cache.

    Raises:
        ValueError: a recipe or fallback is unknown, an entry is not a rule, or a pattern or a range of steps is empty.
    """

    recipe: str = "sage3"
    fallback: str | None = None
    layers: tuple[LayerRule, ...] = ()
    steps: tuple[StepRule, ...] = ()
    note: str = ""
    training: str | None = None
    sparse: Sparse | Literal["model"] | None = None
    architecture: str = ""
    kv_cache: str | None = None

    def __post_init__(self) -> None:
        _check_recipe(self.recipe, "recipe")
        if self.training is not None:
            _check_recipe(self.training, "training")
        if self.fallback is not None and self.fallback not in FALLBACKS:
            raise ValueError(f"fallback: {self.fallback!r} is not one of {', '.join(FALLBACKS)}")
        for key in ("note", "architecture"):
            if not isinstance(getattr(self, key), str):
                raise ValueError(f"{key}: expected a string, got {getattr(self, key)!r}")
        if self.sparse not in (None, "model") and not isinstance(self.sparse, Sparse):
            raise ValueError(f'sparse: expected a Sparse or "model", got {self.sparse!r}')
        if self.kv_cache is not None:
            get_format(self.kv_cache)
        for key, kind in (("layers", LayerRule), ("steps", StepRule)):
            rules = getattr(self, key)
            if not isinstance(rules, list | tuple) or not all(isinstance(rule, kind) for rule in rules):
                problem = f"expected a tuple of {kind.__name__}, got {rules!r}"
                raise ValueError(f"{key}: {problem} (SageConfig.from_dict reads plain data)")
            object.__setattr__(self, key, tuple(rules))
        for i, rule in enumerate(self.layers):
            if not isinstance(rule.pattern, str) or not rule.pattern:
                raise ValueError(f"layers[{i}].pattern: expected a layer name or pattern, got {rule.pattern!r}")
            _check_recipe(rule.recipe, f"layers[{i}].recipe")
        for i, step_rule in enumerate(self.steps):
            for key, bound in (("start", step_rule.start), ("stop", step_rule.stop)):
                if bound is not None and (not isinstance(bound, int) or isinstance(bound, bool)):
                    raise ValueError(f"steps[{i}].{key}: expected an integer or null, got {bound!r}")
            start, stop = step_rule.start or 0, step_rule.stop
            if stop == 0 or (stop is not None and start >= stop and (start < 0) == (stop < 0)):
                raise ValueError(f"steps[{i}]: the range {step_rule.start}:{stop} holds no step")
            _check_recipe(step_rule.recipe, f"steps[{i}].recipe")

    def of_model(self, name: str, layers: Iterable[str]) -> SageConfig:
        """Return the configuration for one model of a pipeline, with its layers' names in place of patterns.

        Args:
            name: the model's name in the pipeline, with which patterns may begin; "": no pattern does.
            layers: names of the model's layers.
        """
        if not name:
            return self
        layers = list(layers)

        def named(pattern: str) -> list[str]:
            matching = (layer for layer in layers if matches(pattern, layer) or matches(pattern, f"{name}.{layer}"))
            return list(map(glob.escape, matching))

        rules = tuple(replace(rule, pattern=layer) for rule in self.layers for layer in named(rule.pattern))
        sparse = self.sparse
        if isinstance(sparse, Sparse):
            dense = tuple(layer for pattern in sparse.dense_layers for layer in named(pattern))
            sparse = replace(sparse, dense_layers=dense)
        return replace(self, layers=rules, sparse=sparse)

    def layer_rule(self, layer: str) -> LayerRule | None:
        """Return the layer rule that decides for `layer`; None if no rule matches."""
        return next((rule for rule in self.layers if matches(rule.pattern, layer)), None)

    def training_recipe(self, layer: str) -> str | None:
        """Return the recipe of `layer` in training mode; None if `training` is None or a layer rule decides."""
        return self.training if self.layer_rule(layer) is None else None

    def resolve(self, layer: str, step: int = 0, num_steps: int | None = None) -> str:
        """Return the recipe of `layer`, in evaluation mode, at `step` (0 is the first) of `num_steps`.

        Raises:
            ValueError: a step rule counts from the end and `num_steps` is None.
        """
        if (layer_rule := self.layer_rule(layer)) is not None:
            return layer_rule.recipe
        return next((rule.recipe for rule in self.steps if rule.covers(step, num_steps)), self.recipe)

    def unmatched_patterns(self, layers: Iterable[str]) -> list[str]:
        """Return the patterns of the layer rules, and of dense layers, that match none of `layers`."""
        layers = list(layers)
        dense = self.sparse.dense_layers if isinstance(self.sparse, Sparse) else ()
        patterns = [*(rule.pattern for rule in self.layers), *dense]
        return [pattern for pattern in patterns if not any(matches(pattern, name) for name in layers)]

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain data that `from_dict` reads back, without empty entries."""
        data: dict[str, Any] = {"recipe": self.recipe, "training": self.training, "fallback": self.fallback}
        data["layers"] = [{"pattern": rule.pattern, "recipe": rule.recipe} for rule in self.layers]
        data["steps"] = [{"start": rule.start, "stop": rule.stop, "recipe": rule.recipe} for rule in self.steps]
        data["sparse"] = self.sparse.to_dict() if isinstance(self.sparse, Sparse) else self.sparse
        data["kv_cache"] = self.kv_cache
        data["architecture"] = self.architecture
        data["note"] = self.note
        return {key: value for key, value in data.items() if value not in (None, [], "")}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SageConfig:
        """Build a configuration from plain data.

        Raises:
            ValueError: a key is unknown or missing, or its value is not supported; the message names the key.
        """
        optional = ("fallback", "layers", "steps", "training", "note", "sparse", "architecture", "kv_cache")
        _check_keys(data, "the configuration", required=("recipe",), optional=optional)
        layers, steps = [], []
        for i, rule in enumerate(_list(data, "layers")):
            _check_keys(rule, f"layers[{i}]", required=("pattern", "recipe"))
            layers.append(LayerRule(rule["pattern"], rule["recipe"]))
        for i, rule in enumerate(_list(data, "steps")):
            _check_keys(rule, f"steps[{i}]", required=("recipe",), optional=("start", "stop"))
            if "start" not in rule and "stop" not in rule:
                raise ValueError(f"steps[{i}]: give start, stop or both (a Python slice of the denoising steps)")
            steps.append(StepRule(rule.get("start"), rule.get("stop"), rule["recipe"]))
        sparse = data.get("sparse")
        if sparse not in (None, "model"):
            sparse = Sparse.from_dict(sparse)
        plain_fields: dict[str, Any] = {key: data.get(key) for key in ("fallback", "training", "kv_cache")}
        plain_fields |= {key: data.get(key, "") for key in ("note", "architecture")}
        return cls(data["recipe"], layers=tuple(layers), steps=tuple(steps), sparse=sparse, **plain_fields)

    def to_json(self) -> str:
        """Return the configuration as JSON text that `from_json` reads back."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> SageConfig:
        """Build a configuration from JSON text.

        Raises:
            ValueError: `text` is not JSON, or not a configuration (the message names the key).
        """
        try:
            data = json.loads(text, object_pairs_hook=_no_duplicates)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"not valid JSON: {error}") from error
        return cls.from_dict(data)

    def save(self, path: str | Path) -> None:
        """Write the configuration as JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def from_file(cls, path: str | Path) -> SageConfig:
        """Read a JSON file.

        Raises:
            ValueError: the file cannot be read or is not a configuration; the message names file and key.
        """
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8-sig"))
        except OSError as error:
            raise ValueError(f"cannot read the configuration {path}: {error.strerror or error}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_name(cls, name: str | Path) -> SageConfig:
        """Return the configuration of a recipe ("sage3"), a model family ("cogvideox-2b", see `names`) or a JSON file.

        Raises:
            TypeError: `name` is neither a string nor a path.
            ValueError: `name` is none of these; the message lists the existing names.
        """
        if not isinstance(name, str | Path):
            raise TypeError(
                f"expected a SageConfig, a name or a path, got {type(name).__name__}: see SageConfig.from_dict"
            )
        if name in RECIPES:
            return cls(recipe=str(name))
        if isinstance(name, str) and name in cls.names():
            return cls.from_file(_configs_folder() / f"{name}.json")
        path = Path(name)
        if path.suffix == ".json" or path.exists():
            return cls.from_file(path)
        raise ValueError(
            f"{str(name)!r} is neither a recipe ({', '.join(sorted(RECIPES))}), nor a configuration that ships with "
            f"sage-hf ({', '.join(cls.names())}), nor a JSON file"
        )

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the configurations that ship with sage-hf."""
        return tuple(sorted(path.stem for path in _configs_folder().glob("*.json")))


def _configs_folder() -> Path:
    """Return the folder of configurations: `sage_hf/configs` of an installed wheel, else `configs/` of the checkout."""
    package = Path(__file__).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def _check_recipe(name: object, key: str) -> None:
    if not isinstance(name, str):
        raise ValueError(f"{key}: expected the name of a recipe, got {name!r}")
    try:
        get_recipe(name)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _check_keys(data: object, where: str, required: tuple[str, ...], optional: tuple[str, ...] = ()) -> None:
    if not isinstance(data, Mapping):
        raise ValueError(f"{where}: expected an object with {', '.join(required + optional)}, got {data!r}")
    if unknown := [key for key in data if key not in required + optional]:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; keys are {', '.join(required + optional)}")
    if missing := [key for key in required if key not in data]:
        raise ValueError(f"{where}: the key {missing[0]!r} is missing")


def _list(data: Mapping[str, Any], key: str) -> list:
    value = data.get(key, [])
    if not isinstance(value, list):
        raise ValueError(f"{key}: expected a list, got {value!r}")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        raise ValueError(f"a key appears twice among {[key for key, _ in pairs]}")
    return data
