"""Every launch gives its kernel each parameter by its name. Needs no GPU."""

import inspect

import pytest
import torch
import triton

from sage_kernels.spec.layout import Lengths
from sage_kernels.spec.recipe import RECIPES
from sage_kernels.triton.common.launch import RecordedLaunch, recording
from sage_kernels.triton.common.replayed_launches import ReplayedLaunches
from tests.helpers.calls import new_backward_call, new_call
from tests.helpers.triton_calls import attend, attend_and_save, backward

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter's launches bind by themselves")


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def kinds():
    """Options of a call of 2 sequences of 300 tokens with one mask or another."""
    starts = meta(3, dtype=torch.int32)
    return {
        "none": {},
        "causal": {"is_causal": True, "causal_offset": 5},
        "keys": {"key_mask": meta(2, 300, dtype=torch.bool)},
        "bool": {"mask": meta(2, 1, 300, 300, dtype=torch.bool)},
        "additive": {"mask": meta(1, 4, 300, 300)},
        "packed": {"lengths": Lengths(starts, starts, 200, 200, meta(2, dtype=torch.int32))},
    }


def assert_named(launches: list[RecordedLaunch]) -> None:
    assert launches
    for launch in launches:
        parameters = set(inspect.signature(launch.kernel.fn).parameters)
        assert set(launch.arguments) == parameters, launch.kernel.__name__


def tensors(kind):
    batch = 1 if kind == "packed" else 2
    return meta(batch, 4, 300, 64), meta(batch, 2, 300, 64), meta(batch, 2, 300, 80)


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if recipe.qk != "exact"])
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_forward_pass_names_every_parameter(recipe, kind, return_lse):
    with recording() as launches:
        attend(new_call(*tensors(kind), recipe, return_lse=return_lse, **kinds()[kind]), (9, 0))
    assert_named(launches)


@pytest.mark.parametrize("kind", ["none", "causal", "keys", "packed"])
@pytest.mark.parametrize("recipe", [name for name, recipe in RECIPES.items() if recipe.backward is not None])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_both_passes_of_a_recipe_with_gradients_name_every_parameter(recipe, kind, capability):
    query, key, value = tensors(kind)
    options = kinds()[kind]
    with recording() as launches:
        output, saved = attend_and_save(new_call(query, key, value, recipe, **options), capability)
        call = new_backward_call(output, value, output, saved, recipe, 64, **options)
        backward(call, capability)
    assert_named(launches)


def test_repeated_launches_refuse_values_that_no_kernel_takes():
    with pytest.raises(ValueError, match="adress"):
        ReplayedLaunches([], {"adress": 1})


@pytest.mark.parametrize("recipe", ["sage1", "sage2", "sage_bwd"])
def test_a_kernel_is_compiled_for_aligned_arguments_or_for_any(recipe):
    """However few of the strides and sizes are multiples of 16, and whichever."""

    def kernels_of(head_dim, pad, heads=4):
        query, key, value = (meta(2, 300, n, head_dim + pad)[..., :head_dim].transpose(1, 2) for n in (heads, 2, 2))
        with recording() as launches:
            attend(new_call(query, key, value, recipe), (9, 0))
        return {launch.kernel.__name__: launch.kernel for launch in launches}

    aligned, *others = kernels_of(64, 0), kernels_of(72, 0), kernels_of(72, 8), kernels_of(65, 0), kernels_of(72, 1, 6)
    assert all(kernels == others[0] for kernels in others)
    of_callers = [name for name in aligned if aligned[name] is not others[0][name]]
    assert {"block_statistics", "quantize_query_int8", "int8_forward"} <= set(of_callers)
    assert all(kernels_of(64, 16)[name] is aligned[name] for name in aligned)


def test_a_kernel_has_one_place_in_the_cache_whatever_was_compiled_before(forks):
    """Kernels that share functions are digested in both orders, each in a fresh process."""
    code = """
from sage_kernels.replay import trace
from sage_kernels.triton.common import backward_operands, launch
from sage_kernels.triton import bwd_dkdv, bwd_dq

kernels = [backward_operands.prepare_queries, backward_operands.prepare_keys]
kernels += [bwd_dkdv.int8_bwd_dkdv, bwd_dq.int8_bwd_dq]
with trace.tracing(compiles_only=True):
    for kernel in ORDER(kernels):
        launch.launch(kernel, (1,), **dict.fromkeys(kernel.arg_names, 16))
print(sorted((kernel.__name__, kernel.cache_key) for kernel in ORDER(kernels)))
"""
    first, second = (forks.run(code.replace("ORDER", order)) for order in ("list", "reversed"))
    assert first == second
