"""CUDA C++ is compiled once, for all that it depends on, and what cannot be compiled says why. Needs no GPU."""

import logging
import os
import re
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from sage_kernels.cuda import compiler, launch, quantize
from sage_kernels.replay import driver
from sage_kernels.testing.aot import machine_code

pytestmark = pytest.mark.skipif(bool(compiler.missing()), reason=compiler.missing())

KERNEL = """#include "outer.cuh"
extern "C" __global__ void scale(int* x) {
  x[threadIdx.x] *= FACTOR * INNER;
}
"""
OUTER = '#pragma once\n  #  include "inner.cuh"\n#define UNUSED "outer.cuh"\n'
INNER = '#include "outer.cuh"\n#define INNER 5\n'
# Compiles when told to, at leisure, and prints how often it did.
COMPILE_SLOWLY = """
import sys, time
from pathlib import Path
from cuda.bindings import nvrtc
from sage_kernels.cuda import compiler, launch

compiler.SOURCES = compiler.HEADERS = Path(sys.argv[1])
calls, compile = 0, nvrtc.nvrtcCompileProgram
def compile_slowly(*args):
    global calls
    calls += 1
    time.sleep(2)
    return compile(*args)
nvrtc.nvrtcCompileProgram = compile_slowly
print("ready", flush=True)
sys.stdin.readline()
assert compiler.compile("kernel.cu", {"FACTOR": 3}).image
print(calls)
"""

OWN = {"SOURCES": compiler.SOURCES, "HEADERS": compiler.HEADERS}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sources in place of ours, and an empty cache."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "kernel.cu").write_text(KERNEL)
    (folder / "outer.cuh").write_text(OUTER)
    (folder / "inner.cuh").write_text(INNER)
    monkeypatch.setattr(compiler, "SOURCES", folder)
    monkeypatch.setattr(compiler, "HEADERS", folder)
    monkeypatch.setattr(compiler, "_unstored", {})
    monkeypatch.setattr(compiler, "_unusable", set())
    monkeypatch.setattr(compiler, "announce_compilation", lambda: None)
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SAGE_KERNELS_COMPILE", raising=False)
    return folder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[bytes]]:
    """Options of each compilation by NVRTC."""
    from cuda.bindings import nvrtc

    calls = []
    compile_program = nvrtc.nvrtcCompileProgram

    def counted(program, count, options):
        calls.append(options)
        return compile_program(program, count, options)

    monkeypatch.setattr(nvrtc, "nvrtcCompileProgram", counted)
    return calls


@pytest.fixture
def uncached():
    """Forget what is known of this machine, before a test and after it."""
    compiler.forget_machine()
    yield
    compiler.forget_machine()


def cached_files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").glob("*.cubin*"))


def test_a_source_is_compiled_once(calls, tmp_path):
    first = compiler.compile("kernel.cu", {"FACTOR": 3})
    assert first.image.startswith(b"\x7fELF")
    assert compiler.compile("kernel.cu", {"FACTOR": 3}) == first
    assert len(calls) == 1
    assert len(cached_files(tmp_path)) == 1


def test_the_log_tells_registers_and_spills_from_the_cache_too():
    for _ in range(2):
        log = compiler.compile("kernel.cu", {"FACTOR": 3}).log
        assert "registers" in log
        assert "0 bytes spill stores" in log


@pytest.mark.audit
@pytest.mark.parametrize("chosen", [False, True])
def test_kernels_assembled_in_parallel_equal_kernels_assembled_in_turn(tmp_path, monkeypatch, chosen):
    """Bit for bit, and the log tells of each kernel by itself."""
    for name, folder in OWN.items():
        monkeypatch.setattr(compiler, name, folder)
    features = quantize.Features(rotate=True, equalize=True, heavy_keys=64, choice=chosen)
    source = quantize.kernels(128, torch.bfloat16, "fp8", False, features)[0].source
    together = source.compile()
    monkeypatch.setattr(compiler, "SPLITTING", (99, 0))
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path / "in turn"))
    in_turn = source.compile()
    assert instructions(together) == instructions(in_turn) and len(instructions(together)) == 2
    assert usage(together) == usage(in_turn) and len(usage(together)) == 2


