"""Threads, streams, graphs and allocators at work during our calls on a GPU: all go on, and every result is right."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_hf import sage_attention
from sage_kernels.dispatch import execution
from sage_kernels.dispatch.plan import exact_plan
from sage_kernels.dispatch.registry import get_exact
from sage_kernels.replay import cache
from sage_kernels.spec.call import Call
from sage_kernels.spec.recipe import get_recipe

RECIPES = ("sage2", "sage1", "exact", "sage_bwd")
CANARY = 0x5A


pytestmark = pytest.mark.usefixtures("nothing_known")


def draw(device, *shape, count=3):
    return [torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(count)]


def attend(*tensors, recipe="sage2", **options):
    """The output of a call; for a recipe with gradients, also these."""
    if recipe != "sage_bwd":
        return (sage_attention(*tensors, recipe=recipe, **options),)
    inputs = [x.detach().requires_grad_() for x in tensors]
    output = sage_attention(*inputs, recipe=recipe, fallback="error", **options)
    return output, *torch.autograd.grad(output, inputs, torch.ones_like(output))


def alone(*tensors, **options):
    """The results of a call's first time."""
    cache.forget()
    results = [x.detach().clone() for x in attend(*tensors, **options)]
    cache.forget()
    return results


def same(found, expected) -> bool:
    """Compare results bit by bit; the gradient of Q, if there is one, may be summed in any order."""
    bitwise = [number for number in range(len(expected)) if number != 1]
    return (
        len(found) == len(expected)
        and all(torch.equal(found[number], expected[number]) for number in bitwise)
        and cache.are_equal_to_rounding(found[1:2], expected[1:2])
    )


def at_once(*works: Callable[[], None]) -> None:
    """Run functions in threads that begin at once, and raise the first error of any."""
    start, errors = threading.Barrier(len(works)), []

    def run(work):
        start.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize(
    ("sizes", "recipe"),
    [((1, 2, 20, 2048, 128), "exact"), ((1, 2, 20, 2048, 128), "sage2"), ((1, 2, 1, 3000, 128), "sage2")],
    ids=str,
)
def test_replayed_calls_write_to_no_others_memory(device, sizes, recipe):
    batch, heads, queries, keys, channels = sizes
    tensors = [
        *draw(device, batch, heads, queries, channels, count=1),
        *draw(device, batch, heads, keys, channels, count=2),
    ]
    expected = alone(*tensors, recipe=recipe)
    canaries = [torch.full((size,), CANARY, device=device, dtype=torch.uint8) for size in (512, 5120, 20480) * 40]
    del canaries[1::2]  # holes, between canaries, for what the calls allocate
    for _ in range(200):
        assert same(attend(*tensors, recipe=recipe), expected)
    assert all((x == CANARY).all() for x in canaries)


@pytest.mark.parametrize("name", ["fa3", "masked_forward", "splitkv_forward"])
def test_threads_that_never_used_the_gpu_begin_a_layout_at_once(device, name):
    inputs = [draw(device, 1, 8, 64, 128, count=1) + draw(device, 1, 2, 3000, 128, count=2) for _ in range(4)]
    calls = [Call(*tensors, get_recipe("exact"), scale=0.1) for tensors in inputs]
    if reason := get_exact(name).unsupported(execution.request_of(calls[0])):
        pytest.skip(reason)
    plan = exact_plan(execution.request_of(calls[0]), kernel=name)
    expected, found = [execution.compute(call, plan)[0] for call in calls], {}
    torch.cuda.synchronize()
    for _ in range(10):
        at_once(*[lambda n=n: found.update({n: execution.compute(calls[n], plan)[0]}) for n in range(4)])
        torch.cuda.synchronize()
        assert all(torch.equal(found[n], expected[n]) for n in range(4))


@pytest.mark.parametrize("recipe", RECIPES)
def test_threads_begin_a_layout_of_ours_at_once(device, recipe):
    inputs = [draw(device, 2, 4, 320, 64) for _ in range(4)]
    expected, wrong = [alone(*tensors, recipe=recipe) for tensors in inputs], []
    torch.cuda.synchronize()

    def work(number):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                results = attend(*inputs[number], recipe=recipe)
                torch.cuda.current_stream().synchronize()
                wrong.extend([] if same(results, expected[number]) else [number])

    at_once(*[lambda n=n: work(n) for n in range(4)])
    assert not wrong


