"""Which calls the CUDA C++ kernels serve, and what they compile to. Needs no GPU."""

import re
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import triton

import sage_kernels.backends  # noqa: F401 - registers the kernels
from sage_kernels.cuda import block_lists, compiler, int8_forward, quantize
from sage_kernels.cuda.parameters import NO_TENSOR_MAP
from sage_kernels.cuda.registration import CudaInt8Forward, CudaInt8Quantizer
from sage_kernels.dispatch.decide import runs_one_by_one
from sage_kernels.dispatch.registry import forget_choices
from sage_kernels.dispatch.request import Request
from sage_kernels.dispatch.select import select
from sage_kernels.spec.block_list import BlockList
from sage_kernels.spec.call import Call, Mask
from sage_kernels.spec.recipe import get_recipe
from sage_kernels.triton import registration

# Of a call: head_dim, format of P·V and kv_len.
SIZES = ((64, "fp8", 4096), (128, "fp8", 4096), (128, "fp8", 20_000), (64, "fp16", 4096), (128, "fp16", 4096))
SELF_QUANTIZED = (SIZES[0], SIZES[1], SIZES[4])  # the kernel quantises Q of causal calls
LISTED = (SIZES[0], SIZES[1], SIZES[3], SIZES[4])
DTYPES = (torch.bfloat16, torch.float16)
NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
LONG = replace(
    Request("sage2", "cuda", (9, 0), torch.bfloat16, 2, 32, 8, 20_000, 20_000, 128, 128, "none", False, False),
    aligned=True,
)


