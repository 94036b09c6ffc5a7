"""Measure what first calls of many kinds cost: drawn calls in one process, each made once, and what they compile.

python benchmarks/run.py cold-variety --calls 350 --caches /tmp/caches
python benchmarks/run.py cold-variety --calls 350 --plan

Caches that hold nothing are an empty folder's; run twice, they are full. With --plan nothing runs, and no GPU is
needed: what the calls would compile for an H100 is counted. Printed are, by kernel, how many variants of it were asked
for, how many were compiled, and for how long; by kind of call, calls and seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from sage_kernels.spec.masks import key_mask

RECIPES = ("sage2", "sage1", "sage3", "sage_bwd")
HEAD_DIMS = (16, 24, 32, 40, 48, 64, 64, 72, 80, 96, 112, 128, 128, 144, 160, 192, 224, 256)
MASKS = ("none", "none", "causal", "keys", "bool", "additive", "window", "rows without keys")
LAYOUTS = ("heads first", "tokens first", "packed", "wide", "offset")


@dataclass(frozen=True)
class Drawn:
    """A drawn call: sizes, layouts of Q, K and V, and options."""

    recipe: str
    batch: int
    kv_heads: int
    group: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    layouts: tuple[str, str, str]
    mask: str
    return_lse: bool


def draw(count: int, seed: int) -> list[Drawn]:
    """Draw calls; the first ones are the same for every count."""
    choose = random.Random(seed)

    def head_dim() -> int:
        return choose.choice(HEAD_DIMS) if choose.random() < 0.75 else choose.randint(16, 256)

    def length() -> int:
        return choose.randint(1, 3000) if choose.random() < 0.5 else round(2 ** choose.uniform(0, 11.5))

    def one() -> Drawn:
        recipe, dim = choose.choice(RECIPES), head_dim()
        v_dim = head_dim() if choose.random() < 0.2 else dim
        q_len = length()
        kv_len = q_len if choose.random() < 0.5 else length()
        layout = choose.choice(LAYOUTS)
        layouts = (layout, layout, layout) if choose.random() < 0.7 else tuple(choose.choices(LAYOUTS, k=3))
        return Drawn(
            recipe, choose.randint(1, 3), choose.randint(1, 4), choose.randint(1, 7) if choose.random() < 0.5 else 1,
            q_len, kv_len, dim, v_dim, choose.choice((torch.float16, torch.bfloat16)), layouts, choose.choice(MASKS),
            choose.random() < 0.4,
        )  # fmt: skip

    return [one() for _ in range(count)]


def lay_out(batch: int, heads: int, tokens: int, channels: int, layout: str, **options: Any) -> torch.Tensor:
    """Return random numbers (batch, heads, tokens, channels) in a layout that models give."""
    if layout == "heads first":
        return torch.randn(batch, heads, tokens, channels, **options)
    if layout == "tokens first":
        return torch.randn(batch, tokens, heads, channels, **options).transpose(1, 2)
    if layout == "packed":
        return torch.randn(batch, tokens, 3, heads, channels, **options)[:, :, 1].transpose(1, 2)
    if layout == "wide":
        return torch.randn(batch, heads, tokens, channels + 8, **options)[..., :channels]
    return torch.randn(batch * heads * tokens * channels + 1, **options)[1:].view(batch, heads, tokens, channels)


def inputs_of(drawn: Drawn, device: str) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """Return Q, K and V of a call, and its options."""
    heads = drawn.kv_heads * drawn.group, drawn.kv_heads, drawn.kv_heads
    tokens, dims = (drawn.q_len, drawn.kv_len, drawn.kv_len), (drawn.head_dim, drawn.head_dim, drawn.v_head_dim)
    sizes = zip(heads, tokens, dims, drawn.layouts, strict=True)
    tensors = [lay_out(drawn.batch, *size, dtype=drawn.dtype, device=device) for size in sizes]
    row, column = torch.arange(drawn.q_len, device=device)[:, None], torch.arange(drawn.kv_len, device=device)
    mask = None
    if drawn.mask == "keys":
        mask = (column < max(1, drawn.kv_len - drawn.kv_len // 8)).expand(drawn.batch, 1, 1, -1)
    elif drawn.mask == "bool":
        mask = torch.rand(drawn.batch, 1, drawn.q_len, drawn.kv_len, device=device) < 0.7
    elif drawn.mask == "additive":
        mask = torch.randn(1, heads[0], drawn.q_len, drawn.kv_len, device=device, dtype=drawn.dtype)
    elif drawn.mask == "window":
        mask = ((row - column).abs() <= 256)[None, None]
    elif drawn.mask == "rows without keys":
        mask = (row >= 3)[None, None].expand(1, 1, -1, drawn.kv_len)
    causal = drawn.mask == "causal"
    return tensors, {"attn_mask": mask, "is_causal": causal, "recipe": drawn.recipe, "return_lse": drawn.return_lse}


@dataclass
class Kernel:
    """Variants of a kernel: those that were asked for, and how many of them no cache had."""

    variants: set[Any] = field(default_factory=set)
    compiled: int = 0
    seconds: float = 0.0


Kernels = defaultdict[str, Kernel]


@contextlib.contextmanager
def counting() -> Iterator[Kernels]:
    """Count the variants of Triton's kernels and of NVRTC's programs."""
    from triton import knobs

    from sage_kernels.cuda import compiler

    kernels: Kernels = defaultdict(Kernel)

    def seen(*, src: Any, metadata: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        kernel = kernels[src.fn.__name__]
        kernel.variants.add(metadata["hash"])
        kernel.compiled += not cache_hit
        kernel.seconds += times.total / 1e6

    nvrtc, read = compiler._compile, compiler.compile

    def compile(program: Any) -> Any:
        start = time.perf_counter()
        cubin = nvrtc(program)
        kernels[program.source].compiled += 1
        kernels[program.source].seconds += time.perf_counter() - start
        return cubin

    def get(source: str, macros: Any, arch: str = "sm_90a", *others: Any) -> Any:
        kernels[source].variants.add((arch, *sorted(macros.items())))
        return read(source, macros, arch, *others)

    knobs.compilation.listener, compiler._compile, compiler.compile = seen, compile, get  # type: ignore[assignment]
    try:
        yield kernels
    finally:
        knobs.compilation.listener, compiler._compile, compiler.compile = None, nvrtc, read


def run(drawn: list[Drawn], seconds: float) -> tuple[Kernels, list[tuple[Drawn, str, float]]]:
    """Make the calls until the time is over; return what was compiled, and what ran each call for how long."""
    from sage_hf import record, sage_attention

    rows, plans, end = [], [], time.perf_counter() + seconds
    torch.zeros(1, device="cuda")
    with counting() as kernels, record.observe(plans.append):
        for one in drawn:
            (query, key, value), options = inputs_of(one, "cuda")
            grad = one.recipe == "sage_bwd"
            for x in (query, key, value):
                x.requires_grad_(grad)
            plans.clear()
            torch.cuda.synchronize()
            start = time.perf_counter()
            with torch.set_grad_enabled(grad):
                found = sage_attention(query, key, value, enable_gqa=True, **options)
                output = found[0] if one.return_lse else found
                if grad:
                    output.backward(torch.randn_like(output))
            torch.cuda.synchronize()
            rows.append((one, plans[-1].plan.kernel if plans and plans[-1].plan else "?", time.perf_counter() - start))
            if time.perf_counter() > end:
                break
    return kernels, rows


def plan(drawn: list[Drawn]) -> tuple[Kernels, list[tuple[Drawn, str, float]]]:
    """Do as `run` on an H100 that is not there: the calls' host code runs on tensors without memory."""
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map_only
    from triton import knobs
    from triton.runtime.driver import driver

    from sage_kernels import backends, ops  # noqa: F401 - `backends` registers the kernels
    from sage_kernels.cuda import compiler, launch, tensor_map
    from sage_kernels.dispatch import precompile
    from sage_kernels.dispatch import run as dispatch
    from sage_kernels.external import flash_attention3
    from sage_kernels.language.launch import recording
    from sage_kernels.replay import trace
    from sage_kernels.testing import aot

    kernels: Kernels = defaultdict(Kernel)
    device = torch.device("cuda", 0)

    def stand_in(x: torch.Tensor, memory: Any = None) -> torch.Tensor:
        traced = trace.current()
        return trace.StandIn(x, memory or traced.new_memory(x), device, traced)

    class Pretending(TorchDispatchMode):
        """Run operators on the meta device, and say that it is a GPU."""

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            memories = {}

            def meta_of(x: Any) -> torch.Tensor:
                memories[x._meta.untyped_storage()._cdata] = x._memory
                return x._meta

            args, kwargs = tree_map_only(trace.StandIn, meta_of, (args, kwargs or {}))
            given = kwargs.get("device")
            if not memories and (given is None or torch.device(given).type != "cuda"):
                return function(*args, **kwargs)
            if given is not None:
                kwargs["device"] = torch.device("meta")
            made = function(*args, **kwargs)
            return tree_map_only(torch.Tensor, lambda x: stand_in(x, memories.get(x.untyped_storage()._cdata)), made)

    def variant(*, fn: Any, compile: Any, **_: Any) -> bool:
        kernels[fn.jit_function.__name__].variants.add(str(compile["key"]))
        return True

    driver.set_active(aot._CompileOnlyDriver((9, 0)))
    knobs.runtime.jit_cache_hook = variant
    compiler.why_not, launch._try_to_compile = (lambda *_: ""), lambda *_: None
    tensor_map.relocatable = lambda make, address: bytes(128)
    trace._NoMemory, precompile.compile_forward, precompile.compile_backward = Pretending, *[lambda *_: None] * 2
    flash_attention3._operator, flash_attention3._row_blocks = (lambda: print), lambda call: 8
    flash_attention3.FlashAttention3.attend = lambda self, call: call.new_outputs()[0]
    properties = SimpleNamespace(multi_processor_count=132, total_memory=80 * 2**30, name="NVIDIA H100 80GB HBM3")
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.cuda.is_current_stream_capturing, torch.cuda._lazy_init = (lambda: False), lambda: None
    rows = []
    for one in drawn:
        tensors, options = inputs_of(one, "meta")
        mask, causal, recipe = options["attn_mask"], options["is_causal"], options["recipe"]
        with recording() as launches, trace.tracing(compiles_only=True) as traced:
            tensors, mask = [stand_in(x) for x in tensors], None if mask is None else stand_in(mask)
            call = ops.checked_call(*tensors, mask, causal, 0, None, recipe, one.return_lse)
            ran = plan_training(call) if recipe == "sage_bwd" else dispatch.plan_of(call, "native").kernel
            if recipe != "sage_bwd":
                dispatch.attend(call, "native")
        for made in launches:
            if 0 not in made.grid:
                made.kernel.run(grid=made.grid, warmup=True, **made.arguments, **made.options)
        for source in (compilation.func.__self__ for compilation in traced.compilations):
            kernels[source.file].variants.add(tuple(sorted(source.macros.items())))
        rows.append((one, ran, 0.0))
    return kernels, rows


