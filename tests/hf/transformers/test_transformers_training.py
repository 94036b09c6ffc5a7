"""Training transformers models: low-bit gradients with padding, exact ones for other masks, and what the modes run."""

from __future__ import annotations

import ast
import functools
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from transformers import (
    AttentionMaskInterface,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    StaticCache,
    masking_utils,
)
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

import sage_hf
from sage_hf import SageConfig, record
from sage_hf.config import LayerRule
from sage_hf.sources import source_of
from sage_hf.transformers import attention_layers
from sage_hf.transformers.attention import sage_attention_forward
from sage_hf.transformers.inspection import models_of
from sage_hf.transformers.masks import sage_mask, sage_training_mask
from sage_kernels.spec.recipe import RECIPES
from tests.helpers.tiny_transformers import (
    DECODERS,
    MODELS,
    SERVED,
    TOKENS,
    WITH_STATIC_CACHE,
    TinyModel,
    of_real_tokens,
    run,
)
from tests.hf.transformers.test_transformers_attention import Layer, bool_mask, qkv

TRAINABLE = [name for name, recipe in RECIPES.items() if recipe.backward is not None]
BY_NAME = {"ids": lambda value: getattr(value, "name", value)}
LLAMA = MODELS["llama"]


@pytest.fixture
def full_masks() -> Iterator[None]:
    """Masks of recipes with gradients as those of the others."""
    AttentionMaskInterface.register("sage_bwd_emulate", sage_mask)
    yield
    AttentionMaskInterface.register("sage_bwd_emulate", sage_training_mask)


def plans(model: nn.Module) -> set[tuple[str, str]]:
    """(recipe, reason) of all that the layers ran."""
    return {
        (plan.recipe, plan.reason) for layer in attention_layers(model).values() for plan in record.last_plans(layer)
    }


def loss_of(model: nn.Module, inputs: dict[str, torch.Tensor], **more: object) -> torch.Tensor:
    labels = inputs["input_ids"]
    if "attention_mask" in inputs:
        labels = labels.masked_fill(inputs["attention_mask"] == 0, -100)
    return model(**inputs, labels=labels, **more).loss


def gradients(model: nn.Module, inputs: dict[str, torch.Tensor], **more: object) -> list[torch.Tensor]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(loss_of(model, inputs, **more), parameters))


