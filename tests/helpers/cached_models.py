"""Small models, a prompt and a quantised cache, for tests of caches."""

import inspect

import pytest
import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

import sage_hf

DECODER = {
    "vocab_size": 97,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.05,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
NEW = inspect.signature(LlamaForCausalLM.forward).parameters.keys() & {"cache"}
NAME = "cache" if NEW else "past_key_values"
hands_on = pytest.mark.skipif(not NEW, reason="this transformers does not hand a cache's keywords to attention")
PROMPT = 150


def build(implementation: str = "sage_exact", **config) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**DECODER | config)).eval()
    model.set_attn_implementation(implementation)
    return model


def prompt(padding: int = 13) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, 97, (2, PROMPT), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    return {"input_ids": ids, "attention_mask": mask}


def new_cache(model, format: str = "int8"):
    return sage_hf.QuantizedKVCache(model.config, format)


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    return ((x - y).norm() / y.norm()).item()


def windowed(**config) -> transformers.MistralForCausalLM:
    """A model all of whose layers have a sliding window."""
    torch.manual_seed(0)
    config = transformers.MistralConfig(**DECODER | {"sliding_window": 32} | config)
    return transformers.MistralForCausalLM(config).eval()


def half_windowed(**config) -> transformers.Gemma3ForCausalLM:
    """A model whose first layer has full attention, and whose second one has a sliding window."""
    config = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 32} | config
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**DECODER | config)).eval()
    model.set_attn_implementation("sage_exact")
    return model
