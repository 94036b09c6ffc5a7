"""Fine-tune a language model with exact, INT8 and FP8 attention, then let it answer with exact and with FP4 attention.

    python studies/finetune_then_fp4.py MODEL --seeds 0 1 2 --output benchmarks/results

The task is arithmetic in a few sentences: each text holds as many solved problems as fit into TOKENS tokens, and only
the answers count in the loss. An answer after the first UNSCORED tokens is right if each of its tokens is the most
likely token. The same seed draws the same problems for every training; the test has other problems.

The JSON is <device>-finetune_then_fp4.json, with a row for each seed, method, training and inference, written after
each measurement; a run with the same versions and commit continues an earlier run. "right" is a share, "loss" the mean
of the last tenth of the steps, and "tokens_per_second" the speed of the last half of the training's steps.
"""

from __future__ import annotations

import argparse
import random
import time
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

import fp8_training
import torch
import torch.nn.functional as F
from finetune_then_fp4_table import INFERENCE, markdown
from language_models import check_recipe, read_model, use_recipe
from torch import Tensor

from sage_hf import set_routing
from sage_hf.bench import results
from sage_hf.bench.timing import synchronize

TRAINING = ("exact", "sage_bwd", fp8_training.NAME)
METHODS = ("lora", "full")
RATE = {"lora": 1e-3, "full": 5e-5}
"""Learning rates."""
TOKENS = 512
UNSCORED = 128
"""Number of a text's first tokens, whose answers are not scored: they see few low-bit keys."""
IGNORED = -100
"""Label of tokens that are not part of an answer."""
NAMES = ("Ada", "Ben", "Cara", "Dan", "Eve", "Finn")
THINGS = ("apples", "books", "coins", "shells", "pens", "stamps")
WARM_UP = 20
"""Number of steps in which the learning rate rises; afterwards it falls to 0."""


def problem(draw: random.Random) -> tuple[str, str]:
    """Draw a problem and its solution."""
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    a, b, c = draw.randint(10, 60), draw.randint(10, 60), draw.randint(2, 9)
    return draw.choice(
        (
            (f"{name} has {a} {thing}, gets {b} more and gives {c} away. How many are left?", str(a + b - c)),
            (f"{name} fills {c} boxes with {a} {thing} each. How many are there?", str(a * c)),
            (f"{a} {thing} lie here. {name} adds {b}, and then {c}. How many are there?", str(a + b + c)),
        )
    )


def texts(tokenizer: Any, draw: random.Random, count: int) -> tuple[Tensor, Tensor]:
    """Draw texts of solved problems, and their labels: IGNORED except for answers. Both are int64 (count, TOKENS)."""

    def encode(part: str) -> list[int]:
        return tokenizer(part, add_special_tokens=False).input_ids

    all_ids, all_labels = [], []
    for _ in range(count):
        ids: list[int] = []
        labels: list[int] = []
        while len(ids) < TOKENS:
            question, solution = problem(draw)
            question_ids, answer, end = encode(f"Question: {question} Answer:"), encode(f" {solution}"), encode(".\n\n")
            ids += question_ids + answer + end
            labels += [IGNORED] * len(question_ids) + answer + [IGNORED] * len(end)
        all_ids.append(ids[:TOKENS])
        all_labels.append(labels[:TOKENS])
    return torch.tensor(all_ids), torch.tensor(all_labels)


def share_right(predicted: Tensor, labels: Tensor) -> float:
    """Return the share of answers whose tokens are all predicted.

    Args:
        predicted: int64 (texts, TOKENS), the most likely token at each place.
        labels: as from `texts`. Answers that begin within the first UNSCORED tokens, or reach the last token, do not
            count.
    """
    num_correct = num_answers = 0
    for guess, wanted in zip(predicted.tolist(), labels.tolist(), strict=True):
        for start in range(UNSCORED, TOKENS):
            begins = wanted[start] != IGNORED and wanted[start - 1] == IGNORED
            if begins and IGNORED in wanted[start:]:
                stop = wanted.index(IGNORED, start)
                num_answers += 1
                num_correct += guess[start:stop] == wanted[start:stop]
    return num_correct / num_answers