@pytest.mark.parametrize("recipe", TRAINABLE)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_training_lowers_the_loss_in_few_bits(recipe: str, padding: str) -> None:
    model, inputs = LLAMA.build(recipe).train(), LLAMA.inputs(padding)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(5):
        loss = loss_of(model, inputs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert plans(model) == {(recipe, "")}


@pytest.mark.parametrize("tiny", [tiny for tiny in SERVED if tiny.kind == "encoder"], **BY_NAME)
def test_encoders_train_in_few_bits_with_padding(tiny: TinyModel) -> None:
    model, inputs = tiny.build("sage_bwd").train(), tiny.inputs("right")
    loss_of(model, inputs).backward()
    assert plans(model) == {("sage_bwd", "")}


@pytest.mark.parametrize("padding", ["left", "right"])
def test_gradients_of_a_padded_batch_point_where_exact_ones_do(padding: str) -> None:
    """A lost mask, or lost causality, is an error of order 1."""
    inputs = LLAMA.inputs(padding)
    ours, exactly = (gradients(LLAMA.build(name).train(), inputs) for name in ("sage_bwd", "sage_exact"))
    ours, exactly = (torch.cat([gradient.flatten() for gradient in some]) for some in (ours, exactly))
    assert torch.cosine_similarity(ours, exactly, dim=0) > 0.98


@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_tokens_change_no_gradient(padding: str) -> None:
    inputs = LLAMA.inputs(padding)
    real = inputs["attention_mask"].bool()
    other = {**inputs, "input_ids": torch.where(real, inputs["input_ids"], 3)}
    model = LLAMA.build("sage_bwd").train()
    predicted = real & real.roll(1, 1)  # not the first token after padding, which a padding token predicts
    found = []
    for some in (inputs, other):
        labels = some["input_ids"].masked_fill(~predicted, -100)
        found.append(torch.autograd.grad(model(**some, labels=labels).loss, list(model.parameters())[1:]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


OTHER_MASKS = {
    "window": (MODELS["mistral"], {}),
    "packed": (LLAMA, {"position_ids": torch.cat([torch.arange(30), torch.arange(TOKENS - 30)])[None]}),
    "own": (LLAMA, {"attention_mask": torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.bool).tril().triu(-20)}),
}


@pytest.mark.parametrize(("tiny", "inputs"), OTHER_MASKS.values(), ids=OTHER_MASKS)
def test_other_masks_train_exactly_and_it_is_recorded(tiny: TinyModel, inputs: dict) -> None:
    inputs = {**tiny.inputs(), **inputs}
    ours = tiny.build("sage_bwd").train()
    labels = tiny.inputs()["input_ids"]
    found = []
    for model in (ours, tiny.build("sage_exact").train()):
        loss = model(**inputs, labels=labels, use_cache=False).loss
        found.append(torch.autograd.grad(loss, list(model.parameters())))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    ((recipe, reason),) = plans(ours)
    assert recipe == "exact" and "the same for all queries" in reason


def test_what_a_model_adds_to_attention_trains_exactly() -> None:
    for name, reason in (("gemma2", "softcap"), ("gpt_oss", "sinks")):
        model = MODELS[name].build("sage_bwd").train()
        loss_of(model, MODELS[name].inputs("right")).backward()
        ((recipe, why),) = plans(model)
        assert recipe == "exact" and reason in why


@pytest.fixture
def asked_for_a_mask() -> Iterator[dict]:
    """Record what transformers asks the mask function of a padded causal batch."""
    asked: dict = {}
    AttentionMaskInterface.register("sage_bwd_emulate", lambda **kwargs: asked.update(kwargs) or sage_mask(**kwargs))
    run(LLAMA.build("sage_bwd_emulate"), **LLAMA.inputs("right"))
    AttentionMaskInterface.register("sage_bwd_emulate", sage_training_mask)
    yield asked


def test_padding_comes_alone_only_where_it_is_all_that_a_mask_would_say(asked_for_a_mask: dict) -> None:
    padding = asked_for_a_mask["attention_mask"]
    assert sage_training_mask(**asked_for_a_mask) is padding and padding.shape == (2, TOKENS)
    window = masking_utils.sliding_window_causal_mask_function(20)
    longer = torch.cat([padding, padding[:, :1]], 1)
    for change in (
        {"mask_function": window},
        {"mask_function": window, "local_size": 20},
        {"allow_is_causal_skip": False},
        {"kv_length": TOKENS + 1, "attention_mask": longer},
        {"kv_offset": 1},
        {"config": MODELS["t5"].build("eager").config},  # hands no such mask on: it cannot run flash attention
    ):
        mask = sage_training_mask(**asked_for_a_mask | change)
        assert mask.dim() == 4 and mask.shape[2] == TOKENS, change
        assert torch.equal(mask, sage_mask(**asked_for_a_mask | change))
    nothing_padded = {"attention_mask": torch.ones_like(padding)}
    assert sage_training_mask(**asked_for_a_mask | nothing_padded) is None


def test_padding_comes_alone_where_another_class_only_holds_the_model(asked_for_a_mask: dict) -> None:
    class RewardModel(PreTrainedModel):
        config_class = type(asked_for_a_mask["config"])

    models_of.cache_clear()
    assert RewardModel.config_class is LlamaConfig
    assert sage_training_mask(**asked_for_a_mask) is asked_for_a_mask["attention_mask"]


NEAR_KEYS = torch.arange(TOKENS)[:, None] - torch.arange(TOKENS) < 40


class Near(LlamaAttention):
    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor, **kwargs: object) -> tuple:
        return super().forward(hidden_states, attention_mask=attention_mask & NEAR_KEYS, **kwargs)


class WrappedNear(LlamaAttention):
    @functools.wraps(LlamaAttention.forward)
    def forward(self, hidden_states: torch.Tensor, attention_mask: torch.Tensor, **kwargs: object) -> tuple:
        return LlamaAttention.forward(self, hidden_states, attention_mask=attention_mask & NEAR_KEYS, **kwargs)


NEAR_CLASSES, this_module = {"near": Near}, sys.modules[__name__]


class NearConfig(LlamaConfig):
    pass


class WrappedNearConfig(LlamaConfig):
    pass


class NearLlama(LlamaForCausalLM):
    config_class = NearConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.layers[0].self_attn = Near(config, 0)


class WrappedNearLlama(LlamaForCausalLM):
    config_class = WrappedNearConfig

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        self.model.layers[0].self_attn = WrappedNear(config, 0)


def near_llama(build: Callable[..., None]) -> type:
    """Return a class of models whose first attention layer another constructor builds."""

    class Config(LlamaConfig):
        pass

    class Layer(LlamaDecoderLayer):
        __init__ = build

    class Model(LlamaForCausalLM):
        config_class = Config

        def __init__(self, config: LlamaConfig) -> None:
            super().__init__(config)
            self.model.layers[0] = Layer(config, 0)

    return Model


def by_table(self: LlamaDecoderLayer, config: LlamaConfig, index: int) -> None:
    LlamaDecoderLayer.__init__(self, config, index)
    self.self_attn = NEAR_CLASSES["near"](config, index)


def by_module(self: LlamaDecoderLayer, config: LlamaConfig, index: int) -> None:
    LlamaDecoderLayer.__init__(self, config, index)
    self.self_attn = this_module.Near(config, index)


@pytest.mark.parametrize("model_class", [NearLlama, WrappedNearLlama, near_llama(by_table), near_llama(by_module)])
def test_a_layer_of_your_own_that_computes_with_its_mask_keeps_causality(model_class: type) -> None:
    """Padding alone of one sequence would broadcast with what it is combined with."""
    inputs = {name: x[1:] for name, x in LLAMA.inputs("left").items()}
    outputs = []
    for implementation in ("sdpa", "sage_bwd_emulate"):
        torch.manual_seed(0)
        config = LLAMA.make_config(model_class.config_class)
        model = model_class._from_config(config, attn_implementation=implementation).eval()
        outputs.append(of_real_tokens(run(model, **inputs), inputs))
    assert (outputs[1] - outputs[0]).norm() < 0.1 * outputs[0].norm()


FUNCTIONS = {
    "near": lambda attention_mask: attention_mask & NEAR_KEYS,
}


def test_code_whose_source_is_a_part_of_a_statement_may_compute_with_its_mask() -> None:
    assert source_of(FUNCTIONS["near"].__code__) is None


def test_source_is_parsed_again_if_another_thread_disturbed_the_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that are built in several threads at once have their source read; Python before 3.12.2 may fail then."""
    parse, disturbed = ast.parse, []

    def disturbed_once(text: str) -> ast.Module:
        if not disturbed:
            disturbed.append(text)
            raise SystemError("AST constructor recursion depth mismatch")
        return parse(text)

    monkeypatch.setattr(ast, "parse", disturbed_once)
    assert source_of(Near.forward) is not None and disturbed


CASES = [
    pytest.param(tiny, padding, id=f"{tiny.name}-{padding}")
    for tiny in SERVED
    if tiny.takes_padding
    for padding in ("left", "right")
]


@pytest.mark.parametrize(("tiny", "padding"), CASES)
def test_inference_is_the_same_as_with_full_masks(tiny: TinyModel, padding: str, request) -> None:
    inputs = tiny.inputs(padding)
    model = tiny.build("sage_bwd_emulate")
    found = of_real_tokens(run(model, **inputs), inputs)
    request.getfixturevalue("full_masks")
    assert torch.equal(found, of_real_tokens(run(model, **inputs), inputs))


@pytest.mark.parametrize("tiny", [tiny for tiny in DECODERS if tiny in WITH_STATIC_CACHE], **BY_NAME)
@pytest.mark.parametrize("cache", [None, "static"])
def test_generating_is_the_same_as_with_full_masks(tiny: TinyModel, cache: str | None, request) -> None:
    options = {} if cache is None else {"cache_implementation": cache}
    model, inputs = tiny.build("sage_bwd_emulate"), tiny.inputs("left")

    def generate() -> torch.Tensor:
        with torch.no_grad():
            return model.generate(**inputs, max_new_tokens=4, do_sample=False, **options)

    found = generate()
    request.getfixturevalue("full_masks")
    assert torch.equal(found, generate())


def test_a_batch_in_a_static_cache_keeps_its_full_mask() -> None:
    model, inputs = LLAMA.build("sage_bwd_emulate"), LLAMA.inputs("left")
    found = []
    for length in (TOKENS, TOKENS + 20):
        cache = StaticCache(config=model.config, max_cache_len=length)
        found.append(of_real_tokens(run(model, **inputs, past_key_values=cache), inputs))
    plain = of_real_tokens(run(model, **inputs), inputs)
    assert torch.equal(found[0], plain)
    assert (found[1] - plain).abs().max() <= 1e-4 * plain.abs().max()


@pytest.mark.parametrize("recipe", ["exact", "sage3", "sage_bwd"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "extra", ["nothing", "dropout", "softcap", "s_aux", "position_bias", "output_attentions", "temper"]
)
def test_a_two_dimensional_mask_is_padding_under_causality(
    recipe: str, grad: bool, extra: str, no_recent_keys: None
) -> None:
    """`recipe` is what a rule or the mode gives the layer; the masks are those of the implementation's name."""
    values = {
        "dropout": 0.5,
        "softcap": 2.0,
        "s_aux": torch.tensor([0.3, -1.0]),
        "position_bias": torch.randn(1, 2, 20, 20, generator=torch.Generator().manual_seed(4)),
        "output_attentions": True,
        "temper": 2.0,
    }
    extras = {extra: values[extra]} if extra in values else {}
    layer = Layer(is_causal=False)
    layer.sage_recipe, layer.sage_fallback, layer.sage_implementation = recipe, "emulate", "sage_bwd"
    padding = torch.ones(2, 20, dtype=torch.bool)
    padding[0, 15:] = False
    full = padding[:, None, None] & torch.ones(20, 20, dtype=torch.bool).tril()
    inputs = [x.requires_grad_(grad) for x in qkv()]
    found = []
    for mask in (padding, full):
        torch.manual_seed(0)
        found.append(sage_attention_forward(layer, *inputs, mask, **extras, recipe="sage_bwd")[0])
    if grad and recipe == "sage_bwd" and extra == "nothing":
        assert (found[0] - found[1]).abs().max() < 0.05  # the second is exact
    else:
        assert torch.equal(*found)


def test_a_mask_for_each_query_still_beats_causality() -> None:
    query, key, value = qkv()
    found = [
        sage_attention_forward(Layer(), query, key, value, mask, recipe=recipe)[0]
        for recipe in ("sage_bwd", "exact")
        for mask in (bool_mask(), torch.ones(2, 1, 1, 20, dtype=torch.bool))
    ]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])  # too short: exact in inference