@pytest.mark.audit
@pytest.mark.skipif(bool(compiler.unavailable()), reason=compiler.unavailable())
@pytest.mark.parametrize(
    ("size", "is_causal", "return_lse", "padded", "dtype", "quantizes_query", "heavy", "lists"),
    [
        *product(SIZES, (False, True), (False, True), (False, True), (torch.bfloat16,), (False,), (True,), (False,)),
        *product(SIZES[3:], (False, True), (True,), (False, True), (torch.bfloat16,), (False,), (False,), (False,)),
        *((size, False, False, False, torch.float16, False, True, False) for size in SIZES),
        *((size, False, False, False, dtype, True, True, False) for size in SIZES[:2] for dtype in DTYPES),
        *((size, True, False, False, torch.bfloat16, True, True, False) for size in SELF_QUANTIZED),
        *product(LISTED, (False, True), (False, True), (False, True), (torch.bfloat16,), (False,), (False,), (True,)),
    ],
)
def test_int8_forward_overlaps_its_matrix_products(
    tmp_path, monkeypatch, size, is_causal, return_lse, padded, dtype, quantizes_query, heavy, lists
):
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path))
    head_dim, pv, kv_len = size
    config = int8_forward.Int8ForwardConfig.of(
        recipe=replace(get_recipe("sage2"), pv=pv, heavy_keys=64 * heavy),
        head_dim=head_dim,
        kv_len=kv_len,
        mask=(("none", "blocks"), ("keys", "block_keys"))[padded][lists],
        is_causal=is_causal,
        may_leave_query=quantizes_query,
    )
    late_keys = 16 * (heavy and is_causal)
    cubin = int8_forward.kernel(config, is_causal, return_lse, dtype, late_keys).source.compile()
    # ptxas says so where it waits for each MMA instruction (C7510 to C7514), or takes no more registers (C7508).
    assert not re.search(r"warning|C75\d\d", cubin.log, re.IGNORECASE), cubin.log
    assert f"Used {168 if config.warpgroups == 2 else 128} registers" in cubin.log
    image = tmp_path / "kernel.cubin"
    image.write_bytes(cubin.image)
    code = subprocess.run([NVDISASM, "-c", image], capture_output=True, text=True, check=True).stdout
    # Two steps; three warpgroups have few registers, which NVRTC 13.0 and 13.5 use in different ways. For the LSE of
    # padded batches they lack about ten.
    loop = loop_without_mask(code, 2 * head_dim // 32)
    # A wait for each product of a step: more would keep them from overlapping.
    assert sum("WARPGROUP.DEPBAR" in line for line in loop) <= 4
    spills = sum("LDL" in line or "STL" in line for line in loop)
    if config.warpgroups == 3 and padded and return_lse:
        assert spills <= 12
    else:
        assert spills <= (0 if config.block_n == 128 else 4 if return_lse else 2)
    assert len(loop) <= (1300 if return_lse else 1200)
    # An item's first tile, and four steps (odd and even, masked or not), or two more: with half of the softmax, or
    # where a list's tiles without a mask end.
    halves = pv == "fp8" and config.block_n == 128 and not (is_causal or return_lse or padded)
    tiles = 7 if lists or halves else 5
    assert len(re.findall(r"IGMMA\.64x\d+x32", code)) == tiles * head_dim // 32
    opcode, depth = ("QGMMA", 32) if pv == "fp8" else ("HGMMA", 16)
    with_sums = head_dim == 64 if pv == "fp16" else not return_lse
    # Where the kernel quantises Q, heavy keys come with their mean, whose scores are a product too.
    products = {"HGMMA": ((1 + quantizes_query) * head_dim + int8_forward.HEAVY_KEYS) // 16 * heavy}
    products[opcode] = products.get(opcode, 0) + tiles * (1 + with_sums) * config.block_n // depth
    for name, count in products.items():
        assert len(re.findall(rf"{name}\.64x\d+x\d+", code)) == count
    assert "bytes smem" not in cubin.log  # all shared memory is dynamic
    assert config.shared_bytes <= 227 * 1024


def loop_without_mask(code, products):
    """Instructions of the shortest loop with so many INT8 MMA instructions."""
    labels, lines, loops = {}, [], []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x?_?\d+):", line.strip()):
            labels[label[1]] = len(lines)
        elif re.match(r"/\*[0-9a-f]{4,}\*/", line.strip()):
            lines.append(line)
    for end, line in enumerate(lines):
        jump = re.search(r"BRA.*`\((\.L_x?_?\d+)\)", line)
        if jump and labels[jump[1]] < end:
            body = lines[labels[jump[1]] : end + 1]
            if sum("IGMMA" in instruction for instruction in body) == products:
                loops.append(body)
    return min(loops, key=len)


@pytest.mark.usefixtures("can_compile")
def test_int8_forward_serves_what_it_is_fastest_at():
    assert select(LONG).kernel == "int8_forward_hopper"
    for change in (
        {"is_causal": True, "q_len": 100, "head_dim": 80},
        {"mask": "keys"},
        {"recipe": "sage1"},
        {"recipe": "sage_bwd", "grad": True},
        {"mask": "blocks", "list_sizes": (128, 128)},
        {"mask": "block_keys", "list_sizes": (128, 128), "is_causal": True},
        {"mask": "blocks", "list_sizes": (128, 128), "recipe": "sage1", "head_dim": 64, "v_head_dim": 64},
    ):
        assert select(replace(LONG, **change)).kernel == "int8_forward_hopper", change
    for change in (
        {"mask": "bool"},
        {"mask": "blocks", "list_sizes": (64, 64)},
        {"mask": "blocks", "list_sizes": (128, 128), "head_dim": 64, "v_head_dim": 64},
        {"mask": "blocks", "list_sizes": (128, 64)},
        {"packed": True},
        {"head_dim": 64},
        {"head_dim": 256, "v_head_dim": 256},
        {"head_dim": 32, "v_head_dim": 32},
        {"v_head_dim": 100},
        {"dtype": torch.float32},
        {"capability": (10, 0)},
        {"batch": 4000},
    ):
        plan = select(replace(LONG, **change))
        assert plan.kernel == "int8_forward", change
        assert any(who == "sage2 by int8_forward_hopper" for who, _ in plan.passed_over), change


@pytest.mark.usefixtures("can_compile")
@pytest.mark.parametrize("fallback", ["native", "emulate", "error"])
@pytest.mark.parametrize("grad", [False, True])
def test_without_triton_packed_sequences_run_one_by_one(monkeypatch, grad, fallback):
    """A sequence alone has a kernel, or exact attention for its length and not because sequences are packed."""
    packed = replace(LONG, recipe="sage_bwd" if grad else "sage2", grad=grad, packed=True)
    assert not runs_one_by_one(packed, fallback)
    monkeypatch.setattr(registration, "triton_version", lambda: None)
    forget_choices()
    assert runs_one_by_one(packed, fallback)
    assert runs_one_by_one(replace(packed, q_len=200, kv_len=200), fallback)
    for facts in ({"dtype": torch.float32}, {"head_dim": 320}):
        assert not runs_one_by_one(replace(packed, **facts), fallback), facts
    forget_choices()


@pytest.mark.usefixtures("can_compile")
@pytest.mark.parametrize("recipe", ["sage1", "sage2"])
def test_with_heavy_keys_tensors_that_are_not_aligned_run_the_portable_kernel(recipe):
    plan = select(replace(LONG, recipe=recipe, aligned=False))
    assert (plan.recipe, plan.kernel, plan.quantizer) == (recipe, "int8_forward", "int8_quantize")
    reason = "with heavy keys, addresses and strides of Q must be multiples of 16 bytes"
    assert (f"{recipe} by int8_forward_hopper", reason) in plan.passed_over
    assert select(replace(LONG, recipe="sage_bwd", grad=True, aligned=False)).kernel == "int8_forward_hopper"


def test_int8_forward_says_what_it_lacks(monkeypatch):
    monkeypatch.setattr(compiler, "unavailable", lambda *_: "no NVRTC here")
    forget_choices()
    plan = select(LONG)
    forget_choices()
    assert plan.kernel == "int8_forward"
    assert ("sage2 by int8_forward_hopper", "no NVRTC here") in plan.passed_over


@pytest.fixture
def forbidden(tmp_path, monkeypatch):
    """Return a function that forbids compiling, with an empty cache so far."""
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler, "_compile", lambda program: compiler.Cubin(b"", str(program)))
    monkeypatch.setattr(compiler, "_outdated", lambda nvrtc: "")
    forget_choices()

    def forbid():
        monkeypatch.setenv("SAGE_KERNELS_COMPILE", "0")
        monkeypatch.setattr(compiler, "missing", lambda: "no NVRTC here")
        forget_choices()

    yield forbid
    forget_choices()


