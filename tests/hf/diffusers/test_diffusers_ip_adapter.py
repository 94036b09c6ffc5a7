"""IP-Adapters come and go: recipe, fallback and training recipe stay, the adapter's layers are served, and undone."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0, SD3IPAdapterJointAttnProcessor2_0
from diffusers.models.embeddings import IPAdapterTimeImageProjection
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

import sage_hf
from sage_hf import SageAttnProcessor, SageConfig, record
from sage_hf.config import LayerRule, StepRule
from sage_hf.diffusers import UnsupportedAttentionError, attention_layers, bind
from sage_hf.diffusers.processor import sage_of
from tests.helpers.families import BATCH, Inputs, family, run

IMAGE_DIM = 8
ADAPTERS = {
    "unet": IPAdapterAttnProcessor2_0,
    "flux": FluxIPAdapterAttnProcessor,
    "sd3": SD3IPAdapterJointAttnProcessor2_0,
}
each_model = pytest.mark.parametrize("name", ADAPTERS)


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: torch.randn_like(value) * 0.2 for name, value in module.state_dict().items()}


def unet_adapter(model: torch.nn.Module) -> dict[str, Any]:
    cross = [m for name, m in attention_layers(model).items() if name.endswith("attn2")]
    layers = {
        f"{2 * i + 1}.{weight}.weight": torch.randn(layer.inner_dim, 16) * 0.5
        for i, layer in enumerate(cross)
        for weight in ("to_k_ip", "to_v_ip")
    }
    return {"image_proj": projection(16), "ip_adapter": layers}


def flux_adapter(model: torch.nn.Module) -> dict[str, Any]:
    dim = model.inner_dim
    layers = {
        f"{i}.{part}.{kind}": torch.randn(dim, 16) if kind == "weight" else torch.randn(dim)
        for i in range(len(model.transformer_blocks))
        for part, kind in itertools.product(("to_k_ip", "to_v_ip"), ("weight", "bias"))
    }
    return {"image_proj": projection(16), "ip_adapter": layers}


def sd3_adapter(model: torch.nn.Module) -> dict[str, Any]:
    torch.manual_seed(3)
    layers = {}
    for i in range(len(attention_layers(model))):
        processor = SD3IPAdapterJointAttnProcessor2_0(64, 64, 32, timesteps_emb_dim=64)
        layers |= {f"{i}.{name}": value for name, value in weights_of(processor).items()}
    project = IPAdapterTimeImageProjection(
        embed_dim=IMAGE_DIM, output_dim=64, hidden_dim=64, depth=4, heads=1, num_queries=4, timestep_in_dim=16
    )
    return {"image_proj": weights_of(project), "ip_adapter": layers}


def projection(dim: int) -> dict[str, torch.Tensor]:
    """Four tokens for each image."""
    return {
        "proj.weight": torch.randn(4 * dim, IMAGE_DIM),
        "proj.bias": torch.randn(4 * dim),
        "norm.weight": torch.ones(dim),
        "norm.bias": torch.zeros(dim),
    }


class Tiny:
    """A pipeline of nothing but its denoiser, into which an IP-Adapter can be loaded."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.name = name
        self.model = family(name).build()
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
        if name == "unet":
            parts = *[None] * 3, self.model, diffusers.EulerDiscreteScheduler(steps_offset=1), None, None
            self.pipe: Any = diffusers.StableDiffusionPipeline(*parts, requires_safety_checker=False)
            self.weights = unet_adapter(self.model)
        elif name == "flux":
            self.pipe = diffusers.FluxPipeline(scheduler, None, None, None, None, None, self.model)
            self.weights = flux_adapter(self.model)
        else:
            self.pipe = diffusers.StableDiffusion3Pipeline(self.model, scheduler, *[None] * 7)
            self.weights = sd3_adapter(self.model)
        torch.manual_seed(4)
        self.image = torch.randn(BATCH, 1, IMAGE_DIM) if name != "sd3" else torch.randn(BATCH, 3, IMAGE_DIM)

    def load(self) -> None:
        folder = {} if self.name != "unet" else {"subfolder": ""}
        image_encoder = "image_encoder_pretrained_model_name_or_path" if self.name == "flux" else "image_encoder_folder"
        self.pipe.load_ip_adapter(
            self.weights, weight_name="", **folder, **{image_encoder: None}, low_cpu_mem_usage=False
        )
        self.pipe.set_ip_adapter_scale(0.7)

    def unload(self) -> None:
        self.pipe.unload_ip_adapter()

    def inputs(self) -> Inputs:
        inputs = family(self.name).make_inputs()
        processors = list(self.model.attn_processors.values())
        if not any(isinstance(processor, ADAPTERS[self.name]) for processor in processors):
            return inputs
        if self.name == "unet":
            return inputs | {"added_cond_kwargs": {"image_embeds": [self.image]}}
        embeds = [self.image] if self.name == "flux" else self.image
        return inputs | {"joint_attention_kwargs": {"ip_adapter_image_embeds": embeds}}

    def run(self) -> torch.Tensor:
        return run(self.model, self.inputs())

    def adapters(self) -> list[Any]:
        return [p for p in self.model.attn_processors.values() if isinstance(p, ADAPTERS[self.name])]

    def layers(self) -> dict[str, torch.nn.Module]:
        """Return the model's attention layers, without the loaded adapter's own in its projection of the image."""
        return {name: m for name, m in attention_layers(self.model).items() if not name.startswith("image_proj")}

    def sages(self) -> list[SageAttnProcessor | None]:
        return [sage_of(layer) for layer in self.layers().values()]

    def plans(self) -> set[tuple[str, str]]:
        return {(p.recipe, p.numerics) for layer in self.layers().values() for p in record.last_plans(layer)}


