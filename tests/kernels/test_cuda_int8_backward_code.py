"""Check what int8_backward.cu compiles to, and which calls the fused backward kernel serves, without a GPU."""

import re
import subprocess
from itertools import product

import pytest
import torch
from triton import knobs

from sage_kernels.cuda import compiler, int8_backward
from sage_kernels.cuda.registration import CudaInt8Backward
from sage_kernels.dispatch.request import Request
from sage_kernels.replay import trace
from sage_kernels.spec.call import BackwardCall, Call, Mask
from sage_kernels.spec.operands import Saved
from sage_kernels.spec.recipe import RECIPES
from sage_kernels.spec.saved import empty_saved
from sage_kernels.testing.aot import machine_code
from tests.helpers import fake_gpu

MOST_SHARED_BYTES = 232448  # that a block of Hopper can have
VARIANTS = list(product((64, 128), (torch.bfloat16, torch.float16), int8_backward.SUMS))
ADDITIONS = {torch.float32: "F32.RN", torch.float16: "F16.RN", torch.int32: "S32"}
# Of a tile for each warpgroup: S, dP, dV and dK of the keys' two, and dQ.
PRODUCTS = {64: 2 + 4 + 4 + 4 + 8, 128: 4 + 8 + 4 + 4 + 8}


@pytest.mark.audit
@pytest.mark.skipif(bool(compiler.unavailable()), reason=compiler.unavailable())
@pytest.mark.parametrize(("channels", "dtype", "sums"), VARIANTS, ids=str)
def test_nothing_spills_or_waits_for_each_product(tmp_path, monkeypatch, channels, dtype, sums):
    """The compiler says by a warning that it waits; the loops have the products of a tile, and no other."""
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path))
    kernels = int8_backward.kernels(channels, dtype, sums)
    assert kernels.backward.shared_bytes <= MOST_SHARED_BYTES
    for kernel in (kernels.backward, kernels.finish):
        log = kernel.source.compile().log
        assert "warning" not in log.lower() and "C75" not in log, log
        assert set(re.findall(r"(\d+) bytes spill", log)) == {"0"}, log
    code = machine_code(kernels.backward.source.compile().image)
    opcodes = code.instructions.counts
    assert opcodes["IGMMA"] == channels // 32
    assert opcodes["IGMMA"] + opcodes["HGMMA"] == PRODUCTS[channels]
    assert code.registers == 168  # of each of 384 threads; warpgroups exchange them


@pytest.mark.audit
@pytest.mark.skipif(bool(compiler.unavailable()), reason=compiler.unavailable())
@pytest.mark.parametrize(
    ("channels", "sums", "limit"), [(64, torch.float32, 420), (128, torch.float32, 520), (128, torch.float16, 565)]
)
def test_a_tile_takes_few_instructions(tmp_path, monkeypatch, channels, sums, limit):
    """Return the loop of the keys' warpgroups in which nothing is masked."""
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path))
    code = machine_code(int8_backward.kernels(channels, torch.bfloat16, sums).backward.source.compile().image)
    assert code.main_loop.least <= limit


@pytest.mark.audit
@pytest.mark.skipif(bool(compiler.unavailable()), reason=compiler.unavailable())
@pytest.mark.parametrize("sums", int8_backward.SUMS, ids=str)
def test_the_tma_adds_what_is_summed(tmp_path, monkeypatch, sums):
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path))
    (tmp_path / "cubin").write_bytes(int8_backward.kernels(128, torch.bfloat16, sums).backward.source.compile().image)
    command = [knobs.nvidia.nvdisasm.path, "-c", str(tmp_path / "cubin")]
    code = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert set(re.findall(r"UBLKRED\.G\.S\.ADD\.(\S+)", code)) == {ADDITIONS[sums]}


@pytest.mark.parametrize(
    ("channels", "dtype", "kv_len", "sums"),
    [
        (128, torch.bfloat16, 32768, torch.float16),
        (128, torch.bfloat16, 32769, torch.float32),
        (128, torch.float16, 1024, torch.float32),
        (64, torch.bfloat16, 1024, torch.float32),
    ],
)
def test_sums_are_in_float16_where_that_is_faster_and_near_enough_and_in_int32_where_they_must_repeat(
    monkeypatch, channels, dtype, kv_len, sums
):
    assert int8_backward.sums_dtype(channels, dtype, kv_len) == sums
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert int8_backward.sums_dtype(channels, dtype, kv_len) == torch.int32


