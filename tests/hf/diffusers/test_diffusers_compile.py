"""A denoiser with our processors is compiled once for all steps, and again only where a recipe changes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import sage_hf
from sage_hf import SageAttnProcessor, SageConfig
from sage_hf.config import StepRule
from sage_hf.diffusers import attention_layers
from tests.helpers.families import FAMILIES, Family, family, run


class Graphs:
    """Counts the graphs that are compiled, and runs them as they are."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        self.count += 1
        return graph.forward


@pytest.fixture
def graphs(compilable_dispatch: None) -> Iterator[Graphs]:
    torch._dynamo.reset()
    yield Graphs()
    torch._dynamo.reset()


def share(model: torch.nn.Module) -> None:
    model.set_attn_processor(SageAttnProcessor("sage2"))


def apply(model: torch.nn.Module) -> None:
    sage_hf.apply(model, "sage2")


def set_backend(model: torch.nn.Module) -> None:
    model.set_attention_backend("sage2")


def calls_of(model: torch.nn.Module, case: Family) -> list[tuple[torch.nn.Module, tuple, dict]]:
    """Return one call of an attention layer of each kind that the model has, as the model makes it."""
    found: dict[tuple, tuple[torch.nn.Module, tuple, dict]] = {}

    def record(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        kind = (type(module), len(args), *kwargs, *(x is None for x in (*args, *kwargs.values())))
        found.setdefault(kind, (module, args, kwargs))

    layers = attention_layers(model).values()
    handles = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    run(model, case.make_inputs())
    for handle in handles:
        handle.remove()
    return list(found.values())


# One family by diffusers' dispatch, one by our processors of joint attention, and one UNet.
QUICK = ("wan-t2v", "hunyuan-video", "unet")
# All layers of every family with a shared processor, and one layer with one of its own, by the two switches in turn.
CASES = [
    *(pytest.param(case, share, marks=() if case.name in QUICK else pytest.mark.audit) for case in FAMILIES),
    *(
        pytest.param(case, switch, marks=pytest.mark.audit if position > 0 else ())
        for position, (case, switch) in enumerate(zip(FAMILIES, itertools.cycle([apply, set_backend]), strict=False))
    ),
]


@pytest.mark.parametrize(("case", "switch"), CASES, ids=lambda value: getattr(value, "__name__", str(value)))
@torch.no_grad()
def test_every_step_runs_what_the_first_compiled(
    case: Family, switch: Callable[[torch.nn.Module], None], graphs: Graphs
):
    model = case.build()
    calls = calls_of(model, case)
    switch(model)
    for module, args, kwargs in calls if switch is share else calls[:1]:
        module.compile(backend=graphs)
        graphs.count = 0
        module(*args, **kwargs)
        compiled = graphs.count
        assert compiled > 0
        for _ in range(2):
            module(*args, **kwargs)
            assert graphs.count == compiled, type(module).__name__


def compile_blocks(model: torch.nn.Module, backend: Graphs) -> None:
    for block in getattr(model, "transformer_blocks", None) or model.blocks:
        block.compile(backend=backend)


def graphs_of_the_original(case: Family) -> int:
    """Graphs that diffusers' own processors need; CogVideoX: two, as its first block gets other strides."""
    model, graphs = case.build(), Graphs()
    compile_blocks(model, graphs)
    run(model, case.make_inputs())
    torch._dynamo.reset()
    return graphs.count


@pytest.mark.audit  # what shares them below, with another recipe and in training, is compiled each time
@pytest.mark.parametrize("switch", [share, apply, set_backend], ids=lambda switch: switch.__name__)
@pytest.mark.parametrize("name", ["cogvideox", "wan-t2v"])
def test_blocks_share_what_was_compiled(name: str, switch: Callable[[torch.nn.Module], None], graphs: Graphs):
    case = family(name)
    expected = graphs_of_the_original(case)
    model, inputs = case.build(), case.make_inputs()
    switch(model)
    compile_blocks(model, graphs)
    for _ in range(3):
        run(model, inputs)
        assert graphs.count == expected


@pytest.mark.parametrize("name", ["wan-t2v", pytest.param("cogvideox", marks=pytest.mark.audit)])
def test_a_step_with_another_recipe_compiles_once_and_takes_effect(name: str, graphs: Graphs):
    case = family(name)
    model, inputs = case.build(), case.make_inputs()
    once = graphs_of_the_original(case)
    sage_hf.apply(model, SageConfig("sage2", "emulate", steps=(StepRule(0, 1, "exact"),)))
    steps = [inputs | {"timestep": torch.full_like(inputs["timestep"], value)} for value in (900.0, 600.0, 300.0)]
    expected = [run(model, step) for step in steps]
    compile_blocks(model, graphs)
    counts = []
    for _ in range(2):
        for step, output in zip(steps, expected, strict=True):
            assert torch.equal(run(model, step), output)
            counts.append(graphs.count)
    assert counts == [once, *[2 * once] * 5]


def test_training_and_evaluation_are_compiled_once_each(graphs: Graphs):
    model, inputs = family("wan-t2v").draw()
    model.set_attn_processor(SageAttnProcessor("exact", "emulate", training="sage2"))
    expected = run(model, inputs), run(model.train(), inputs)
    assert not torch.equal(*expected)
    compile_blocks(model, graphs)
    for _ in range(2):
        for training in (False, True):
            assert torch.equal(run(model.train(training), inputs), expected[training])
    assert graphs.count == 2
