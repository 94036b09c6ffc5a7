"""The denoising step to which a timestep belongs."""

import copy
import pickle
import weakref

import numpy as np
import pytest
import torch
from diffusers import (
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    HeunDiscreteScheduler,
    KDPM2AncestralDiscreteScheduler,
    KDPM2DiscreteScheduler,
    ModularPipeline,
    PNDMScheduler,
)

import sage_hf
from sage_hf.config import LayerRule, SageConfig, StepRule
from sage_hf.schedule import StepSchedule
from tests.helpers import tiny_pipelines as tiny

FIRST_AND_LAST = SageConfig("sage3", steps=(StepRule(0, 1, "sage2"), StepRule(-1, None, "exact")))


class Processor:
    recipe = "sage3"


def recipes_of_generation(pipe, config, steps, give=lambda t: t, calls_per_step=1, schedule=None):
    """The recipe in force at every step of a denoising loop that calls the denoiser with give(t)."""
    processor = Processor()
    schedule = schedule or StepSchedule(config, {"layer": processor}, pipe)
    processor = schedule.processors["layer"]
    pipe.scheduler.set_timesteps(steps)
    seen = []
    for t in pipe.scheduler.timesteps:
        for _ in range(calls_per_step):
            schedule.advance(give(t).expand(2))
            seen.append(processor.recipe)
    return seen


class Pipe:
    def __init__(self, scheduler):
        self.scheduler = scheduler


UNITS = {
    "t (CogVideoX, HunyuanVideo, Wan)": lambda t: t,
    "t in bfloat16 (HunyuanVideo)": lambda t: t.bfloat16(),
    "t / 1000 (Flux, Qwen-Image)": lambda t: t.bfloat16() / 1000,
    "1 - t / 1000 (Lumina 2, Z-Image)": lambda t: 1 - t / 1000,
    "something else": lambda t: torch.log(t + 1),
}


@pytest.mark.parametrize("unit", UNITS)
def test_first_and_last_step_are_found_whatever_the_pipeline_calls_a_timestep(unit):
    pipe = Pipe(FlowMatchEulerDiscreteScheduler(shift=7.0))
    expected = ["sage2", *["sage3"] * 48, "exact"]
    assert recipes_of_generation(pipe, FIRST_AND_LAST, 50, UNITS[unit]) == expected


def ends_at_one_thousandth(steps):
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=np.linspace(1, 0.001, steps))
    return scheduler


def ends_at_one(steps):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    scheduler.set_timesteps(steps)
    return scheduler


def ends_at_zero(steps):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.sigma_min = 0.0
    scheduler.set_timesteps(steps)
    return scheduler


def starts_at_zero(steps):
    scheduler = tiny.rising_scheduler()
    scheduler.set_timesteps(steps)
    return scheduler


@pytest.mark.parametrize("steps", [1, 2, 8])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("schedule", [ends_at_one_thousandth, ends_at_one, ends_at_zero, starts_at_zero])
def test_a_timestep_that_fits_two_units_counts_as_the_first_step(schedule, unit, steps):
    pipe = Pipe(schedule(steps))
    processor = Processor()
    follower = StepSchedule(FIRST_AND_LAST, {"layer": processor}, pipe)
    seen = []
    for t in pipe.scheduler.timesteps:
        follower.advance(UNITS[unit](t))
        seen.append((follower.step, processor.recipe))
    assert seen == [(step, FIRST_AND_LAST.resolve("layer", step, steps)) for step in range(steps)]


def test_second_order_schedulers_repeat_timesteps_without_losing_the_last_step():
    pipe = Pipe(HeunDiscreteScheduler())
    assert recipes_of_generation(pipe, FIRST_AND_LAST, 3)[-1] == "exact"


