"""Cases of context parallelism by plans of ours, by which all processes have the text: processes agree with one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers import ContextParallelConfig
from diffusers.models.attention_processor import SD3IPAdapterJointAttnProcessor2_0

import sage_hf
from sage_hf import SageAttnProcessor, SageConfig, Sparse
from sage_hf.diffusers import attention_layers
from sage_kernels.exact import sdpa
from tests.helpers.families import BATCH, Family, Inputs, family, run
from tests.helpers.processes import Case, degrees_of, with_heads

FAMILIES = "cogvideox", "cogvideox-1.5", "hunyuan-video", "mochi", "sd3", "sd3.5"
RECIPES = {
    "cogvideox-1.5": ("exact", "sage2", "sage3"),
    "hunyuan-video": ("exact", "sage2"),
    "mochi": ("exact", "sage3"),
}
"""Recipes of a family, if more than "exact": how tokens are split does not depend on the format."""


def cases(processes: int) -> dict[str, Case]:
    """Return the cases of models that we have plans for."""
    found: dict[str, Case] = {}
    degrees_of_modes = degrees_of(processes)
    for mode, degrees in degrees_of_modes.items():
        if mode.endswith("anything"):
            found[f"uneven-{mode}"] = partial(agrees_unevenly, degrees, processes)
            continue
        for name in FAMILIES:
            found[f"{name}-{mode}"] = partial(agrees_with_one, _family(name, processes), degrees)
        found[f"prompts-{mode}"] = partial(takes_prompts_of_any_length, degrees, processes)
        extended = partial(agrees_with_one, degrees=degrees)
        found[f"ip-adapter-{mode}"] = partial(extended, _family("sd3", processes), extend=_load_ip_adapter)
        found[f"controlnet-{mode}"] = partial(extended, _family("sd3.5", processes), extend=_add_residuals)
        found[f"lora-{mode}"] = partial(lora_counts, degrees, processes)
        found[f"collectives-{mode}"] = partial(communicates_little, degrees, processes)
    ulysses = degrees_of_modes["ulysses"]
    found["entry points"] = partial(entry_points_agree, ulysses, processes)
    found["changes"] = partial(survives_changes, ulysses, processes)
    found["offloaded"] = partial(survives_offloading, ulysses, processes)
    found["gradient"] = partial(refuses_gradients, ulysses, processes)
    found["sparse"] = partial(keeps_the_same_tiles, ulysses, processes)
    return found


def _family(name: str, processes: int) -> Family:
    return with_heads(family(name), processes)


def _uneven(processes: int) -> Family:
    """CogVideoX with numbers of heads and of video tokens that do not divide."""
    case = _family("cogvideox", processes + 1)

    def inputs() -> Inputs:
        found = case.inputs()
        return found | {"hidden_states": found["hidden_states"][:, :, :, :6, :6]}

    config = {"sample_width": 6, "sample_height": 6, "num_attention_heads": processes + 1}
    return replace(case, config=case.config | config, inputs=inputs)


def agrees_unevenly(degrees: dict[str, Any], processes: int) -> str:
    """Numbers of heads and of tokens need not divide."""
    with patch.object(dist, "all_gather", _all_gather_of_any_sizes):
        return agrees_with_one(_uneven(processes), degrees)


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


COLLECTIVES = "all_to_all_single", "all_gather_single", "all_gather_into_tensor", "all_gather", "broadcast"


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
            alone[recipe] = run(model, inputs)
    sage_hf.apply(model, _emulated(recipes[0]))
    model.enable_parallelism(config=ContextParallelConfig(**degrees))
    wrong = []
    for recipe in recipes:
        sage_hf.apply(model, _emulated(recipe))
        output = run(model, inputs)
        together, error = _distance(output, reference), _distance(alone[recipe], reference)
        # The same sums of the same products in another order: as many roundings, so as large an error.
        if not error / 2 <= together <= 2 * error:
            wrong.append(f"{recipe}: error {together:.2e}, of one process {error:.2e}")
        # In Ulysses, heads have the codes of one process, but for those that a rounding turns. In a ring, keys have;
        # blocks of queries begin elsewhere, so that two errors add up.
        apart = _distance(output, alone[recipe].double())
        if apart > error * (1.5 if "ring_degree" in degrees or recipe == "exact" else 0.1):
            wrong.append(f"{recipe}: {apart:.2e} from one process, whose error is {error:.2e}")
    return "; ".join(wrong)


def _is_close(output: torch.Tensor, expected: torch.Tensor) -> bool:
    """Check whether two float32 runs of a model of two layers differ by roundings alone."""
    return _distance(output, expected.double()) <= 32 * torch.finfo(torch.float32).eps


def takes_prompts_of_any_length(degrees: dict[str, Any], processes: int) -> str:
    """A second prompt has another number of tokens, and other ones that are valid."""
    case = _family("hunyuan-video", processes)
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
    case = _family("cogvideox-1.5", processes)
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


ENTRY_POINTS: dict[str, Callable[[Any], object]] = {
    "apply": lambda model: sage_hf.apply(model, _emulated("sage2")),
    "set_attn_processor": lambda model: model.set_attn_processor(SageAttnProcessor("sage2", "emulate")),
    "set_attention_backend": lambda model: model.set_attention_backend("sage2_emulate"),
}


def entry_points_agree(degrees: dict[str, Any], processes: int) -> str:
    """Every way to set a recipe, before the tokens are split and after, computes the same."""
    outputs = {}
    for name in ("hunyuan-video", "cogvideox"):
        case = _family(name, processes)
        inputs = case.make_inputs()
        for entry_point, enter in ENTRY_POINTS.items():
            for order in ("before", "after"):
                model = case.build()
                if order == "before":
                    enter(model)
                plan = None if order == "before" else sage_hf.context_parallel_plan(model)
                model.enable_parallelism(config=ContextParallelConfig(**degrees), cp_plan=plan)
                if order == "after":
                    enter(model)
                outputs[f"{name} {entry_point} {order}"] = run(model, inputs)
    firsts = {key.split()[0]: output for key, output in reversed(outputs.items())}
    return ", ".join(key for key, output in outputs.items() if not torch.equal(output, firsts[key.split()[0]]))


def survives_changes(degrees: dict[str, Any], processes: int) -> str:
    """A model computes what one process does without anything applied, after `restore`, and with fused projections."""
    case = _family("cogvideox", processes)
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


def survives_offloading(degrees: dict[str, Any], processes: int) -> str:
    """A pipeline's call ends by taking accelerate's hook off and setting it anew; the tokens stay split."""
    case = _family("cogvideox-1.5", processes)
    model, inputs = case.build(), case.make_inputs()
    expected = run(model, inputs)
    sage_hf.apply(model, "exact")
    model.enable_parallelism(config=ContextParallelConfig(**degrees))
    wrong = []
    for call in range(2):
        add_hook_to_module(model, ModelHook())
        if not _is_close(run(model, inputs), expected):
            wrong.append(f"call {call}")
        remove_hook_from_module(model, recurse=True)
    return ", ".join(wrong)


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Count the calls of PyTorch's collectives, by name."""
    calls: Counter[str] = Counter()

    def counting(name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def counted(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return original(*args, **options)

        return counted

    names = [name for name in COLLECTIVES if hasattr(dist, name)]
    with patch.multiple(dist, **{name: counting(name) for name in names}):
        yield calls


def communicates_little(degrees: dict[str, Any], processes: int) -> str:
    """A layer has one exchange before attention and one behind it, and one gathering in a ring; one attention call."""
    case = _family("cogvideox-1.5", processes)
    model, inputs = case.build(), case.make_inputs()
    sage_hf.apply(model, "exact")
    model.enable_parallelism(config=ContextParallelConfig(**degrees))
    run(model, inputs)
    with counted_collectives() as calls, patch.object(sdpa, "pytorch_sdpa", wraps=sdpa.pytorch_sdpa) as attention:
        run(model, inputs)
    layers = len(attention_layers(model))
    exchanges = 2 * layers if "ulysses_degree" in degrees else 0
    gathers = layers if "ring_degree" in degrees else 0
    found = calls["all_to_all_single"], calls.total() - calls["all_to_all_single"], attention.call_count
    return "" if found == (exchanges, gathers, layers) else f"{found} in {layers} layers"


def keeps_the_same_tiles(degrees: dict[str, Any], processes: int) -> str:
    """Sparse attention in Ulysses chooses the tiles of one process, for all heads of which a process has some."""
    small = _family("cogvideox", processes)
    config = {"sample_width": 32, "sample_height": 32}
    video = torch.randn(BATCH, 3, 4, 32, 32, generator=torch.Generator().manual_seed(4))
    case = replace(small, config=small.config | config, inputs=lambda: small.inputs() | {"hidden_states": video})
    inputs = case.make_inputs()
    sparse = replace(_emulated("sage2"), sparse=Sparse("subblock", keep=0.5, from_tokens=64))
    alone, together = case.build(), case.build()
    sage_hf.apply(alone, _emulated("sage2"))
    dense = run(alone, inputs).double()
    sage_hf.apply(alone, sparse)
    expected = run(alone, inputs).double()
    sage_hf.apply(together, sparse)
    together.enable_parallelism(config=ContextParallelConfig(**degrees))
    distance, effect = _distance(run(together, inputs), expected), _distance(dense, expected)
    sage_hf.apply(together, sparse)  # once tokens are split
    again = _distance(run(together, inputs), expected)
    return "" if max(distance, again) < effect / 100 else f"distances {distance:.1e}, {again:.1e}, effect {effect:.1e}"


def refuses_gradients(degrees: dict[str, Any], processes: int) -> str:
    """Training would need a backward pass across processes."""
    case = _family("cogvideox", processes)
    model = case.build()
    sage_hf.apply(model, "exact")
    model.enable_parallelism(config=ContextParallelConfig(**degrees))
    output = model(**case.make_inputs(), return_dict=False)[0]
    try:
        output.sum().backward()
    except NotImplementedError as error:
        return "" if "enable_parallelism" in str(error) else str(error)
    return "a gradient was computed"
