"""Generate a long answer with the default cache and with low-bit caches; print memory and tokens per second.

python examples/long_chat.py                                  # a tiny model with random weights, also on a CPU
python examples/long_chat.py --model FOLDER --tokens 32000
"""

from __future__ import annotations

import argparse
import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM

import sage_hf
from sage_hf.transformers.kv_cache import cache_keyword


def tiny_model() -> LlamaForCausalLM:
    """Build a model of two layers with random weights."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, max_position_embeddings=2**20, eos_token_id=None)).eval()


def bytes_of(cache: DynamicCache | sage_hf.QuantizedKVCache) -> int:
    """Return the bytes of a cache's tensors."""
    if isinstance(cache, sage_hf.QuantizedKVCache):
        return sum(cache.record.bytes.values())
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name of a causal language model")
    parser.add_argument("--tokens", type=int, default=1000, help="length of the prompt")
    parser.add_argument("--new", type=int, default=32, help="tokens to generate")
    parser.add_argument("--recipe", default="sage2")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype) if args.model else tiny_model()
    model = model.to(device, dtype)
    sage_hf.apply(model, args.recipe)
    ids = torch.randint(0, model.config.vocab_size, (1, args.tokens), device=device)
    for name in ("default", "int8", "int4"):
        cache = DynamicCache(config=model.config) if name == "default" else sage_hf.QuantizedKVCache(model.config, name)
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, cache_keyword(model): cache}
        model.generate(ids, max_new_tokens=2, **options)
        longer = torch.cat((ids, ids[:, :2]), 1)
        options["attention_mask"] = torch.ones_like(longer)
        start = time.perf_counter()
        model.generate(longer, max_new_tokens=args.new, **options)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        print(f"{name:8} cache {bytes_of(cache) / 2**20:8.2f} MiB, {args.new / seconds:7.1f} tokens a second")
    print(sage_hf.explain(model))


if __name__ == "__main__":
    main()
