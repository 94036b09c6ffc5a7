"""VSA in diffusers' Wan transformers: its gates, their checkpoints, training through them, and what is refused."""

import copy
import json
import pickle
from dataclasses import replace

import accelerate
import pytest
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import load_file, save_file

import sage_hf
from sage_hf.config import LayerRule, SageConfig
from sage_hf.diffusers import gates, vsa
from sage_hf.sparse import Sparse, vsa_attention
from sage_hf.sparse.reference import vsa_reference
from tests.helpers import tiny_pipelines as tiny
from tests.helpers.families import family, run

CASE = family("wan-t2v")


def build(dtype=torch.float32):
    return CASE.build(dtype)


def video(frames=5, height=18, width=24, seed=2):
    """Inputs of the tiny Wan transformer, with a grid of `frames` × half the height × half the width."""
    generator = torch.Generator().manual_seed(seed)
    return CASE.make_inputs() | {"hidden_states": torch.randn(2, 4, frames, height, width, generator=generator)}


def in_double(inputs):
    return {name: x.double() if torch.is_floating_point(x) else x for name, x in inputs.items()}


def fill_gates(model):
    """Give a model with VSA gates that matter."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for block in model.blocks:
            for parameter in block.to_gate_compress.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


@pytest.fixture
def checkpoint(tmp_path):
    """A folder as FastVideo's: diffusers' names, and `blocks.N.to_gate_compress`."""

    def make(shards=1, name="transformer"):
        model = build()
        sage_hf.enable_vsa(model)
        fill_gates(model)
        size = "10GB" if shards == 1 else "80KB"
        model.save_pretrained(tmp_path / name, max_shard_size=size)
        assert (len(list((tmp_path / name).glob("*.safetensors"))) > 1) == (shards > 1)
        return tmp_path / name, model

    return make


def test_a_gate_of_zero_and_all_tiles_are_the_dense_model():
    model, inputs = build(), video()
    expected = run(model, inputs)
    handle = sage_hf.enable_vsa(model, 0.0)
    assert handle.loaded == 0
    assert torch.allclose(run(model, inputs), expected, atol=1e-5)
    handle.sparsity = 0.75
    assert not torch.allclose(run(model, inputs), expected, atol=1e-4)
    handle.restore()
    handle.restore()
    assert torch.equal(run(model, inputs), expected)
    assert not model._forward_pre_hooks and not any("gate" in name for name in model.state_dict())


def test_each_layer_computes_vsa_of_its_projections(monkeypatch):
    """Against the reference in float64, with a grid that is no multiple of the tile."""
    model, checked = fill_gates_of(build().double()), []

    def check(query, key, value, gate, order, sparsity, **options):
        output = vsa_attention(query, key, value, gate, order, sparsity, **options)
        assert torch.allclose(output, vsa_reference(query, key, value, gate, order.grid, sparsity), atol=1e-10)
        checked.append(order.grid)
        return output

    monkeypatch.setattr(vsa, "vsa_attention", check)
    for grid in ((5, 9, 12), (12, 9, 5)):  # two shapes with as many tokens
        run(model, in_double(video(grid[0], 2 * grid[1], 2 * grid[2])))
        assert checked[-2:] == [grid] * 2


def fill_gates_of(model, sparsity=0.5):
    sage_hf.enable_vsa(model, sparsity)
    return fill_gates(model)


def test_the_gate_is_made_of_the_normalised_states():
    model, inputs, seen = fill_gates_of(build()), video(), []
    block = model.blocks[1]
    block.attn1.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    block.to_gate_compress.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    run(model, inputs)
    assert seen[0] is seen[1]


def test_gradients_reach_gates_and_projections_as_in_the_reference(monkeypatch):
    model, inputs = fill_gates_of(build().double()).train(), video()
    inputs = in_double(inputs)

    def gradients():
        model.zero_grad()
        model(**inputs, return_dict=False)[0].square().sum().backward()
        return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    found = gradients()

    def reference(query, key, value, gate, order, sparsity, **options):
        return vsa_reference(query, key, value, gate, order.grid, sparsity)

    monkeypatch.setattr(vsa, "vsa_attention", reference)
    expected = gradients()
    assert found["blocks.0.to_gate_compress.weight"].abs().max() > 0
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-6, atol=1e-9 * gradient.abs().max().item()), name


def test_a_gate_of_zero_learns():
    """The coarse stage reaches the gate's weights, though they hide it."""
    model = build().train()
    sage_hf.enable_vsa(model, 0.5)
    model(**video(), return_dict=False)[0].square().mean().backward()
    assert all(block.to_gate_compress.weight.grad.abs().max() > 0 for block in model.blocks)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("how", ["where it came from", "named", "file"])