def instructions(cubin):
    """Return the machine code of each kernel by its section's name, read from the ELF file."""
    image = cubin.image
    (start,), (size, count, names) = struct.unpack_from("<Q", image, 40), struct.unpack_from("<3H", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, start + number * size) for number in range(count)]
    found = {}
    for name, _, _, _, offset, length in headers:
        place = headers[names][4] + name
        found[image[place : image.index(b"\0", place)].decode()] = image[offset : offset + length]
    return {name: code for name, code in found.items() if name.startswith(".text.")}


def usage(cubin):
    """Return the registers of each kernel, as the log tells them."""
    return dict(re.findall(r"entry function '(\w+)'.*?Used (\d+) registers", cubin.log, re.DOTALL))


@pytest.mark.parametrize("change", ["source", "header", "header of a header", "macro", "arch", "name", "compiler"])
def test_a_change_of_anything_it_depends_on_compiles_again(change, calls, folder, monkeypatch):
    source, macros, arch = "kernel.cu", {"FACTOR": 3}, "sm_90a"
    before = compiler.compile(source, macros, arch)
    if change == "source":
        (folder / "kernel.cu").write_text(KERNEL.replace("*=", "+="))
    elif change == "header":
        (folder / "outer.cuh").write_text("#define INNER 6\n")
    elif change == "header of a header":
        (folder / "inner.cuh").write_text("#define INNER 6\n")
    elif change == "macro":
        macros = {"FACTOR": 4}
    elif change == "arch":
        arch = "sm_80"
    elif change == "name":
        source = "other.cu"
        (folder / source).write_text(KERNEL)
    elif change == "compiler":
        monkeypatch.setattr(compiler, "_nvrtc_version", lambda: (99, 0))
    after = compiler.compile(source, macros, arch)
    assert len(calls) == 2
    assert (after.image != before.image) == (change not in ("name", "compiler"))
    assert compiler.compile(source, macros, arch) == after
    assert len(calls) == 2


def test_macro_order_and_unrelated_headers_do_not_recompile(calls, folder):
    compiler.compile("kernel.cu", {"FACTOR": 3, "A": 1})
    (folder / "unrelated.cuh").write_text("#define B\n")
    compiler.compile("kernel.cu", {"A": 1, "FACTOR": 3})
    assert len(calls) == 1


def test_a_truth_value_is_a_number_to_the_preprocessor(folder):
    (folder / "kernel.cu").write_text('#if !YES || NO\n#error\n#endif\nextern "C" __global__ void k() {}\n')
    assert compiler.compile("kernel.cu", {"YES": True, "NO": False}).image


def test_the_machine_code_is_for_the_architecture_and_the_macros(folder):
    (folder / "kernel.cu").write_text("""
extern "C" __global__ void k(unsigned long long a, unsigned long long b, int* out) {
  int d[4] = {};
#if HOPPER
  asm volatile("wgmma.fence.sync.aligned;\\n"
               "wgmma.mma_async.sync.aligned.m64n8k32.s32.s8.s8 {%0, %1, %2, %3}, %4, %5, 1;\\n"
               "wgmma.commit_group.sync.aligned;\\nwgmma.wait_group.sync.aligned 0;"
               : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]) : "l"(a), "l"(b));
#else
  d[0] = __dp4a((int)a, (int)b, 0);
#endif
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = d[i];
}""")
    code = {hopper: machine_code(compiler.compile("kernel.cu", {"HOPPER": hopper}).image) for hopper in (0, 1)}
    assert code[1].instructions.matrix_opcodes == {"IGMMA"}
    assert code[0].instructions.matrix_opcodes == set()
    assert code[0].instructions.counts["IDP"] == 1
    with pytest.raises(compiler.CompileError, match="wgmma"):
        compiler.compile("kernel.cu", {"HOPPER": 1}, "sm_80")


def test_what_does_not_compile_says_where_and_why_and_is_not_cached(calls, tmp_path):
    for _ in range(2):
        with pytest.raises(compiler.CompileError) as error:
            compiler.compile("kernel.cu", {"OTHER": "x y"})
        for part in ("kernel.cu", "sm_90a", "-DOTHER=x y", 'kernel.cu(3): error: identifier "FACTOR"', "1 error"):
            assert part in str(error.value)
    assert len(calls) == 2
    assert cached_files(tmp_path) == []