@pytest.mark.parametrize("unit", ["t (CogVideoX, HunyuanVideo, Wan)", "something else"])
@pytest.mark.parametrize("steps", [1, 2, 20])
def test_timesteps_between_steps_belong_to_the_earlier_step(steps, unit):
    recipes = recipes_of_generation(Pipe(KDPM2DiscreteScheduler()), FIRST_AND_LAST, steps, UNITS[unit])
    steps_of_calls = [call // 2 for call in range(2 * steps - 1)]
    assert recipes == [FIRST_AND_LAST.resolve("layer", step, steps) for step in steps_of_calls]


@pytest.mark.parametrize("karras", [False, True])
@pytest.mark.parametrize("steps", [6, 10, 20])
def test_timesteps_between_steps_that_equal_the_next_step_shift_no_other(steps, karras):
    pipe = Pipe(KDPM2AncestralDiscreteScheduler(use_karras_sigmas=karras))
    names = ["sage1", "sage2", "sage3", "exact"]
    config = SageConfig("sage3", steps=tuple(StepRule(step, step + 1, names[step % 4]) for step in range(steps)))
    recipes = recipes_of_generation(pipe, config, steps)
    timesteps = pipe.scheduler.timesteps.tolist()
    assert len(set(timesteps)) < len(timesteps) == 2 * steps - 1
    begun = timesteps[::2]
    expected = [begun.index(t) if t in begun else call // 2 for call, t in enumerate(timesteps)]
    assert recipes == [names[step % 4] for step in expected]


def test_every_timestep_is_a_step_if_a_scheduler_adds_some():
    pipe = Pipe(PNDMScheduler())
    recipes = recipes_of_generation(pipe, FIRST_AND_LAST, 20)
    assert len(set(pipe.scheduler.timesteps.tolist())) == 23
    assert recipes.count("sage2") == recipes.count("exact") == 1 and recipes[0] == "sage2" and recipes[-1] == "exact"


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("calls_per_step", [1, 2, 3])
def test_calls_that_share_a_step_do_not_advance_it(steps, calls_per_step):
    pipe = Pipe(FlowMatchEulerDiscreteScheduler())
    recipes = recipes_of_generation(pipe, FIRST_AND_LAST, steps, calls_per_step=calls_per_step)
    expected = [FIRST_AND_LAST.resolve("layer", step, steps) for step in range(steps)]
    assert recipes == [recipe for recipe in expected for _ in range(calls_per_step)]


def test_consecutive_generations_start_at_the_first_step_whatever_their_lengths():
    pipe = Pipe(FlowMatchEulerDiscreteScheduler())
    schedule = StepSchedule(FIRST_AND_LAST, {"layer": Processor()}, pipe)
    for steps in (4, 1, 1, 6, 2):
        recipes = recipes_of_generation(pipe, None, steps, schedule=schedule)
        assert recipes == [FIRST_AND_LAST.resolve("layer", step, steps) for step in range(steps)], steps


def test_an_interrupted_generation_does_not_shift_the_next_one():
    pipe = Pipe(FlowMatchEulerDiscreteScheduler())
    schedule = StepSchedule(FIRST_AND_LAST, {"layer": Processor()}, pipe)
    pipe.scheduler.set_timesteps(10)
    for t in pipe.scheduler.timesteps[:3]:
        schedule.advance(t)
    assert recipes_of_generation(pipe, None, 3, schedule=schedule) == ["sage2", "sage3", "exact"]


def test_a_schedule_entered_in_the_middle_keeps_its_numbering():
    pipe = Pipe(FlowMatchEulerDiscreteScheduler())
    processor = Processor()
    schedule = StepSchedule(FIRST_AND_LAST, {"layer": processor}, pipe)
    pipe.scheduler.set_timesteps(10)
    seen = []
    for t in pipe.scheduler.timesteps[6:]:
        schedule.advance(t)
        seen.append((schedule.step, processor.recipe))
    assert seen == [(6, "sage3"), (7, "sage3"), (8, "sage3"), (9, "exact")]


def test_without_a_pipeline_steps_are_counted_by_changes_of_the_timestep():
    config = SageConfig("sage3", steps=(StepRule(0, 1, "sage2"), StepRule(2, 3, "exact")))
    processor = Processor()
    schedule = StepSchedule(config, {"layer": processor})
    seen = []
    for t in (999.0, 999.0, 600.0, 600.0, 300.0, 10.0, 999.0, 600.0):
        schedule.advance(torch.tensor([t]))
        seen.append(processor.recipe)
    assert seen == ["sage2", "sage2", "sage3", "sage3", "exact", "sage3", "sage2", "sage3"]


def test_a_model_without_pipeline_cannot_count_from_the_end():
    with pytest.raises(ValueError, match="apply the configuration to the pipeline"):
        StepSchedule(FIRST_AND_LAST, {})
    model = tiny.transformer()
    before = [layer.processor for layer in model.modules() if hasattr(layer, "processor")]
    with pytest.raises(ValueError, match="apply the configuration to the pipeline"):
        sage_hf.apply(model, FIRST_AND_LAST)
    assert before == [layer.processor for layer in model.modules() if hasattr(layer, "processor")]


def test_a_pipeline_that_is_gone_is_an_error_and_not_a_guess():
    pipe = Pipe(FlowMatchEulerDiscreteScheduler())
    schedule = StepSchedule(FIRST_AND_LAST, {"layer": Processor()}, pipe)
    del pipe
    with pytest.raises(RuntimeError, match=r"pipeline .* is gone"):
        schedule.advance(1.0)


def test_a_denoiser_with_step_rules_can_be_copied_and_pickled():
    pipe = tiny.cogvideox(num_layers=1)
    sage_hf.apply(pipe, SageConfig("exact", steps=(StepRule(-1, None, "sage2"),)))
    expected = tiny.latents(pipe)
    loaded = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(pipe.transformer))))
    with pytest.raises(RuntimeError, match=r"pipeline .* is gone"):
        loaded(**tiny.transformer_inputs())
    pipe.transformer = copy.deepcopy(pipe.transformer)
    assert torch.equal(tiny.latents(pipe), expected)


