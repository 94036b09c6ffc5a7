"""The attention function honours or refuses each argument that a model may send it."""

from __future__ import annotations

import inspect
from functools import partial
from importlib.metadata import version

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import sage_hf
from sage_hf import record
from sage_hf.transformers import attention_layers
from sage_hf.transformers.attention import sage_attention_forward
from sage_hf.transformers.keywords import NAMED
from sage_kernels.dispatch.plan import KernelUnavailableError
from sage_kernels.exact import sdpa
from tests.helpers.tiny_transformers import IN_FLOAT64, MODELS, TOKENS, TinyModel, run


class Layer(nn.Module):
    """An attention layer as models have them, with an eager attention in its module."""

    def __init__(self, is_causal: bool = True) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(self, attention_interface, *args, **kwargs):
        return attention_interface(self, *args, picks=kwargs.pop("picks", None), **kwargs)


def eager_attention_forward(module, query, key, value, attention_mask, scaling, dropout=0.0, temper=None, **kwargs):
    weights = query @ key.transpose(2, 3) * scaling + (0 if attention_mask is None else attention_mask)
    weights = (weights * (1 if temper is None else temper)).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


def qkv(q_len: int = 20, kv_len: int = 20, heads: int = 2, kv_heads: int = 2, v_head_dim: int = 16, batch: int = 2):
    generator = torch.Generator().manual_seed(0)
    shapes = ((batch, heads, q_len, 16), (batch, kv_heads, kv_len, 16), (batch, kv_heads, kv_len, v_head_dim))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)


def attend(layer: nn.Module, *args, recipe: str = "exact", **kwargs) -> torch.Tensor:
    return sage_attention_forward(layer, *args, recipe=recipe, **kwargs)[0].transpose(1, 2)


def bool_mask(q_len: int = 20, kv_len: int = 20) -> torch.Tensor:
    mask = torch.rand(2, 1, q_len, kv_len, generator=torch.Generator().manual_seed(2)) < 0.5
    return mask | (torch.arange(kv_len) == 0)


@pytest.mark.parametrize("module_causal", [True, False])
@pytest.mark.parametrize("keyword", [True, False, None])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("q_len", [1, 20])
def test_mask_beats_keyword_beats_module_and_one_query_sees_all(
    module_causal: bool, keyword: bool | None, masked: bool, q_len: int
) -> None:
    query, key, value = qkv(q_len)
    mask = bool_mask(q_len) if masked else None
    causal = (module_causal if keyword is None else keyword) and not masked and q_len > 1
    output = attend(Layer(module_causal), query, key, value, mask, is_causal=keyword)
    assert torch.equal(output, F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal))


def test_output_is_contiguous_in_the_layout_models_reshape() -> None:
    query, key, value = qkv(v_head_dim=24)
    output, weights = sage_attention_forward(Layer(), query, key, value, None, recipe="sage3")
    assert output.shape == (2, 20, 2, 24)
    assert output.is_contiguous()
    assert weights is None


def test_causal_prompt_in_a_static_cache_sees_only_what_is_filled() -> None:
    query, key, value = qkv(8, 20)
    key[:, :, 8:] = value[:, :, 8:] = float("nan")
    output = attend(Layer(), query, key, value, None)
    assert torch.equal(output, F.scaled_dot_product_attention(query, key[:, :, :8], value[:, :, :8], is_causal=True))


@pytest.mark.skipif(version("transformers") < "5", reason="before transformers 5, its sdpa cuts masks to the keys")
@pytest.mark.parametrize("kv_len", [15, 30])
@pytest.mark.parametrize("recipe", ["exact", "sage2"])
def test_a_mask_for_another_number_of_keys_is_refused(kv_len: int, recipe: str) -> None:
    with pytest.raises(ValueError, match="does not broadcast"):
        attend(Layer(), *qkv(), bool_mask(20, kv_len), recipe=recipe)


def test_learned_queries_of_batch_one_attend_to_every_sample() -> None:
    query, key, value = qkv()
    assert torch.equal(
        attend(Layer(False), query[:1], key, value, None),
        F.scaled_dot_product_attention(query[:1].expand(2, -1, -1, -1), key, value),
    )


def test_grouped_queries_other_scale_and_value_width() -> None:
    query, key, value = qkv(heads=4, kv_heads=2, v_head_dim=32)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=1.0, enable_gqa=True)
    assert torch.equal(attend(Layer(), query, key, value, None, scaling=1.0), expected)


@pytest.mark.parametrize("masking", ["bool", "additive", "causal", "none", "static_cache"])
def test_position_bias_is_added_under_every_mask(masking: str) -> None:
    query, key, value = qkv(20, 30 if masking == "static_cache" else 20)
    bias = torch.randn(1, 2, 20, key.shape[2], generator=torch.Generator().manual_seed(3))
    mask = {"bool": bool_mask(), "additive": torch.randn(2, 1, 20, 20)}.get(masking)
    output = attend(Layer(masking in ("causal", "static_cache")), query, key, value, mask, position_bias=bias)
    allowed = {"bool": mask, "causal": torch.ones(20, 20, dtype=torch.bool).tril()}.get(masking)
    if masking == "static_cache":
        allowed = torch.ones(20, 30, dtype=torch.bool).tril()
    scores = query.double() @ key.double().transpose(2, 3) / 4 + bias + (mask if masking == "additive" else 0)
    scores = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
    torch.testing.assert_close(output.double(), scores.softmax(-1) @ value.double(), rtol=1e-5, atol=1e-6)