def trainable(model: Any, method: str) -> Any:
    """Return a copy of a model in float32, to train its weights or low-rank additions to them."""
    # transformers refuses to train models that it read from GGUF, although their weights are dequantised.
    copy = torch.nn.Module.float(deepcopy(model))
    if method == "full":
        return copy
    from peft import LoraConfig, get_peft_model

    return get_peft_model(copy, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """Compute in bfloat16 on a GPU."""
    return torch.autocast(device.type, torch.bfloat16) if device.type == "cuda" else nullcontext()


def train(
    model: Any, tokenizer: Any, training: str, method: str, seed: int, steps: int, batch: int
) -> dict[str, float]:
    """Train a model with one of TRAINING's attentions, and return a row's "loss" and "tokens_per_second"."""
    model.train()
    if training == fp8_training.NAME:
        model.set_attn_implementation(training)
    else:
        use_recipe(model, training)
    device, draw, losses = model.device, random.Random(seed), []
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], RATE[method], weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARM_UP, (steps - step) / max(steps - WARM_UP, 1))
    )
    batches = [texts(tokenizer, draw, batch) for _ in range(steps)]
    for step, drawn in enumerate(batches):
        if step == steps // 2:
            start = synchronize(device)
        ids, labels = (x.to(device) for x in drawn)
        with autocast(device):
            # Without a mask, transformers 4.56 makes one in case the texts were packed.
            logits = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    seconds = synchronize(device) - start
    if training != fp8_training.NAME:
        check_recipe(model, training)
    loss = torch.stack(losses[-max(steps // 10, 1) :]).mean().item()
    return {"loss": loss, "tokens_per_second": (steps - steps // 2) * batch * TOKENS / seconds}


@torch.no_grad()
def score(model: Any, tokenizer: Any, recipe: str, count: int, batch: int) -> float:
    """Return the share of the test's answers that are right with a recipe's attention."""
    model.eval()
    use_recipe(model, recipe)
    ids, labels = texts(tokenizer, random.Random("test"), count)
    predicted = []
    for part in ids.split(batch):
        with autocast(model.device):
            logits = model(part.to(model.device), use_cache=False).logits
        predicted.append(F.pad(logits.argmax(-1)[:, :-1], (1, 0)).cpu())
    check_recipe(model, recipe)
    return share_right(torch.cat(predicted), labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder of safetensors, or a GGUF file")
    parser.add_argument("--method", choices=METHODS, default="lora")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tested", type=int, default=64, help="texts of the test")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no training after this time")
    parser.add_argument("--output", type=Path, default=Path("output"), metavar="DIR", help="folder for the JSON")
    args = parser.parse_args()
    start = time.monotonic()
    set_routing(False)  # short sequences would train exactly, but the recipes are to be compared
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer = read_model(args.model, device)
    facts = results.facts(device)
    stored = results.ResumedResult(results.path_of(args.output, facts, "finetune_then_fp4"), facts, ("rows",))
    settings = {"model": args.model.stem, "method": args.method, "steps": args.steps, "batch": args.batch}
    for seed, training in product(args.seeds, TRAINING):
        row = settings | {"seed": seed, "training": training}
        if stored.has("rows", **row):
            continue
        if time.monotonic() - start > args.seconds:
            print(f"stopped after {args.seconds:.0f} s: the same command goes on here", flush=True)
            break
        torch.manual_seed(seed)
        trained = trainable(model, args.method)
        row |= train(trained, tokenizer, training, args.method, seed, args.steps, args.batch)
        rights = {name: score(trained, tokenizer, name, args.tested, args.batch) for name in INFERENCE}
        stored.add("rows", *(row | {"inference": name, "right": right} for name, right in rights.items()))
        print(f"{time.monotonic() - start:.0f} s", flush=True)
    print(markdown(stored.result["rows"]))


if __name__ == "__main__":
    main()