@pytest.mark.audit
def test_a_process_that_only_loads_a_denoiser_follows_the_pipeline_that_runs_it(tmp_path, forks):
    pipe = tiny.cogvideox(num_layers=1)
    sage_hf.apply(pipe, SageConfig("exact", steps=(StepRule(-1, None, "sage2"),)))
    (tmp_path / "model").write_bytes(pickle.dumps(pipe.transformer))
    forks.run(f"""
import pickle
from pathlib import Path
import sage_hf
from tests.helpers import tiny_pipelines as tiny
pipe = tiny.cogvideox(num_layers=1)
pipe.transformer = pickle.loads(Path({str(tmp_path / "model")!r}).read_bytes())
tiny.latents(pipe, steps=2, guidance_scale=1.0)
assert {{row.recipe: row.calls for row in sage_hf.explain(pipe).rows}} == {{"exact": 1, "sage2": 1}}
""")


@pytest.mark.parametrize("guidance_scale", [1.0, 3.0])
def test_real_pipeline_runs_each_step_by_its_recipe(guidance_scale):
    pipe = tiny.cogvideox()
    config = SageConfig("sage3", layers=(LayerRule("*.1.*", "sage1"),), steps=FIRST_AND_LAST.steps)
    with sage_hf.apply(pipe, config):
        for steps in (4, 1):
            tiny.latents(pipe, steps=steps, guidance_scale=guidance_scale)
        ran = {}
        for row in sage_hf.explain(pipe).rows:
            ran.setdefault(row.layer, {})[row.recipe] = row.calls
    assert ran["transformer_blocks.1.attn1"] == {"sage1": 5}
    assert ran["transformer_blocks.0.attn1"] == {"sage2": 2, "sage3": 2, "exact": 1}
    assert not pipe.transformer._forward_pre_hooks


def compile_blocks(pipe):
    for block in pipe.transformer.transformer_blocks:
        block.compile(fullgraph=True, backend="eager")


def compile_in_place(pipe):
    pipe.transformer.compile(fullgraph=True, backend="eager")


def compile_wrapped(pipe):
    pipe.transformer = torch.compile(pipe.transformer, fullgraph=True, backend="eager")


@pytest.mark.parametrize(
    ("compile_pipe", "order"),
    [
        (compile_blocks, "apply, compile"),
        (compile_in_place, "compile, apply"),
        (compile_wrapped, "apply, compile"),
        # How the pipe is compiled, and when, each stand above.
        pytest.param(compile_blocks, "compile, apply", marks=pytest.mark.audit),
        pytest.param(compile_in_place, "apply, compile", marks=pytest.mark.audit),
        pytest.param(compile_wrapped, "compile, apply", marks=pytest.mark.audit),
    ],
)
def test_compiled_denoiser_follows_the_steps_without_a_graph_break(compile_pipe, order):
    config = SageConfig("exact", steps=(StepRule(0, 1, "sage2"),))
    with sage_hf.apply(pipe := tiny.cogvideox(num_layers=1), config):
        eager = tiny.latents(pipe, steps=3)
    pipe = tiny.cogvideox(num_layers=1)
    try:
        if order == "compile, apply":
            compile_pipe(pipe)
        sage_hf.apply(pipe, config)
        if order == "apply, compile":
            compile_pipe(pipe)
        assert torch.equal(eager, tiny.latents(pipe, steps=3))
        assert torch.equal(eager, tiny.latents(pipe, steps=3))
    finally:
        torch._dynamo.reset()


class Denoiser(torch.nn.Module):
    """Notes the recipe in force at every call."""

    def __init__(self, config, pipe=None):
        super().__init__()
        self.processor = Processor()
        self.seen = []
        StepSchedule(config, {"layer": self.processor}, pipe).attach(self)

    def forward(self, timestep):
        self.seen.append(self.processor.recipe)


