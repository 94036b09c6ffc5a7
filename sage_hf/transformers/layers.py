"""Which modules of a model call transformers' attention interface, and which models have none that does."""

from __future__ import annotations

import sys

from torch import nn

from sage_hf.transformers.inspection import built_classes, calls_interface, is_module_class, once_per_class
from sage_hf.transformers.keywords import unknown_keywords


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of `model` that call transformers' attention interface, by dotted name, in the model's order.

    Each reads `sage_recipe` (a recipe's name) and `sage_fallback` from its own attributes in preference to what
    `attn_implementation` says, so that one layer can be set apart. Layers of a model that `refusal` is about are left
    out.
    """
    refused: dict[str, bool] = {}
    layers = {}
    for name, module in model.named_modules():
        if _is_pretrained_model(module):
            refused[name] = refusal(type(module)) is not None
        if calls_interface(type(module)) and not _of_nearest_parent(name, refused):
            layers[name] = module
    return layers


def unsupported(model: nn.Module) -> str | None:
    """Why setting `attn_implementation` to one of our names would not change `model`, or None if it would."""
    if attention_layers(model):
        return None
    if not _is_pretrained_model(model):
        return f"{type(model).__name__} is not a transformers model"
    return refusal(type(model)) or f"{type(model).__name__} has no layer that calls transformers' attention interface"


@once_per_class
def refusal(model_class: type) -> str | None:
    """Why models of a class must not be given one of our names, or None if they may; judged before there are layers.

    Transformers lets any registered name through. A model that does not look it up then computes attention by its own
    code with masks meant for ours, which loses causality and padding (Bloom), or fails on a name it has no class for
    (GPT-J). One whose layers leave it to the attention function to pick keys, except with "eager" and "sdpa", would
    attend to all of them (DeepSeek V3.2). One that only combines other models passes: they are judged in their turn.
    """
    file = model_class.__module__
    namespace = vars(sys.modules[file]) if file in sys.modules else {}
    own = {name: value for name, value in namespace.items() if getattr(value, "__module__", file) == file}
    attention = [value for name, value in own.items() if "Attention" in name and is_module_class(value)]
    if any(isinstance(value, dict) and name.endswith("ATTENTION_CLASSES") for name, value in own.items()):
        return f"{file} chooses among attention classes of its own"
    if attention and not any(calls_interface(value) for value in own.values() if is_module_class(value)):
        return f"{file} does not use transformers' attention interface"
    if not (
        getattr(model_class, "_supports_sdpa", False) or getattr(model_class, "_supports_attention_backend", False)
    ):
        return f"{model_class.__name__} supports no attention implementation but its own"
    for layer in sorted(filter(calls_interface, built_classes(model_class)), key=lambda layer: layer.__name__):
        if unknown := unknown_keywords(layer):
            keywords = ", ".join(f"{name}=" for name in sorted(unknown))
            return f"{layer.__name__} hands {keywords} to its attention function, which sage_hf does not know"
    return None


def _is_pretrained_model(module: nn.Module) -> bool:
    return hasattr(module, "get_correct_attn_implementation")


def _of_nearest_parent(name: str, of_parents: dict[str, bool]) -> bool:
    """What `of_parents` says of the module of that name or else of the closest one around it; False if of none."""
    while name and name not in of_parents:
        name = name.rpartition(".")[0]
    return of_parents.get(name, False)
