"""Masks of models that nobody has listed: what is made for a model is told by its class alone."""

from __future__ import annotations

import inspect

import pytest
import torch
from accelerate import hooks
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel, masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sage_hf import record
from sage_hf.names import NAMES
from sage_hf.transformers import attention_layers, masks
from sage_hf.transformers.masks import Causality, causality_of
from tests.helpers.tiny_transformers import MODELS, run
from tests.hf.transformers.test_transformers_generation import behind_a_cache

TOKENS, HEADS, WIDTH = 80, 2, 32


class AddingConfig(PretrainedConfig):
    model_type = "adding"


class CuttingConfig(PretrainedConfig):
    model_type = "cutting"


def eager_attention_forward(module, query, key, value, attention_mask, scaling, **kwargs):
    return ((query @ key.mT * scaling + attention_mask).softmax(-1) @ value).transpose(1, 2), None


class PlainAttention(nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.config, self.is_causal = config, True

    def forward(self, query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        name = self.config._attn_implementation
        attend = eager_attention_forward if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]
        heads = [x.unflatten(-1, (HEADS, -1)).transpose(1, 2) for x in (query, key, key)]
        return attend(self, *heads, attention_mask, scaling=0.25)[0].flatten(2)


class AddingAttention(PlainAttention):
    """It brings keys of its own, and appends to the mask how much they count."""

    def forward(self, query: torch.Tensor, key: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        own = torch.linspace(-2.0, 0.0, 8).expand(len(query), 1, query.shape[1], -1)
        attention_mask = torch.cat([attention_mask, own.to(attention_mask.dtype)], -1)
        return super().forward(query, torch.cat([key, 2 * key[:, :8]], 1), attention_mask)


class OwnModel(PreTrainedModel):
    _supports_sdpa = _supports_flash_attn = _supports_attention_backend = True

    def make_mask(self, hidden: torch.Tensor) -> torch.Tensor | None:
        given = {"config": self.config, "inputs_embeds": hidden, "input_embeds": hidden}
        given["cache_position"] = torch.arange(hidden.shape[1])
        names = inspect.signature(masking_utils.create_causal_mask).parameters
        asked = [name for name, one in names.items() if one.default is inspect.Parameter.empty or name in given]
        return masking_utils.create_causal_mask(**{name: given.get(name) for name in asked if name != "kwargs"})


class AddingModel(OwnModel):
    config_class = AddingConfig
    _supports_sdpa = False

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.attention = AddingAttention(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.attention(hidden, hidden, self.make_mask(hidden))


class CuttingModel(OwnModel):
    """It computes its last tokens only, but for sdpa without a mask, to which causality would say otherwise."""

    config_class = CuttingConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.attention = PlainAttention(config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        mask, last = self.make_mask(hidden), slice(-20, None)
        if self.config._attn_implementation == "sdpa" and mask is None:
            return self.attention(hidden, hidden, None)[:, last]
        return self.attention(hidden[:, last], hidden, None if mask is None else mask[:, :, last])


@pytest.mark.parametrize("recipe", ["sage_exact", "sage2_emulate", "sage_bwd_emulate"])
@pytest.mark.parametrize("model_class", [AddingModel, CuttingModel])
def test_models_that_change_their_mask_or_queries_compute_as_with_eager(
    model_class: type[OwnModel], recipe: str
) -> None:
    eager, ours = (
        model_class._from_config(model_class.config_class(), attn_implementation=name).eval()
        for name in ("eager", recipe)
    )
    hidden = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected, found = eager(hidden), ours(hidden)
    (layer,) = attention_layers(ours).values()
    (plan,) = record.last_plans(layer)
    assert plan.request.recipe == NAMES[recipe][0]
    error = (found - expected).norm() / expected.norm()
    assert error < (1e-5 if recipe == "sage_exact" else 0.1)  # causality or a bias that is lost: .3


@pytest.mark.audit
@pytest.mark.parametrize("implementation", ["sage_exact", "sage2"])
def test_attention_outside_a_compiled_graph_reads_its_mask(implementation: str) -> None:
    """Padding alone, as a compiled model makes it, says nothing of causality."""
    model, tokens = MODELS["llama"].build(implementation), MODELS["llama"].inputs()["input_ids"][:1]
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "use_cache": False}
    expected = run(model, **inputs)
    for layer in attention_layers(model).values():
        layer.forward = torch.compiler.disable(layer.forward)
    torch.compiler.reset()
    torch.testing.assert_close(run(torch.compile(model, backend="eager"), **inputs), expected)


@pytest.mark.parametrize("name", ["sage_exact", "sage2", "sage_bwd"])
def test_a_mask_without_values_decides_nothing(name: str) -> None:
    """FakeTensorMode, by which memory is estimated, runs a padded batch as it does with `sdpa`."""
    model, inputs = MODELS["llama"].build(name), MODELS["llama"].inputs("left")
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits = run(model, **inputs)
    assert logits.shape == run(model, **inputs).shape


@behind_a_cache
def test_the_values_of_a_mask_decide_nothing_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph is replayed with other padding, and reading a value would end its capture."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    config, real = MODELS["llama"].build("sage_bwd").config, torch.ones(2, TOKENS, dtype=torch.bool)
    sizes = {"batch_size": 2, "kv_length": TOKENS, "kv_offset": 0, "config": config, "device": real.device}
    arguments = {"attention_mask": real, "mask_function": masking_utils.causal_mask_function, **sizes}
    assert masks.sage_training_mask(**arguments, q_length=TOKENS, q_offset=0) is not None
    behind = masks.sage_mask(**arguments, q_length=8, q_offset=TOKENS - 8)
    assert causality_of(behind, 8, TOKENS) is None


@pytest.mark.parametrize("name", ["sage2", "sage_bwd"])
def test_a_trace_of_calls_without_padding_serves_calls_with_padding(name):
    """`torch.jit.trace` keeps what a mask's values decide."""

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = MODELS["llama"].build(name)

        def forward(self, ids, mask):
            return self.model(input_ids=ids, attention_mask=mask, use_cache=False)[0]

    ids = torch.randint(2, 30, (2, 40))
    whole, padded = torch.ones_like(ids), torch.ones_like(ids)
    padded[1, :15] = 0
    with torch.no_grad():
        traced = torch.jit.trace(Logits(), (ids, whole), check_trace=False)
        for mask in (whole, padded):
            expected, found = (run(ids, mask)[mask.bool()] for run in (Logits(), traced))
            assert (found - expected).norm() <= 0.05 * expected.norm()


def test_a_mask_that_accelerate_copies_keeps_its_meaning() -> None:
    padding = torch.arange(40)[None] >= 7
    parameters = inspect.signature(masking_utils.create_causal_mask).parameters
    mask = masking_utils.create_causal_mask(
        config=LlamaConfig(attn_implementation="sage3"),
        attention_mask=padding,
        position_ids=torch.arange(40)[None],
        **{"inputs_embeds" if "inputs_embeds" in parameters else "input_embeds": torch.empty(1, 40, 8)},
        **{"cache" if "cache" in parameters else "past_key_values": None},
        **({"cache_position": torch.arange(40)} if "cache_position" in parameters else {}),
    )
    assert causality_of(mask, 40, 40).keys.equal(padding)
    sent = hooks.send_to_device({"attention_mask": mask, "use_cache": False}, torch.device("meta"))
    assert sent["use_cache"] is False
    copied = causality_of(sent["attention_mask"], 40, 40)
    assert copied == Causality(0, keys=copied.keys) and copied.keys.is_meta and copied.keys.shape == padding.shape
    mask.logical_not_()
    assert causality_of(hooks.send_to_device({"mask": mask}, torch.device("meta"))["mask"], 40, 40) is None
