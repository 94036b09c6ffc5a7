"""Sparse self-attention in diffusers' denoisers: where it runs, in which order, and what `explain` says of it."""

import copy
import json
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import sage_hf
from sage_hf.config import LayerRule, SageConfig
from sage_hf.diffusers.processor import attention_layers, sage_of
from sage_hf.sparse import Sparse, TileOrder, layer
from sage_hf.sparse.grids import arguments_of, layout_of
from sage_kernels.dispatch.select import select
from tests.helpers import tiny_pipelines as tiny
from tests.helpers.families import family, run

EAGER = Sparse("subblock", keep=0.5, from_tokens=64)


def video(frames=3, size=16):
    """Inputs of the tiny CogVideoX with 226 text tokens and frames · (size / 2)² video tokens."""
    inputs = tiny.transformer_inputs()
    generator = torch.Generator().manual_seed(1)
    return inputs | {"hidden_states": torch.randn(1, frames, 4, size, size, generator=generator)}


def layers_of(model):
    return [sage_of(module).sparse for module in attention_layers(model).values()]


def predict(model, inputs):
    with torch.no_grad():
        return model(**inputs).sample


@pytest.mark.parametrize("router", ["mean", "subblock", "share"])
def test_all_tiles_kept_is_the_dense_model_in_any_order(router):
    """The order of tokens changes no result but by rounding."""
    model = tiny.transformer()
    expected = predict(model, video())
    with sage_hf.apply(model, SageConfig("sage2", sparse=Sparse(router, keep=1.0, from_tokens=64))):
        sparse = predict(model, video())
        assert all(
            one.statistics.ordered and one.statistics.calls == 1 and not one.statistics.dense
            for one in layers_of(model)
        )
        assert all(float(one.statistics.tiles) == 1 for one in layers_of(model))
    with sage_hf.apply(model, "sage2"):
        dense = predict(model, video())
    assert not torch.equal(sparse, expected)
    # Two recipes' errors, that with heavy keys and that without.
    assert (sparse - expected).norm() <= 2 * (dense - expected).norm() + 1e-3 * expected.norm()


def test_routers_see_text_first_and_video_in_tiles(monkeypatch):
    model, seen = tiny.transformer(), []
    with sage_hf.apply(model, SageConfig("sage2", sparse=EAGER)):
        shared = layers_of(model)[0].model
        route = type(shared.router).route

        def spy(self, query, key, scale=None, dense=()):
            seen.append((query, dense))
            return route(self, query, key, scale, dense)

        monkeypatch.setattr(type(shared.router), "route", spy)
        predict(model, video())
        assert shared.call.grid == (3, 8, 8)
        order = shared.order(226 + 192, torch.device("cpu"))
    assert order.text == slice(0, 226)
    assert torch.equal(order.tokens[:226], torch.arange(226))
    assert torch.equal(order.tokens[226:], 226 + TileOrder.of((3, 8, 8)).tokens)
    assert torch.equal(order.tokens[order.places], torch.arange(226 + 192))
    assert [dense for _, dense in seen] == [[slice(0, 226)]] * tiny.LAYERS


def test_sparse_attention_attends_to_reordered_tokens(monkeypatch):
    """Against a dense mask: each layer's output is exact attention under the chosen tiles, in the caller's order."""
    model, checked = tiny.transformer(), []
    plain = layer.sage_attention

    def spy(query, key, value, attn_mask=None, *, blocks=None, **options):
        if blocks is None:
            return plain(query, key, value, attn_mask, **options)
        checked.append(float(blocks.counts.float().mean()))
        mask = blocks.mask(key.shape[2], 0, query.shape[2])
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    expected = predict(model, video())
    monkeypatch.setattr(layer, "sage_attention", spy)
    with sage_hf.apply(model, SageConfig("sage2", sparse=Sparse("mean", keep=1.0, from_tokens=64))):
        assert torch.allclose(predict(model, video()), expected, atol=1e-5)
    assert len(checked) == tiny.LAYERS


