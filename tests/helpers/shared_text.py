"""Processes that run plans by which all have the text: `shared_text.py STORE PROCESSES REPORT`.

REPORT is the JSON file that the first process writes: by case what is wrong, or "" where the processes agree with one.
All is done by gloo on the CPU in float32.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
import torch
import torch.distributed as dist
import torch.multiprocessing
from diffusers import ContextParallelConfig
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0

import sage_hf
from sage_hf import SageAttnProcessor, SageConfig
from sage_hf.diffusers import attention_layers
from tests.helpers.families import BATCH, Family, Inputs, family, run

ROOT = Path(__file__).parents[2]
FAMILIES = "cogvideox", "cogvideox-1.5", "hunyuan-video", "mochi", "sd3", "sd3.5"
RECIPES = {
    "cogvideox-1.5": ("exact", "sage2", "sage3"),
    "hunyuan-video": ("exact", "sage2"),
    "mochi": ("exact", "sage3"),
}
"""Recipes of a family, if more than "exact": how tokens are split does not depend on the format."""


def run_processes(folder: Path, processes: int, seconds: float) -> dict[str, str]:
    """Return the findings of some processes, as `main` reports them.

    Args:
        folder: an empty one, for the processes' files.
        processes: how many.
        seconds: how long they may take.
    """
    report = folder / "report.json"
    command = [sys.executable, "-m", __spec__.name, str(folder / "store"), str(processes), str(report)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=seconds)
    return json.loads(report.read_text())


def main(rank: int, store: str, processes: str, report: str) -> None:
    """Run every case, and let the first process write what it found."""
    diffusers.logging.set_verbosity_error()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=int(processes))
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it
    found = dict(cases(int(processes)))
    dist.destroy_process_group()
    if rank == 0:
        Path(report).write_text(json.dumps(found))


def cases(processes: int) -> Iterator[tuple[str, str]]:
    """Yield each case by name, with what is wrong."""
    modes: dict[str, dict[str, Any]] = {"ulysses": {"ulysses_degree": processes}, "ring": {"ring_degree": processes}}
    if processes == 4:
        modes["both"] = {"ulysses_degree": 2, "ring_degree": 2}
    for mode, degrees in modes.items():
        for name in FAMILIES:
            yield f"{name}-{mode}", agrees_with_one(with_heads(name, processes), degrees)
        uneven = {"ulysses_anything": True} if mode == "ulysses" else {"ring_anything": True}
        if mode != "both":
            with patch.object(dist, "all_gather", _all_gather_of_any_sizes):
                yield f"uneven-{mode}", agrees_with_one(_uneven(processes), degrees | uneven)
        yield f"prompts-{mode}", takes_prompts_of_any_length(degrees, processes)
        yield f"ip-adapter-{mode}", agrees_with_one(with_heads("sd3", processes), degrees, _load_ip_adapter)
        yield f"controlnet-{mode}", agrees_with_one(with_heads("sd3.5", processes), degrees, _add_residuals)
        yield f"lora-{mode}", lora_counts(degrees, processes)
    yield "doors", doors_agree(modes["ulysses"], processes)
    yield "changes", survives_changes(modes["ulysses"], processes)
    yield "gradient", refuses_gradients(modes["ulysses"], processes)


def with_heads(name: str, heads: int) -> Family:
    """Return a family with at least so many heads."""
    case = family(name)
    if case.config["num_attention_heads"] >= heads:
        return case
    config = case.config | {"num_attention_heads": heads}
    if "caption_projection_dim" in config:
        config["caption_projection_dim"] = heads * config["attention_head_dim"]
    return replace(case, config=config)


def _uneven(processes: int) -> Family:
    """CogVideoX with numbers of heads and of video tokens that do not divide."""
    case = with_heads("cogvideox", processes + 1)

    def inputs() -> Inputs:
        found = case.inputs()
        return found | {"hidden_states": found["hidden_states"][:, :, :, :6, :6]}

    config = {"sample_width": 6, "sample_height": 6, "num_attention_heads": processes + 1}
    return replace(case, config=case.config | config, inputs=inputs)


def _all_gather_of_any_sizes(parts: list[torch.Tensor], mine: torch.Tensor, group: Any = None) -> None:
    """Gather tensors of different sizes, as NCCL does for diffusers and gloo does not."""
    parts[dist.get_rank(group)].copy_(mine)
    for rank, part in enumerate(parts):
        dist.broadcast(part, group=group, group_src=rank)


def _load_ip_adapter(model: Any, inputs: Inputs) -> None:
    torch.manual_seed(3)
    dim = model.inner_dim
    for layer in attention_layers(model).values():
        processor = SD3IPAdapterJointAttnProcessor2_0(dim, 8, model.config.attention_head_dim, 4, scale=0.7)
        layer.set_processor(processor.to(model.dtype))
    tokens, temb = torch.randn(BATCH, 3, 8), torch.randn(BATCH, 4)
    inputs["joint_attention_kwargs"] = {"ip_hidden_states": tokens.to(model.dtype), "temb": temb.to(model.dtype)}


def _add_residuals(model: Any, inputs: Inputs) -> None:
    torch.manual_seed(3)
    residual = torch.randn(BATCH, 64, model.inner_dim, dtype=model.dtype)
    inputs["block_controlnet_hidden_states"] = [residual]


def _emulated(recipe: str) -> SageConfig:
    return SageConfig(recipe, fallback="emulate")


def _distance(output: torch.Tensor, reference: torch.Tensor) -> float:
    return float((output.double() - reference).norm() / reference.norm())


def agrees_with_one(case: Family, degrees: dict[str, Any], extend: Callable[[Any, Inputs], None] | None = None) -> str:
    """Some processes err as much as one does, recipe by recipe, against diffusers' own model in float64."""
    given = case.build().double(), case.make_inputs(torch.float64)
    model, inputs = case.build(), case.make_inputs()
    recipes = RECIPES.get(case.name, ("exact",))
    if extend is not None:
        extend(*given)
        extend(model, inputs)
        recipes = ("exact",)
    reference = run(*given)
    alone = {}
    for recipe in recipes:
        with sage_hf.apply(model, _emulated(recipe)):
            alone[recipe] = _distance(run(model, inputs), reference)
    sage_hf.apply(model, _emulated(recipes[0]))
    model.enable_parallelism(config=ContextParallelConfig(**degrees))
    wrong = []
    for recipe in recipes:
        sage_hf.apply(model, _emulated(recipe))
        together = _distance(run(model, inputs), reference)
        # The same sums of the same products in another order: as many roundings, so as large an error.
        if not alone[recipe] / 2 <= together <= 2 * alone[recipe]:
            wrong.append(f"{recipe}: error {together:.2e}, of one process {alone[recipe]:.2e}")
    return "; ".join(wrong)


