"""Models of every type that transformers has, with the default config made small, and inputs for them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import torch
import transformers
from torch import nn
from transformers import StaticCache
from transformers.models.auto import modeling_auto

TOKENS = 80  # more than the 64 keys below which a call is exact for being short
SOURCE, TARGET = TOKENS, 70
PADDING = 11

_SIZES = {
    64: "hidden_size d_model n_embd embed_dim dim embedding_size word_embed_proj_dim encoder_hidden_size hidden_dim "
    "decoder_hidden_size intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff n_inner ffn_hidden_size "
    "dense_intermediate_size intermediate_size_mlp mlp_dim out_hidden_size conv_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size qk_head_dim index_head_dim "
    "moe_shared_expert_intermediate_size q_lora_rank kv_lora_rank global_head_dim mamba_d_head mamba_head_dim "
    "image_size projection_dim projection_size",
    16: "head_dim attention_head_dim kv_channels d_kv key_value_dim qk_nope_head_dim qk_rope_head_dim v_head_dim "
    "o_lora_rank query_pre_attn_scalar linear_key_head_dim linear_value_head_dim num_mel_bins mamba_chunk_size "
    "hidden_size_per_layer_input",
    24: "sliding_window local_attention attention_chunk_size attention_window_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts mamba_n_heads mamba_num_heads "
    "linear_num_value_heads",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers depth "
    "num_encoder_layers num_key_value_heads num_kv_heads num_experts_per_tok moe_top_k moe_topk top_k moe_k "
    "num_experts_per_token index_n_heads o_groups mamba_expand n_mamba_heads linear_num_key_heads altup_num_inputs",
    1: "num_hidden_groups n_shared_experts n_group topk_group mamba_n_groups",
    8: "index_topk mamba_d_state ssm_state_size laurel_rank patch_size",
    97: "vocab_size vocab_size_per_layer_input src_vocab_size tgt_vocab_size decoder_vocab_size",
    128: "mamba_d_ssm",
    SOURCE: "max_source_positions",
    160: "max_target_positions",
}
SIZES = {name: size for size, names in _SIZES.items() for name in names.split()}

NAMES: dict[str, str] = {}
"""Model classes, by the type: language models before plain ones."""
for _mapping in (
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    modeling_auto.MODEL_MAPPING_NAMES,
):
    for _type, _name in _mapping.items():
        NAMES.setdefault(_type, _name if isinstance(_name, str) else _name[0])


def make_small(config: transformers.PretrainedConfig) -> transformers.PretrainedConfig:
    """Make a config small, in place; of the kinds of layers, one of each stays."""
    own = vars(config)
    for value in list(own.values()):
        if isinstance(value, transformers.PretrainedConfig):
            make_small(value)
    for name, value in list(own.items()):
        if (name, value) == ("top_k", 50):  # of generation, which configs of transformers 4 have too
            continue
        if name in SIZES and isinstance(value, int) and not isinstance(value, bool):
            setattr(config, name, SIZES[name])
        elif name in ("initializer_range", "init_std"):
            setattr(config, name, 0.2)
        elif "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
        elif name.endswith("_token_id") and isinstance(value, int):
            setattr(config, name, 0 if name == "pad_token_id" else 1 if value < 97 else 96)
    layers, kinds = 2, own.get("layer_types")
    if kinds:
        kinds = list(dict.fromkeys(kinds))
        config.layer_types = kinds if len(kinds) > 1 else kinds * 2
        layers = len(config.layer_types)
        for name in ("num_hidden_layers", "n_layer", "n_layers", "num_layers"):
            if name in own:
                setattr(config, name, layers)
    for name, value in list(own.items()):
        if isinstance(value, list) and name != "layer_types" and "layer" in name and len(value) > layers:
            setattr(config, name, value[:layers])
    if "kv_lora_rank" in own and "num_key_value_heads" in own:
        config.num_key_value_heads = 4
    config.pad_token_id = 0
    return config


def build(model_type: str, implementation: str | None) -> nn.Module:
    """The small model in eval mode, with the same weights whatever the implementation."""
    config = make_small(transformers.models.auto.CONFIG_MAPPING[model_type]())
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, NAMES[model_type])._from_config(config, attn_implementation=implementation).eval()
    if sum(parameter.numel() for parameter in model.parameters()) > 20e6:
        raise ValueError(f"{model_type} is still larger than 20 million parameters")
    for name, parameter in model.named_parameters():
        if "sink" in name:  # zeros, when new
            nn.init.normal_(parameter)
    return model


def cases(model: nn.Module) -> Iterator[tuple[str, list[dict[str, torch.Tensor]]]]:
    """The name of a case, and the inputs of its calls, each behind the cache of the one before, for `run`."""
    takes = inspect.signature(model.forward).parameters
    generator = torch.Generator().manual_seed(1)
    if model.main_input_name == "pixel_values":
        yield "image", [{"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}]
    elif model.main_input_name == "input_features":
        decoded = {"decoder_input_ids": torch.randint(2, 90, (2, TARGET), generator=generator)}
        features = {"input_features": torch.randn(2, 16, 2 * SOURCE, generator=generator)}
        yield "sound", [features | (decoded if "decoder_input_ids" in takes else {})]
    elif model.main_input_name == "input_ids":
        tokens = torch.randint(2, 90, (2, TOKENS), generator=generator)
        decoded = {"decoder_input_ids": torch.randint(2, 90, (2, TARGET), generator=generator)}
        inputs = {"input_ids": tokens} | (decoded if "decoder_input_ids" in takes else {})
        yield "tokens", [inputs]
        masks = {side: torch.ones(2, TOKENS, dtype=torch.long) for side in ("left", "right")}
        masks["left"][1, :PADDING] = masks["right"][1, -PADDING:] = 0
        if "attention_mask" in takes:
            for side, mask in masks.items():
                yield f"padded on the {side}", [inputs | {"attention_mask": mask}]
        if "use_cache" in takes and "decoder_input_ids" not in takes:
            turns = [{"input_ids": tokens[:, :40]}, {"input_ids": tokens[:, 40:]}]
            yield "a second turn", turns
            yield "a second turn, in a static cache", turns
            left = masks["left"]
            padded = [turns[0] | {"attention_mask": left[:, :40]}, turns[1] | {"attention_mask": left}]
            yield "a second turn, padded on the left", padded


@torch.no_grad()
def run(model: nn.Module, name: str, calls: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """The first output of the last call of a case, without the rows of padding."""
    cache: dict[str, object] = {}
    if "static" in name:
        cache["past_key_values"] = StaticCache(config=model.config.get_text_config(), max_cache_len=TOKENS + 20)
    for inputs in calls:
        output = model(**inputs, **cache, **({"use_cache": True} if len(calls) > 1 else {}))
        if len(calls) > 1:
            cache = {"past_key_values": output.past_key_values}
    found = next(output[key] for key in ("logits", "last_hidden_state", "pooler_output") if key in output)
    mask = inputs.get("attention_mask")
    return found[mask.bool()] if mask is not None and found.shape[:2] == mask.shape else found