@pytest.mark.parametrize("name", ["wan-t2v", "hunyuan-video", "ltx", "mochi", "cogvideox"])
def test_the_grid_of_known_families_matches_their_tokens(name):
    model, inputs = family(name).draw()
    found = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: found.append(layout_of(module).grid(module, arguments_of(module, args, kwargs))),
        with_kwargs=True,
    )
    lengths = []
    for module in attention_layers(model).values():
        module.register_forward_pre_hook(
            lambda module, args, kwargs: lengths.append((args[0] if args else kwargs["hidden_states"]).shape[1]),
            with_kwargs=True,
        )
    with torch.no_grad():
        run(model, inputs)
    handle.remove()
    (grid,) = found
    assert grid[0] * grid[1] * grid[2] in lengths


@pytest.mark.parametrize("sizes", [{}, {"num_frames": 1, "height": 1, "width": 1}], ids=["condition", "long"])
def test_a_video_told_by_coordinates_is_routed_in_raster_order(sizes):
    """LTX's pipelines with conditions give the coordinates of tokens, and no sizes or sizes of 1."""
    model, inputs = family("ltx").draw()
    tokens = 512
    inputs["hidden_states"] = torch.randn(2, tokens, 8, generator=torch.Generator().manual_seed(0))
    inputs = {name: x for name, x in inputs.items() if name not in ("num_frames", "height", "width")} | sizes
    inputs["video_coords"] = torch.rand(2, 3, tokens, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), sage_hf.apply(model, SageConfig("sage2", sparse=Sparse("mean", keep=0.5, from_tokens=64))):
        run(model, inputs)
        joint = [one.statistics for one in layers_of(model) if one.statistics.calls]
    assert joint and all(not one.ordered and float(one.tiles) == 0.5 for one in joint)


