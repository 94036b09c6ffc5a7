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
from sage_kernels.cuda.registration import NVFP4_CAPABILITIES, NVFP4Quantizer
from sage_kernels.recipe import get_recipe
from sage_kernels.registry import Request

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
SAGE3, PAPER = get_recipe("sage3"), get_recipe("sage3_paper")
WARP_ELEMENTS = 32  # of a thread, in the one tile that it quantises
compiles = pytest.mark.skipif(bool(compiler.why_not()), reason=compiler.why_not())


def compiled(channels, rotation, dtype, recipe, capability, return_lse=False, padded=False):
    kernels = quantize_nvfp4.kernels(
        channels, rotation, dtype, recipe, recipe.heavy_keys, recipe.heavy_choice == "heaviest", padded, return_lse
    )
    return kernels[0].source.compile(architecture(capability))


@pytest.mark.audit
@compiles
@pytest.mark.parametrize("capability", NVFP4_CAPABILITIES, ids=str)
@pytest.mark.parametrize(
    ("channels", "rotation", "dtype", "recipe", "return_lse", "padded"),
    [
        (128, 128, torch.bfloat16, SAGE3, False, False),
        (128, 128, torch.bfloat16, SAGE3, False, True),
        (128, 16, torch.bfloat16, SAGE3, False, False),
        (64, 64, torch.float16, SAGE3, True, True),
        (128, 1, torch.float16, PAPER, False, False),
    ],
    ids=["128", "padded", "rotation in 16", "64", "paper"],
)
def test_every_architecture_compiles_it_with_few_spills(
    tmp_path, monkeypatch, capability, channels, rotation, dtype, recipe, return_lse, padded
):
    """32 elements of a thread leave it 32 registers for the rest: it may spill 40 words."""
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path))
    log = compiled(channels, rotation, dtype, recipe, capability, return_lse, padded).log
    assert "warning" not in log.lower(), log
    assert all(int(spilled) <= 160 for spilled in re.findall(r"(\d+) bytes spill stores", log)), log


def instructions_of_a_tile(image, folder):
    """Instructions that a thread has for a tile, of the three roles with the most: V, K and Q, in this order.

    A role's code ends with an EXIT. It counts whole: that of the last block's missing tokens, of elements that are not
    finite and of what is in the places of heavy keys too, which seldom run.
    """
    path = folder / "kernel.cubin"
    path.write_bytes(image)
    listing = subprocess.run([NVDISASM, "-c", path], capture_output=True, text=True, check=True).stdout
    code = re.search(r"\.text\.quantize:(.*?)(?=\n\s*\.section|\Z)", listing, re.DOTALL)
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]*);", code[1])
    roles = " ".join(line.strip().replace(" ", "_") for line in lines).split(" EXIT")
    return sorted(len(role.split()) for role in roles)[-3:]


@pytest.mark.audit
@compiles
@pytest.mark.parametrize("channels", [64, 128])
@pytest.mark.parametrize(("capability", "budgets"), [((12, 0), (44, 48, 58)), ((9, 0), (45, 50, 60))], ids=str)
def test_an_element_takes_few_instructions(tmp_path, monkeypatch, channels, capability, budgets):
    """For V, K and Q; measured 42.1, 45.7 and 55.9 on sm_120, 43.2, 47.6 and 57.6 on sm_90.

    All but 28.1, 44.5 and 48.3, and 28.7, 46.1 and 49.9, seldom run. To measure again: print what
    `instructions_of_a_tile` returns.
    """
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path))
    cubin = compiled(channels, channels, torch.bfloat16, SAGE3, capability)
    found = instructions_of_a_tile(cubin.image, tmp_path)
    assert all(count <= budget * WARP_ELEMENTS for count, budget in zip(found, budgets, strict=True)), found


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
    return NVFP4Quantizer().unsupported(replace(request, device_type="cuda", capability=(9, 0), aligned=True, **facts))


@pytest.fixture
def can_compile(monkeypatch):
    monkeypatch.setattr(compiler, "why_not", lambda *_: "")


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
        ({"packed": True}, "packed"),
        ({"mask": "keys"}, ""),
        ({"mask": "additive"}, ""),
        ({"mask": "blocks"}, ""),
    ],
    ids=str,
)
def test_serves_what_it_can_read(can_compile, facts, reason):
    found = unsupported(**facts)
    assert reason in found and bool(reason) == bool(found)


@pytest.mark.parametrize("capability", NVFP4_CAPABILITIES)
def test_asks_the_compiler_for_the_gpus_own_architecture(monkeypatch, capability):
    asked = []
    monkeypatch.setattr(compiler, "why_not", lambda *arguments: asked.append(arguments[2]) or "")
    tensors = [torch.empty(2, 4, 300, 128, dtype=torch.bfloat16) for _ in range(3)]
    request = replace(Request.of(*tensors, recipe="sage3"), device_type="cuda", capability=capability, aligned=True)
    assert NVFP4Quantizer().unsupported(request) == ""
    assert asked == [architecture(capability)]


def test_serves_no_search_over_more_scales_than_a_row_of_its_table():
    assert NVFP4Quantizer().serves(SAGE3) and NVFP4Quantizer().serves(PAPER)
    assert not NVFP4Quantizer().serves(replace(SAGE3, scale_steps=tuple(range(1, 9))))
    assert not NVFP4Quantizer().serves(replace(SAGE3, key_scale_steps=tuple(range(1, 9))))
    assert not NVFP4Quantizer().serves(replace(SAGE3, scale_steps=(12,)))
