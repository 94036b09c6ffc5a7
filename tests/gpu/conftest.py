"""Everything in this folder is marked `gpu` and needs a CUDA device."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sage_kernels.cuda import compiler
from sage_kernels.replay import cache
from sage_kernels.replay.launch_plan import LaunchPlan

FOLDER = Path(__file__).parent
MOST_CACHED_BYTES = 2**31


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.gpu)
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def nothing_known() -> Iterator[None]:
    """No call is known from before."""
    cache.forget()
    yield
    cache.forget()


@pytest.fixture
def repeatable() -> Iterator[None]:
    """Equal calls give equal bits: PyTorch is to be deterministic."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run of the tests, the same for all workers."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def triton_compiles_once(run_folder: Path) -> Iterator[None]:
    """Let one of the workers that want a kernel now compile it: then Triton's cache on disk has it for the others."""
    try:
        from triton.runtime import jit

        compile_now = jit.JITFunction._do_compile
    except (ImportError, AttributeError):  # Triton 3.4 has no such method
        yield
        return
    locks = run_folder / "triton_locks"
    locks.mkdir(exist_ok=True)

    def compile_once(kernel: Any, key: object, *arguments: Any) -> Any:
        program = f"{kernel.cache_key} {key} {os.environ.get('TRITON_CACHE_DIR')}"
        with (locks / hashlib.sha256(program.encode()).hexdigest()).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return compile_now(kernel, key, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit.JITFunction, "_do_compile", compile_once)
        yield


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[LaunchPlan]:
    """The plans of launches that ran instead of calls; none at first."""
    cache.forget()
    plans: list[LaunchPlan] = []
    original = cache.Replay.__call__

    def call(self: cache.Replay, *tensors: torch.Tensor | None) -> Any:
        before = len(ran)
        result = original(self, *tensors)
        plans.extend(dict.fromkeys(ran[before:]))  # for another GPU than the current one, a plan calls itself
        del ran[before:]  # a replay that runs another one counts no launches twice
        return result

    ran: list[LaunchPlan] = []
    run = LaunchPlan.run
    monkeypatch.setattr(LaunchPlan, "run", lambda self, *tensors: ran.append(self) or run(self, *tensors))
    monkeypatch.setattr(cache.Replay, "__call__", call)
    return plans


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda")


@pytest.fixture
def needs_hopper(device: torch.device) -> None:
    """Skip a test of Hopper's CUDA kernels on another GPU, and where nothing compiles them."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("needs compute capability 9.0")
    if reason := compiler.unavailable():
        pytest.skip(reason)


@pytest.fixture(autouse=True)
def shared_memory() -> Iterator[None]:
    """Leave the GPU's memory to the other workers: PyTorch keeps of what tests freed no more than MOST_CACHED_BYTES."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > MOST_CACHED_BYTES:
        torch.cuda.empty_cache()


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that PyTorch hands out uninitialised holds NaN, or the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def enough_memory(device: torch.device) -> Iterator[None]:
    """Skip a test if the GPU has no memory for tensors of more elements than 32 bits count."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info(device)[0] < 60e9:
        pytest.skip("needs 60 GB of free GPU memory")
    yield
    torch.cuda.empty_cache()
