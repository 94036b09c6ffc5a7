"""Measure the effect of low-bit attention in trained language models: perplexity, retrieval, and greedy answers.

    python studies/trained_models.py MODEL TEXT... --tokens 2048 8192 --output benchmarks/results

MODEL is a folder of safetensors or a GGUF file; no network is needed. The recipes run in their own numerics: FP4 is
emulated on GPUs without FP4, and every recipe is emulated on a CPU. On a GPU, other installed kernels are measured too;
FA2 and cuDNN are exact attention, and show the effect of rounding to bfloat16 alone.

The JSON is <device>-trained_models.json, written row by row; a run with the same versions and commit continues a run
that --seconds stopped. Its tables: "rows", perplexity by recipe and length ("ppl_change" is a fraction,
"standard_error" the standard error of its mean over tokens, "kl" in nats per token, "same_top" the share of tokens with
the same most likely prediction); "needles", which of the facts of `retrieval` are found at each depth; "answers",
greedy continuations; "sinks", each layer's heaviest key and loudest channel of K (`sage_hf.app.peaks`).
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from greedy_answers import answer, prompts, same_beginning
from language_models import (
    Differences,
    Head,
    beginning,
    check_recipe,
    hidden_states,
    read_model,
    read_tokens,
    use_recipe,
    windows,
)
from retrieval import FACTS, hide
from torch import Tensor, nn
from trained_models_table import markdown
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from sage_hf import record, set_routing
from sage_hf.app.peaks import find_peaks
from sage_hf.bench import cases, results
from sage_hf.bench.providers import PROVIDERS, Provider

RECIPES = ("sage1", "sage2", "sage3", "sage3_paper")
EXACT = "exact"
OTHER_PROVIDERS = {
    provider.name: provider
    for provider in PROVIDERS
    if provider.name in ("sdpa_fa2", "cudnn", "fa3_fp8")
    or (provider.name.startswith("sageattention") and provider.scope != "kernel")
}
TURNS = 2
"""Number of facts hidden at each depth."""
TABLES = ("rows", "needles", "answers", "sinks")


def use(model: Any, name: str) -> None:
    """Let a model run exact attention, a recipe in its own numerics, or another provider's kernel."""
    if name in OTHER_PROVIDERS:
        model.set_attn_implementation(register(OTHER_PROVIDERS[name]))
    else:
        use_recipe(model, name)


def register(provider: Provider) -> str:
    """Register a provider's attention with transformers, and return its name there."""
    name = f"study_{provider.name}"
    AttentionInterface.register(name, partial(attend, provider))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