def test_gates_of_a_checkpoint_are_kept(checkpoint, shards, how):
    folder, trained = checkpoint(shards)
    model = WanTransformer3DModel.from_pretrained(folder)
    assert not any("gate" in name for name in model.state_dict())
    if how == "file":
        merged = {}
        for path in folder.glob("*.safetensors"):
            merged |= load_file(path)
        save_file(merged, folder.parent / "gates.safetensors")
    source = {"where it came from": None, "named": folder, "file": folder.parent / "gates.safetensors"}[how]
    assert sage_hf.enable_vsa(model, checkpoint=source).loaded == len(model.blocks)
    model.eval()
    assert torch.equal(run(model, video()), run(trained.eval(), video()))


def test_gates_take_dtype_and_device_of_the_model(checkpoint):
    folder, _ = checkpoint()
    model = WanTransformer3DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    sage_hf.enable_vsa(model)
    assert {p.dtype for block in model.blocks for p in block.to_gate_compress.parameters()} == {torch.bfloat16}
    assert run(model, {k: v.to(torch.bfloat16) for k, v in video().items()}).dtype == torch.bfloat16


@pytest.mark.parametrize("cast_first", [True, False])
def test_gates_compute_where_weights_are_stored_in_8_bits(cast_first):
    model, inputs = family("wan-t2v").build(), family("wan-t2v").make_inputs()
    dtypes = {"storage_dtype": torch.float8_e4m3fn, "compute_dtype": torch.float32}
    if cast_first:
        model.enable_layerwise_casting(**dtypes)
    sage_hf.enable_vsa(model, sparsity=0.0)
    if not cast_first:
        model.enable_layerwise_casting(**dtypes)
    found = run(model, inputs)
    sage_hf.restore(model)
    assert (found - run(model, inputs)).norm() < 1e-5 * found.norm()


def test_a_pipeline_reads_the_gates_of_its_denoisers_from_their_subfolders(checkpoint):
    folder, trained = checkpoint(name="transformer")
    checkpoint(name="transformer_2")
    pipe = type("Pipe", (), {})()
    pipe.transformer, pipe.transformer_2 = build(), build()
    assert sage_hf.enable_vsa(pipe, checkpoint=folder.parent).loaded == 4
    assert torch.equal(pipe.transformer_2.blocks[1].to_gate_compress.bias, trained.blocks[1].to_gate_compress.bias)


def test_gates_of_the_hub_are_read_from_its_cache(checkpoint, monkeypatch):
    folder, _ = checkpoint()
    asked = []

    def download(name, allow_patterns, local_files_only):
        asked.append((name, local_files_only))
        return str(folder.parent)

    monkeypatch.setattr(gates, "snapshot_download", download)
    model = build()
    model.register_to_config(_name_or_path="some/model")
    assert sage_hf.enable_vsa(model).loaded == 2
    assert sage_hf.enable_vsa(build(), checkpoint="some/other").loaded == 2
    assert asked == [("some/model", True), ("some/other", False)]