@pytest.mark.parametrize("recipe", RECIPES)
def test_another_thread_works_on_every_stream_of_pytorchs_pool(device, recipe):
    tensors, done = draw(device, 2, 4, 320, 64), threading.Event()
    expected, sums = alone(*tensors, recipe=recipe), []
    torch.cuda.synchronize()

    def users():
        x = torch.ones(4096, device=device)
        torch.cuda.current_stream().synchronize()
        while not done.is_set():
            with torch.cuda.stream(torch.cuda.Stream()):
                sums.append(float((x * 2).sum()))

    def ours():
        try:
            for turn in range(300):
                if turn % 50 == 0:
                    cache.forget()
                assert same(attend(*tensors, recipe=recipe), expected)
        finally:
            done.set()

    at_once(users, ours)
    assert set(sums) == {8192.0}


@pytest.mark.parametrize("recipe", RECIPES)
def test_another_thread_captures_graphs_of_its_own(device, recipe):
    layouts = [draw(device, 2, 4, 320 + 16 * n, 64) for n in range(6)]
    expected, found, replays = [alone(*tensors, recipe=recipe) for tensors in layouts], [], []
    ready, done = threading.Event(), threading.Event()
    torch.cuda.synchronize()

    def users():
        x = torch.arange(4096.0, device=device)
        ready.wait()
        while not done.is_set():
            graph = torch.cuda.CUDAGraph()
            # By default, PyTorch forbids all threads to allocate while one captures.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                y = (x * 2 + 1).sum()
            graph.replay()
            replays.append(y.clone())

    def ours():  # waits for no results: a thread must not while another one captures
        try:
            attend(
                *draw(device, 1, 2, 128, 64), recipe=recipe
            )  # PyTorch's libraries begin in each thread by themselves
            ready.set()
            found.extend(attend(*layouts[turn % 6], recipe=recipe) for turn in range(300))
        finally:
            ready.set()
            done.set()

    at_once(users, ours)
    assert all(same(results, expected[turn % 6]) for turn, results in enumerate(found))
    assert replays and {float(x) for x in replays} == {float((torch.arange(4096.0) * 2 + 1).sum())}


@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_caller_captures_a_call_at_any_time(device, recipe, before):
    alone(*draw(device, 2, 4, 320, 64), recipe=recipe)  # compiles: compilers wait for the GPU
    tensors = draw(device, 2, 4, 336, 64)
    for _ in range(before):
        attend(*tensors, recipe=recipe)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend(*tensors, recipe=recipe)
    eager = [attend(*draw(device, 2, 4, 336, 64), recipe=recipe) for _ in range(3)]  # between capture and replay
    for _ in range(2):
        new = draw(device, 2, 4, 336, 64)
        for x, y in zip(tensors, new, strict=True):
            x.copy_(y)
        graph.replay()
        assert same(results, alone(*new, recipe=recipe))
    assert all(x.isfinite().all() for one in eager for x in one)


def test_no_switch_of_pytorchs_backends_is_touched(device, routed):
    """Another thread's contexts hold, and leave the switches as they were."""
    query, *others = draw(device, 1, 8, 1, 128, count=1) + draw(device, 1, 2, 700, 128, count=2)
    before, seen, done = torch.backends.cuda.cudnn_sdp_enabled(), set(), threading.Event()

    def users():
        while not done.is_set():
            with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                seen.update(torch.backends.cuda.cudnn_sdp_enabled() for _ in range(20))

    def ours():
        try:
            for length in range(400, 700):
                key, value = (x[:, :, :length] for x in others)
                sage_attention(query, key, value, enable_gqa=True, recipe="sage2")
        finally:
            done.set()

    at_once(users, ours)
    assert seen == {False} and torch.backends.cuda.cudnn_sdp_enabled() == before


IN_A_PROCESS = """
import torch
from tests.gpu.test_concurrency import RECIPES, alone, attend, draw, same
device = torch.device("cuda")
for recipe in RECIPES:
    tensors = draw(device, 2, 4, 320, 64)
    expected = alone(*tensors, recipe=recipe)
    for _ in range(6):
        assert same(attend(*tensors, recipe=recipe), expected), recipe
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = attend(*tensors, recipe=recipe)
    graph.replay()
    assert same(results, expected), recipe
print("right")
"""


@pytest.mark.parametrize("allocator", ["backend:cudaMallocAsync", "expandable_segments:True"])
def test_other_allocators_serve(allocator):
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": allocator, "PYTORCH_ALLOC_CONF": allocator}
    command = [sys.executable, "-c", IN_A_PROCESS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and done.stdout.split() == ["right"], done.stderr


@pytest.mark.parametrize("before", range(4))
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_call_that_runs_out_of_memory_is_right_the_next_time(device, recipe, before):
    tensors = draw(device, 4, 16, 4096, 64)
    expected = alone(*tensors, recipe=recipe)
    for _ in range(before):
        attend(*tensors, recipe=recipe)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**22) / total)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            kept = [attend(*tensors, recipe=recipe) for _ in range(1000)]
            del kept
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    for _ in range(3):
        assert same(attend(*tensors, recipe=recipe), expected)
