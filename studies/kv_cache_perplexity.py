"""Measure a language model's perplexity through a low-bit KV cache, token by token as it would generate.

    python studies/kv_cache_perplexity.py FOLDER TEXT... --tokens 2048 --output FILE.json

FOLDER holds a model with its tokenizer, or one GGUF file. The first 512 tokens are a prompt; the others come behind it,
16 at a time, each of which sees the earlier ones as the cache holds them.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import sage_hf
from sage_hf.bench.results import facts

PROMPT, CHUNK = 512, 16


@torch.no_grad()
def log_probabilities(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Return the log-probabilities of each next token, (tokens - 1, vocabulary), of ids (1, tokens)."""
    name = "cache" if hasattr(cache, "get_query_offset") else "past_key_values"
    found = []
    for part in (ids[:, :PROMPT], *ids[:, PROMPT:].split(CHUNK, 1)):
        found.append(model(part, use_cache=True, **{name: cache}).logits[0].float().log_softmax(-1))
    return torch.cat(found)[:-1]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("texts", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--output", type=Path, help="where the JSON goes; default: nowhere")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    files = list(args.folder.glob("*.gguf"))
    options = {"gguf_file": files[0].name} if files else {}
    tokenizer = AutoTokenizer.from_pretrained(args.folder, **options)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=dtype, **options).eval().to(device)
    sage_hf.apply(model, "exact")
    text = "\n\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in args.texts)
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : args.tokens].to(device)
    rows, exact = [], None
    for format in ("16 bits", "int8", "int4", "nvfp4"):
        start = time.perf_counter()
        if format == "16 bits":
            cache = DynamicCache(config=model.config)
        else:
            cache = sage_hf.QuantizedKVCache(model.config, format)
        found = log_probabilities(model, ids, cache)
        exact = found if exact is None else exact
        # The prompt's tokens see no cache: they are left out.
        scored = slice(PROMPT, None)
        loss = -found.gather(1, ids[0, 1:, None])[scored].mean().item()
        expected = -exact.gather(1, ids[0, 1:, None])[scored].mean().item()
        row = {
            "format": format,
            "tokens": ids.shape[1],
            "prompt": PROMPT,
            "perplexity": math.exp(loss),
            "change": math.exp(loss - expected) - 1,
            "kl": (exact.exp() * (exact - found)).sum(-1)[scored].mean().item(),
            "same_top_token": (exact.argmax(-1) == found.argmax(-1))[scored].float().mean().item(),
            "recipe": "exact",
        }
        rows.append(row)
        print(row, f"{time.perf_counter() - start:.0f} s", flush=True)
    if args.output:
        result = {**facts(torch.device(device)), "model": args.folder.resolve().name, "rows": rows}
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
