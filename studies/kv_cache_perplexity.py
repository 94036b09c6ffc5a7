"""Measure a language model's predictions through a low-bit KV cache, token by token as in generation.

    python studies/kv_cache_perplexity.py MODEL TEXT... --tokens 2048 --output benchmarks/results

MODEL is a folder of safetensors or a GGUF file. The first 512 tokens are a prompt; the others follow 16 at a time, and
each token sees the earlier tokens as the cache stores them. Ours is compared with the 4-bit caches of QServe (arXiv
2405.04532, sections 4.2 and 5.3) and Atom (arXiv 2310.19102, section 4.4), whose K and V are rounded as these describe
and kept in floating point: both have a scale and a zero point for each token and head, and no token in 16 bits; QServe
divides K's channels by their largest elements before (SmoothAttention).

The JSON is <device>-kv_cache_perplexity.json, written row by row, with the tables "rows", "needles" and "answers" of
`trained_models`; the facts are hidden in the prompt, and asked for behind it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from greedy_answers import answer, prompts, same_beginning
from language_models import Differences, Head, beginning, hidden_states, read_model, read_tokens, windows
from retrieval import hide
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

import sage_hf
from sage_hf.bench import results
from sage_hf.transformers.kv_cache import cache_keyword

PROMPT = 512
"""Number of first tokens, which are a prompt."""
CHUNK = 16
"""Number of tokens that follow at a time."""
LEVELS = 15
"""Steps between the smallest and the largest element of a token in 4 bits."""
SMOOTHING = 0.5
"""Exponent of QServe's SmoothAttention."""


def rounded(x: Tensor) -> Tensor:
    """Round tokens (…, head_dim) to 4 bits, asymmetrically, with scale and lowest value in float16."""
    low, high = x.float().amin(-1, keepdim=True), x.float().amax(-1, keepdim=True)
    scale = ((high - low) / LEVELS).half().float().clamp_min(torch.finfo(torch.float16).tiny)
    low = low.half().float()
    return (((x - low) / scale).round().clamp(0, LEVELS) * scale + low).to(x.dtype)


class RoundedLayer(DynamicLayer):
    """Cache layer of K and V in 4 bits, as Atom or, with smoothing, QServe rounds them."""

    def __init__(self, smooth: bool) -> None:
        super().__init__()
        self.smooth = smooth
        self.factor: Tensor | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store rounded new tokens (batch, kv_heads, tokens, head_dim); attention within a prompt sees unrounded
        tokens."""
        is_prompt = self.factor is None
        if self.factor is None:
            self.factor = smoothing_factor(key_states) if self.smooth else torch.ones_like(key_states[:, :, :1])
        rounded_key = rounded(key_states / self.factor) * self.factor
        whole = super().update(rounded_key, rounded(value_states))
        return (key_states, value_states) if is_prompt else whole


def smoothing_factor(key: Tensor) -> Tensor:
    """Return the divisor of K in SmoothAttention, (batch, kv_heads, 1, head_dim).

    The two channels that the rotary embedding mixes, half of head_dim apart, have the same divisor.
    """
    largest = key.abs().amax(2, keepdim=True).unflatten(-1, (2, -1)).amax(-2, keepdim=True)
    return largest.clamp_min(1e-4).pow(SMOOTHING).expand(*largest.shape[:-2], 2, -1).flatten(-2)


def rounded_cache(config: Any, smooth: bool) -> Cache:
    """Make a cache of `RoundedLayer` for a model's config."""
    return Cache(layers=[RoundedLayer(smooth) for _ in range(config.num_hidden_layers)])


CACHES: dict[str, Callable[[Any], Cache]] = {
    "16 bits": lambda config: DynamicCache(config=config),
    "int8": lambda config: sage_hf.QuantizedKVCache(config, "int8"),
    "int4": lambda config: sage_hf.QuantizedKVCache(config, "int4"),
    "nvfp4": lambda config: sage_hf.QuantizedKVCache(config, "nvfp4"),
    "QServe KV4": lambda config: rounded_cache(config, smooth=True),
    "Atom KV4": lambda config: rounded_cache(config, smooth=False),
}


def through_cache(model: Any, ids: Tensor, prompt: int, cache: Cache) -> Tensor:
    """Return the hidden states (tokens, hidden size) of ids (1, tokens): first the prompt, then CHUNK tokens at a
    time."""
    parts = (ids[:, :prompt], *ids[:, prompt:].split(CHUNK, 1))
    return torch.cat([hidden_states(model, part, use_cache=True, **{cache_keyword(model): cache}) for part in parts])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of safetensors, or a GGUF file")
    parser.add_argument("texts", type=Path, nargs="+", help="files in UTF-8")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048], help="lengths of the texts")
    parser.add_argument("--threads", type=int, help="of a CPU")
    parser.add_argument("--output", type=Path, default=Path("output"), metavar="DIR", help="folder for the JSON")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = read_model(args.model, device)
    sage_hf.apply(model, "exact")
    text, head = read_tokens(tokenizer, args.texts).to(device), Head(model)
    result: dict[str, Any] = results.facts(device) | {"rows": [], "needles": [], "answers": []}
    path = results.path_of(args.output, result, "kv_cache_perplexity")

    def add(table: str, row: dict[str, Any]) -> None:
        result[table].append({"model": args.model.stem, **row})
        results.write(path, result)
        print(table, row, f"{time.perf_counter() - start:.0f} s", flush=True)

    for tokens in args.tokens:
        (ids,), haystack = windows(text, tokens, 1, beginning(tokenizer)), hide(tokenizer, text, tokens)
        exact: Tensor | None = None
        for format, make in CACHES.items():
            start = time.perf_counter()
            cached_states = through_cache(model, ids, PROMPT, make(model.config))
            exact = cached_states if exact is None else exact
            differences = Differences()
            # The prompt's tokens do not read the cache, so they are left out.
            differences.add(head, exact[PROMPT:-1], cached_states[PROMPT:-1], ids[0, PROMPT + 1 :])
            facts = {"format": format, "tokens": tokens}
            add("rows", facts | {"prompt": PROMPT} | differences.row())
            hidden = through_cache(model, haystack.ids.to(device), haystack.asked, make(model.config))
            counts = {f"{depth:g}": int(is_found) for depth, is_found in haystack.found_facts(head, hidden).items()}
            add("needles", facts | {"found": counts, "of": 1})
    expected: dict[str, list[int]] = {}
    for format, make in CACHES.items():
        for prompt, ids in prompts(tokenizer, text).items():
            start = time.perf_counter()
            new = answer(model, ids.to(device), **{cache_keyword(model): make(model.config)})
            num_same = same_beginning(expected.setdefault(prompt, new), new)
            row = {"format": format, "prompt": prompt, "answer": tokenizer.decode(new)}
            add("answers", row | {"tokens": len(new), "same_beginning": num_same})


if __name__ == "__main__":
    main()