def test_text_that_lies_last_is_kept_and_its_padding_hidden():
    """HunyuanVideo's self-attention has a key-padding mask with the list."""
    model, inputs = family("hunyuan-video").draw()
    inputs["hidden_states"] = torch.randn(2, 4, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = run(model, inputs)
        with sage_hf.apply(model, SageConfig("sage2", sparse=Sparse("mean", keep=1.0, from_tokens=64))):
            output = run(model, inputs)
            joint = [one.statistics for one in layers_of(model) if one.statistics.calls]
    assert joint and all(one.ordered and not one.dense for one in joint)
    assert (output - expected).norm() / expected.norm() < 0.1


def test_a_family_through_diffusers_dispatch_is_routed_too():
    model, inputs = family("wan-t2v").draw()
    inputs["hidden_states"] = torch.randn(2, 4, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = run(model, inputs)
        with sage_hf.apply(model, SageConfig("sage2", sparse=Sparse("mean", keep=1.0, from_tokens=1))):
            output = run(model, inputs)
            kept = {name: sage_of(module).sparse.statistics for name, module in attention_layers(model).items()}
    assert all(one.calls == 1 and one.ordered for name, one in kept.items() if "attn1" in name)
    assert all(one.dense == {"cross-attention": 1} for name, one in kept.items() if "attn2" in name)
    assert (output - expected).norm() / expected.norm() < 0.1


def test_cross_attention_to_as_many_keys_as_queries_is_dense():
    model, inputs = family("wan-t2v").draw()
    generator = torch.Generator().manual_seed(0)
    inputs["hidden_states"] = torch.randn(2, 4, 3, 12, 20, generator=generator)
    inputs["encoder_hidden_states"] = torch.randn(2, 180, 16, generator=generator)
    with sage_hf.apply(model, SageConfig("sage2", sparse=Sparse("mean", keep=0.5, from_tokens=1))):
        run(model, inputs)
        kept = {name: sage_of(module).sparse.statistics for name, module in attention_layers(model).items()}
    assert all(one.calls == 1 and not one.dense for name, one in kept.items() if "attn1" in name)
    assert all(one.dense == {"cross-attention": 1} for name, one in kept.items() if "attn2" in name)


def test_short_calls_other_masks_and_gradients_run_densely_and_say_so():
    model = tiny.transformer()
    with sage_hf.apply(model, "sage2"):
        expected = predict(model, video())
    with sage_hf.apply(model, SageConfig("sage2", sparse=Sparse())):
        assert torch.equal(predict(model, video()), expected)
        why = "fewer than 4096 tokens, the configuration's from_tokens"
        assert all(one.statistics.dense == {why: 1} for one in layers_of(model))
        assert f"transformer_blocks.0-{tiny.LAYERS - 1}.attn1: 1 dense: {why}" in str(sage_hf.explain(model))
    one = layer.SparseLayer(layer.SparseModel(EAGER, model))
    inputs = [torch.randn(1, 2, 300, 32) for _ in range(3)]
    masked = torch.zeros(1, 1, 300, 300)
    one.attend(*inputs, masked, recipe="sage2", fallback=None)
    one.attend(*(x.requires_grad_() for x in inputs), None, recipe="sage2", fallback=None).sum().backward()
    inputs = [x.detach() for x in inputs]
    one.attend(inputs[0][:, :, :100], *inputs[1:], None, recipe="sage2", fallback=None)
    one.attend(*inputs, None, recipe="exact", fallback=None)
    one.attend(*(x[..., :8] for x in inputs), None, recipe="sage2", fallback=None)
    assert list(one.statistics.dense) == [
        "a mask other than a key-padding mask",
        "gradients are wanted",
        "cross-attention",
        "exact attention over a block list is no faster than dense attention",
        "sage2 does not run here: head_dim outside 16…256",
    ]
    assert one.statistics.calls == 0


def test_calls_that_run_exactly_are_dense_whichever_kernel_runs_them(routed, monkeypatch):
    """On a GPU, PyTorch without cuDNN attends for few queries."""

    def select_for_gpu(request, fallback):
        return select(replace(request, device_type="cuda", capability=(9, 0)), fallback)

    monkeypatch.setattr(layer, "select", select_for_gpu)
    one = layer.SparseLayer(layer.SparseModel(Sparse("mean", keep=0.5, from_tokens=1), torch.nn.Linear(1, 1)))
    query = torch.randn(1, 2, 8, 32, dtype=torch.bfloat16)
    one.attend(query, query, query, None, recipe="sage2", fallback=None)
    reason = "fewer than 16 queries or 64 keys: too short to gain from low-bit attention"
    assert one.statistics.dense == {f"sage2 does not run here: {reason}": 1}


def test_padding_where_text_is_not_known_runs_densely_and_says_so():
    """A router would not see it, and a row that keeps nothing but padding would be 0."""
    one = layer.SparseLayer(layer.SparseModel(EAGER, torch.nn.Linear(1, 1)))
    inputs = [torch.randn(1, 2, 300, 32) for _ in range(3)]
    mask = torch.arange(300) < 100
    output = one.attend(*inputs, mask.view(1, 1, 1, 300), recipe="sage2", fallback=None)
    assert list(one.statistics.dense) == ["a key-padding mask with unknown text tokens: a row might keep only padding"]
    truth = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask.view(1, 1, 1, 300))
    assert (output - truth).norm() / truth.norm() < 0.05


def test_a_share_of_next_to_nothing_keeps_one_tile():
    model = tiny.transformer()
    with sage_hf.apply(model, SageConfig("sage2", sparse=Sparse("mean", keep=1e-6, from_tokens=64))):
        assert predict(model, video(6, 24)).isfinite().all()
        # Rows of text attend to all, and text, 226 tokens in two tiles of 128, is attended to by all.
        tiles = -(-(226 + 864) // 128)
        rest = tiles - 2
        assert float(layers_of(model)[0].statistics.tiles) <= (2 * tiles + rest * 3) / tiles**2 + 1e-6


def test_without_text_one_tile_is_kept():
    model, inputs = family("wan-t2v").draw()
    inputs["hidden_states"] = torch.randn(2, 4, 3, 16, 24, generator=torch.Generator().manual_seed(0))
    with sage_hf.apply(model, SageConfig("sage2", sparse=Sparse("mean", keep=1e-6, from_tokens=1))):
        run(model, inputs)
        tiles = -(-3 * 8 * 12 // 128)
        assert float(sage_of(model.blocks[0].attn1).sparse.statistics.tiles) == pytest.approx(1 / tiles)


def test_padding_goes_with_the_order():
    model = tiny.transformer()
    shared = layer.SparseModel(Sparse("mean", keep=1.0, from_tokens=64), model)
    shared.call.grid = (3, 8, 8)
    one = layer.SparseLayer(shared)
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 2, 226 + 192, 32, generator=generator) for _ in range(3)]
    mask = torch.rand(2, 1, 1, 226 + 192, generator=generator) < 0.7
    output = one.attend(*inputs, mask, recipe="sage2", fallback=None)
    truth = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask)
    assert one.statistics.ordered
    assert (output - truth).norm() / truth.norm() < 0.05