def _is_close(output: torch.Tensor, expected: torch.Tensor) -> bool:
    """Check whether two float32 runs of a model of two layers differ by roundings alone."""
    return _distance(output, expected.double()) <= 32 * torch.finfo(torch.float32).eps


def takes_prompts_of_any_length(degrees: dict[str, Any], processes: int) -> str:
    """A second prompt has another number of tokens, and other ones that are valid."""
    case = with_heads("hunyuan-video", processes)
    alone, together, inputs = case.build(), case.build(), case.make_inputs()
    sage_hf.apply(together, "exact")
    together.enable_parallelism(config=ContextParallelConfig(**degrees))
    wrong = []
    for length in (13, 5, 7):
        text = {name: inputs[name][:, :length] for name in ("encoder_hidden_states", "encoder_attention_mask")}
        if not _is_close(run(together, inputs | text), run(alone, inputs | text)):
            wrong.append(f"{length} tokens")
    return ", ".join(wrong)


def lora_counts(degrees: dict[str, Any], processes: int) -> str:
    """An adapter changes the result as in one process, whether it is loaded before or after the tokens are split."""
    try:
        from peft import LoraConfig
    except ImportError:
        return ""
    case = with_heads("cogvideox-1.5", processes)
    outputs = {}
    for order in ("alone", "before", "after"):
        model, inputs = case.build(), case.make_inputs()
        if order != "after":
            _add_lora(model, LoraConfig)
        if order != "alone":
            sage_hf.apply(model, "exact")
            model.enable_parallelism(config=ContextParallelConfig(**degrees))
        if order == "after":
            _add_lora(model, LoraConfig)
        outputs[order] = run(model, inputs)
    expected = outputs.pop("alone")
    if _is_close(run(case.build(), case.make_inputs()), expected):
        return "the adapter has no effect"
    return ", ".join(order for order, output in outputs.items() if not _is_close(output, expected))