@pytest.mark.audit
def test_a_compiled_model_trains_as_the_model_does() -> None:
    inputs = LLAMA.inputs("right")
    expected = gradients(LLAMA.build("sage_bwd").train(), inputs, use_cache=False)
    torch.compiler.reset()
    compiled = torch.compile(LLAMA.build("sage_bwd").train(), backend="aot_eager", fullgraph=True)
    found = gradients(compiled, inputs, use_cache=False)
    assert {outcome.recipe for outcome in record.outcomes_outside_layers()} == {"sage_bwd"}
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-4 * b.abs().max() + 1e-7


def test_a_compiled_model_without_a_mask_trains_exactly(
    caplog: pytest.LogCaptureFixture,
) -> None:
    torch.compiler.reset()
    model, inputs = LLAMA.build("sage_bwd").train(), LLAMA.inputs()
    loss = loss_of(torch.compile(model, backend="eager", fullgraph=True), inputs, use_cache=False)
    assert not record.outcomes_outside_layers() and "the same for all queries and heads" in caplog.text
    assert torch.allclose(loss, loss_of(LLAMA.build("sage_exact").train(), inputs, use_cache=False))


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(reentrant: bool) -> None:
    inputs = LLAMA.inputs("left")
    expected = gradients(LLAMA.build("sage_bwd").train(), inputs)
    model = LLAMA.build("sage_bwd").train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    loss_of(model, inputs, use_cache=False).backward()
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, wanted)


