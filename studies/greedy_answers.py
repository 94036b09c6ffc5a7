"""Greedy answers of a language model: prompts, and the number of tokens until an answer differs from the exact
answer."""

from __future__ import annotations

from typing import Any

import torch
from language_models import beginning, windows
from torch import Tensor

QUESTIONS = ("What is the capital of France?", "Name three animals that lay eggs.", "Write one sentence about the sea.")
CONTINUED = 1024
"""Number of the text's tokens that are continued greedily."""
NEW_TOKENS = 32
"""Number of tokens of a greedy answer."""


@torch.no_grad()
def answer(model: Any, ids: Tensor, **options: Any) -> list[int]:
    """Continue ids (1, tokens) greedily, and return the new tokens."""
    whole = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS, **options
    )
    return whole[0, ids.shape[1] :].tolist()


def prompts(tokenizer: Any, text: Tensor) -> dict[str, Tensor]:
    """Return prompts (1, tokens) by name: questions in the model's chat format, and a text to continue."""
    (continued,) = windows(text, CONTINUED, 1, beginning(tokenizer))
    ids_by_name = {f"the first {CONTINUED} tokens of the text": continued}
    for question in QUESTIONS:
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": question}]
            shown = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        else:
            shown = f"Question: {question}\nAnswer:"
        ids_by_name[question] = tokenizer(
            shown, add_special_tokens=not tokenizer.chat_template, return_tensors="pt"
        ).input_ids
    return ids_by_name


def same_beginning(first: list[int], second: list[int]) -> int:
    """Return the number of equal tokens before the first difference."""
    equal = [a == b for a, b in zip(first, second, strict=False)]
    return equal.index(False) if False in equal else len(equal)
