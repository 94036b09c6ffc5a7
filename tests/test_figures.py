"""Figures in the prose of README.md and docs/ are those of the results that they come from."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from statistics import mean

import pages
import pytest

DOCS = Path(__file__).parents[1] / "docs"


def prose(page: str) -> str:
    """Return a page without its generated sections, in one line."""
    text = re.sub(r"<!-- generated: [\w-]+ -->.*?<!-- end -->", "", (DOCS / page).read_text(), flags=re.DOTALL)
    return " ".join(text.split())


def span(values, digits=0, scale=1.0) -> str:
    values = [scale * value for value in values]
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def errors_of_trained_models() -> str:
    rows = [row for row in pages.read_result("cpu-peaked_models")["rows"] if row["rel_l1"] > 1e-4]  # where bits are few

    def of(recipe, digits, handled=True):
        found = (row["rel_l1"] for row in rows if (row["provider"], row["outlier_handling"]) == (recipe, handled))
        return f"of {span(found, digits, 100)} %"

    return (
        f"`sage1` has an output error {of('sage1', 1)}, `sage2` {of('sage2', 1)}, `sage3` {of('sage3', 0)}; the "
        f"published SageAttention3 (`sage3_paper`) {of('sage3_paper', 0, False)}."
    )


def growth_of_perplexity() -> str:
    rows = pages.read_result("cpu-peaked_models")["perplexity"]
    more = {(row["provider"], row.get("outlier_handling")): f"{row['change']:.2%}".replace("%", " %") for row in rows}
    return (
        f"perplexity grows by {more['sage1', True]} with `sage1`, {more['sage2', True]} with `sage2`, and "
        f"{more['sage3_paper', False]} with the published recipe."
    )


def share_of_the_published_error() -> str:
    ratios = pages.read_result("cpu-output_errors")["sage3_over_paper"].values()
    share = math.prod(ratios) ** (1 / len(ratios))
    return f"`sage3` has {share:.2f} of the published recipe's error on the trained models (geometric mean)."


def errors_of_variants() -> dict[str, dict[str, float]]:
    return {row["variant"]: row["rel_l1"] for row in pages.read_result("cpu-output_errors")["rows"]}


def share_on_gaussian_tensors() -> str:
    errors = errors_of_variants()
    sage3, published = errors["+ equalising (`sage3`)"], errors["smooth Q, K (`sage3_paper`)"]
    ratio = mean(sage3[name] / published[name] for name in sage3 if name.startswith("Gaussian"))
    return f"On Gaussian tensors `sage3` has {ratio:.2f} of the published error"


def cost_of_leaving_q_as_it_is() -> str:
    errors = errors_of_variants()
    sage3, without = errors["+ equalising (`sage3`)"], errors["`sage3` without smooth Q"]
    more = [without[name] / sage3[name] - 1 for name in sage3 if not name.startswith("Gaussian")]
    return f"errors are {span(more, 0, 100)} % larger on correlated tokens and on the trained models."


def largest_errors_with_sinks() -> str:
    rows = pages.read_result("nvidia-h200-peaked")["rows"]
    sinks = {row["tensor"] for row in rows if "sink" in row["tensor"]}
    causal = {tensor for tensor in sinks if "causal" in tensor}
    middle = {tensor for tensor in causal if "in the middle" in tensor and "last queries" not in tensor}

    def largest(tensors):
        with_handling = [row for row in rows if row["tensor"] in tensors and row.get("outlier_handling")]
        return [
            f"{max(row['rel_l1'] for row in with_handling if row['provider'] == recipe):.4f}"
            for recipe in ("sage1", "sage2", "sage3")
        ]

    first, second, third = (largest(tensors) for tensors in (sinks - causal, causal - middle, middle))
    return (
        f"without causality, {len(sinks - causal)} tensors of 8,192 to 119,056 keys (a mass of 0.5, 0.8 or 0.95, one "
        f"sink or four, at each of the three places): {first[0]} (`sage1`), {first[1]} (`sage2`) and {first[2]} "
        f"(`sage3`); - with causality, {len(causal - middle)} tensors: {second[0]}, {second[1]} and {second[2]}; - in "
        f"causal calls with as many queries as keys and the sink in the middle, {len(middle)} tensors: {third[0]}, "
        f"{third[1]} and {third[2]}."
    )


def gradient_errors_of(variant: str) -> dict[str, dict[str, float]]:
    """Return the relative L1 errors of a variant's gradients, by tensors and gradient."""
    (row,) = (row for row in pages.read_result("cpu-gradient_errors")["rows"] if row["variant"] == variant)
    tensors = ("Gaussian σ=1", "Gaussian σ=3", "Gaussian σ=10", "DiT-like", "tiny video", "tiny_llama")
    return {name: {one: row[name][one]["rel_l1"] for one in ("dQ", "dK", "dV")} for name in tensors}