def test_a_header_that_is_not_there_is_the_compilers_error(folder):
    (folder / "inner.cuh").unlink()
    with pytest.raises(compiler.CompileError, match=r'outer\.cuh\(2\).*"inner\.cuh"'):
        compiler.compile("kernel.cu", {"FACTOR": 3})


def damaged(content: bytes) -> dict[str, bytes]:
    middle = len(content) // 2
    return {
        "empty": b"",
        "a digest alone": content[:32],
        "its first half": content[:middle],
        "all but the last byte": content[:-1],
        "one bit of the image": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "one bit of the digest": bytes([content[0] ^ 1]) + content[1:],
        "more than all": content + b"\0",
        "something else": b"something else",
    }


@pytest.mark.parametrize("damage", damaged(b"0" * 99))
def test_a_damaged_file_is_replaced(damage, calls, tmp_path):
    cubin = compiler.compile("kernel.cu", {"FACTOR": 3})
    (path,) = cached_files(tmp_path)
    content = path.read_bytes()
    path.write_bytes(damaged(content)[damage])
    again = compiler.compile("kernel.cu", {"FACTOR": 3})
    assert again.image == cubin.image
    assert len(calls) == 2
    assert compiler.compile("kernel.cu", {"FACTOR": 3}) == again
    assert len(calls) == 2


def test_a_file_has_its_name_only_when_it_is_whole(calls, tmp_path, monkeypatch):
    replace = os.replace

    def observed(temporary, path):
        assert compiler.read(Path(temporary)) is not None
        assert Path(temporary).parent == Path(path).parent
        assert not Path(path).exists()
        replace(temporary, path)

    monkeypatch.setattr(os, "replace", observed)
    cubin = compiler.compile("kernel.cu", {"FACTOR": 3})
    (path,) = cached_files(tmp_path)
    assert compiler.read(path) == cubin


def test_a_write_that_fails_leaves_nothing_behind(calls, tmp_path, monkeypatch):
    def full(temporary, path):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    cubin = compiler.compile("kernel.cu", {"FACTOR": 3})
    assert compiler.compile("kernel.cu", {"FACTOR": 3}) is cubin
    assert len(calls) == 1
    assert cached_files(tmp_path) == []


def test_without_a_cache_folder_a_process_compiles_once_and_warns_once(calls, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path / "file" / "cache"))
    for factor in (3, 3, 4, 4):
        assert compiler.compile("kernel.cu", {"FACTOR": factor}).image
    assert len(calls) == 2
    (warning,) = (record for record in caplog.records if record.levelno == logging.WARNING)
    assert "SAGE_KERNELS_CACHE" in warning.getMessage()
    assert str(tmp_path / "file") in warning.getMessage()


@pytest.mark.parametrize("cache", ["cache", "file/cache"])
def test_threads_compile_a_source_once(cache, calls, tmp_path, monkeypatch):
    (tmp_path / "file").touch()  # so that there is no folder below it
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path / cache))
    with ThreadPoolExecutor(4) as pool:
        cubins = list(pool.map(lambda _: compiler.compile("kernel.cu", {"FACTOR": 3}), range(4)))
    assert cubins == cubins[:1] * 4
    assert len(calls) == 1


def test_the_kernels_of_a_call_compile_at_the_same_time(folder, tmp_path, monkeypatch):
    """A kernel that does not compile does not stop the others."""
    from cuda.bindings import nvrtc

    both, compile_program = threading.Barrier(3, timeout=60), nvrtc.nvrtcCompileProgram
    monkeypatch.setattr(nvrtc, "nvrtcCompileProgram", lambda *args: both.wait() >= 0 and compile_program(*args))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    sources = [launch.KernelSource("kernel.cu", {}, {"FACTOR": factor}) for factor in (3, 5, "?")]
    kernels = tuple(launch.ConfiguredKernel(source, "scale", 32) for source in (*sources, sources[0]))
    launch.compile_together(kernels, torch.device("cuda", 0))
    assert len(cached_files(tmp_path)) == 2