class Runner(DiffusionPipeline):
    """Denoises as pipelines do; `start` is where image to image enters the schedule."""

    def __init__(self, scheduler):
        super().__init__()
        self.register_modules(scheduler=scheduler)

    def __call__(self, denoiser, steps, start=0, after_step=lambda: None):
        self.scheduler.set_timesteps(steps)
        for t in self.scheduler.timesteps[start:]:
            denoiser(t.expand(2))
            after_step()


def runners():
    return [Runner(FlowMatchEulerDiscreteScheduler()) for _ in range(2)]


def expected(steps, start=0):
    return [FIRST_AND_LAST.resolve("layer", step, steps) for step in range(start, steps)]


def test_pipelines_that_share_a_denoiser_each_count_their_own_steps():
    first, second = runners()
    denoiser = Denoiser(FIRST_AND_LAST, first)
    for pipe, steps, start in ((first, 4, 0), (second, 8, 0), (first, 2, 0), (second, 8, 5), (second, 1, 0)):
        denoiser.seen.clear()
        pipe(denoiser, steps, start)
        assert denoiser.seen == expected(steps, start)


def test_a_pipeline_that_runs_inside_another_one_does_not_disturb_its_steps():
    first, second = runners()
    denoiser = Denoiser(SageConfig("sage3", steps=(StepRule(2, 3, "exact"),)), first)
    first(denoiser, 3, after_step=lambda: second(denoiser, 5))
    inside = ["sage3", "sage3", "exact", "sage3", "sage3"]
    assert denoiser.seen == ["sage3", *inside, "sage3", *inside, "exact", *inside]


def test_a_scheduler_that_replaces_the_pipelines_own_is_followed():
    pipe, other = runners()
    denoiser = Denoiser(FIRST_AND_LAST, pipe)
    pipe(denoiser, 4)
    pipe.scheduler = other.scheduler
    denoiser.seen.clear()
    pipe(denoiser, 3)
    assert denoiser.seen == expected(3)


def test_copied_and_unpickled_pipelines_count_their_own_steps():
    pipe, runner = runners()
    pipe.denoiser = Denoiser(FIRST_AND_LAST, pipe)
    pipe(pipe.denoiser, 4)
    other = copy.deepcopy(pipe)
    loaded = pickle.loads(pickle.dumps(pipe.denoiser))
    pipe.scheduler.set_timesteps(2)
    for owner, denoiser in ((other, other.denoiser), (runner, loaded)):
        denoiser.seen.clear()
        owner(denoiser, 5)
        assert denoiser.seen == expected(5)


def test_a_denoiser_given_alone_takes_its_steps_from_the_pipeline_that_runs_it():
    config = SageConfig("sage3", steps=(StepRule(5, 6, "exact"),))
    denoiser = Denoiser(config)
    runners()[0](denoiser, 8, start=4)
    assert denoiser.seen == ["sage3", "exact", "sage3", "sage3"]


class Telling(Runner):
    """Tells its timestep as diffusers' pipelines do, and gives the denoiser something else."""

    def __init__(self, scheduler, tell, give):
        super().__init__(scheduler)
        self.tell, self.give, self.current_timestep = tell, give, None

    def __call__(self, denoiser, steps, start=0):
        self.scheduler.set_timesteps(steps)
        for place in range(start, steps):
            t, sigma = self.scheduler.timesteps[place], self.scheduler.sigmas[place]
            self.current_timestep = self.tell(t)
            denoiser(self.give(t, sigma))
        self.current_timestep = None


@pytest.mark.parametrize(
    ("tell", "give"),
    [
        (lambda t: t, lambda t, sigma: (sigma / (sigma + 1)).bfloat16().expand(2)),
        (lambda t: t.item(), lambda t, sigma: torch.stack([torch.tensor(900.0), sigma])),
        (lambda t: 1000 - t, lambda t, sigma: t.expand(2)),
        (lambda t: t.expand(3), lambda t, sigma: t.expand(2)),
    ],
    ids=["Cosmos 2", "Cosmos 2.5, a clean frame", "Mochi", "a timestep for each frame"],
)
def test_the_pipelines_timestep_goes_before_the_denoisers_argument(tell, give):
    """σ / (σ + 1) of a Karras schedule is, in another unit, near timesteps that come much later."""
    scheduler = FlowMatchEulerDiscreteScheduler(use_karras_sigmas=True)
    scheduler.sigma_min, scheduler.sigma_max = 0.002, 80
    pipe = Telling(scheduler, tell, give)
    denoiser = Denoiser(FIRST_AND_LAST, pipe)
    for start in (0, 0, 20):
        denoiser.seen.clear()
        pipe(denoiser, 36, start)
        assert denoiser.seen == expected(36, start)