def attend(
    provider: Provider,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention of a whole text for transformers.

    Raises:
        ValueError: the call has a mask, or a scale other than head_dim ** -0.5; or the provider raises it.
    """
    (batch, q_heads, q_len, head_dim), kv_heads = query.shape, key.shape[1]
    if attention_mask is not None or q_len != key.shape[2]:
        raise ValueError("it takes causal attention without a mask only")
    if scaling is not None and abs(scaling * head_dim**0.5 - 1) > 1e-6:
        raise ValueError(f"it takes no scale such as {scaling}")
    case = cases.BenchCase("trained", batch, q_heads, kv_heads, q_len, q_len, head_dim, "causal")
    prepared = provider.prepare(cases.CaseInputs(case, *(x.contiguous() for x in (query, key, value))))
    with provider.context():
        output = prepared.call() * prepared.output_scale
    return output.to(query.dtype).transpose(1, 2).contiguous(), None


def measure_text(model: Any, parts: Sequence[Tensor], exact: Sequence[Tensor], name: str) -> dict[str, Any]:
    """Measure the differences of predictions of texts from exact predictions.

    Args:
        model: the model.
        parts: int64 (1, tokens) each.
        exact: `hidden_states` of each part with exact attention.
        name: name of the attention.

    Returns:
        "recipe", and `Differences.row`; or "unavailable" with the reason.
    """
    head, differences = Head(model), Differences()
    try:
        use(model, name)
        for part, truth in zip(parts, exact, strict=True):
            actual = hidden_states(model, part)
            differences.add(head, truth[:-1], actual[:-1], part[0, 1:])
        if name not in OTHER_PROVIDERS:
            check_recipe(model, name)
    except Exception as error:  # Another provider may raise any error: its row holds it.
        if name not in OTHER_PROVIDERS:
            raise
        return {"recipe": name, "unavailable": results.reason(error)}
    return {"recipe": name, **differences.row()}


def measure_needles(model: Any, tokenizer: Any, text: Tensor, tokens: int, name: str) -> dict[str, Any]:
    """Count the facts found at each depth: a row has "found" {depth: number}, and "of", the number of facts at a
    depth."""
    head, counts = Head(model), Counter()
    use(model, name)
    for turn in range(TURNS):
        haystack = hide(tokenizer, text[turn * tokens :], tokens, turn * (len(FACTS) // TURNS))
        is_found_by_depth = haystack.found_facts(head, hidden_states(model, haystack.ids.to(model.device)))
        counts.update({f"{depth:g}": int(is_found) for depth, is_found in is_found_by_depth.items()})
    check_recipe(model, name)
    return {"recipe": name, "found": dict(counts), "of": TURNS}


@torch.no_grad()
def sinks(model: Any, ids: Tensor) -> list[dict[str, Any]]:
    """Return the peaks of each layer's attention to a text: "layer", "share", "key", "loudness"."""
    rows: list[dict[str, Any]] = []

    def look(call: record.AttentionCall) -> None:
        causality = {"is_causal": call.is_causal, "causal_offset": call.causal_offset}
        peaks = find_peaks(call.query, call.key, mask=call.attn_mask, scale=call.scale, **causality)
        rows.append({"layer": len(rows), **peaks.to_dict()})

    model.set_attn_implementation("sage_exact")
    with record.observe(look):
        hidden_states(model, ids)
    return rows


class Run:
    """The measurements of one model that are still missing in the results, in the order of `steps`."""

    def __init__(
        self,
        name: str,
        model: Any,
        tokenizer: Any,
        text: Tensor,
        stored: results.ResumedResult,
        tables: Sequence[str] = TABLES,
    ) -> None:
        self.name, self.model, self.tokenizer, self.text = name, model, tokenizer, text
        self.stored, self.tables = stored, tables
        self.exact: dict[int, list[Tensor]] = {}
        self.answers: dict[str, list[int]] = {}

    def measure_sinks(self, tokens: int) -> None:
        """Measure the peaks of each layer's attention in the first tokens of the text."""
        rows = sinks(self.model, self.text[None, :tokens])
        self.stored.add("sinks", *({"model": self.name, "tokens": tokens, **row} for row in rows))

    def measure_rows(self, tokens: int, samples: int, name: str) -> None:
        """Measure the perplexity of parts of the text."""
        parts = windows(self.text, tokens, samples, beginning(self.tokenizer))
        if tokens not in self.exact:
            use(self.model, EXACT)
            self.exact = {tokens: [hidden_states(self.model, part) for part in parts]}
        facts = {"model": self.name, "tokens": tokens, "samples": len(parts)}
        self.stored.add("rows", facts | measure_text(self.model, parts, self.exact[tokens], name))

    def measure_needles(self, tokens: int, name: str) -> None:
        """Measure which facts are found."""
        needles = measure_needles(self.model, self.tokenizer, self.text, tokens, name)
        self.stored.add("needles", {"model": self.name, "tokens": tokens, **needles})

    def measure_answers(self, name: str) -> None:
        """Measure greedy answers, and the number of tokens before the first difference from the exact answer."""
        rows = []
        for prompt, ids in prompts(self.tokenizer, self.text).items():
            if prompt not in self.answers:
                use(self.model, EXACT)
                self.answers[prompt] = answer(self.model, ids.to(self.model.device))
            use(self.model, name)
            tokens = answer(self.model, ids.to(self.model.device))
            row = {"model": self.name, "recipe": name, "prompt": prompt, "answer": self.tokenizer.decode(tokens)}
            num_same = same_beginning(self.answers[prompt], tokens)
            rows.append(row | {"tokens": len(tokens), "same_beginning": num_same})
        self.stored.add("answers", *rows)

    def steps(self, lengths: Sequence[int], samples: int, names: Sequence[str]) -> Iterator[Callable[[], None]]:
        """Yield the measurements that are not stored yet.

        Args:
            lengths: tokens of texts, ascending.
            samples: largest number of texts of a length.
            names: recipes and providers.
        """
        recipes = [name for name in names if name not in OTHER_PROVIDERS]
        for tokens in lengths[:1]:
            yield from self.lacking("sinks", partial(self.measure_sinks, tokens))
        for tokens, name in product(lengths, [name for name in names if name != EXACT]):
            yield from self.lacking("rows", partial(self.measure_rows, tokens, samples, name), tokens, name)
        for tokens, name in product(lengths, recipes):
            yield from self.lacking("needles", partial(self.measure_needles, tokens, name), tokens, name)
        for name in recipes:
            yield from self.lacking("answers", partial(self.measure_answers, name), recipe=name)

    def lacking(
        self, table: str, step: Callable[[], None], tokens: int | None = None, recipe: str | None = None
    ) -> Iterator[Callable[[], None]]:
        """Yield a measurement if its table is wanted, and has no row of the model with this length and recipe."""
        key = {"model": self.name, "tokens": tokens, "recipe": recipe}
        if table in self.tables and not self.stored.has(table, **{k: v for k, v in key.items() if v is not None}):
            yield step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of safetensors, or a GGUF file")
    parser.add_argument("texts", type=Path, nargs="+", help="files in UTF-8")
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048], help="lengths of the texts")
    parser.add_argument("--samples", type=int, default=8, help="most texts of a length")
    parser.add_argument("--attention", nargs="+", metavar="NAME", help="recipes and providers; default: all")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=TABLES, help="default: all")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no measurement after this time")
    parser.add_argument("--threads", type=int, help="of a CPU")
    parser.add_argument("--output", type=Path, default=Path("output"), metavar="DIR", help="folder for the JSON")
    args = parser.parse_args()
    start = time.monotonic()
    if args.threads:
        torch.set_num_threads(args.threads)
    set_routing(False)  # exact attention would replace recipes where it is faster
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = args.attention or [EXACT, *RECIPES, *(OTHER_PROVIDERS if device.type == "cuda" else ())]
    model, tokenizer = read_model(args.model, device)
    facts = results.facts(device)
    stored = results.ResumedResult(results.path_of(args.output, facts, "trained_models"), facts, TABLES)
    longest = model.config.get_text_config().max_position_embeddings
    lengths = [tokens for tokens in sorted(args.tokens) if tokens <= longest]
    text = read_tokens(tokenizer, args.texts).to(device)
    run = Run(args.model.stem, model, tokenizer, text, stored, args.tables)
    for step in run.steps(lengths, args.samples, names):
        if time.monotonic() - start > args.seconds:
            print(f"stopped after {args.seconds:.0f} s: the same command goes on here", flush=True)
            break
        step()
        print(f"{time.monotonic() - start:.0f} s", flush=True)
    print(markdown(stored.result))


if __name__ == "__main__":
    main()
