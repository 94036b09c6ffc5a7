"""A needle task that small language models solve: facts are hidden in a text at several depths; questions end the text.

Each fact is one sentence, and its question is the sentence without the last word; a model answers by copying the word
that followed before. A fact is found if the model's most likely tokens are its last word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from language_models import Head, beginning
from torch import Tensor

FACTS = (
    ("The password of the old safe is", "lantern"),
    ("The captain named her wooden boat", "pepper"),
    ("The painter mixed her blue with", "honey"),
    ("The king's horse was afraid of", "feathers"),
    ("The stolen crown was hidden inside a", "piano"),
    ("My grandmother grew nothing but", "onions"),
    ("The clock in the harbour was made of", "glass"),
    ("The baker paid his rent in", "candles"),
    ("The monks of the island collected", "spoons"),
)
"""(beginning, last word): the last words are unlikely, so that only the text reveals them."""
ORDER = 5
"""Stride of the questions over the facts, so that questions come in another order than facts."""


@dataclass(frozen=True)
class Haystack:
    """A text with hidden facts, followed by their questions, each with its answer.

    Attributes:
        ids: int64 (1, tokens).
        asked: first token of the questions.
        answers: (depth, first token, token after the last) of each answer; depth 0 is the text's beginning, 1 its end.
    """

    ids: Tensor
    asked: int
    answers: tuple[tuple[float, int, int], ...]

    @torch.no_grad()
    def found_facts(self, head: Head, hidden: Tensor) -> dict[float, bool]:
        """Return whether the fact at each depth is found.

        Args:
            head: the model's output head.
            hidden: hidden states of the ids, (tokens, hidden size).
        """
        results = {}
        for depth, start, stop in self.answers:
            predicted = head(hidden[start - 1 : stop - 1]).argmax(-1)
            results[depth] = predicted.tolist() == self.ids[0, start:stop].tolist()
        return dict(sorted(results.items()))


def hide(tokenizer: Any, text: Tensor, tokens: int, turn: int = 0) -> Haystack:
    """Hide the facts in the first tokens of a text.

    Args:
        tokenizer: the model's tokenizer.
        text: int64 (at least `tokens`,).
        tokens: length of the result.
        turn: number of depths by which each fact moves.

    Raises:
        ValueError: there is no room between the facts.
    """

    def encode(part: str) -> list[int]:
        return tokenizer(part, add_special_tokens=False).input_ids

    facts = [FACTS[(place + turn) % len(FACTS)] for place in range(len(FACTS))]
    needles = [encode(f"\n\n{begin} {word}.\n\n") for begin, word in facts]
    questions = [(encode(f"\n\n{begin}"), encode(f" {word}")) for begin, word in facts]
    stop = encode(".")
    ids = beginning(tokenizer).tolist()
    room = (
        tokens
        - len(ids)
        - sum(map(len, needles))
        - sum(len(asked_ids) + len(answer_ids) + len(stop) for asked_ids, answer_ids in questions)
    )
    if room < len(facts):
        raise ValueError(f"{tokens} tokens are too few to hide {len(facts)} facts in")
    depths = [place / (len(facts) - 1) for place in range(len(facts))]
    cuts = [round(depth * room) for depth in depths]
    for begin, end, needle in zip([0, *cuts], cuts, needles, strict=False):
        ids += [*text[begin:end].tolist(), *needle]
    asked, answers = len(ids), []
    for place in (ORDER * number % len(facts) for number in range(1, len(facts) + 1)):
        question, answer = questions[place]
        ids += question
        answers.append((depths[place], len(ids), len(ids) + len(answer)))
        ids += answer + stop
    return Haystack(torch.tensor(ids)[None], asked, tuple(answers))
