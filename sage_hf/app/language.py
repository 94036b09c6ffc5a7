"""Comparison of a language model's predictions of a text with its predictions under exact attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sage_hf.app.layer_errors import LayerErrorRecorder, record_layer_errors
from sage_hf.app.pipelines import LOADING_ERRORS, folder_or_name
from sage_hf.apply import apply
from sage_hf.config import SageConfig
from sage_hf.explain import Explanation, explain
from sage_hf.text import text_table
from sage_kernels.spec.kv_cache import MAX_QUERIES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WINDOW = 2048
"""Largest number of tokens that the model reads at once."""


@dataclass(frozen=True)
class TextComparison:
    """Predictions of a text with low-bit attention, and with the model's own attention.

    Attributes:
        label: name of the low-bit attention.
        tokens: number of predicted tokens.
        exact, perplexity: perplexity per token of the baseline model, and with low-bit attention.
        divergence: mean Kullback-Leibler divergence of the low-bit prediction from the exact prediction, in nats.
        same_top: share of tokens for which both predict the same most likely token.
        explanation: the kernels that ran in each layer.
        recorder: errors of each layer's attention on its own inputs, over the first window.
    """

    label: str
    tokens: int
    exact: float
    perplexity: float
    divergence: float
    same_top: float
    explanation: Explanation
    recorder: LayerErrorRecorder

    def __str__(self) -> str:
        change = f"{self.perplexity / self.exact - 1:+.3%}"
        rows = [
            ["exact", f"{self.exact:.4f}", "-", "-", "-"],
            [self.label, f"{self.perplexity:.4f}", change, f"{self.divergence:.5f}", f"{self.same_top:.2%}"],
        ]
        header = ["attention", "perplexity", "change", "mean KL, nats", "same top token"]
        parts = [text_table(header, rows), f"{self.tokens} tokens predicted.", "", str(self.explanation), ""]
        return "\n".join([*parts, "Errors of each layer, on the first window:", str(self.recorder)])


def compare_text(
    pretrained: str,
    path: Path,
    config: SageConfig,
    label: str,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str], None] = lambda line: None,
) -> TextComparison:
    """Let a causal language model read a text with its own attention and with low-bit attention, in windows of WINDOW.

    Args:
        pretrained: folder of the model, or its name on the Hub.
        path: a text in UTF-8.
        config: the recipe and its exceptions; with a KV cache, the second half of each window is predicted through it.
        label: name of the low-bit attention in the result.
        dtype, device: of the weights.
        progress: called with a line about each window.

    Raises:
        ValueError: the model or the text cannot be read; the text has fewer than two tokens, or with a KV cache fewer
            than three; or `sage_hf.apply` refuses.
    """
    model, tokenizer = load_language_model(folder_or_name(pretrained), dtype, device)
    windows = read_windows(path, model, tokenizer)
    exact_loss = low_loss = divergence = 0.0
    tokens = num_same_top = 0
    explanation = Explanation(())
    with apply(model, config), record_layer_errors(model) as recorder:
        _predict(model, windows[0].to(device))
    for number, window in enumerate(windows, 1):
        progress(f"window {number} of {len(windows)}: {len(window)} tokens")
        ids = window.to(device)
        exact = _predict(model, ids)
        with apply(model, config):
            if config.kv_cache is None:
                low = _predict(model, ids)
            else:
                half = len(ids) // 2
                low = logits_through_cache(model, ids, half, config.kv_cache).float().log_softmax(-1)
                ids, exact = ids[half:], exact[half:]
            explanation = explanation.joined(explain(model))
        targets = ids[1:, None]
        exact_loss -= exact.gather(-1, targets).sum().item()
        low_loss -= low.gather(-1, targets).sum().item()
        divergence += (exact.exp() * (exact - low)).sum().item()
        num_same_top += int((exact.argmax(-1) == low.argmax(-1)).sum())
        tokens += len(targets)
    if not tokens:
        raise ValueError(f"--text: {path} has fewer than three tokens: give a longer text")
    return TextComparison(
        label,
        tokens,
        math.exp(exact_loss / tokens),
        math.exp(low_loss / tokens),
        divergence / tokens,
        num_same_top / tokens,
        explanation,
        recorder,
    )


def load_language_model(pretrained: str, dtype: torch.dtype, device: torch.device) -> tuple[PreTrainedModel, Any]:
    """Load a causal language model for evaluation, and its tokenizer, from a folder or the Hub.

    Raises:
        ValueError: there is no such model, or it cannot be read.
    """
    import transformers

    if (Path(pretrained) / "model_index.json").is_file():
        raise ValueError(
            f"{pretrained} is a diffusers pipeline: use --prompt for pipelines; --text is for causal language models"
        )
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(pretrained)
        model = transformers.AutoModelForCausalLM.from_pretrained(pretrained, dtype=dtype)
    except LOADING_ERRORS as error:
        raise ValueError(f"cannot load a causal language model and its tokenizer from {pretrained}: {error}") from error
    return model.eval().to(device), tokenizer


def read_windows(path: Path, model: PreTrainedModel, tokenizer: Any) -> list[torch.Tensor]:
    """Return the tokens of a text in UTF-8 in windows of at most WINDOW tokens, int64 (tokens,) each.

    Raises:
        ValueError: the text cannot be read, or has fewer than two tokens.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text: cannot read {path}: {error}") from error
    windows = list(_windows(model, tokenizer, text))
    if not windows:
        raise ValueError(f"--text: {path} has fewer than two tokens: give a longer text")
    return windows


def _windows(model: PreTrainedModel, tokenizer: Any, text: str) -> Iterator[torch.Tensor]:
    """Yield the text's tokens in parts of two or more, int64 (tokens,), each after the BOS token if there is one."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    size = min(WINDOW, getattr(model.config.get_text_config(), "max_position_embeddings", None) or WINDOW) - len(first)
    for start in range(0, len(ids), size):
        window = [*first, *ids[start : start + size]]
        if len(window) > 1:
            yield torch.tensor(window)


@torch.no_grad()
def logits_through_cache(model: Any, tokens: torch.Tensor, first: int, kv_cache: str) -> torch.Tensor:
    """Return the logits of each next token after the first `first` tokens, through a KV cache that begins with these.

    The tokens, int64 (tokens,), come MAX_QUERIES at a time. The result is (tokens - first - 1, vocabulary).
    """
    from sage_hf.transformers.kv_cache import QuantizedKVCache, cache_keyword

    keyword = {cache_keyword(model): QuantizedKVCache(model.config, kv_cache)}
    tokens = tokens[None].to(next(model.parameters()).device)
    model(tokens[:, :first], use_cache=True, **keyword)
    parts = tokens[:, first:].split(MAX_QUERIES, 1)
    return torch.cat([model(part, use_cache=True, **keyword).logits[0] for part in parts])[:-1]


@torch.no_grad()
def _predict(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of each next token, float32 (tokens - 1, vocabulary)."""
    logits = model(ids[None], use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1)