@pytest.mark.audit
def test_processes_compile_a_source_once(folder):
    command = [sys.executable, "-c", COMPILE_SLOWLY, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        assert sum(int(process.communicate(timeout=120)[0]) for process in processes) == 1
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


def test_a_file_system_without_locks_compiles_and_caches(calls, monkeypatch):
    import fcntl

    def unsupported(file, operation):
        raise OSError("no locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    for _ in range(2):
        assert compiler.compile("kernel.cu", {"FACTOR": 3}).image
    assert len(calls) == 1


def test_forbidden_to_compile_the_cache_serves_and_nothing_else(calls, monkeypatch):
    cubin = compiler.compile("kernel.cu", {"FACTOR": 3})
    monkeypatch.setenv("SAGE_KERNELS_COMPILE", "0")
    assert "SAGE_KERNELS_COMPILE" in compiler.unavailable()
    assert compiler.compile("kernel.cu", {"FACTOR": 3}) == cubin
    with pytest.raises(compiler.CompileError, match=r"kernel\.cu .*-DFACTOR=4 .*SAGE_KERNELS_COMPILE=0"):
        compiler.compile("kernel.cu", {"FACTOR": 4})
    assert len(calls) == 1
    monkeypatch.delenv("SAGE_KERNELS_COMPILE")
    assert "SAGE_KERNELS_COMPILE" not in compiler.unavailable()
    compiler.compile("kernel.cu", {"FACTOR": 4})
    assert len(calls) == 2


@pytest.mark.parametrize("cache", ["cache", "file/cache"])
def test_forbidden_to_compile_a_kernel_can_be_had_when_it_is_cached(cache, calls, tmp_path, monkeypatch):
    (tmp_path / "file").touch()  # so that there is no folder below it
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path / cache))
    monkeypatch.setattr(compiler, "_outdated", lambda nvrtc: "")
    others = [("kernel.cu", {"FACTOR": 4}, "sm_90a"), ("kernel.cu", {"FACTOR": 3}, "sm_80")]
    asked = [("kernel.cu", {"FACTOR": 3}, "sm_90a"), *others]
    compiler.compile(*asked[0])
    assert [compiler.unavailable(*kernel) for kernel in asked] == ["", "", ""]
    monkeypatch.setenv("SAGE_KERNELS_COMPILE", "0")
    assert ["SAGE_KERNELS_COMPILE=0" in compiler.unavailable(*kernel) for kernel in asked] == [False, True, True]
    assert compiler.unavailable(*asked[0]) == ""
    assert len(calls) == 1


@pytest.fixture
def without_nvrtc(monkeypatch, uncached):
    """Return a function that takes NVRTC's library away."""
    from cuda.bindings import nvrtc

    def not_found(*args):
        raise RuntimeError("libnvrtc.so not found")

    def take_away():
        monkeypatch.setattr(nvrtc, "nvrtcVersion", not_found)
        monkeypatch.setattr(nvrtc, "nvrtcCreateProgram", not_found)
        compiler.forget_machine()

    return take_away


@pytest.mark.parametrize("forbidden", [False, True])
def test_without_nvrtc_the_cache_serves_what_was_compiled_before(forbidden, without_nvrtc, monkeypatch):
    cubin = compiler.compile("kernel.cu", {"FACTOR": 3})
    without_nvrtc()
    if forbidden:
        monkeypatch.setenv("SAGE_KERNELS_COMPILE", "0")
    assert compiler.unavailable("kernel.cu", {"FACTOR": 3}) == ""
    assert compiler.compile("kernel.cu", {"FACTOR": 3}) == cubin
    reason = "SAGE_KERNELS_COMPILE=0" if forbidden else "pip install"
    assert reason in compiler.unavailable()
    assert reason in compiler.unavailable("kernel.cu", {"FACTOR": 4})
    with pytest.raises(compiler.CompileError, match=rf"FACTOR=4 is not in .*{reason}"):
        compiler.compile("kernel.cu", {"FACTOR": 4})


def test_forbidden_to_compile_the_newest_that_the_driver_can_run_serves(monkeypatch, uncached):
    from cuda.bindings import nvrtc

    versions = ((12, 8), (12, 10), (13, 0))
    for version in versions:
        found = (nvrtc.nvrtcResult.NVRTC_SUCCESS, *version)
        monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda found=found: found)
        compiler.forget_machine()
        monkeypatch.setattr(compiler, "_compile", lambda _, version=version: compiler.Cubin(b"", str(version)))
        compiler.compile("kernel.cu", {"FACTOR": 3})
    monkeypatch.setenv("SAGE_KERNELS_COMPILE", "0")
    for driver_version, served in ((13000, "(13, 0)"), (12080, "(12, 10)")):
        monkeypatch.setattr(driver, "version", lambda x=driver_version: x)
        compiler.forget_machine()
        assert compiler.compile("kernel.cu", {"FACTOR": 3}).log == served
    monkeypatch.setattr(driver, "version", lambda: 12020)
    compiler.forget_machine()
    assert "SAGE_KERNELS_COMPILE=0" in compiler.unavailable("kernel.cu", {"FACTOR": 3})


