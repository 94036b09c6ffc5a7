"""The machine code of quantize_nvfp4.cu, and the requests that it takes. Needs no GPU."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton

from sage_kernels.cuda import compiler, quantize_nvfp4
from sage_kernels.cuda.launch import architecture
from sage_kernels.cuda.registration import CudaNVFP4Quantizer
from sage_kernels.dispatch.request import Request
from sage_kernels.dispatch.support import NVIDIA_CAPABILITIES
from sage_kernels.formats.nvfp4 import BINS, FIRST_BIN, search_table
from sage_kernels.spec.recipe import get_recipe
from sage_kernels.spec.transforms import LATE_SHARE
from sage_kernels.testing.aot import machine_code

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
SAGE3, PAPER = get_recipe("sage3"), get_recipe("sage3_paper")
WARP_ELEMENTS = 32  # of a thread, in the one tile that it quantises
compiles = pytest.mark.skipif(bool(compiler.unavailable()), reason=compiler.unavailable())


def compiled(channels, rotation, dtype, recipe, capability, return_lse=False, padded=False, packed=False, late=False):
    places = recipe.heavy_keys // (LATE_SHARE if late else 1) if recipe.heavy_choice == "heaviest" else 0
    config = quantize_nvfp4.NVFP4QuantizeConfig(
        *(channels, rotation, dtype, recipe, recipe.heavy_keys, places, late), *(padded, packed, return_lse)
    )
    return quantize_nvfp4.kernels(config)[0].source.compile(architecture(capability))


@pytest.mark.audit
@compiles
@pytest.mark.parametrize("capability", NVIDIA_CAPABILITIES, ids=str)
@pytest.mark.parametrize(
    ("channels", "rotation", "dtype", "recipe", "options"),
    [
        (128, 128, torch.bfloat16, SAGE3, {}),
        (128, 128, torch.bfloat16, SAGE3, {"padded": True}),
        (128, 128, torch.bfloat16, SAGE3, {"packed": True, "return_lse": True}),
        (128, 128, torch.bfloat16, SAGE3, {"padded": True, "return_lse": True, "late": True}),
        (128, 16, torch.bfloat16, SAGE3, {}),
        (64, 64, torch.float16, SAGE3, {"padded": True, "return_lse": True}),
        (128, 1, torch.float16, PAPER, {}),
    ],
    ids=["128", "padded", "packed", "late keys", "rotation in 16", "64", "paper"],
)
def test_every_architecture_compiles_it_with_few_spills(
    tmp_path, monkeypatch, capability, channels, rotation, dtype, recipe, options
):
    """32 elements of a thread leave it 32 registers for the rest: it may spill 40 words."""
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path))
    log = compiled(channels, rotation, dtype, recipe, capability, **options).log
    assert "warning" not in log.lower(), log
    assert all(int(spilled) <= 160 for spilled in re.findall(r"(\d+) bytes spill stores", log)), log


def instructions_of_a_tile(image):
    """Instructions that a thread has for a tile, of the three loops that search: V's, K's and Q's, in this order.

    A loop counts whole: what the last block's missing tokens, elements that are not finite and keys in the places of
    heavy ones need too, which seldom runs.
    """
    loops = [loop.total for loop in machine_code(image).loops if loop.counts["HFMA2"] + loop.counts["HMUL2"] > 200]
    value, *others = sorted(loops)[:3]
    return [value, *others]


@pytest.mark.audit
@compiles
@pytest.mark.parametrize("channels", [64, 128])
@pytest.mark.parametrize(("capability", "budgets"), [((12, 0), (33, 48, 49)), ((9, 0), (33, 48, 49))], ids=str)
def test_an_element_takes_few_instructions(monkeypatch, tmp_path, channels, capability, budgets):
    """V, K and Q take, as measured, 31.1, 46.5 and 47.7 on compute capability 12.0, and 31.4, 46.5 and 47.8 on 9.0.

    To measure again: print what `instructions_of_a_tile` returns.
    """
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path))
    cubin = compiled(channels, channels, torch.bfloat16, SAGE3, capability)
    found = instructions_of_a_tile(cubin.image)
    assert all(count <= budget * WARP_ELEMENTS for count, budget in zip(found, budgets, strict=True)), found


def test_what_a_power_of_two_leaves_of_the_search_s_table_is_in_shared_memory():
    """Rows of scales that are smaller by a power of two differ in their first words alone, as `SharedSearch` says."""
    shared, least = (127 + 5) << 4, (127 - 5) << 4
    for steps in (SAGE3.scale_steps, SAGE3.key_scale_steps, (-4, 11)):
        table = search_table(steps, torch.device("cpu"))[:BINS]
        for number in range(least - FIRST_BIN, shared - FIRST_BIN):
            exponent = (shared - FIRST_BIN - number + 15) // 16
            expected = table[number + 16 * exponent].clone()
            expected[0] += exponent * ((1 << 10) - (8 << 16))
            assert torch.equal(table[number], expected), number


@pytest.mark.audit
@compiles
def test_blackwell_converts_to_e2m1_by_itself(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path))
    path = tmp_path / "kernel.cubin"
    for capability, native in (((9, 0), False), ((10, 0), True), ((12, 0), True)):
        path.write_bytes(compiled(128, 128, torch.bfloat16, PAPER, capability).image)
        listing = subprocess.run([NVDISASM, "-c", path], capture_output=True, text=True, check=True).stdout
        assert ("E2M1" in listing) == native, capability


def unsupported(**facts):
    tensors = [torch.empty(2, 4, 300, 128, dtype=torch.bfloat16) for _ in range(3)]
    request = Request.of(*tensors, recipe="sage3")
    return CudaNVFP4Quantizer().unsupported(
        replace(request, device_type="cuda", capability=(9, 0), aligned=True, **facts)
    )


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, ""),
        ({"head_dim": 80, "v_head_dim": 128}, ""),
        ({"head_dim": 40, "v_head_dim": 64, "dtype": torch.float16}, ""),
        ({"head_dim": 64}, "both"),
        ({"head_dim": 32, "v_head_dim": 32}, "both"),
        ({"v_head_dim": 100}, "16 bytes"),
        ({"dtype": torch.float32}, "dtype"),
        ({"packed": True}, ""),
        ({"mask": "keys"}, ""),
        ({"mask": "additive"}, ""),
        ({"mask": "blocks"}, ""),
    ],
    ids=str,
)
def test_serves_what_it_can_read(can_compile, facts, reason):
    found = unsupported(**facts)
    assert reason in found and bool(reason) == bool(found)


@pytest.mark.parametrize("capability", NVIDIA_CAPABILITIES)
def test_asks_the_compiler_for_the_gpus_own_architecture(monkeypatch, capability):
    asked = []
    monkeypatch.setattr(compiler, "unavailable", lambda *arguments: asked.append(arguments[2]) or "")
    tensors = [torch.empty(2, 4, 300, 128, dtype=torch.bfloat16) for _ in range(3)]
    request = replace(Request.of(*tensors, recipe="sage3"), device_type="cuda", capability=capability, aligned=True)
    assert CudaNVFP4Quantizer().unsupported(request) == ""
    assert asked == [architecture(capability)]


def test_serves_no_search_over_more_scales_than_a_row_of_its_table():
    assert CudaNVFP4Quantizer().serves(SAGE3) and CudaNVFP4Quantizer().serves(PAPER)
    assert not CudaNVFP4Quantizer().serves(replace(SAGE3, scale_steps=tuple(range(1, 9))))
    assert not CudaNVFP4Quantizer().serves(replace(SAGE3, key_scale_steps=tuple(range(1, 9))))
    assert not CudaNVFP4Quantizer().serves(replace(SAGE3, scale_steps=(12,)))