def test_the_mode_chooses_the_recipe_and_rules_win() -> None:
    model, inputs = LLAMA.build("sdpa"), LLAMA.inputs("left")
    before = [set(vars(module)) for module in model.modules()]
    exact = run(model, **inputs)
    config = SageConfig("sage3", layers=(LayerRule("model.layers.1.*", "sage2"),), training="sage_bwd")
    with sage_hf.apply(model, config):
        asked = [row.asked for row in sage_hf.explain(model).rows]
        assert asked == ["sage3, training: sage_bwd", "sage2"]
        model.train()
        loss_of(model, inputs).backward()
        model.eval()
        run(model, **inputs)
        ran = [[plan.recipe for plan in record.last_plans(layer)] for layer in attention_layers(model).values()]
        assert ran == [["sage_bwd", "sage3"], ["exact", "sage2"]]
        rows = [(row.layer, row.asked, row.recipe, row.calls) for row in sage_hf.explain(model).rows]
        assert rows[:2] == [
            ("model.layers.0.self_attn", "sage_bwd", "sage_bwd", 1),
            ("model.layers.0.self_attn", "sage3", "sage3", 1),
        ]
    assert [set(vars(module)) for module in model.modules()] == before
    assert torch.equal(run(model, **inputs), exact)


@pytest.mark.parametrize("padding", ["left", "right"])
def test_a_rule_alone_trains_its_layers_in_few_bits_with_padding(padding: str) -> None:
    model, inputs = LLAMA.build("sdpa").train(), LLAMA.inputs(padding)
    expected = gradients(model, inputs)
    with sage_hf.apply(model, SageConfig("exact", layers=(LayerRule("model.layers.1.*", "sage_bwd"),))):
        found = gradients(model, inputs)
        ran = [(row.asked, row.recipe) for row in sage_hf.explain(model).rows]
    assert ran == [("exact", "exact"), ("sage_bwd", "sage_bwd")]
    found, expected = (torch.cat([gradient.flatten() for gradient in some]) for some in (found, expected))
    assert torch.cosine_similarity(found, expected, dim=0) > 0.98


def test_the_shipped_configuration_trains_in_int8_and_infers_in_fp4(no_recent_keys: None) -> None:
    model = LLAMA.build("sdpa")
    with sage_hf.apply(model, "train-int8-infer-fp4"):
        low_bit = run(model, **LLAMA.inputs("right"))
        assert plans(model) == {("sage3", "")}
    model.set_attn_implementation("sage3")
    inputs = LLAMA.inputs("right")
    assert torch.equal(of_real_tokens(low_bit, inputs), of_real_tokens(run(model, **inputs), inputs))
