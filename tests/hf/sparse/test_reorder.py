"""Tokens in 4×4×4 order between a denoiser's first block and its last: they change nothing that a model computes."""

import copy
import functools
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig

import sage_hf
from sage_hf.config import SageConfig
from sage_hf.diffusers.processor import attention_layers, sage_of
from sage_hf.sparse import Sparse, layer
from tests.helpers.families import family, run

NAMES = ["cogvideox", "cogvideox-1.5", "hunyuan-video", "mochi", "wan-t2v", "wan-i2v", "ltx"]
GRID = (3, 6, 10)  # no side but one is a multiple of the tile's
ALL = SageConfig("sage2", sparse=Sparse("mean", keep=1.0, from_tokens=1))


def inputs_of(name):
    """Return the inputs of a tiny model with the tokens of GRID."""
    inputs, (frames, height, width) = family(name).make_inputs(), GRID
    generator = torch.Generator().manual_seed(3)
    normal = functools.partial(torch.randn, generator=generator)
    if name == "ltx":
        return inputs | {
            "hidden_states": normal(2, frames * height * width, 8),
            "num_frames": frames,
            "height": height,
            "width": width,
        }
    if name == "cogvideox-1.5":
        angles = normal(frames * height * width, 32).repeat_interleave(2, 1)
        states = normal(2, 2 * frames, 4, 2 * height, 2 * width)
        return inputs | {"hidden_states": states, "image_rotary_emb": (angles.cos(), angles.sin())}
    if name == "cogvideox":
        return inputs | {"hidden_states": normal(2, frames, 4, 2 * height, 2 * width)}
    return inputs | {"hidden_states": normal(2, 4, frames, 2 * height, 2 * width)}


def model_of(name):
    case = family(name)
    sizes = {"sample_height": 12, "sample_width": 20, "sample_frames": 9} if name == "cogvideox" else {}
    model = case.build() if not sizes else type(case.build())(**{**case.config, **sizes})
    return model.eval()


def exactly(monkeypatch):
    """Make sparse calls exact ones; return a list of the calls, and one of the permutations inside them."""
    calls, permuted = [], []
    permute = layer.permute_tokens

    def attend(query, key, value, attn_mask=None, *, blocks=None, scale=None, **_):
        calls.append(query.shape)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, scale=scale)

    def spy(x, index):
        permuted.append(x.shape)
        return permute(x, index)

    monkeypatch.setattr(layer, "sage_attention", attend)
    monkeypatch.setattr(layer, "permute_tokens", spy)
    return calls, permuted


def sparse_layers(model):
    found = (sage_of(module) for module in attention_layers(model).values())
    return [one.sparse for one in found if one is not None and one.sparse.statistics.calls]


