"""What quantize.cu compiles to, and which tensors it takes. Needs no GPU."""

import re
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import triton

from sage_kernels.call import Call
from sage_kernels.cuda import compiler, quantize
from sage_kernels.cuda.registration import HopperQuantizer
from sage_kernels.dispatch import request_of
from sage_kernels.layout import is_aligned
from sage_kernels.recipe import RECIPES

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
REGISTERS = 65536  # of a multiprocessor
DTYPES = (torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def can_compile(monkeypatch):
    monkeypatch.setattr(compiler, "why_not", lambda *_: "")


def instructions(code, kernel):
    """Without branches for threads that are not where the others are: of the kernel's text up to its slow paths."""
    text = code.split(f".text.{kernel}:")[1].split(".section")[0]
    return re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]*)", text, re.MULTILINE)


@pytest.mark.skipif(bool(compiler._missing()), reason="without NVRTC")
@pytest.mark.parametrize(
    ("channels", "dtype", "pv", "return_lse"), product((64, 128), DTYPES, ("fp8", "fp16"), (False, True))
)
def test_enough_bytes_are_under_way(tmp_path, monkeypatch, channels, dtype, pv, return_lse):
    """Loads of 16 bytes, all of a thread's before it waits, of so many threads that a multiprocessor has 64 KB."""
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path))
    cubin = quantize.kernels(channels, dtype, pv, return_lse)[0].source.compile()
    assert "warning" not in cubin.log.lower(), cubin.log
    assert re.findall(r"(\d+) bytes spill stores", cubin.log) == ["0", "0"], cubin.log
    registers = {
        kernel: int(number)
        for kernel, number in re.findall(r"entry function '(\w+)'.*?Used (\d+) registers", cubin.log, re.DOTALL)
    }
    image = tmp_path / "kernel.cubin"
    image.write_bytes(cubin.image)
    code = subprocess.run([NVDISASM, "-c", image], capture_output=True, text=True, check=True).stdout

    loads = channels // 16  # of a thread, of Q or K
    threads = REGISTERS // registers["quantize"]
    assert threads // 128 * 128 * loads * 16 >= 64 * 1024
    body = instructions(code, "quantize")
    assert not {"LDL", "STL"} & {name.split(".")[0] for name in body}
    # V, K and Q in some order; Q waits only for its mean score.
    parts = "\n".join(body).split("\nEXIT")
    found = {}
    for part in parts:
        before, wait, after = part.partition("ACQBULK")
        if part.count("LDG.E.EF.128"):
            which = "value" if "F2FP" in part else "key" if "REDUX" in part else "query"
            found[which] = part.count("LDG.E.EF.128"), part.count("STG.E.128"), part.count("STG.E.64")
            assert bool(wait) == (which != "query" or return_lse)
            assert not wait or "LDG.E.EF.128" not in after
            assert "LDG.E.EF.128" in before
    value = (8, 4, 0) if pv == "fp8" else (loads, loads, 0)
    assert found == {"value": value, "key": (loads, 0, loads), "query": (loads, 0, loads)}
    assert body.count("PREEXIT") == 1

    threads = REGISTERS // registers["statistics"]
    assert threads // channels * channels * 16 * 16 >= 64 * 1024
    body = instructions(code, "statistics")
    assert not {"LDL", "STL"} & {name.split(".")[0] for name in body}
    # With care and without: 16 loads each, in one run that no use interrupts.
    wide = [index for index, name in enumerate(body) if name == "LDG.E.128"]
    assert len(wide) == 32
    for run in (wide[:16], wide[16:]):
        between = body[run[0] : run[-1]]
        assert not any(name.startswith(("FADD", "HADD", "HMNMX", "SHFL")) for name in between)
    assert body.count("PREEXIT") == 1
    assert body.count("UCGABAR_WAIT") == 1


def tensors(head_dim=128, v_head_dim=128, dtype=torch.bfloat16):
    return [torch.empty(2, 4, 300, channels, dtype=dtype) for channels in (head_dim, head_dim, v_head_dim)]


def serves(query, key, value):
    """Return whether the quantiser serves tensors like these on a Hopper GPU."""
    request = request_of(Call(query, key, value, RECIPES["sage2"]))
    aligned = all(is_aligned(x) for x in (query, key, value))
    return not HopperQuantizer().unsupported(replace(request, device_type="cuda", capability=(9, 0), aligned=aligned))


def test_serves_what_is_aligned():
    assert serves(*tensors())
    assert serves(*tensors(40, 64, torch.float16))
    assert serves(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors()))
    query, key, value = tensors()
    assert serves(query, key[:, :1].expand_as(key), value)
    assert serves(query[:, :, :1, 8:], key[..., 8:], value)
    assert serves(query[:1], key[:1, :1], value[:1, :1])


@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"),
    [(32, 32), (128, 64), (64, 128), (256, 256), (100, 100), (128, 100), (36, 64), (130, 128)],
)
def test_does_not_serve_other_channels(head_dim, v_head_dim):
    assert not serves(*tensors(head_dim, v_head_dim))


@pytest.mark.parametrize("number", range(3))
def test_does_not_serve_other_layouts_or_dtypes(number):
    def with_one(change):
        inputs = tensors()
        inputs[number] = change(inputs[number])
        return inputs

    for change in (
        lambda x: torch.empty(*x.shape, 2, dtype=x.dtype)[..., 0],
        lambda x: torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape),
        lambda x: torch.empty(*x.shape[:3], 132, dtype=x.dtype)[..., :128],
        lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        assert not serves(*with_one(change))
    assert not serves(*tensors(dtype=torch.float32))