def share_of_the_published_gradient_error() -> str:
    ours, published = gradient_errors_of("`sage_bwd`"), gradient_errors_of("published")
    names = "Gaussian σ=1", "tiny video"
    ratios = [ours[name][one] / published[name][one] for name in names for one in ours[name]]
    return f"At σ = 1 and on the video model it has {span(ratios, 2)} of the published recipe's error."


def growth_by_an_8_bit_dp() -> str:
    ours = gradient_errors_of("`sage_bwd`")

    def growth(variant):
        theirs = gradient_errors_of(variant)
        return span([theirs[name]["dQ"] / ours[name]["dQ"] for name in ours], 1)

    return (
        f"In FP8, dQ's error is {growth('`sage_bwd`, dO·Vᵀ in FP8')} times as large. In INT8 with a scale per token, "
        f"it is {growth('`sage_bwd`, dO·Vᵀ in INT8')} times as large."
    )


def gain_by_smoothing_k() -> str:
    smooth, not_smooth = gradient_errors_of("`sage_bwd`"), gradient_errors_of("`sage_bwd`, no smooth K")
    error, without = (errors["DiT-like"]["dQ"] for errors in (smooth, not_smooth))
    return f"on DiT-like tensors dQ's error is {error:.3f} with smoothing and {without:.3f} without."


def time_relative_to_flash_attention_3_in_training() -> str:
    shapes: dict[str, dict[str, float]] = {}
    for row in pages.read_result("nvidia-h200-forward_backward")["rows"]:
        shapes.setdefault(row["shape"], {})[row["provider"]] = row["ms"]
    times = [ms["sage_hf:sage_bwd"] / ms["fa3"] for ms in shapes.values()]
    return f"`sage_bwd` takes {min(times):.2f} to {max(times):.2f} × the time of FlashAttention 3"


def sparse_quality_of(*runs: str) -> list[str]:
    """Return mean right clips and mean PSNR of ways to run the dense models, over seeds."""
    rows, found = pages.read_result("nvidia-h200-sparse_quality")["rows"], []
    for run in runs:
        of_run = [row for row in rows if (row["trained"], row["run"]) == ("dense", run)]
        found.append(f"{mean(row['score']['all'] for row in of_run):.0f}")
        if run != "exact":
            found[-1] += f" ({mean(row['psnr'] for row in of_run):.0f} dB)"
    return found


def what_few_bits_cost_a_video_model() -> str:
    exact, *few = sparse_quality_of("exact", "sage1", "sage2", "sage3", "sage3_paper")
    return (
        f"{exact} of 48: `sage1` {few[0]}, `sage2` {few[1]}, `sage3` {few[2]}, the published FP4 recipe {few[3]}. In "
        "brackets is the PSNR against exact attention."
    )


def what_untrained_sparsity_costs() -> str:
    half, quarter, later = sparse_quality_of(
        "sage2, subblock 0.5", "sage2, subblock 0.25", "sage2, subblock 0.25, 3 dense steps"
    )
    return f"with half of the tiles {half}, with a quarter {quarter}, with a quarter after three dense steps {later}."


def what_a_pooled_tail_mends() -> str:
    half, quarter = sparse_quality_of("exact, subblock 0.5, pooled tail", "exact, subblock 0.25, pooled tail")
    return f"with half of the tiles {half}, with a quarter {quarter}."


FIGURES: list[tuple[str, Callable[[], str]]] = [
    ("accuracy.md", errors_of_trained_models),
    ("accuracy.md", growth_of_perplexity),
    ("accuracy.md", share_of_the_published_error),
    ("accuracy.md", share_on_gaussian_tensors),
    ("accuracy.md", cost_of_leaving_q_as_it_is),
    ("accuracy.md", largest_errors_with_sinks),
    ("training.md", share_of_the_published_gradient_error),
    ("training.md", growth_by_an_8_bit_dp),
    ("training.md", gain_by_smoothing_k),
    ("training.md", time_relative_to_flash_attention_3_in_training),
    ("sparse.md", what_few_bits_cost_a_video_model),
    ("sparse.md", what_untrained_sparsity_costs),
    ("sparse.md", what_a_pooled_tail_mends),
]


@pytest.mark.parametrize(("page", "sentence"), FIGURES, ids=lambda one: getattr(one, "__name__", one))
def test_figures_in_prose_match_the_results(page, sentence):
    assert sentence() in prose(page)
