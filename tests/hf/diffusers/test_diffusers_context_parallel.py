"""Context parallelism with our attention: processes agree with one, or it is refused before it runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import diffusers
import pytest
import torch

import sage_hf
from sage_hf import SageAttnProcessor
from sage_hf.diffusers import UnsupportedAttentionError, attention_layers, cp_plans, shards
from tests.helpers.families import FAMILIES, Family, family

pytestmark = pytest.mark.skipif(not hasattr(diffusers, "ContextParallelConfig"), reason="this diffusers has none")

WITHOUT_CP_PLAN = [
    case
    for case in FAMILIES
    if getattr(getattr(diffusers, case.model_class, None), "_cp_plan", None) is None
    and case.model_class not in cp_plans.FAMILIES
]


FEW = ("cogvideox-1.5-ulysses", "hunyuan-video-*", "mochi-ring", "sd3-ulysses", "flux-[!2]*", "wan-t2v-ring")
FEW += ("prompts-ring", "uneven-*", "collectives-*", "changes", "offloaded", "gradient", "restored")
"""Cases that two processes run each time: each family with a cp_plan of ours, each mode, and others' faults."""


@pytest.mark.parametrize(
    ("processes", "names"),
    [
        (2, FEW),
        pytest.param(2, ("*",), marks=pytest.mark.audit),
        pytest.param(4, ("[!c]*", "c[!o]*", "co[!m]*"), marks=pytest.mark.audit),  # all but what is compiled
        pytest.param(
            8, ("cogvideox-1.5-*", "hunyuan-video-both", "uneven-*", "collectives-*"), marks=pytest.mark.audit
        ),
    ],
    ids=["few", "all", "four", "eight"],
)
def test_processes_agree_with_one(processes: int, names: tuple[str, ...], tmp_path: Path):
    from tests.helpers.processes import run_processes  # an older diffusers has nothing to import

    found = run_processes(tmp_path, processes, names)
    assert not {case: what for case, what in found.items() if what}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("head_dim", "offset"), [(64, 0), (64, 3), (10, 0)], ids=["wide", "unaligned", "odd"])
def test_tensors_of_any_layout_are_joined_as_they_are(head_dim: int, offset: int, dtype: torch.dtype):
    memory = torch.randn(offset + 3 * 2 * 5 * 4 * head_dim).to(dtype)
    memory[offset + 1] = torch.nan
    tensors = memory[offset:].view(3, 2, 5, 4, head_dim).permute(0, 3, 1, 2, 4).unbind()
    for join in (torch.stack, torch.cat):
        found, wanted = shards._joined(join, tensors, 1), join(tensors, 1)
        assert found.dtype == dtype and torch.equal(found.nan_to_num(7), wanted.nan_to_num(7))


@pytest.mark.parametrize("case", WITHOUT_CP_PLAN, ids=str)
def test_a_family_without_a_plan_is_refused_before_it_is_changed(case: Family):
    model = case.build()
    model.set_attn_processor(SageAttnProcessor("sage3"))
    with pytest.raises(UnsupportedAttentionError, match=case.model_class):
        model.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=2))
    assert model._parallel_config is None


def test_a_layer_that_does_not_dispatch_is_refused_though_there_is_a_cp_plan():
    model = family("cogvideox").build()
    model.set_attn_processor(SageAttnProcessor("sage3"))
    with pytest.raises(UnsupportedAttentionError, match=r"transformer_blocks\.0\.attn1.*CogVideoXAttnProcessor2_0"):
        model.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=2), cp_plan={})
    assert model._parallel_config is None


SPARSE = sage_hf.SageConfig("sage2", sparse=sage_hf.Sparse(keep=0.5))
REFUSED = {
    "sparse": (SPARSE, {"ulysses_degree": 2}, r"blocks\.0\.attn1: sparse attention chooses tiles"),
    "sparse-ring": (SPARSE, {"ring_degree": 2}, r"blocks\.0\.attn1: sparse attention chooses tiles"),
    "heads": ("sage2", {"ulysses_degree": 64}, r"blocks\.0\.attn1: ulysses_degree 64 is more than .* 2 heads"),
}


@pytest.mark.parametrize("split_first", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_what_diffusers_plan_cannot_serve_is_refused_before_a_change(case: str, split_first: bool):
    recipe, degrees, match = REFUSED[case]
    model, config = family("wan-t2v").build(), diffusers.ContextParallelConfig(**degrees)
    if split_first:
        model._parallel_config = SimpleNamespace(context_parallel_config=config)  # as enable_parallelism leaves it
    else:
        sage_hf.apply(model, recipe)
    processors = [layer.processor for layer in attention_layers(model).values()]
    with pytest.raises(UnsupportedAttentionError, match=match):
        if split_first:
            sage_hf.apply(model, recipe)
        else:
            model.enable_parallelism(config=config)
    assert [layer.processor for layer in attention_layers(model).values()] == processors
    assert split_first or model._parallel_config is None


@pytest.mark.skipif(not hasattr(diffusers, "AceStepTransformer1DModel"), reason="this diffusers has no such model")
def test_fewer_key_heads_than_heads_are_refused_before_a_change():
    config, refusal = diffusers.ContextParallelConfig(ulysses_degree=2), r"layers\.0\.self_attn: .* has 2 and 4"
    unsplit, split, ungrouped = (
        diffusers.AceStepTransformer1DModel(64, 64, 1, num_attention_heads=4, num_key_value_heads=key_heads)
        for key_heads in (2, 2, 4)
    )
    sage_hf.apply(unsplit, "sage2")
    with pytest.raises(UnsupportedAttentionError, match=refusal):
        unsplit.enable_parallelism(config=config, cp_plan={})
    assert unsplit._parallel_config is None
    for model in (split, ungrouped):
        model._parallel_config = SimpleNamespace(context_parallel_config=config)  # as enable_parallelism leaves it
    with pytest.raises(UnsupportedAttentionError, match=refusal):
        sage_hf.apply(split, "sage2")
    sage_hf.apply(ungrouped, "sage2")


@pytest.mark.parametrize("applied", [False, True])
def test_vsa_is_refused_before_a_change(applied: bool):
    model = family("wan-t2v").build()
    sage_hf.enable_vsa(model)
    if applied:
        sage_hf.apply(model, "sage2")
    with pytest.raises(UnsupportedAttentionError, match=r"blocks\.0\.attn1: VSA chooses tiles"):
        model.enable_parallelism(config=diffusers.ContextParallelConfig(ulysses_degree=2))
    assert model._parallel_config is None


ENTRY_POINTS = {
    "shared": lambda model: model.set_attn_processor(SageAttnProcessor("sage3")),
    "dictionary": lambda model: model.set_attn_processor(
        {name: SageAttnProcessor("sage3") for name in model.attn_processors}
    ),
    "backend": lambda model: model.set_attention_backend("sage3"),
    "apply": lambda model: sage_hf.apply(model, "sage3"),
}


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_a_layer_that_does_not_dispatch_is_refused_where_tokens_are_split_already(entry_point: str):
    model = family("cogvideox").build()
    originals = [layer.processor for layer in attention_layers(model).values()]
    config = diffusers.ContextParallelConfig(ulysses_degree=2)
    model._parallel_config = SimpleNamespace(context_parallel_config=config)  # as enable_parallelism leaves it
    with pytest.raises(UnsupportedAttentionError, match=r"CogVideoXAttnProcessor2_0.*enable_parallelism"):
        ENTRY_POINTS[entry_point](model)
    assert [layer.processor for layer in attention_layers(model).values()] == originals