def test_checkpoints_that_do_not_fit_are_refused_before_anything_is_changed(checkpoint, tmp_path):
    folder, _ = checkpoint()
    (path,) = folder.glob("*.safetensors")
    weights = load_file(path)
    model = build()
    for change, message in (
        (lambda w: {k: v for k, v in w.items() if "gate" not in k}, "has no keys blocks.N.to_gate_compress"),
        (lambda w: {k: v for k, v in w.items() if k != "blocks.1.to_gate_compress.bias"}, "but not blocks.1.to_gate"),
        (lambda w: w | {"blocks.1.to_gate_compress.bias": torch.zeros(3)}, r"has shape \(3,\)"),
    ):
        save_file(change(weights), tmp_path / "other.safetensors")
        with pytest.raises(ValueError, match=message):
            sage_hf.enable_vsa(model, checkpoint=tmp_path / "other.safetensors")
    assert not any("gate" in name for name in model.state_dict())


@pytest.mark.parametrize("sparsity", [1.0, -0.1, True, "half"])
def test_shares_that_mean_nothing_are_refused(sparsity):
    with pytest.raises(ValueError, match="sparsity must be in"):
        sage_hf.enable_vsa(build(), sparsity)


def test_models_without_a_known_grid_or_with_other_processors_are_refused():
    with pytest.raises(ValueError, match="VSA is for WanTransformer3DModel; got CogVideoX"):
        sage_hf.enable_vsa(tiny.transformer())
    with pytest.raises(TypeError, match="expected a pipeline"):
        sage_hf.enable_vsa(3)
    model = build()
    model.blocks[0].to_gate_compress = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="have a to_gate_compress already, which is not ours"):
        sage_hf.enable_vsa(model)
    model = build()
    processor = type(model.blocks[0].attn1.processor)
    model.blocks[0].attn1.set_processor(type(processor.__name__, (processor,), {})())
    with pytest.raises(ValueError, match="which is not diffusers' WanAttnProcessor"):
        sage_hf.enable_vsa(model)
    with pytest.raises(ValueError, match="VSA is for WanTransformer3DModel"):
        sage_hf.enable_vsa(type("WanTransformer3DModel", (WanTransformer3DModel,), {})(**CASE.config))
    model = build()
    sage_hf.apply(model, "sage2")
    with pytest.raises(ValueError, match="call enable_vsa first"):
        sage_hf.enable_vsa(model)


def test_weights_are_offloaded_one_by_one_after_the_gates_are_made_and_not_before():
    model, inputs, device = build(), video(), torch.device("cpu")
    sage_hf.enable_vsa(model, 0.5)
    expected = run(fill_gates(model), inputs)
    assert torch.equal(run(accelerate.cpu_offload(model, execution_device=device), inputs), expected)
    model = build()
    expected = run(model, inputs)
    accelerate.cpu_offload(model, execution_device=device)
    with pytest.raises(ValueError, match="call enable_vsa before enable_sequential_cpu_offload"):
        sage_hf.enable_vsa(model, 0.5)
    assert torch.equal(run(model, inputs), expected)


@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
def test_weights_are_offloaded_in_groups_after_the_gates_are_made_and_not_before(kind, tmp_path):
    model, inputs, device = build(), video(), torch.device("cpu")
    options = {"offload_type": kind, "num_blocks_per_group": 1, "offload_to_disk_path": str(tmp_path)}
    sage_hf.enable_vsa(model, 0.5)
    expected = run(fill_gates(model), inputs)
    model.enable_group_offload(device, device, **options)
    assert torch.equal(run(model, inputs), expected)
    sage_hf.enable_vsa(model, 0.5)
    assert torch.equal(run(model, inputs), expected)
    with pytest.raises(ValueError, match=r"call enable_vsa before enable_group_offload"):
        sage_hf.enable_vsa(model, 0.5, checkpoint=tmp_path)
    model = build()
    model.enable_group_offload(device, device, **options)
    with pytest.raises(ValueError, match=r"call enable_vsa before enable_group_offload"):
        sage_hf.enable_vsa(model, 0.5)


