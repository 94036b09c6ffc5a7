"""Whatever saves memory wraps, moves or copies modules: attention finds its layer all the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

import sage_hf
from sage_hf import record
from sage_hf.diffusers import attention_layers
from tests.helpers.families import family, run

CPU = torch.device("cpu")


def offload(model: Any, folder: Path) -> Any:
    """Weights on the meta device until a module's forward, as with `enable_sequential_cpu_offload`."""
    accelerate.cpu_offload(model, execution_device=CPU)
    return model


def offload_to_disk(model: Any, folder: Path) -> Any:
    accelerate.disk_offload(model, str(folder), execution_device=CPU)
    return model


def offload_in_groups(model: Any, folder: Path) -> Any:
    model.enable_group_offload(onload_device=CPU, offload_device=CPU, offload_type="leaf_level")
    return model


def store_in_float8(model: Any, folder: Path) -> Any:
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    return model


SAVERS: dict[str, Callable[[Any, Path], Any]] = {
    "offload": offload,
    "disk": offload_to_disk,
    "groups": offload_in_groups,
    "float8": store_in_float8,
    "copy": lambda model, folder: copy.deepcopy(model),
}


@pytest.mark.parametrize(
    ("name", "order"),  # our own function; diffusers' dispatch
    [
        *(("cogvideox", "before"), ("flux", "after")),
        *(pytest.param(*one, marks=pytest.mark.audit) for one in (("cogvideox", "after"), ("flux", "before"))),
    ],
)
@pytest.mark.parametrize("saver", SAVERS)
def test_attention_is_switched_recorded_and_restored_where_memory_is_saved(
    saver: str, name: str, order: str, tmp_path: Path
):
    case, save = family(name), SAVERS[saver]
    dtype = torch.bfloat16 if saver == "float8" else torch.float32
    inputs = case.make_inputs(dtype)
    expected = run(save(case.build(dtype), tmp_path / "plain"), inputs)
    model = case.build(dtype)
    if order == "before":
        handle = sage_hf.apply(model, "exact")
        saved = save(model, tmp_path / "switched")
    else:
        model = saved = save(model, tmp_path / "switched")
        handle = sage_hf.apply(model, "exact")
    assert torch.equal(run(saved, inputs), expected)
    assert all(record.last_plans(layer) for layer in attention_layers(saved).values())
    handle.restore()
    record.clear()
    restored = model if saver != "copy" else save(model, tmp_path)
    assert torch.equal(run(restored, inputs), expected)
    assert not any(record.last_plans(layer) for layer in attention_layers(restored).values())