class OtherQuantizer(CudaInt8Quantizer):
    """Stands for the Triton quantiser, which needs a GPU: what its operands hold does not matter here."""

    name = "int8_quantize"

    def quantize(self, call, padding=None):
        return quantize.quantize_operands(call)


def sources_of(request, monkeypatch):
    """Return the sources that a request's call launches."""
    launched = {quantize: [], int8_forward: [], block_lists: []}
    for module, sources in launched.items():
        monkeypatch.setattr(module, "launch", lambda kernel, *_, to=sources, **__: to.append(kernel.source))
    monkeypatch.setattr(int8_forward, "tensor_map", lambda *_: NO_TENSOR_MAP)
    monkeypatch.setattr(int8_forward, "compile_together", lambda *_: None)
    for module in (int8_forward, block_lists):
        monkeypatch.setattr(module, "multiprocessors", lambda index: 132)

    def new(heads, tokens, channels):
        return torch.empty(request.batch, heads, tokens, channels, dtype=request.dtype, device="meta")

    query = new(request.q_heads, request.q_len, request.head_dim)
    key = new(request.kv_heads, request.kv_len, request.head_dim)
    value = new(request.kv_heads, request.kv_len, request.v_head_dim)
    key_mask = torch.empty(request.batch, request.kv_len, dtype=torch.bool, device="meta")
    mask = Mask.of_keys(key_mask if request.mask in ("keys", "block_keys") else None)
    if request.mask in ("blocks", "block_keys"):
        tiles = torch.empty(1, 1, -(-request.q_len // 128), 9, dtype=torch.int32, device="meta")
        mask = replace(mask, kind=request.mask, blocks=BlockList(tiles[..., 0], tiles))
    call = Call(query, key, value, get_recipe(request.recipe), mask, request.is_causal, return_lse=request.return_lse)
    hopper = not CudaInt8Quantizer().unsupported(request)
    kernel, quantizer = CudaInt8Forward(), CudaInt8Quantizer() if hopper else OtherQuantizer()
    (kernel.attend_and_save if request.grad else kernel.attend)(call, quantizer)
    return [*(launched[quantize] if hopper else []), *launched[block_lists], *launched[int8_forward]]


@pytest.mark.skipif(bool(compiler.missing()), reason="without NVRTC")
@pytest.mark.parametrize(
    "request_",
    [
        LONG,
        replace(LONG, kv_len=4096),  # Q is quantised by the forward kernel
        replace(LONG, kv_len=4096, recipe="sage_bwd", grad=True, aligned=False),
        replace(LONG, kv_len=4096, is_causal=True),
        replace(LONG, mask="keys", head_dim=64, v_head_dim=64),
        replace(LONG, recipe="sage_bwd", grad=True),
        replace(LONG, recipe="sage1", return_lse=True, dtype=torch.float16),
        replace(LONG, mask="blocks", list_sizes=(128, 128)),
        replace(LONG, mask="block_keys", list_sizes=(128, 128), aligned=False),
    ],
)
def test_forbidden_to_compile_what_is_cached_is_chosen_and_nothing_else(request_, forbidden, monkeypatch):
    sources = sources_of(request_, monkeypatch)
    for source in sources:
        source.compile()
    forbidden()
    plan = select(request_)
    assert plan.kernel == "int8_forward_hopper"
    assert plan.quantizer == ("int8_quantize_hopper" if request_.aligned else "int8_quantize")
    for source in sources:
        assert source.compile()
    other_head_dim = 192 - request_.head_dim if request_.list_sizes == (0, 0) else 96
    for change in (
        {"head_dim": other_head_dim, "v_head_dim": other_head_dim, "return_lse": True},
        {"dtype": torch.float16 if request_.dtype == torch.bfloat16 else torch.bfloat16},
    ):
        other = select(replace(request_, **change))
        assert "hopper" not in other.kernel
        assert any("SAGE_KERNELS_COMPILE=0" in reason for _, reason in other.passed_over)