def test_context_parallelism_is_refused_before_and_after():
    model = build()
    model._parallel_config = type("Config", (), {"context_parallel_config": object()})()
    with pytest.raises(ValueError, match="WanTransformer3DModel: VSA chooses tiles among all tokens"):
        sage_hf.enable_vsa(model)
    model = build()
    sage_hf.enable_vsa(model)
    with pytest.raises(ValueError, match="VSA chooses tiles among all tokens"):
        model.blocks[0].attn1.processor._parallel_config = object()
    with sage_hf.apply(model, "sage2"), pytest.raises(ValueError, match="VSA chooses tiles among all tokens"):
        gates_of_apply(model).check_parallel()


def gates_of_apply(model):
    from sage_hf.diffusers.processor import layer_of

    return layer_of(model.blocks[0].attn1)


def test_a_mask_or_a_block_alone_is_refused():
    model = build()
    sage_hf.enable_vsa(model)
    attn, states = model.blocks[0].attn1, torch.zeros(1, 8, 64)
    with pytest.raises(RuntimeError, match="grid of tokens"):
        attn(states)
    with pytest.raises(ValueError, match="takes no mask"):
        attn(states, None, torch.ones(1, 8, dtype=torch.bool))


@pytest.mark.parametrize("recipe", ["sage2", "sage3", "exact"])
def test_apply_chooses_the_recipe_of_the_fine_stage_and_says_so(recipe):
    model, inputs = fill_gates_of(build()), video()
    expected = run(model, inputs)
    with sage_hf.apply(model, SageConfig(recipe, fallback="emulate", layers=(LayerRule("*.attn2", "exact"),))):
        output = run(model, inputs)
        rows = {row.layer: row for row in sage_hf.explain(model).rows}
        assert rows["blocks.1.attn1"].recipe == recipe
        assert "blocks.0-1.attn1: VSA: 9 of 18 tiles of 4x4x4 tokens (50.0%)" in str(sage_hf.explain(model))
        assert rows["blocks.1.attn1"].kernel == ("sdpa of tiles side by side" if recipe == "exact" else "reference")
    assert (output - expected).norm() <= {"exact": 0, "sage2": 0.02, "sage3": 0.1}[recipe] * expected.norm()
    assert torch.equal(run(model, inputs), expected)


def test_gates_train_with_a_recipe_that_has_gradients():
    model, inputs, found = fill_gates_of(build()).train(), video(), []
    for recipe in (None, "sage_bwd"):
        handle = None if recipe is None else sage_hf.apply(model, SageConfig(recipe, fallback="emulate"))
        model.zero_grad()
        model(**inputs, return_dict=False)[0].square().sum().backward()
        found.append([parameter.grad.clone() for block in model.blocks for parameter in block.attn1.parameters()])
        found[-1] += [
            parameter.grad.clone() for block in model.blocks for parameter in block.to_gate_compress.parameters()
        ]
        if handle is not None:
            handle.restore()
    exact, low = (torch.cat([gradient.flatten() for gradient in gradients]) for gradients in found)
    assert 0 < (low - exact).norm() < 0.05 * exact.norm()


def test_vsa_and_another_router_exclude_each_other():
    model = build()
    handle = sage_hf.enable_vsa(model)
    with pytest.raises(ValueError, match="has VSA, which chooses its tiles itself"):
        sage_hf.apply(model, SageConfig("sage2", sparse=Sparse()))
    handle.restore()


ORDERS = (
    *("vsa apply restore", "vsa vsa restore", "vsa apply vsa restore"),
    *("vsa apply apply restore", "vsa hand restore"),
)


@pytest.mark.parametrize("all_of_it", [False, True], ids=["by handle", "restore"])
@pytest.mark.parametrize("cells", ORDERS)
def test_cells_that_run_in_any_order_can_be_undone(cells, all_of_it):
    model, inputs = build(), video()
    exact, before = run(model, inputs), dict(model.attn_processors)
    for cell in cells.split():
        if cell == "vsa":
            handle = sage_hf.enable_vsa(model, 0.5)
        elif cell == "apply":
            low_bits = sage_hf.apply(model, "sage2")
        elif cell == "hand":
            model.set_attn_processor(sage_hf.SageAttn2Processor())
        elif all_of_it or cell == "hand":
            sage_hf.restore(model)
        else:
            handle.restore()
    if "hand" in cells:
        sage_hf.restore(model)
    assert all(model.attn_processors[name] is processor for name, processor in before.items())
    assert not any("gate" in name for name in model.state_dict()) and not model._forward_pre_hooks
    assert torch.equal(run(model, inputs), exact)
    handle.restore()
    if "apply" in cells:
        low_bits.restore()
    assert torch.equal(run(model, inputs), exact)


