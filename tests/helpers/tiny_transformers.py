"""Tiny models, built from configs, one for each thing transformers' attention interface can be asked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import CONFIG_MAPPING

from tests.helpers.model_zoo import PADDING, TOKENS, make_small

VOCAB = 97
BATCH = 2


@dataclass(frozen=True)
class TinyModel:
    """A tiny model: how to build it, and its inputs.

    Attributes:
        name: transformers' name of the type.
        model_class: name in transformers.
        changes: what its config has otherwise than `make_small` makes it.
        kind: what its inputs are.
        beyond_sdpa: transformers' own sdpa refuses it or drops something.
    """

    name: str
    model_class: str
    changes: dict[str, object] = field(default_factory=dict, hash=False)
    kind: str = "decoder"
    beyond_sdpa: bool = False

    def make_config(self, config_class: type[transformers.PretrainedConfig] | None = None) -> Any:
        """The config, of another class if one is given."""
        config = make_small((config_class or CONFIG_MAPPING[self.name])())
        return _changed(config, {"eos_token_id": None} | self.changes)

    def build(self, implementation: str, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model in eval mode, with the same weights whatever the implementation and dtype."""
        config = self.make_config()
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"  # the others are not for float64
        torch.manual_seed(0)
        model = getattr(transformers, self.model_class)._from_config(config, attn_implementation=implementation)
        return model.eval().to(dtype)

    def inputs(self, padding: str = "none") -> dict[str, torch.Tensor]:
        """Random inputs; `padding` none, left or right, of the second sequence."""
        generator = torch.Generator().manual_seed(1)
        inputs = _INPUTS[self.kind](generator)
        if padding != "none":
            mask = torch.ones(BATCH, TOKENS, dtype=torch.long)
            mask[1, slice(0, PADDING) if padding == "left" else slice(TOKENS - PADDING, TOKENS)] = 0
            inputs["attention_mask"] = mask
        return inputs

    @property
    def takes_padding(self) -> bool:
        return self.kind in ("decoder", "encoder", "t5", "clip")


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    for name, value in changes.items():
        if isinstance(getattr(config, name, None), transformers.PretrainedConfig):
            _changed(getattr(config, name), value)
        else:
            setattr(config, name, value)
    return config


def _tokens(generator: torch.Generator, length: int = TOKENS) -> torch.Tensor:
    return torch.randint(2, VOCAB, (BATCH, length), generator=generator)


_INPUTS: dict[str, Callable[[torch.Generator], dict[str, torch.Tensor]]] = {
    "decoder": lambda g: {"input_ids": _tokens(g)},
    "encoder": lambda g: {"input_ids": _tokens(g)},
    "vision": lambda g: {"pixel_values": torch.randn(BATCH, 3, 36, 36, generator=g)},
    "clip": lambda g: {"input_ids": _tokens(g), "pixel_values": torch.randn(BATCH, 3, 36, 36, generator=g)},
    "t5": lambda g: {"input_ids": _tokens(g), "decoder_input_ids": _tokens(g, 70)},
    "whisper": lambda g: {
        "input_features": torch.randn(BATCH, 16, 2 * TOKENS, generator=g),
        "decoder_input_ids": _tokens(g, 70),
    },
}


_IMAGES = {"image_size": 36, "patch_size": 4}

MODELS = {
    model.name: model
    for model in (
        TinyModel("llama", "LlamaForCausalLM", {"num_key_value_heads": 4}),
        TinyModel("qwen2", "Qwen2ForCausalLM"),
        TinyModel("qwen3", "Qwen3ForCausalLM", {"num_key_value_heads": 1}),
        TinyModel("mistral", "MistralForCausalLM"),
        TinyModel("gemma2", "Gemma2ForCausalLM", {"attn_logit_softcapping": 2.0}, beyond_sdpa=True),
        TinyModel("gpt_oss", "GptOssForCausalLM", beyond_sdpa=True),
        TinyModel("deepseek_v3", "DeepseekV3ForCausalLM", {"v_head_dim": 24, "first_k_dense_replace": 1}),
        TinyModel("bert", "BertForMaskedLM", kind="encoder"),
        TinyModel("vit", "ViTForImageClassification", _IMAGES, kind="vision"),
        TinyModel(
            "clip",
            "CLIPModel",
            {"text_config": {"max_position_embeddings": 128, "eos_token_id": VOCAB - 1}, "vision_config": _IMAGES},
            kind="clip",
        ),
        TinyModel("t5", "T5ForConditionalGeneration", {"decoder_start_token_id": 0}, kind="t5"),
        TinyModel(
            "whisper",
            "WhisperForConditionalGeneration",
            {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None},
            kind="whisper",
        ),
    )
}


def calls_interface(model: TinyModel) -> bool:
    """Tell whether its attention calls the interface in the installed transformers (BERT and T5: since version 5)."""
    modelling_file = sys.modules[getattr(transformers, model.model_class).__module__]
    return "ALL_ATTENTION_FUNCTIONS" in vars(modelling_file)


SERVED = [model for model in MODELS.values() if calls_interface(model)]
IGNORING = [model for model in MODELS.values() if not calls_interface(model)]
DECODERS = [model for model in SERVED if model.kind == "decoder"]

_BEFORE_5 = int(transformers.__version__.split(".")[0]) < 5
IN_FLOAT64 = [model for model in SERVED if not (_BEFORE_5 and model.name in ("clip", "deepseek_v3"))]
"""Those that transformers computes in float64 at all: before version 5 their code stumbles over it."""
WITH_STATIC_CACHE = [model for model in SERVED if not (_BEFORE_5 and model.name == "deepseek_v3")]
"""Those that transformers has a static cache for: before version 5 keys and values had to be equally wide."""


def run(model: nn.Module, **inputs: object) -> torch.Tensor:
    """The model's logits (last hidden state of CLIP's text model), without gradients."""
    dtype = next(model.parameters()).dtype
    inputs = {
        name: value.to(dtype) if name in ("pixel_values", "input_features") else value for name, value in inputs.items()
    }
    with torch.no_grad():
        output = model(**inputs)
    if "text_model_output" in output:
        return output.text_model_output.last_hidden_state
    return output.logits


def of_real_tokens(output: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """`output` without the rows of padding tokens, which mean nothing."""
    if "attention_mask" not in inputs or output.shape[1] != TOKENS:
        return output
    return output[inputs["attention_mask"].bool()]