def test_sinks_run_in_low_bits_and_exactly_with_gradients() -> None:
    query, key, value = qkv(TOKENS, TOKENS, heads=4, kv_heads=2)
    sinks = torch.tensor([-2.0, 0.0, 2.0, 8.0])
    scores = query.double() @ key.double().repeat_interleave(2, 1).transpose(2, 3) / 4
    scores = torch.cat([scores, sinks.double().view(1, 4, 1, 1).expand(2, 4, TOKENS, 1)], dim=-1)
    expected = scores.softmax(-1)[..., :-1] @ value.double().repeat_interleave(2, 1)

    def error(recipe: str, **tensors: torch.Tensor) -> float:
        output = attend(
            layer, query, key, value, None, recipe=recipe, is_causal=False, s_aux=tensors.get("s_aux", sinks)
        )
        return ((output - expected).norm() / expected.norm()).item()

    layer = Layer()
    plain = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    low_bit = attend(Layer(), query, key, value, None, recipe="sage3", is_causal=False)
    recipe_error = ((low_bit - plain).norm() / plain.norm()).item()
    assert error("exact") < 1e-6
    assert 1e-3 < error("sage3") < 2 * recipe_error
    assert record.last_plans(layer)[-1].recipe == "sage3"
    assert error("sage3", s_aux=sinks.clone().requires_grad_()) < 1e-6
    assert "sinks" in record.last_plans(layer)[-1].reason


def test_dropout_is_exact_with_the_same_reason_and_result_as_in_sage_attention() -> None:
    layer, inputs = Layer(), qkv()
    causal = {"is_causal": True, "dropout_p": 0.5}
    outputs = []
    for attention in (
        lambda: attend(layer, *inputs, None, recipe="sage3", dropout=0.5),
        lambda: record.run_in_layer(layer, lambda: sage_hf.sage_attention(*inputs, **causal, recipe="sage3")),
        lambda: F.scaled_dot_product_attention(*inputs, **causal),
    ):
        torch.manual_seed(0)
        outputs.append(attention())
    assert torch.equal(outputs[0], outputs[1]) and torch.equal(outputs[0], outputs[2])
    assert {plan.reason for plan in record.last_plans(layer)} == {"sage3 computes no attention dropout"}


@pytest.mark.parametrize("masking", ["causal", "bool", "none"])
def test_attention_weights_asked_for_come_from_the_models_own_eager_attention(masking: str) -> None:
    query, key, value = qkv()
    layer, mask = Layer(masking == "causal"), bool_mask() if masking == "bool" else None
    output, weights = sage_attention_forward(layer, query, key, value, mask, output_attentions=True, recipe="sage3")
    torch.testing.assert_close(output.transpose(1, 2), attend(layer, query, key, value, mask))
    torch.testing.assert_close(weights @ value, output.transpose(1, 2))
    assert record.last_plans(layer)[0].reason == "attention weights are asked for"


def test_a_keyword_only_the_models_eager_attention_knows_is_handed_to_it() -> None:
    query, key, value = qkv()
    layer = Layer(False)
    output = attend(layer, query, key, value, None, temper=2.0, recipe="sage3")
    assert torch.equal(
        output, eager_attention_forward(layer, query, key, value, None, 0.25, temper=2.0)[0].mT.mT.transpose(1, 2)
    )
    assert "temper" in record.last_plans(layer)[-1].reason


def test_a_keyword_the_layer_hands_on_and_nobody_knows_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Layer hands picks= to its attention function.*sdpa"):
        Layer()(
            lambda *args, **kwargs: sage_attention_forward(*args, recipe="sage3", **kwargs), *qkv(), None, picks=[1]
        )


def test_rows_without_a_key_are_zero_under_dropout_whatever_pytorch_makes_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sdpa, "sdpa", lambda query, key, value, **options: query + 7.0)  # as CUDA kernels may
    mask = torch.ones(1, 1, 20, 20, dtype=torch.bool)
    mask[:, :, 3] = False
    output = attend(Layer(), *qkv(), mask, recipe="sage3", dropout=0.5)
    assert not output[:, :, 3].any()
    assert output[:, :, 4].any()


def test_the_named_keywords_are_the_functions_parameters() -> None:
    assert set(inspect.signature(sage_attention_forward).parameters) == {*NAMED, "recipe", "fallback", "kwargs"}


def test_keywords_that_say_nothing_of_attention_pass() -> None:
    query, key, value = qkv()
    expected = attend(Layer(), query, key, value, None)
    ignored = {"sliding_window": 4, "position_ids": torch.arange(20), "picks": None, "passing_through_the_model": 1}
    assert torch.equal(attend(Layer(), query, key, value, None, **ignored), expected)