def test_a_modular_pipeline_is_asked_for_its_scheduler():
    class Modular(ModularPipeline):
        def __init__(self, scheduler):  # without blocks, which would be loaded
            self.scheduler = scheduler

        def __call__(self, denoiser):
            for t in self.scheduler.timesteps:
                denoiser(t)

    first, second = runners()
    denoiser = Denoiser(SageConfig("sage3", steps=(StepRule(2, 3, "exact"),)), first)
    first.scheduler.set_timesteps(9)
    second.scheduler.set_timesteps(5)
    Modular(second.scheduler)(denoiser)
    assert denoiser.seen == ["sage3", "sage3", "exact", "sage3", "sage3"]


def test_a_loop_outside_of_every_pipeline_is_told_once_whose_steps_are_counted(caplog):
    pipe, _ = runners()
    denoiser = Denoiser(FIRST_AND_LAST, pipe)
    pipe(denoiser, 4)
    assert not caplog.records
    pipe.scheduler.set_timesteps(3)
    denoiser.seen.clear()
    for t in pipe.scheduler.timesteps:
        denoiser(t)
    assert denoiser.seen == expected(3)
    (message,) = caplog.messages
    assert "Denoiser is called from outside a pipeline" in message


def test_a_loop_before_the_pipelines_scheduler_has_timesteps_is_counted():
    """PNDM has none until `set_timesteps`."""
    pipe = Pipe(PNDMScheduler(skip_prk_steps=True))
    processor = Processor()
    schedule = StepSchedule(SageConfig("sage3", steps=(StepRule(0, 1, "sage2"),)), {"layer": processor}, pipe)
    seen = []
    for t in (900.0, 900.0, 500.0, 900.0):
        schedule.advance(t)
        seen.append(processor.recipe)
    assert seen == ["sage2", "sage2", "sage3", "sage2"]
    assert recipes_of_generation(pipe, None, 3, schedule=schedule) == ["sage2", "sage3", "sage3", "sage3"]
    last, fresh = SageConfig("sage3", steps=(StepRule(-1, None, "exact"),)), Pipe(PNDMScheduler())
    with pytest.raises(ValueError, match="number of steps is unknown"):
        StepSchedule(last, {"layer": processor}, fresh).advance(500.0)


def test_a_scheduler_is_not_kept_alive():
    pipe, _ = runners()
    denoiser = Denoiser(FIRST_AND_LAST, pipe)
    pipe(denoiser, 2)
    gone = weakref.ref(pipe.scheduler)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler()
    assert gone() is None


def recipes_of_calls(pipe, steps, **settings):
    """The recipes of the first layer in the denoiser's calls of one generation."""
    layer, seen = pipe.transformer.transformer_blocks[0].attn1, []
    hook = layer.register_forward_pre_hook(lambda *_: seen.append(layer.processor.recipe))
    try:
        tiny.latents(pipe, steps=steps, guidance_scale=1.0, **settings)
    finally:
        hook.remove()
    return seen


def sharing(pipe):
    other = CogVideoXPipeline(**{**pipe.components, "scheduler": CogVideoXDDIMScheduler()})
    other.set_progress_bar_config(disable=True)
    return other


def test_real_pipelines_that_share_a_transformer_run_their_own_steps():
    first = tiny.cogvideox(num_layers=1)
    second = sharing(first)
    sage_hf.apply(first, FIRST_AND_LAST)
    assert recipes_of_calls(first, 2) == expected(2)
    assert recipes_of_calls(second, 4) == expected(4)
    assert recipes_of_calls(first, 3) == expected(3)


def test_a_second_configuration_replaces_the_first_in_every_pipeline():
    first = tiny.cogvideox(num_layers=1)
    second = sharing(first)
    handle = sage_hf.apply(first, FIRST_AND_LAST)
    later = sage_hf.apply(second, SageConfig("sage1", steps=(StepRule(1, 2, "exact"),)))
    for pipe, steps in ((second, 3), (first, 4)):
        assert recipes_of_calls(pipe, steps) == ["sage1", "exact", "sage1", "sage1"][:steps]
    handle.restore()
    assert recipes_of_calls(second, 3) == ["sage1", "exact", "sage1"]
    later.restore()
    assert not any(isinstance(one, sage_hf.SageAttnProcessor) for one in first.transformer.attn_processors.values())
    assert not first.transformer._forward_pre_hooks