def test_gates_outlive_a_second_call():
    model = fill_gates_of(build())
    gates = [block.to_gate_compress for block in model.blocks]
    sage_hf.enable_vsa(model, 0.75)
    assert all(block.to_gate_compress is gate for block, gate in zip(model.blocks, gates, strict=True))


def test_pairs_of_guidance_choose_their_own_tiles():
    model, inputs = fill_gates_of(build()), video()
    together = model(**inputs).sample
    for sample in range(2):
        alone = model(**{name: x[sample : sample + 1] for name, x in inputs.items()}).sample
        assert torch.allclose(together[sample : sample + 1], alone, atol=1e-5)


def test_one_tile_is_kept_at_least():
    model, inputs = fill_gates_of(build(), 0.999), video()
    assert run(model, inputs).isfinite().all()


def test_fused_projections_compute_the_same():
    model, inputs = fill_gates_of(build()), video()
    expected = run(model, inputs)
    model.fuse_qkv_projections()
    assert hasattr(model.blocks[0].attn1, "to_qkv")
    assert torch.allclose(run(model, inputs), expected, atol=1e-5)


def test_checkpointed_blocks_keep_the_grid_of_their_own_call():
    """A portrait and a landscape of as many tokens, whose losses have one backward pass."""
    model = build().train()
    sage_hf.enable_vsa(model, sparsity=0.5)
    fill_gates(model)
    found = []
    for checkpointing in (False, True):
        model.zero_grad()
        if checkpointing:
            model.enable_gradient_checkpointing()
        sizes = ((16, 32), (32, 16))
        sum(model(**video(5, *size), return_dict=False)[0].square().sum() for size in sizes).backward()
        found.append(torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None]))
    assert (found[0] - found[1]).norm() < 1e-5 * found[0].norm()


def test_copies_and_pickles_have_gates_of_their_own():
    model, inputs = fill_gates_of(build()), video()
    expected = run(model, inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(other, inputs), expected)
        with torch.no_grad():
            other.blocks[0].to_gate_compress.bias.add_(1)
        assert not torch.equal(run(other, inputs), expected)
    assert torch.equal(run(model, inputs), expected)


@pytest.mark.audit
@pytest.mark.usefixtures("compilable_dispatch")
def test_blocks_compile_whole():
    model, grids = fill_gates_of(build()), (video(5, 16, 32), video(5, 32, 16))
    expected = [run(model, inputs) for inputs in grids]
    for block in model.blocks:
        block.compile(backend="eager", fullgraph=True)
    for inputs, output in zip(grids * 2, expected * 2, strict=True):
        assert torch.allclose(run(model, inputs), output, atol=1e-5)


@pytest.mark.audit
@pytest.mark.usefixtures("compilable_dispatch")
def test_a_compiled_model_follows_its_grid():
    """The model compiles in parts: the grid is read between them."""
    model = fill_gates_of(replace(CASE, config=CASE.config | {"num_layers": 1}).build())
    compiled = torch.compile(model, backend="eager")
    for inputs in (video(), video(5, 12, 36)):
        with torch.no_grad():
            expected, found = model(**inputs).sample, compiled(**inputs).sample
        assert torch.allclose(found, expected, atol=1e-5)


def test_an_index_of_shards_is_not_needed(checkpoint):
    """diffusers' index names the gates' shards, but FastVideo's files come in any form."""
    folder, _ = checkpoint(3)
    (index,) = folder.glob("*.index.json")
    assert any("to_gate_compress" in key for key in json.loads(index.read_text())["weight_map"])
    index.unlink()
    assert len(gates.read_gates(folder)) == 4