def test_heads_get_shares_of_their_own_once_a_layer():
    """Sharp heads need few tiles; all keep about the same weight, where equal shares do not."""
    generator = torch.Generator().manual_seed(0)
    sharpness = torch.tensor([0.2, 1.0, 3.0, 9.0])[:, None, None]
    centres = torch.randn(1, 4, 8, 32, generator=generator).repeat_interleave(128, 2)
    query, key, value = (centres + 0.3 * torch.randn(1, 4, 1024, 32, generator=generator) for _ in range(3))
    least = {}
    for per_head in (False, True):
        settings = Sparse("mean", keep=0.5, from_tokens=64, per_head=per_head)
        one = layer.SparseLayer(layer.SparseModel(settings, torch.nn.Linear(1, 1)))
        for _ in range(2):
            one.attend(query * sharpness**0.5, key * sharpness**0.5, value, None, recipe="sage2", fallback=None)
            least.setdefault(per_head, float(one.statistics.least[-1]))
        assert one.statistics.calls == 2 and float(one.statistics.tiles) / 2 <= 0.5 + 1e-6
        assert (one.router is not None) == per_head
    shares = one.router.keep
    assert shares == tuple(sorted(shares, reverse=True)) and shares[0] > shares[-1]
    assert f"heads {shares[-1]:.0%} to {shares[0]:.0%}" in layer.sparsity_of(one)
    assert least[True] > least[False] + 0.05


def test_first_steps_and_chosen_layers_are_dense():
    pipe = tiny.cogvideox()
    sparse = Sparse("subblock", keep=0.5, dense_steps=2, dense_layers=("transformer_blocks.1.*",), from_tokens=64)
    with sage_hf.apply(pipe, SageConfig("sage2", sparse=sparse)):
        tiny.latents(pipe, steps=5)
        first, second, third = (one.statistics for one in layers_of(pipe.transformer))
        assert (first.calls, dict(first.dense)) == (3, {"one of the first 2 steps": 2})
        assert (second.calls, dict(second.dense)) == (0, {"a layer that the configuration keeps dense": 5})
        assert third.calls == 3
        tiny.latents(pipe, steps=5)
        assert first.calls == 6
        text = str(sage_hf.explain(pipe))
    assert "transformer_blocks.0.attn1: 6 sparse calls by subblock: " in text
    assert "4x4x4 order; 4 dense: one of the first 2 steps" in text
    assert not pipe.transformer._forward_pre_hooks


def test_two_sizes_in_one_process_have_orders_of_their_own():
    model = tiny.transformer()
    config = SageConfig("sage2", sparse=Sparse("mean", keep=1.0, from_tokens=64))
    inputs = [video(3, 16), video(5, 12), video(3, 16), video(2, 16)]
    expected = [predict(model, one) for one in inputs]
    with sage_hf.apply(model, config):
        for one, wanted in zip(inputs, expected, strict=True):
            assert (predict(model, one) - wanted).norm() / wanted.norm() < 0.1


def test_pairs_of_guidance_choose_their_own_tiles():
    """Lists of a batch are those of its samples; values may round otherwise, as sums of a batch do."""
    model, routed = tiny.transformer(num_layers=1), []
    inputs = video(6, 24)
    both = {
        "hidden_states": torch.cat([inputs["hidden_states"], 0.3 - inputs["hidden_states"]]),
        "encoder_hidden_states": torch.cat([inputs["encoder_hidden_states"], -inputs["encoder_hidden_states"]]),
        "timestep": inputs["timestep"].repeat(2),
    }
    with sage_hf.apply(model, SageConfig("sage2", sparse=Sparse("mean", keep=0.25, from_tokens=64))):
        shared = layers_of(model)[0].model

        class Spy:
            router = shared.router

            def route(self, *args, **kwargs):
                routed.append(self.router.route(*args, **kwargs))
                return routed[-1]

        shared.router = Spy()
        together = predict(model, both)
        alone = torch.cat([predict(model, {k: v[i : i + 1] for k, v in both.items()}) for i in range(2)])
    pair, *single = (blocks.kept(226 + 864) for blocks in routed)
    assert torch.equal(pair, torch.cat(single))
    assert not torch.equal(*single)
    assert (together - alone).norm() <= 1e-3 * alone.norm()