def plan_training(call: Any) -> str:
    """Run the host code of both passes of a call; return the kernel's name, or why gradients are exact."""
    from sage_kernels.dispatch.exact_choice import why_exact_gradients
    from sage_kernels.dispatch.run import attend_and_save, backward, plan_training, request_of
    from sage_kernels.spec.call import BackwardCall, Mask
    from sage_kernels.spec.options import Options

    valid = key_mask(call.mask.tensor, call.kv_len)
    if call.mask.tensor is not None and valid is None:
        return "exact gradients"
    call = replace(call, mask=Mask.of_keys(valid))
    options = Options(call.is_causal, recipe="sage_bwd")
    if why_exact_gradients(call.query, call.key, call.value, call.mask, options):
        return "exact gradients"
    output, saved = attend_and_save(call, "native")
    chosen = plan_training(request_of(call, grad=True), "native")
    gradient, head_dim = torch.empty_like(output), call.query.shape[3]
    options = call.recipe, call.mask, call.is_causal, 0, call.scale
    backward(BackwardCall(gradient, call.value, output, saved, head_dim, *options), chosen.backward)
    return chosen.kernel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `execute` to the parser."""
    parser.add_argument("--calls", type=int, default=350)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no call after so many")
    parser.add_argument("--seed", type=int, default=33)
    parser.add_argument("--caches", metavar="DIR", help="folder of all caches (default: the user's)")
    parser.add_argument("--plan", action="store_true", help="run nothing, count what would be compiled")


def execute(args: argparse.Namespace) -> None:
    """Make the calls, or plan them, and print what was compiled."""
    drawn = draw(args.calls, args.seed)
    if args.caches:
        for name in ("TRITON_CACHE_DIR", "SAGE_KERNELS_CACHE", "CUDA_CACHE_PATH"):
            os.environ[name] = f"{args.caches}/{name}"
    start = time.perf_counter()
    kernels, rows = plan(drawn) if args.plan else run(drawn, args.seconds)
    seconds = time.perf_counter() - start
    print(f"{len(rows)} of {len(drawn)} calls in {seconds:.1f} s")
    for name, kernel in sorted(kernels.items(), key=lambda item: (-item[1].seconds, -len(item[1].variants))):
        print(f"{name:28} {len(kernel.variants):4} variants, {kernel.compiled:4} compiled, {kernel.seconds:7.1f} s")
    total = [
        sum(values)
        for values in zip(*((len(k.variants), k.compiled, k.seconds) for k in kernels.values()), strict=True)
    ]
    print("in all {} variants, {} compiled, {:.1f} s".format(*total))
    kinds: dict[str, list[float]] = defaultdict(list)
    for _, kernel_name, took in rows:
        kinds[kernel_name].append(took)
    for kind, times in sorted(kinds.items(), key=lambda item: -sum(item[1])):
        print(f"{kind:28} {len(times):4} calls, {sum(times):7.1f} s, longest {max(times):.2f} s")