@pytest.mark.parametrize(
    "options",
    [{"dropout": 0.5}, {"softcap": 30.0}, {"s_aux": torch.zeros(2, requires_grad=True)}, {"output_attentions": True}],
    ids=["dropout", "softcap", "sinks", "weights"],
)
def test_fallback_error_refuses_calls_that_would_run_exactly(options) -> None:
    with pytest.raises(KernelUnavailableError, match="sage_bwd"):
        attend(Layer(), *qkv(), None, recipe="sage_bwd", fallback="error", **options)
    attend(Layer(), *qkv(), None, recipe="exact", fallback="error", **options)


def test_a_paged_cache_is_refused() -> None:
    batching = pytest.importorskip("transformers.generation.continuous_batching.cache")
    cache = object.__new__(batching.PagedAttentionCache)
    with pytest.raises(ValueError, match=r'continuous batching.*set_attn_implementation\("sdpa"\)'):
        attend(Layer(), *qkv(), None, cache=cache)


def test_sparse_attention_that_expects_a_kernel_to_pick_keys_is_refused() -> None:
    transformers = pytest.importorskip("transformers")
    if not hasattr(transformers, "DeepseekV32Config"):
        pytest.skip("this transformers has no DeepSeek V3.2")
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention

    layer = DeepseekV32Attention.__new__(DeepseekV32Attention)
    nn.Module.__init__(layer)
    with pytest.raises(TypeError, match="DeepseekV32Attention hands indices="):
        attend(layer, *qkv(), None, indices=torch.zeros(2, 20, 4, dtype=torch.int32))


def test_a_layers_own_recipe_and_fallback_win() -> None:
    model = MODELS["llama"].build("sage3")
    first, second = attention_layers(model).values()
    first.sage_recipe = "exact"
    second.sage_recipe, second.sage_fallback = "sage1", "emulate"
    run(model, **{"input_ids": MODELS["llama"].inputs()["input_ids"][:, :20]})
    assert record.last_plans(first)[0].request.recipe == "exact"
    # Twenty keys are too few for the default, not for emulation.
    assert (record.last_plans(second)[0].recipe, record.last_plans(second)[0].numerics) == ("sage1", "emulated")


@pytest.mark.parametrize("tiny", IN_FLOAT64, ids=lambda tiny: tiny.name)
def test_gradients_match_exact_attention(tiny: TinyModel, float64_softmax: None) -> None:
    def gradient(implementation: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        model = tiny.build(implementation, dtype)
        output = model(**{name: x.to(dtype) if x.is_floating_point() else x for name, x in tiny.inputs().items()})
        loss = output.logits_per_image if tiny.kind == "clip" else output.logits
        loss.square().mean().backward()
        for layer in attention_layers(model).values():
            for plan in record.last_plans(layer):
                assert plan.recipe == "exact"
                assert plan.reason
        assert any(record.last_plans(layer) for layer in attention_layers(model).values()) == (
            implementation != "eager"
        )
        return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])

    judge = gradient("eager", torch.float64)
    rounding = (gradient("eager") - judge).norm() + torch.finfo(torch.float32).eps * judge.norm()
    assert (gradient("sage3") - judge).norm() <= 2 * rounding


@pytest.mark.parametrize(
    ("recipe", "keywords"),
    [
        ("sage3", "mask"),
        pytest.param("exact", "none", marks=pytest.mark.audit),
        *(
            pytest.param("sage3", name, marks=pytest.mark.audit)
            for name in ("none", "softcap", "s_aux", "position_bias")
        ),
    ],
)
def test_compiles_into_one_graph_for_every_length(recipe: str, keywords: str) -> None:
    layer = Layer()

    def call(*states):
        query, key, value = (state.view(2, -1, 4, 16).transpose(1, 2) for state in states)
        length = query.shape[2]
        given = {
            "s_aux": lambda: {"s_aux": torch.ones(4)},
            "softcap": lambda: {"softcap": 2.0},
            "position_bias": lambda: {"position_bias": torch.ones(1, 4, length, length).cumsum(-1)},
        }.get(keywords, dict)()
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).tril() if keywords == "mask" else None
        return sage_attention_forward(layer, query, key, value, mask, recipe=recipe, position_ids=query, **given)[0]

    torch.compiler.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (TOKENS, TOKENS + 9):
        states = torch.randn(3, 2, length, 64, generator=torch.Generator().manual_seed(0)).unbind()
        torch.testing.assert_close(compiled(*states), call(*states))


def test_grouped_queries_compile_for_dynamic_numbers_of_heads() -> None:
    call = partial(sage_attention_forward, Layer(), attention_mask=None, recipe="exact")
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    for heads in (4, 6):
        query, key, value = torch.randn(2, heads, TOKENS, 16), *torch.randn(2, 2, 2, TOKENS, 16)
        output, _ = compiled(query=query, key=key, value=value)
        torch.testing.assert_close(output, call(query=query, key=key, value=value)[0])