def test_context_parallelism_is_refused():
    model = tiny.transformer()
    degrees = SimpleNamespace(ring_degree=2, ulysses_degree=1)
    model._parallel_config = SimpleNamespace(context_parallel_config=degrees)
    with pytest.raises(ValueError, match="sparse attention chooses tiles among all tokens"):
        sage_hf.apply(model, SageConfig("sage2", sparse=EAGER, layers=(LayerRule("*", "exact"),)))


def test_context_parallelism_that_is_enabled_later_is_refused_too():
    from diffusers.models import attention_dispatch as dispatch

    backend = dispatch._AttentionBackendRegistry._backends[dispatch.AttentionBackendName("sage2")]
    one = layer.SparseLayer(layer.SparseModel(EAGER, tiny.transformer()))
    inputs = [torch.randn(1, 80, 2, 32) for _ in range(3)]
    degrees = SimpleNamespace(ring_degree=1, ulysses_degree=2)
    with layer.running(one), pytest.raises(ValueError, match="sparse attention chooses tiles among all tokens"):
        backend(*inputs, _parallel_config=SimpleNamespace(context_parallel_config=degrees))
    assert layer.running_layer() is None


def test_transformers_models_are_refused():
    with pytest.raises(ValueError, match="no diffusers model"):
        sage_hf.apply(tiny.llama(), SageConfig("sage2", sparse=EAGER))


@pytest.mark.audit
@pytest.mark.parametrize("name", ["cogvideox", "wan-t2v"])
def test_a_compiled_model_attends_densely_and_says_so(name, monkeypatch, request):
    """By our own function for the family, and through diffusers' dispatch."""
    if name == "wan-t2v":
        request.getfixturevalue("compilable_dispatch")
    case, said = family(name), []
    monkeypatch.setattr(layer.logger, "warning", said.append)
    layer.log_dense_graphs.cache_clear()
    model, inputs = case.build().eval(), case.make_inputs()
    with sage_hf.apply(model, "sage2"):
        expected = run(model, inputs)
    with sage_hf.apply(model, SageConfig("sage2", sparse=EAGER)):
        output = run(torch.compile(model, backend="eager"), inputs)
        assert all(one.statistics.calls == 0 for one in layers_of(model))
    assert torch.allclose(output, expected, atol=1e-4)
    assert said == ["sparse attention runs eagerly only: inside a compiled graph these layers attend densely"]


def test_copies_and_pickles_keep_their_settings():
    model = tiny.transformer()
    with sage_hf.apply(model, SageConfig("sage2", sparse=EAGER)):
        expected = predict(model, video())
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(predict(other, video()), expected)
            assert all(one.model.settings == EAGER for one in layers_of(other))


def test_configurations_are_read_back_from_json(tmp_path):
    sparse = Sparse("share", keep=0.9, dense_steps=10, dense_layers=("a.*", "b"), from_tokens=100)
    assert Sparse.from_dict({"per_head": True}).per_head
    config = SageConfig("sage2", sparse=sparse)
    assert SageConfig.from_json(config.to_json()) == config
    config.save(tmp_path / "c.json")
    assert SageConfig.from_name(tmp_path / "c.json") == config
    assert SageConfig.from_dict({"recipe": "sage2", "sparse": {"router": "mean"}}).sparse == Sparse("mean")
    assert "sparse" not in json.loads(SageConfig("sage2").to_json())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"router": "best"}, "sparse.router: 'best'"),
        ({"keep": 0}, "sparse.keep"),
        ({"keep": True}, "sparse.keep"),
        ({"dense_steps": -1}, "sparse.dense_steps"),
        ({"from_tokens": 1.5}, "sparse.from_tokens"),
        ({"dense_layers": "a"}, "sparse.dense_layers"),
        ({"per_head": 1}, "sparse.per_head"),
        ({"per_head": True, "router": "share"}, "sparse.per_head"),
        ({"dense": 3}, "unknown key 'dense'"),
        (3, "expected an object"),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(data, message):
    with pytest.raises(ValueError, match=message):
        SageConfig.from_dict({"recipe": "sage2", "sparse": data})


def test_patterns_of_dense_layers_must_match_a_layer():
    with pytest.raises(ValueError, match="matches no attention layer"):
        sage_hf.apply(tiny.transformer(), SageConfig("sage2", sparse=Sparse(dense_layers=("blocks.7",))))
