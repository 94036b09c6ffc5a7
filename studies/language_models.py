"""Trained language models for the studies: loading, and differences of their predictions from exact predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from sage_hf import record
from sage_hf.explain import explain

HEAD_TOKENS = 512
"""Number of tokens whose logits are in memory at once."""


def read_model(path: Path, device: torch.device) -> tuple[Any, Any]:
    """Read a model and its tokenizer, in float32 on a CPU and in bfloat16 on a GPU.

    Args:
        path: a folder of safetensors, or a GGUF file, whose weights are dequantised (this needs the package `gguf`).
        device: device of the model.

    Raises:
        ValueError: the model's logits are not a linear function of its hidden states, or the installed transformers
            reads the tokenizer wrongly.
    """
    folder, options = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    check_tokenizer(tokenizer)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options).eval().to(device)
    check_head(model)
    return model, tokenizer


def read_tokens(tokenizer: Any, texts: Sequence[Path]) -> Tensor:
    """Read texts, with an empty line between them, as int64 (tokens,)."""
    text = "\n\n".join(path.read_text(encoding="utf-8", errors="ignore") for path in texts)
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


def beginning(tokenizer: Any) -> Tensor:
    """Return the tokens, int64, with which every text of a model begins: BOS, or none."""
    return torch.tensor(tokenizer("").input_ids, dtype=torch.int64)


def windows(text: Tensor, tokens: int, samples: int, first: Tensor) -> list[Tensor]:
    """Cut a text into parts (1, tokens), each after the tokens `first`, and return at most `samples` parts.

    Raises:
        ValueError: the text is shorter than one part.
    """
    size, first = tokens - len(first), first.to(text.device)
    if len(text) < size:
        raise ValueError(f"the text has {len(text)} tokens, which are less than {size}")
    return [torch.cat([first, part])[None] for part in text[: len(text) // size * size].split(size)[:samples]]


@torch.no_grad()
def check_tokenizer(tokenizer: Any) -> None:
    """Compare the tokens of a word with the vocabulary, because transformers 5.17 reads Gemma's GGUF files wrongly.

    Raises:
        ValueError: a word of the vocabulary is several tokens.
    """
    words = {"▁world", "Ġworld"} & tokenizer.get_vocab().keys()
    if words and len(tokenizer(" world", add_special_tokens=False).input_ids) > 1:
        raise ValueError("this version of transformers splits a word of the tokenizer's vocabulary: take a newer one")


def check_head(model: Any) -> None:
    """Compare `Head` with the model's own logits for a few tokens.

    Raises:
        ValueError: they differ.
    """
    ids = torch.arange(1, 17, device=model.device)[None]
    logits = model(ids, use_cache=False).logits[0].float()
    if not torch.allclose(Head(model)(hidden_states(model, ids)), logits, rtol=2**-6, atol=2**-6 * logits.std().item()):
        raise ValueError(f"{type(model).__name__}: its logits are no linear function of its hidden states")


def use_recipe(model: Any, name: str) -> None:
    """Let a model run a recipe in its own numerics, native or emulated; "exact" is transformers' own attention."""
    record.clear()
    model.set_attn_implementation("sdpa" if name == "exact" else f"{name}_emulate")


def check_recipe(model: Any, name: str) -> None:
    """Raise RuntimeError if the model has run another recipe since `use_recipe`."""
    ran = {row.recipe for row in explain(model).rows if row.calls}
    if name != "exact" and ran != {name}:
        raise RuntimeError(f"asked for {name}, but {', '.join(sorted(ran)) or 'nothing of ours'} ran")


@torch.no_grad()
def hidden_states(model: Any, ids: Tensor, **options: Any) -> Tensor:
    """Return the input of the output head, (tokens, hidden size), for ids (1, tokens).

    Args:
        model: the model.
        ids: int64.
        options: keywords for the model; without them, it uses no cache.
    """
    return model.base_model(ids, **({"use_cache": False} | options)).last_hidden_state[0]


class Head:
    """Output head of a model in float32, so that the rounding of logits adds no difference."""

    def __init__(self, model: Any) -> None:
        layer = model.get_output_embeddings()
        self.weight = layer.weight.detach().float()
        self.bias = None if layer.bias is None else layer.bias.detach().float()

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits, float32 (tokens, vocabulary)."""
        return F.linear(hidden.float(), self.weight, self.bias)


@dataclass
class Differences:
    """Sums, over predicted tokens, of differences between predictions and exact predictions.

    Attributes:
        tokens: number of predicted tokens.
        exact_loss: sum of the losses with exact attention, in nats.
        change: sum of the changes of the loss.
        squares: sum of the squares of these changes.
        kl: sum of the Kullback-Leibler divergences of the predictions from the exact predictions, in nats.
        same_top: number of tokens for which both predict the same most likely token.
    """

    tokens: int = 0
    exact_loss: float = 0.0
    change: float = 0.0
    squares: float = 0.0
    kl: float = 0.0
    same_top: int = 0

    @torch.no_grad()
    def add(self, head: Head, exact: Tensor, actual: Tensor, targets: Tensor) -> None:
        """Add the predictions of a text.

        Args:
            head: the model's output head.
            exact, actual: hidden states that predict the targets, (tokens, hidden size).
            targets: int64 (tokens,).
        """
        for hidden, actual_part, wanted in zip(*(x.split(HEAD_TOKENS) for x in (exact, actual, targets)), strict=True):
            truth, low = head(hidden).log_softmax(-1), head(actual_part).log_softmax(-1)
            loss, low_loss = (-x.gather(1, wanted[:, None]).double() for x in (truth, low))
            self.tokens += len(wanted)
            self.exact_loss += loss.sum().item()
            self.change += (low_loss - loss).sum().item()
            self.squares += (low_loss - loss).square().sum().item()
            self.kl += (truth.exp() * (truth - low)).sum().item()
            self.same_top += int((truth.argmax(-1) == low.argmax(-1)).sum())

    def row(self) -> dict[str, float]:
        """Return means: "perplexity", "ppl_change" (a fraction) with its "standard_error", "kl" and "same_top"."""
        mean = self.change / self.tokens
        variance = max(self.squares / self.tokens - mean**2, 0.0)
        return {
            "perplexity": math.exp(self.exact_loss / self.tokens + mean),
            "ppl_change": math.expm1(mean),
            "standard_error": math.sqrt(variance / self.tokens),
            "kl": self.kl / self.tokens,
            "same_top": self.same_top / self.tokens,
        }
