"""Tiny models, built from configs, one for each thing transformers' attention interface can be asked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers
from torch import nn

VOCAB = 97
BATCH = 2
TOKENS = 80  # more than the 64 keys below which a call is exact for being short
PADDING = 11

_DECODER = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "initializer_range": 0.2,
}
_VISION = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 36,
    "patch_size": 4,
    "initializer_range": 0.2,
}
_TEXT_ENCODER = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}


@dataclass(frozen=True)
class TinyModel:
    """A tiny model: how to build it, and its inputs.

    Attributes:
        name: as tests show it.
        model_class, config_class: names in transformers.
        config: the config's arguments.
        kind: what its inputs are.
        beyond_sdpa: transformers' own sdpa refuses it or drops something.
    """

    name: str
    model_class: str
    config_class: str
    config: dict[str, object] = field(hash=False)
    kind: str = "decoder"
    beyond_sdpa: bool = False

    def build(self, implementation: str, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model in eval mode, with the same weights whatever the implementation and dtype."""
        config = getattr(transformers, self.config_class)(**self.config)
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


MODELS = {
    model.name: model
    for model in (
        TinyModel("llama", "LlamaForCausalLM", "LlamaConfig", _DECODER),
        TinyModel("qwen2", "Qwen2ForCausalLM", "Qwen2Config", _DECODER | {"num_key_value_heads": 2}),
        TinyModel("qwen3", "Qwen3ForCausalLM", "Qwen3Config", _DECODER | {"num_key_value_heads": 1}),
        TinyModel(
            "mistral",
            "MistralForCausalLM",
            "MistralConfig",
            _DECODER | {"num_key_value_heads": 2, "sliding_window": 24},
        ),
        TinyModel(
            "gemma2",
            "Gemma2ForCausalLM",
            "Gemma2Config",
            _DECODER
            | {
                "num_key_value_heads": 2,
                "sliding_window": 24,
                "attn_logit_softcapping": 2.0,
                "query_pre_attn_scalar": 16,
            },
            beyond_sdpa=True,
        ),
        TinyModel(
            "gpt_oss",
            "GptOssForCausalLM",
            "GptOssConfig",
            _DECODER
            | {
                "num_key_value_heads": 2,
                "sliding_window": 24,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "rope_scaling": {"rope_type": "default", "rope_theta": 10000.0},
            },
            beyond_sdpa=True,
        ),
        TinyModel(
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            "DeepseekV3Config",
            {key: value for key, value in _DECODER.items() if key != "head_dim"}
            | {
                "q_lora_rank": 32,
                "kv_lora_rank": 32,
                "qk_nope_head_dim": 16,
                "qk_rope_head_dim": 16,
                "v_head_dim": 24,
                "n_routed_experts": 4,
                "n_group": 1,
                "topk_group": 1,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "first_k_dense_replace": 1,
            },
        ),
        TinyModel("bert", "BertForMaskedLM", "BertConfig", _TEXT_ENCODER, kind="encoder"),
        TinyModel("vit", "ViTForImageClassification", "ViTConfig", _VISION, kind="vision"),
        TinyModel(
            "clip",
            "CLIPModel",
            "CLIPConfig",
            {
                "text_config": _TEXT_ENCODER | {"eos_token_id": VOCAB - 1},
                "vision_config": _VISION,
                "projection_dim": 32,
            },
            kind="clip",
        ),
        TinyModel(
            "t5",
            "T5ForConditionalGeneration",
            "T5Config",
            {
                "vocab_size": VOCAB,
                "d_model": 64,
                "d_kv": 16,
                "d_ff": 64,
                "num_layers": 2,
                "num_heads": 4,
                "decoder_start_token_id": 0,
                "eos_token_id": None,
                "initializer_factor": 1.0,
            },
            kind="t5",
        ),
        TinyModel(
            "whisper",
            "WhisperForConditionalGeneration",
            "WhisperConfig",
            {
                "vocab_size": VOCAB,
                "num_mel_bins": 16,
                "d_model": 64,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_attention_heads": 4,
                "decoder_attention_heads": 4,
                "encoder_ffn_dim": 64,
                "decoder_ffn_dim": 64,
                "max_source_positions": TOKENS,
                "max_target_positions": 128,
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": None,
                "decoder_start_token_id": 1,
                "suppress_tokens": None,
                "begin_suppress_tokens": None,
                "init_std": 0.2,
            },
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
