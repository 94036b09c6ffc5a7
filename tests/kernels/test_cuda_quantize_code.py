"""The machine code of quantize.cu, and the tensors that it takes. Needs no GPU."""

import re
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import triton

from sage_kernels.cuda import compiler, quantize
from sage_kernels.cuda.quantize import Features
from sage_kernels.cuda.registration import CudaInt8Quantizer
from sage_kernels.dispatch.request import Request
from sage_kernels.spec.layout import is_aligned
from sage_kernels.spec.recipe import get_recipe
from sage_kernels.spec.transforms import rotation_signs

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
REGISTERS = 65536  # of a multiprocessor
DTYPES = (torch.bfloat16, torch.float16)


FEATURES = {
    "plain": quantize.PLAIN,
    "heavy": Features(heavy_keys=64),
    "rotated": Features(rotate=True),
    "all": Features(rotate=True, equalize=True, heavy_keys=64),
    "chosen": Features(rotate=True, equalize=True, heavy_keys=64, choice=True),
    "late": Features(rotate=True, equalize=True, heavy_keys=64, choice=True, causal=True),
}


@pytest.mark.audit
@pytest.mark.skipif(bool(compiler.unavailable()), reason=compiler.unavailable())
@pytest.mark.parametrize(
    ("channels", "dtype", "pv", "return_lse", "features"),
    product((64, 128), DTYPES, ("fp8", "fp16"), (False, True), FEATURES),
)
def test_enough_bytes_are_under_way(tmp_path, monkeypatch, channels, dtype, pv, return_lse, features):
    """At most two registers spill; a multiprocessor has registers for so many threads that their loads are of 56 KB.

    Of 16 bytes each: a thread of `quantize` has one for each 16 channels, one of `statistics` has 16. Without rotation
    they are of 64 KB.
    """
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path))
    cubin = quantize.kernels(channels, dtype, pv, return_lse, FEATURES[features])[0].source.compile()
    assert "warning" not in cubin.log.lower(), cubin.log
    assert all(int(count) <= 8 for count in re.findall(r"(\d+) bytes spill stores", cubin.log)), cubin.log
    registers = {
        kernel: int(number)
        for kernel, number in re.findall(r"entry function '(\w+)'.*?Used (\d+) registers", cubin.log, re.DOTALL)
    }
    for kernel, threads, loads in (("quantize", 128, channels // 16), ("statistics", channels, 16)):
        resident = REGISTERS // registers[kernel] // threads * threads
        assert resident * loads * 16 >= (56 if FEATURES[features].rotate else 64) * 1024, kernel


@pytest.mark.audit
@pytest.mark.skipif(bool(compiler.unavailable()), reason=compiler.unavailable())
@pytest.mark.parametrize("channels", [64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rotated_element_takes_few_instructions(tmp_path, monkeypatch, channels, dtype):
    """At most 17, and 13 where all tokens exist: with 128 channels 11.9 for Q and 11.3 for K, with 64 12.9 and 12.8.

    Of Q's 2.5 are products with K's mean, for heavy keys. Copying 3 bytes for each element at 4.3 TB/s leaves 20
    thread-instructions. To measure again: `nvdisasm -c` of the
    cubin; a tile's path is what ends with an EXIT and has the MMA instructions, of 16 · channels elements a warp.
    """
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path))
    cubin = quantize.kernels(channels, dtype, "fp8", False, FEATURES["all"])[0].source.compile()
    image = tmp_path / "kernel.cubin"
    image.write_bytes(cubin.image)
    listing = subprocess.run([NVDISASM, "-c", image], capture_output=True, text=True, check=True).stdout
    code = listing.partition(".text.quantize:")[2].partition(".text.statistics:")[0]
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;]*);", code)
    paths = " ".join(line.strip().replace(" ", "_") for line in lines).split(" EXIT")
    tiles = sorted(len(path.split()) for path in paths if "HMMA" in path)
    assert len(tiles) == 4  # Q and K, whole and not
    assert tiles[1] <= 13 * channels / 2 and tiles[-1] <= 17 * channels / 2, tiles


def tensors(head_dim=128, v_head_dim=128, dtype=torch.bfloat16):
    return [torch.empty(2, 4, 300, channels, dtype=dtype) for channels in (head_dim, head_dim, v_head_dim)]


def unsupported(query, key, value):
    request = Request.of(query, key, value, recipe="sage2")
    aligned = all(is_aligned(x) for x in (query, key, value))
    return CudaInt8Quantizer().unsupported(replace(request, device_type="cuda", capability=(9, 0), aligned=aligned))


@pytest.mark.usefixtures("can_compile")
def test_serves_aligned_tensors():
    assert not unsupported(*tensors())
    assert not unsupported(*tensors(40, 64, torch.float16))
    assert not unsupported(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors()))
    query, key, value = tensors()
    assert not unsupported(query, key[:, :1].expand_as(key), value)
    assert not unsupported(query[:, :, :1, 8:], key[..., 8:], value)
    assert not unsupported(query[:1], key[:1, :1], value[:1, :1])


@pytest.mark.usefixtures("can_compile")
@pytest.mark.parametrize(
    ("head_dim", "v_head_dim"),
    [(32, 32), (128, 64), (64, 128), (256, 256), (100, 100), (128, 100), (36, 64), (130, 128)],
)
def test_does_not_serve_other_channels(head_dim, v_head_dim):
    assert unsupported(*tensors(head_dim, v_head_dim))


@pytest.mark.usefixtures("can_compile")
@pytest.mark.parametrize("number", range(3))
def test_does_not_serve_other_layouts(number):
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
        assert "16 bytes" in unsupported(*with_one(change))


def test_serves_rotation_with_and_without_equalizing_and_no_equalizer_alone():
    serves = CudaInt8Quantizer().serves
    for name in ("sage1", "sage2", "sage_bwd"):
        recipe = get_recipe(name)
        assert recipe.rotate and recipe.equalize and serves(recipe)
        assert serves(replace(recipe, equalize=False))
        assert serves(replace(recipe, rotate=False, equalize=False))
        assert not serves(replace(recipe, rotate=False))


@pytest.mark.parametrize("channels", [64, 128])
def test_the_rotation_has_the_signs_of_the_reference(channels):
    words = quantize.signs(channels).values()
    bits = [word >> place & 1 for word in words for place in range(32)]
    assert torch.equal(1 - 2.0 * torch.tensor(bits[:channels]), rotation_signs(channels))
    assert not any(bits[channels:])


def test_serves_heavy_keys_that_a_block_of_the_grid_writes():
    serves = CudaInt8Quantizer().serves
    for name in ("sage1", "sage2"):
        assert serves(replace(get_recipe(name), heavy_keys=64))
        assert not serves(replace(get_recipe(name), heavy_keys=128))


@pytest.mark.usefixtures("can_compile")
def test_does_not_serve_float32_attention_biases_or_packed_sequences():
    assert "dtype" in unsupported(*tensors(dtype=torch.float32))
    request = replace(Request.of(*tensors(), recipe="sage2"), device_type="cuda", capability=(9, 0), aligned=True)
    assert CudaInt8Quantizer().unsupported(replace(request, mask="bool")) == "no masks other than key-padding masks"
    assert CudaInt8Quantizer().unsupported(replace(request, packed=True)) == "no packed sequences"
