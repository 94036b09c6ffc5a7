"""The modules of a model that call transformers' attention interface, and models that cannot use our names."""

from __future__ import annotations

import sys

from torch import nn

from sage_hf.transformers.bridge import EVERY_MODEL, is_pretrained_model, runs_other_attention
from sage_hf.transformers.inspection import built_classes, calls_interface, is_module_class, once_per_class
from sage_hf.transformers.keywords import unknown_keywords


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of `model` that call transformers' attention interface, by dotted name, in the model's order.

    A module's own attributes `sage_recipe` (a recipe's name) and `sage_fallback` win over the model's
    `attn_implementation`, so that one layer can run another recipe. Layers of a model that `refusal` rejects are left
    out.
    """
    refused: dict[str, bool] = {}
    layers = {}
    for name, module in model.named_modules():
        if is_pretrained_model(module):
            refused[name] = refusal(type(module)) is not None
        if calls_interface(type(module)) and not _find_enclosing(name, refused):
            layers[name] = module
    return layers


def unsupported(model: nn.Module) -> str | None:
    """Return the reason why our `attn_implementation`s would not change `model`; None if they would."""
    if attention_layers(model):
        return None
    if not is_pretrained_model(model):
        return f"{type(model).__name__} is not a transformers model"
    return refusal(type(model)) or f"{type(model).__name__} has no layer that calls transformers' attention interface"


@once_per_class
def refusal(model_class: type) -> str | None:
    """Return the reason why models of a class must not get our `attn_implementation`s; None if they may.

    The class alone decides, before any layer is built. transformers accepts any registered name. A model that does not
    look the name up would run its own attention with masks made for ours, and lose causality and padding (Bloom), or
    fail because it has no class for the name (GPT-Neo). If a model's layers let the attention function pick the keys,
    except with "eager" and "sdpa", it would attend to all keys (DeepSeek V3.2). A model that only combines other models
    is accepted, because these are checked themselves. A user's class attends like the model from which it derives.
    """
    file = model_class.__module__
    namespace = vars(sys.modules[file]) if file in sys.modules else {}
    defined = {name: value for name, value in namespace.items() if getattr(value, "__module__", file) == file}
    attention = [value for name, value in defined.items() if "Attention" in name and is_module_class(value)]
    if any(isinstance(value, dict) and name.endswith("ATTENTION_CLASSES") for name, value in defined.items()):
        return f"{file} chooses among attention classes of its own"
    calls = any(calls_interface(value) for value in defined.values() if is_module_class(value))
    base = _model_of_another_file(model_class)
    if base is not None and not calls and (reason := refusal(base)):
        return reason
    inherits = base is not None and any(map(calls_interface, built_classes(base)))
    if attention and not (calls or inherits):
        return f"{file} does not use transformers' attention interface"
    if not runs_other_attention(model_class):
        return f"{model_class.__name__} supports no attention implementation but its own"
    for layer in sorted(filter(calls_interface, built_classes(model_class)), key=lambda layer: layer.__name__):
        if unknown := unknown_keywords(layer):
            keywords = ", ".join(f"{name}=" for name in sorted(unknown))
            return f"{layer.__name__} hands {keywords} to its attention function, which sage_hf does not know"
    return None


def _model_of_another_file(model_class: type) -> type | None:
    """Return the closest base class that is a model and is defined in another file; None if there is none."""
    foreign_bases = (
        base for base in model_class.__mro__ if base.__module__ not in (model_class.__module__, *EVERY_MODEL)
    )
    return next(
        (base for base in foreign_bases if is_module_class(base) and hasattr(base, "set_attn_implementation")), None
    )


def _find_enclosing(name: str, values: dict[str, bool]) -> bool:
    """Return the value of module `name`, or of the closest enclosing module that has a value; False if none has."""
    while name and name not in values:
        name = name.rpartition(".")[0]
    return values.get(name, False)