def test_the_cache_is_in_the_users_cache_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("SAGE_KERNELS_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable, folder in (("", tmp_path / "home" / ".cache"), (str(tmp_path / "xdg"), tmp_path / "xdg")):
        monkeypatch.setenv("XDG_CACHE_HOME", variable)
        compiler.compile("kernel.cu", {"FACTOR": 3})
        assert len(list((folder / "sage-hf" / "cuda").glob("*.cubin"))) == 1


def test_a_compilation_is_announced_and_logged_and_a_cache_hit_is_not(monkeypatch, caplog):
    announced = []
    monkeypatch.setattr(compiler, "announce_compilation", lambda: announced.append(None))
    with caplog.at_level(logging.INFO, logger=compiler.logger.name):
        for count in (1, 1, 2):
            compiler.compile("kernel.cu", {"FACTOR": count})
            assert len(announced) == len(caplog.messages) == count
    assert all("kernel.cu" in message and message.endswith(" s") for message in caplog.messages)


@pytest.mark.parametrize(
    ("cuda", "packages"),
    [("12.8", ("cuda-bindings==12.*", "nvidia-cuda-nvrtc-cu12"))]
    + [(cuda, ("cuda-bindings==13.*", "nvidia-cuda-nvrtc==13.*")) for cuda in ("13.0", None)],
)
@pytest.mark.parametrize("missing", ["cuda.bindings", "the library"])
def test_errors_name_missing_packages_to_install(missing, cuda, packages, monkeypatch, uncached):
    from cuda.bindings import nvrtc

    def not_found():
        raise RuntimeError("libnvrtc.so not found")

    monkeypatch.setattr(torch.version, "cuda", cuda)
    if missing == "the library":
        monkeypatch.setattr(nvrtc, "nvrtcVersion", not_found)
    else:
        monkeypatch.setitem(sys.modules, missing, None)
    for package in ("pip install", *packages):
        assert package in compiler.unavailable()
    with pytest.raises(compiler.CompileError, match=r"kernel\.cu .*pip install"):
        compiler.compile("kernel.cu", {"FACTOR": 3})


def test_another_system_than_linux_is_named(monkeypatch, uncached):
    monkeypatch.setattr(sys, "platform", "win32")
    assert "Linux" in compiler.unavailable()


@pytest.mark.parametrize(
    ("driver_version", "nvrtc_version", "needed"),
    [
        (12020, (12, 8), "CUDA 12.4 or newer, this one is for 12.2"),
        (12080, (13, 0), "CUDA 13.0 or newer, this one is for 12.8"),
        (12040, (12, 9), ""),
        (13000, (13, 5), ""),
        (13020, (12, 8), ""),
    ],
)
def test_a_driver_that_is_too_old_for_the_compiler_is_named(
    driver_version, nvrtc_version, needed, monkeypatch, uncached
):
    from cuda.bindings import nvrtc

    monkeypatch.setattr(driver, "version", lambda: driver_version)
    monkeypatch.setattr(nvrtc, "nvrtcVersion", lambda: (nvrtc.nvrtcResult.NVRTC_SUCCESS, *nvrtc_version))
    reason = compiler.unavailable()
    assert needed in reason
    assert bool(reason) == bool(needed)


def test_a_machine_without_a_driver_can_compile(monkeypatch, uncached):
    def not_found():
        raise OSError("libcuda.so.1 not found")

    monkeypatch.setattr(driver, "_open", not_found)
    assert compiler.unavailable() == ""


def test_registering_imports_no_cuda_bindings(forks):
    code = "import sys, torch; known = set(sys.modules); import sage_kernels.cuda.registration as _; "
    assert "'cuda" not in forks.run(code + "print(set(sys.modules) - known)")