def _add_lora(model: Any, config: Any) -> None:
    torch.manual_seed(2)
    model.add_adapter(config(r=2, target_modules=["to_q", "to_v", "to_out.0"], init_lora_weights=False))


DOORS: dict[str, Callable[[Any], object]] = {
    "apply": lambda model: sage_hf.apply(model, _emulated("sage2")),
    "set_attn_processor": lambda model: model.set_attn_processor(SageAttnProcessor("sage2", "emulate")),
    "set_attention_backend": lambda model: model.set_attention_backend("sage2_emulate"),
}


def doors_agree(degrees: dict[str, Any], processes: int) -> str:
    """Every way to set a recipe, before the tokens are split and after, computes the same."""
    outputs = {}
    for name in ("hunyuan-video", "cogvideox"):
        case = with_heads(name, processes)
        inputs = case.make_inputs()
        for door, enter in DOORS.items():
            for order in ("before", "after"):
                model = case.build()
                if order == "before":
                    enter(model)
                plan = None if order == "before" else sage_hf.context_parallel_plan(model)
                model.enable_parallelism(config=ContextParallelConfig(**degrees), cp_plan=plan)
                if order == "after":
                    enter(model)
                outputs[f"{name} {door} {order}"] = run(model, inputs)
    firsts = {key.split()[0]: output for key, output in reversed(outputs.items())}
    return ", ".join(key for key, output in outputs.items() if not torch.equal(output, firsts[key.split()[0]]))


def survives_changes(degrees: dict[str, Any], processes: int) -> str:
    """A model computes what one process does without anything applied, after `restore`, and with fused projections."""
    case = with_heads("cogvideox", processes)
    inputs = case.make_inputs()
    expected = run(case.build(), inputs)
    model = case.build()
    handle = sage_hf.apply(model, _emulated("sage3"))
    model.enable_parallelism(config=ContextParallelConfig(**degrees))
    low = run(model, inputs)
    handle.restore()
    outputs = {"restore": run(model, inputs)}
    model.fuse_qkv_projections()
    outputs["fuse"] = run(model, inputs)
    sage_hf.restore(model)
    outputs["restore all"] = run(model, inputs)
    if _is_close(low, expected):
        return "the recipe did not run"
    return ", ".join(name for name, output in outputs.items() if not _is_close(output, expected))


def refuses_gradients(degrees: dict[str, Any], processes: int) -> str:
    """Training would need a backward pass across processes."""
    case = with_heads("cogvideox", processes)
    model = case.build()
    sage_hf.apply(model, "exact")
    model.enable_parallelism(config=ContextParallelConfig(**degrees))
    output = model(**case.make_inputs(), return_dict=False)[0]
    try:
        output.sum().backward()
    except NotImplementedError as error:
        return "" if "enable_parallelism" in str(error) else str(error)
    return "a gradient was computed"


if __name__ == "__main__":
    for one in FAMILIES:  # each process is a copy of one that has imported the models
        getattr(diffusers, family(one).model_class)
    torch.multiprocessing.start_processes(main, sys.argv[1:], nprocs=int(sys.argv[2]), start_method="fork")