def share(model: torch.nn.Module) -> None:
    model.set_attn_processor(SageAttnProcessor("sage1", "emulate", training="sage_bwd"))


def bind_each(model: torch.nn.Module) -> None:
    for layer in attention_layers(model).values():
        layer.set_processor(bind(layer, "sage1", "emulate", "sage_bwd"))


def apply(model: torch.nn.Module) -> None:
    sage_hf.apply(model, SageConfig("sage1", "emulate", training="sage_bwd"))


def set_backend(model: torch.nn.Module) -> None:
    model.set_attention_backend("sage1_emulate")


WAYS = (share, bind_each, apply, set_backend)


@pytest.mark.parametrize(
    ("name", "switch"),
    [
        pytest.param(name, switch, marks=pytest.mark.audit if name == "unet" and switch is not share else ())
        for name in ADAPTERS
        for switch in WAYS
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_recipe_fallback_and_training_survive_load_and_unload(name: str, switch: Callable[[torch.nn.Module], None]):
    tiny = Tiny(name)
    switch(tiny.model)
    before = tiny.sages()
    training = None if switch is set_backend else "sage_bwd"
    for change in (tiny.load, tiny.unload, tiny.load, tiny.unload):
        change()
        assert tiny.sages() == before and None not in before
        assert {(p.recipe, p.fallback, p.training) for p in before} == {("sage1", "emulate", training)}
        assert bool(tiny.adapters()) == (change == tiny.load)
        record.clear()
        tiny.run()
        assert tiny.plans() == {("sage1", "emulated")}
        assert all(record.last_plans(layer) for layer in tiny.layers().values())
        asked = {row.asked for row in sage_hf.explain(tiny.model).rows if row.layer in tiny.layers()}
        assert asked <= {"sage1", "sage1, training: sage_bwd"}


@pytest.mark.parametrize("order", ["load, switch", "switch, load"])
@each_model
def test_exact_recipe_equals_diffusers_adapter_to_the_bit(name: str, order: str):
    tiny = Tiny(name)
    plain = tiny.run()
    tiny.load()
    expected = tiny.run()
    assert not torch.equal(expected, plain)
    tiny.unload()
    for step in order.split(", "):
        tiny.load() if step == "load" else tiny.model.set_attn_processor(SageAttnProcessor("exact"))
    assert torch.equal(tiny.run(), expected)
    tiny.pipe.set_ip_adapter_scale(0.2)
    scaled = tiny.run()
    assert not torch.equal(scaled, expected)
    tiny.unload()
    assert torch.equal(tiny.run(), plain)


@pytest.mark.parametrize("masks", ["list", "tensor"])
@pytest.mark.parametrize("scale", [0.5, [[0.5, 0.9]], [[0.0, 0.0]], 0.0])
def test_masks_and_scales_of_image_prompts_are_honoured(scale: Any, masks: str):
    tiny = Tiny("unet")
    tiny.load()
    tiny.pipe.set_ip_adapter_scale(scale)
    images = 1 if masks == "tensor" else 2
    if masks == "tensor" and isinstance(scale, list):
        tiny.pipe.set_ip_adapter_scale([scale[0][:1]])
    tiny.image = torch.randn(BATCH, images, IMAGE_DIM)
    area = torch.rand(1, images, 16, 16)
    inputs = tiny.inputs() | {"cross_attention_kwargs": {"ip_adapter_masks": [area] if masks == "list" else area}}
    expected = run(tiny.model, inputs)
    tiny.model.set_attn_processor(SageAttnProcessor("exact"))
    assert torch.equal(run(tiny.model, inputs), expected)
    with pytest.raises(ValueError, match="mask"):
        wrong = [area, area] if masks == "list" else area.repeat(2, 1, 1, 1)
        run(tiny.model, inputs | {"cross_attention_kwargs": {"ip_adapter_masks": wrong}})


UNDONE = {
    "apply": lambda tiny: sage_hf.apply(tiny.model, "sage2").restore,
    "backend": lambda tiny: (tiny.model.set_attention_backend("sage1"), tiny.model.reset_attention_backend)[1],
}


def orders(*events: str) -> list[tuple[str, ...]]:
    """Every order of the events in which an "undo" follows its "do", and "unload" follows "load"."""

    def possible(order: tuple[str, ...]) -> bool:
        places = [[i for i, event in enumerate(order) if event == name] for name in ("do", "undo", "load", "unload")]
        return all(i < j for first, then in (places[:2], places[2:]) for i, j in zip(first, then, strict=False))

    return sorted(filter(possible, set(itertools.permutations(events))))


def follow(tiny: Tiny, order: tuple[str, ...], ways: list[str]) -> None:
    """Load and unload the adapter, and switch the ways in turn; the latest switch is undone first."""
    undo: list[Callable[[], None]] = []
    switch = iter(ways)
    for event in order:
        if event == "do":
            undo.append(UNDONE[next(switch)](tiny))
        elif event == "undo":
            undo.pop()()
        else:
            getattr(tiny, event)()


@pytest.mark.parametrize("way", UNDONE)
@each_model
def test_undoing_leaves_the_adapter_to_diffusers_in_every_order(name: str, way: str):
    tiny = Tiny(name)
    tiny.load()
    expected = tiny.run()
    tiny.unload()
    for order in orders("do", "load", "undo"):
        follow(tiny, order, [way])
        assert tiny.sages() == [None] * len(tiny.sages()), order
        assert {type(processor) for processor in tiny.adapters()} == {ADAPTERS[name]}, order
        assert torch.equal(tiny.run(), expected)
        tiny.unload()


@pytest.mark.audit
@pytest.mark.parametrize("ways", itertools.product(UNDONE, UNDONE), ids=", ".join)
def test_nested_switches_are_undone_around_load_and_unload(ways: tuple[str, str]):
    tiny = Tiny("unet")
    expected = tiny.run()
    for order in orders("load", "unload", "do", "do", "undo", "undo"):
        follow(tiny, order, list(ways))
        assert {type(p).__name__ for p in tiny.model.attn_processors.values()} == {"AttnProcessor2_0"}, order
    assert torch.equal(tiny.run(), expected)


def test_a_backend_beneath_apply_is_reset_too():
    tiny = Tiny("unet")
    tiny.model.set_attention_backend("sage1")
    handle = sage_hf.apply(tiny.model, "sage2")
    tiny.load()
    tiny.model.reset_attention_backend()
    assert {sage.recipe for sage in tiny.sages()} == {"sage2"}
    handle.restore()
    assert tiny.sages() == [None] * len(tiny.sages())


def test_restore_gives_back_the_users_processor_over_the_adapter():
    tiny = Tiny("flux")
    users = SageAttnProcessor("sage3", "emulate")
    tiny.model.set_attn_processor(users)
    handle = sage_hf.apply(tiny.model, "sage2")
    tiny.load()
    handle.restore()
    assert set(tiny.sages()) == {users} and len(tiny.adapters()) == 1
    tiny.run()
    assert ("sage3", "emulated") in tiny.plans()
    tiny.unload()
    assert set(tiny.model.attn_processors.values()) == {users}


def test_a_processor_set_after_apply_does_not_make_restore_drop_the_adapter():
    tiny = Tiny("sd3")
    handle = sage_hf.apply(tiny.model, "sage2")
    tiny.model.set_attn_processor(SageAttnProcessor("sage3"))
    tiny.load()
    handle.restore()
    assert tiny.sages() == [None] * len(tiny.sages()) and len(tiny.adapters()) == len(tiny.sages())


@each_model
def test_step_and_layer_rules_reach_the_adapters_layers(name: str):
    tiny = Tiny(name)
    last = list(tiny.layers())[-1]
    config = SageConfig("sage3", "emulate", (LayerRule(last, "exact"),), (StepRule(0, 1, "sage1"),))
    sage_hf.apply(tiny.model, config)
    tiny.load()
    for timestep, recipe in ((900.0, "sage1"), (500.0, "sage3")):
        record.clear()
        run(tiny.model, tiny.inputs() | {"timestep": torch.full((BATCH,), timestep)})
        ran = {n: {p.recipe for p in record.last_plans(layer)} for n, layer in tiny.layers().items()}
        assert ran.pop(last) == {"exact"}
        assert set().union(*ran.values()) == {recipe}


@pytest.mark.parametrize(
    ("name", "clone"),
    [
        pytest.param(name, clone, marks=pytest.mark.audit if name == "unet" and clone is copy.deepcopy else ())
        for name in ADAPTERS
        for clone in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)))
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_served_adapters_are_copied_saved_and_moved_with_the_model(name: str, clone: Callable[[Any], Any]):
    tiny = Tiny(name)
    tiny.load()
    keys = set(tiny.model.state_dict())
    tiny.model.set_attn_processor(SageAttnProcessor("sage3", "emulate"))
    assert set(tiny.model.state_dict()) == keys
    twin = clone(tiny.model)
    assert torch.equal(run(twin, tiny.inputs()), tiny.run())
    tiny.model.to(torch.float64)
    handle = sage_hf.apply(tiny.model, "exact")
    handle.restore()
    assert {value.dtype for key, value in tiny.model.state_dict().items() if "processor" in key} == {torch.float64}
    assert {value.dtype for key, value in twin.state_dict().items() if "processor" in key} == {torch.float32}


@each_model
def test_served_adapters_refuse_what_ours_refuses(name: str):
    tiny = Tiny(name)
    tiny.load()
    tiny.model.set_attn_processor(SageAttnProcessor("sage3"))
    module = next(one for one in attention_layers(tiny.model).values() if one.processor is tiny.adapters()[0])
    if hasattr(module, "set_attention_backend"):
        with pytest.raises(UnsupportedAttentionError, match="attention backend native"):
            module.set_attention_backend("native")
    served = tiny.adapters()[0]
    served._attention_backend = "native"  # as model.set_attention_backend does
    assert served._attention_backend.value == "sage3"
    served._parallel_config = config = object()  # as model.enable_parallelism does
    assert served.adapter._parallel_config is config


def test_a_failed_load_leaves_the_recipe_where_it_was():
    tiny = Tiny("unet")
    share(tiny.model)
    before = dict(tiny.model.attn_processors)
    with pytest.raises(KeyError):
        tiny.model._load_ip_adapter_weights(
            {"image_proj": tiny.weights["image_proj"], "ip_adapter": {}}, low_cpu_mem_usage=False
        )
    assert tiny.model.attn_processors == before
    tiny.run()
    assert tiny.plans() == {("sage1", "emulated")}


def test_adapters_compile_without_graph_breaks():
    tiny = Tiny("sd3")
    tiny.load()
    tiny.model.set_attn_processor(SageAttnProcessor("sage3", "emulate"))
    expected = tiny.run()
    for block in tiny.model.transformer_blocks:
        block.compile(fullgraph=True, backend="eager")
    assert torch.equal(tiny.run(), expected)