@pytest.fixture
def can_compile(monkeypatch):
    monkeypatch.setattr(compiler, "unavailable", lambda *_: "")


def request(**changes) -> Request:
    facts = {
        "recipe": "sage_bwd",
        "device_type": "cuda",
        "capability": (9, 0),
        "dtype": torch.bfloat16,
        "batch": 2,
        "q_heads": 8,
        "kv_heads": 4,
        "q_len": 1000,
        "kv_len": 1100,
        "head_dim": 128,
        "v_head_dim": 128,
        "mask": "none",
        "is_causal": False,
        "return_lse": False,
        "grad": True,
    }
    return Request(**(facts | changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"head_dim": 40, "v_head_dim": 64, "dtype": torch.float16}, ""),
        ({"mask": "keys"}, ""),
        ({"packed": True, "is_causal": True}, ""),
        ({"capability": (8, 0)}, "9.0"),
        ({"capability": (12, 0)}, "9.0"),
        ({"dtype": torch.float32}, "dtype"),
        ({"mask": "blocks"}, "no masks"),
        ({"head_dim": 32, "v_head_dim": 32}, "both"),
        ({"head_dim": 64}, "both"),
        ({"v_head_dim": 100}, "multiples of 8"),
        ({"batch": 2**18}, "tokens of Q or K"),
    ],
    ids=str,
)
def test_serves_what_it_can_read(can_compile, changes, reason):
    found = CudaInt8Backward().unsupported(request(**changes))
    assert reason in found and bool(reason) == bool(found)


@pytest.mark.parametrize("missing", ["int8_backward.cu", "backward_operands.cu"])
def test_serves_only_if_all_its_kernels_can_be_had(monkeypatch, missing):
    monkeypatch.setattr(compiler, "unavailable", lambda source, *_: f"no {source}" if source == missing else "")
    assert CudaInt8Backward().unsupported(request()) == f"no {missing}"


def test_serves_the_recipes_with_gradients_in_16_bit():
    served = [name for name, recipe in RECIPES.items() if CudaInt8Backward().serves(recipe)]
    assert served == ["sage_bwd"]


@pytest.mark.parametrize(
    ("head_dim", "repeats", "padded", "is_causal"), product((64, 128), (False, True), (False, True), (False, True))
)
def test_kernels_compile_beforehand_and_calls_only_allocate_and_launch(
    monkeypatch, head_dim, repeats, padded, is_causal
):
    fake_gpu.install(monkeypatch)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: repeats)
    x = torch.empty(1, 192, 2, head_dim, dtype=torch.bfloat16).transpose(1, 2)
    recipe = RECIPES["sage_bwd"]
    tensors = [x, x, x, *empty_saved(Call(x, x, x, recipe), torch.empty(1, 2, 192))]
    for compiles_only in (True, False):
        with trace.tracing(compiles_only=compiles_only) as traced:
            key_mask = traced.placeholder(torch.arange(192)[None] < 150) if padded else None
            gradient, value, output, *saved = map(traced.placeholder, tensors)
            mask = Mask.of_keys(key_mask)
            call = BackwardCall(gradient, value, output, Saved(*saved), head_dim, recipe, mask, is_causal)
            int8_backward.backward(call)
        launched = traced.compilations if compiles_only else traced.steps
        assert len(launched) == 4 + padded


def test_a_full_round_of_causal_blocks_is_split(monkeypatch):
    """33 heads of 4 blocks are as many as the multiprocessors: each block has two parts, whose sums are added."""
    fake_gpu.install(monkeypatch)
    query, key = (torch.empty(1, 33, tokens, 64, dtype=torch.bfloat16) for tokens in (4096, 512))
    recipe = RECIPES["sage_bwd"]
    tensors = [query, key, query, *empty_saved(Call(query, key, key, recipe), torch.empty(1, 33, 4096))]
    with trace.tracing() as traced:
        gradient, value, output, *saved = map(traced.placeholder, tensors)
        call = BackwardCall(gradient, value, output, Saved(*saved), 64, recipe, Mask.of_keys(None), True)
        int8_backward.backward(call)
    assert len(traced.steps) == 5
    assert [step.grid[0] for step in traced.steps][2] == 2 * 132
