"""Whatever type of model computes it, exact attention of ours gives what eager attention gives."""

from __future__ import annotations

import logging

import pytest
import torch

from sage_hf.transformers import attention_layers
from tests.helpers import model_zoo

ROUNDING = torch.finfo(torch.float32).eps ** 0.5
"""Half of the digits: what a model, whose experts may change, makes of rounding; a mask that is lost is of order 1."""


def distances(model_type: str, implementation: str) -> dict[str, float]:
    """The relative distance of a model's outputs from eager attention's, by the case; empty if it cannot be built."""
    try:
        eager, other = (model_zoo.build(model_type, name) for name in ("eager", implementation))
    except Exception:  # of more kinds than can be listed: a config that small may make no model
        return {}
    found = {}
    for name, calls in model_zoo.cases(eager) if attention_layers(other) else ():
        try:
            expected, again = (model_zoo.run(eager, name, calls) for _ in range(2))
        except Exception:  # of as many kinds: these may be no inputs for the model
            continue
        if torch.equal(expected, again):  # it draws nothing
            found[name] = ((model_zoo.run(other, name, calls) - expected).norm() / expected.norm()).item()
    return found


@pytest.fixture
def quiet() -> None:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("model_type", ["deepseek_v4", "gpt_oss", "gemma4_text", "doge", "bert"])
def test_models_of_odd_masks_compute_what_eager_attention_computes(model_type: str, quiet: None) -> None:
    if model_type not in model_zoo.NAMES:
        pytest.skip(f"this transformers has no {model_type}")
    if not model_zoo.build(model_type, "eager")._supports_attention_backend:
        pytest.skip(f"{model_type} takes no registered attention in this transformers")
    found = distances(model_type, "sage_exact")
    assert found and max(found.values()) < ROUNDING


@pytest.mark.audit
def test_every_model_type_is_as_near_to_eager_attention_as_sdpa(quiet: None) -> None:
    """A few types differ between transformers' own two, where one lacks a mask."""
    found = {model_type: distances(model_type, "sage_exact") for model_type in model_zoo.NAMES}
    wrong = {model_type: cases for model_type, cases in found.items() if not all(x < ROUNDING for x in cases.values())}
    assert sum(map(bool, found.values())) >= 100
    assert not {
        name: cases for name, cases in wrong.items() if cases != pytest.approx(distances(name, "sdpa"), ROUNDING)
    }