@pytest.mark.parametrize("name", NAMES)
def test_a_model_of_known_family_computes_the_same(name, monkeypatch):
    """Attention is exact, so that a wrong place of one token is far above rounding."""
    model, inputs = model_of(name), inputs_of(name)
    expected = run(model, inputs)
    calls, permuted = exactly(monkeypatch)
    with sage_hf.apply(model, ALL):
        output = run(model, inputs)
        found = sparse_layers(model)
        assert found and all(one.statistics.ordered for one in found)
    assert calls and not permuted
    assert (output - expected).norm() <= 1e-5 * expected.norm()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def tile_by_tile(grid):
    """The raster indices of a grid's tokens in 4×4×4 order, one by one."""
    places = itertools.product(*map(range, grid))
    in_tiles = sorted(enumerate(places), key=lambda one: ([side // 4 for side in one[1]], one[0]))
    return [index for index, _ in in_tiles]


def test_threads_that_call_one_model_keep_their_own_order(monkeypatch):
    model, together = model_of("wan-t2v"), threading.Barrier(2)
    calls = [inputs_of("wan-t2v")]
    calls.append(calls[0] | {"hidden_states": calls[0]["hidden_states"][:, :, :2].contiguous()})
    expected = [run(model, inputs) for inputs in calls]

    def meet(query, key, value, attn_mask=None, *, scale=None, **_):
        together.wait(20)
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, scale=scale)

    monkeypatch.setattr(layer, "sage_attention", meet)
    with sage_hf.apply(model, ALL), ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(functools.partial(run, model), calls))
    for output, one in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gradients", [False, True])
def test_videos_of_several_sizes_have_orders_of_their_own(gradients, monkeypatch):
    """One model serves all sizes, whether blocks get their tokens in order or attention permutes them."""
    model = model_of("wan-t2v").requires_grad_(False)
    _, permuted = exactly(monkeypatch)
    entered, indices = [], []
    permute = layer.permute_tokens
    monkeypatch.setattr(layer, "permute_tokens", lambda x, index: (indices.append(index), permute(x, index))[1])
    for grid in (GRID, (6, 3, 10), (5, 4, 4), GRID):
        inputs = inputs_of("wan-t2v") | {"hidden_states": torch.randn(2, 4, grid[0], 2 * grid[1], 2 * grid[2])}
        entered.clear()
        with sage_hf.apply(model, ALL), torch.set_grad_enabled(gradients):
            handles = [
                model.patch_embedding.register_forward_hook(lambda module, args, output: entered.append(output)),
                model.blocks[0].register_forward_pre_hook(lambda module, args: entered.append(args[0])),
            ]
            model(**inputs)
        for handle in handles:
            handle.remove()
        raster, inside = entered[0].flatten(2).mT, entered[1]
        wanted = tile_by_tile(grid)
        assert torch.equal(inside, raster if gradients else raster[:, wanted])
        if gradients:
            assert indices[0].tolist() == wanted
            indices.clear()
    assert bool(permuted) == gradients


@pytest.mark.parametrize("name", ["wan-t2v", "ltx"])
def test_noise_levels_of_tokens_go_with_them(name, monkeypatch):
    """Image to video: the tokens of the first frame are clean."""
    model, inputs = model_of(name), inputs_of(name)
    levels = torch.full((2, *GRID), 700.0)
    levels[:, 0] = 0
    inputs["timestep"] = levels.flatten(1)
    expected = run(model, inputs)
    calls, permuted = exactly(monkeypatch)
    with sage_hf.apply(model, ALL):
        assert (run(model, inputs) - expected).norm() <= 1e-5 * expected.norm()
    assert calls and not permuted


def test_blocks_that_tell_tokens_apart_are_left_alone(monkeypatch):
    """HunyuanVideo's blocks that replace the first frame's tokens: each call of attention permutes its own."""
    case = family("hunyuan-video")
    config = {**case.config, "image_condition_type": "token_replace"}
    model = type(case.build())(**config).eval()
    inputs = inputs_of("hunyuan-video")
    expected = run(model, inputs)
    _, permuted = exactly(monkeypatch)
    with sage_hf.apply(model, ALL):
        output = run(model, inputs)
        assert all(one.statistics.ordered for one in sparse_layers(model))
    assert len(permuted) == 4 * (len(model.transformer_blocks) + len(model.single_transformer_blocks))
    assert (output - expected).norm() <= 1e-5 * expected.norm()


def test_with_gradients_enabled_each_call_permutes_its_own(monkeypatch):
    """A block that is run again for its gradients would be given tokens in raster order."""
    model, inputs = model_of("wan-t2v").requires_grad_(False), inputs_of("wan-t2v")
    expected = run(model, inputs)
    _, permuted = exactly(monkeypatch)
    with sage_hf.apply(model, ALL):
        with torch.enable_grad():
            output = model(**inputs, return_dict=False)[0].flatten()
        assert (output - expected).norm() <= 1e-5 * expected.norm()
        assert len(permuted) == 4 * len(model.blocks)
        model.requires_grad_(True).train().enable_gradient_checkpointing()
        found = gradients(model, inputs)
        assert len(permuted) == 4 * len(model.blocks)
    truths = gradients(model, inputs)
    assert found.keys() == truths.keys() and found
    for name, gradient in found.items():
        assert (gradient - truths[name]).norm() <= 1e-4 * truths[name].norm() + 1e-7, name


def gradients(model, inputs):
    loss = model(**inputs, return_dict=False)[0].square().mean()
    run(model, inputs)  # between a forward pass and its backward, a call of another kind
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def test_short_videos_and_layers_kept_dense(monkeypatch):
    """The order depends on the video alone, so that what a cache keeps from step to step has one order."""
    model, inputs = model_of("wan-t2v"), inputs_of("wan-t2v")
    expected = run(model, inputs)
    calls, permuted = exactly(monkeypatch)
    orders = []
    model.blocks[1].register_forward_pre_hook(lambda block, args: orders.append(args[0]))
    for settings in (
        Sparse(from_tokens=181),
        Sparse(from_tokens=180, dense_steps=1),
        Sparse(from_tokens=180, dense_layers=("blocks.0.*",)),
    ):
        with sage_hf.apply(model, SageConfig("sage2", sparse=settings)):
            assert (run(model, inputs) - expected).norm() <= 1e-5 * expected.norm()
    assert calls and not permuted
    raster, dense_step, dense_layer = orders
    assert torch.equal(dense_step, dense_layer) and not torch.allclose(raster, dense_step)


def test_blocks_that_a_cache_skips_keep_the_order(monkeypatch):
    """diffusers' first-block cache leaves the other blocks out where the first one's output hardly moved."""
    model, inputs = model_of("wan-t2v"), inputs_of("wan-t2v")
    plain, cached = copy.deepcopy(model), copy.deepcopy(model)
    calls, permuted = exactly(monkeypatch)
    for one in (plain, cached):
        one.enable_cache(FirstBlockCacheConfig(threshold=1e9))
    with sage_hf.apply(cached, ALL):
        for step in range(3):
            states = inputs | {"hidden_states": inputs["hidden_states"] * (1 - 0.1 * step)}
            expected, output = (in_context(one, states) for one in (plain, cached))
            assert (output - expected).norm() <= 1e-5 * expected.norm()
    assert len(calls) == 2 * len(model.blocks) + 2 * 2 and not permuted


def in_context(model, inputs):
    with model.cache_context("both"):
        return run(model, inputs)


@pytest.mark.audit
def test_compiled_blocks_keep_the_order_that_they_are_given():
    """Their attention is dense. An eager block before them may have begun the order, and one behind may end it."""
    model, inputs = model_of("wan-t2v"), inputs_of("wan-t2v")
    with sage_hf.apply(model, "sage2"):
        expected = run(model, inputs)
    for compiled in ((0, 1), (1,), (0,)):
        copied = copy.deepcopy(model)
        for place in compiled:
            copied.blocks[place].compile(backend="eager")
        with sage_hf.apply(copied, ALL):
            output = run(copied, inputs)
        assert (output - expected).norm() <= 0.05 * expected.norm()


def test_a_model_whose_last_block_is_taken_out_is_told_to_be_switched_again():
    model, inputs = model_of("wan-t2v"), inputs_of("wan-t2v")
    sage_hf.apply(model, ALL)
    last = model.blocks.pop(-1)
    with torch.no_grad(), pytest.raises(RuntimeError, match="again after changing the model's blocks"):
        run(model, inputs)
    model.blocks.append(last)
    with torch.no_grad():
        assert torch.isfinite(run(model, inputs)).all()
