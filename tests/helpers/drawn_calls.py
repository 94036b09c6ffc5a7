"""Drawn sequences of calls, each of whose outputs is compared with that of the same call on its own.

A call's output, layout, flags and plan may depend on the call and on settings, never on what ran before, meanwhile, or
in which tensors. A sequence is drawn from a seed. `check` names the fewest steps that show a finding.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from sage_hf import record, sage_attention
from sage_hf.attention import attend_observed
from sage_kernels import ops, training
from sage_kernels.cuda.registration import CudaInt8Backward
from sage_kernels.dispatch import registry
from sage_kernels.dispatch.select import set_routing
from sage_kernels.spec.options import Options
from sage_kernels.spec.recipe import RECIPES
from tests.helpers.blocks import draw_blocks
from tests.helpers.layouts import LAYOUTS, lay_out

NAMES = ("query", "key", "value", "mask")
LONGEST = 2048
"""Keys of a call, at most."""
FREED = 0.05
"""Share of the steps whose last call has keys without memory, as FSDP leaves parameters."""

# Contexts of one thread, and of the process: the latter are entered around threads, not in them.
LOCAL = ("", "", "", "function mode", "dispatch mode", "default device", "observed", "vmap", "torch.func.grad")
SHARED = ("", "", "default dtype", "patched", "deterministic", "math alone", "without cudnn", "flash alone", "tf32")
# Those of them that change no output: the call on its own runs without them.
BYSTANDERS = ("function mode", "dispatch mode", "default device", "observed", "default dtype", "patched")


@dataclass(frozen=True)
class Kind:
    """A call but for its values; shapes as in `ops.attention`, `layouts` of Q, K and V (`layouts.lay_out`)."""

    entry_point: str
    recipe: str
    fallback: str
    dtype: torch.dtype
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    layouts: tuple[str, str, str]
    mask: str
    scale: float | None
    return_lse: bool


@dataclass(frozen=True)
class Mode:
    """Way to make a call: `grad` is "no_grad", "inference_mode", or the names of the arguments that want gradients."""

    grad: str | tuple[str, ...]
    autocast: torch.dtype | None
    context: str


@dataclass(frozen=True)
class Step:
    """Some calls of a kind, each with the values of a seed.

    Attributes:
        seeds: of the values of each call.
        inputs: "new" tensors for each call, or "written": those of the call before, with new values in place.
        freed: the keys' memory is freed before the last call, which must raise.
    """

    kind: Kind
    mode: Mode
    seeds: tuple[int, ...]
    inputs: str
    freed: bool = False


@dataclass(frozen=True)
class Program:
    """A sequence of steps, which so many threads run at once inside a context of the process."""

    seed: int
    steps: tuple[Step, ...]
    threads: int
    around: str
    routed: bool


@dataclass
class Outcome:
    """Outcome of a call: tensors by name, facts that must be equal, and the names of sums in no fixed order."""

    tensors: dict[str, torch.Tensor]
    facts: dict[str, object]
    unordered: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Finding:
    """A step that differed from the call on its own, and in what."""

    step: int
    what: str


def draw(seed: int, device: torch.device) -> Program:
    """Draw a program."""
    choose = random.Random(seed)
    threads = choose.choice((1, 1, 1, 2, 4))
    kinds = [_draw_kind(choose, device)]
    if choose.random() < 0.2:  # steps behind a cache that grows
        form = {"q_len": choose.choice((1, 4)), "mask": "none", "layouts": ("contiguous",) * 3}
        kinds[0] = replace(kinds[0], entry_point=choose.choice(("sage_attention", "attend")), **form)
        kinds += [replace(kinds[0], kv_len=kinds[0].kv_len + more) for more in (1, 2, 3)]
    while len(kinds) < 3:
        kinds.append(_vary(kinds[0], choose, device))
    modes = [_draw_mode(choose, threads)]
    while len(modes) < 4:
        name = choose.choice(("grad", "grad", "autocast", "context"))
        modes.append(replace(modes[0], **{name: getattr(_draw_mode(choose, threads), name)}))
    steps = []
    for _ in range(choose.randint(3, 12)):
        kind, mode = choose.choice(kinds), choose.choice(modes)
        seeds = tuple(choose.randrange(3) for _ in range(choose.choice((1, 1, 2, 3, 5))))
        freed = choose.random() < FREED and mode.autocast is None  # which PyTorch casts without a look
        steps.append(Step(kind, mode, seeds, choose.choice(("new", "written")), freed))
    around = choose.choice(SHARED) if threads > 1 else ""
    return Program(seed, tuple(steps), threads, around, choose.random() < 0.5)


def _draw_kind(choose: random.Random, device: torch.device) -> Kind:
    on_gpu = device.type == "cuda"
    heads = choose.choice(((1, 1), (2, 2), (4, 2), (4, 1)))
    # Of what a GPU's kernels are compiled for, few forms occur often: a compiler takes as long as hundreds of calls.
    head_dim = choose.choice((64, 64, 128) if on_gpu else (16, 40, 64, 64, 8))
    rare = not on_gpu or choose.random() < 0.1
    layout = choose.choice(LAYOUTS)
    return Kind(
        entry_point=choose.choice(("sage_attention", "sage_attention", "attend", "operator", "packed")),
        recipe=choose.choice((*RECIPES, "sage_bwd", "sage_bwd")),
        fallback=choose.choice(("native", "native", "emulate")) if rare else "native",
        dtype=choose.choice((torch.bfloat16, torch.float16, torch.float32)) if rare else torch.bfloat16,
        batch=choose.choice((1, 2)),
        q_heads=heads[0],
        kv_heads=heads[1],
        q_len=choose.choice((1, 5, 20, 65, 130, *((1024,) if on_gpu else ()))),
        kv_len=choose.choice((1, 40, 64, 129, 200, *((1024, LONGEST) if on_gpu else ()))),
        head_dim=head_dim,
        v_head_dim=choose.choice((head_dim, head_dim, 24)) if rare else head_dim,
        layouts=(layout, choose.choice((layout, choose.choice(LAYOUTS))), choose.choice((layout, "contiguous"))),
        mask=choose.choice(("none", "none", "none", "causal", "causal tensor", "keys", "bool", "additive", "blocks")),
        scale=choose.choice((None, None, 0.3, -0.2, 0.0)),
        return_lse=choose.random() < 0.2,
    )


def _vary(kind: Kind, choose: random.Random, device: torch.device) -> Kind:
    """Draw a kind that differs in one or two fields: what is remembered by too few facts serves the wrong one."""
    if choose.random() < 0.3:
        return replace(kind, kv_len=kind.kv_len + choose.randint(1, 3))
    other = _draw_kind(choose, device)
    names = choose.sample([field.name for field in fields(Kind)], choose.choice((1, 1, 2)))
    if "q_heads" in names or "kv_heads" in names:
        names += ["q_heads", "kv_heads"]
    return replace(kind, **{name: getattr(other, name) for name in names})


def _draw_mode(choose: random.Random, threads: int) -> Mode:
    wanted = tuple(name for name in NAMES if choose.random() < 0.6)
    grad = choose.choice(("no_grad", "inference_mode", (), wanted, wanted))
    autocast = choose.choice((None, None, torch.float16, torch.bfloat16))
    return Mode(grad, autocast, choose.choice((*LOCAL, *SHARED) if threads == 1 else LOCAL))


class Inputs:
    """Tensors of a kind, with the values of a seed; `write` puts those of another seed in the same memory."""

    def __init__(self, kind: Kind, mode: Mode, seed: int, device: torch.device) -> None:
        self.kind, self.device = kind, device
        values = self._values(seed)
        self.tensors = {
            name: lay_out(x, layout)
            for (name, x), layout in zip(values.items(), (*kind.layouts, "contiguous"), strict=False)
        }
        self.is_causal: Any = kind.mask == "causal"
        if kind.mask == "causal tensor":
            self.is_causal = torch.tensor(seed % 2 == 0)
        self.blocks = None
        if kind.mask == "blocks":
            drawn = draw_blocks(1, 1, kind.q_len, kind.kv_len)
            self.blocks = drawn._replace(counts=drawn.counts.to(device), tiles=drawn.tiles.to(device))
        if isinstance(mode.grad, tuple):
            for name in mode.grad:
                if name in self.tensors and self.tensors[name].is_floating_point():
                    self.tensors[name] = self.tensors[name].detach().requires_grad_()

    def write(self, seed: int) -> None:
        with torch.no_grad():
            for name, x in self._values(seed).items():
                shared = self.tensors[name].stride(1) == 0 and x.shape[1] > 1
                (self.tensors[name][:, :1] if shared else self.tensors[name]).copy_(x[:, :1] if shared else x)
            if self.kind.mask == "causal tensor":
                self.is_causal.fill_(seed % 2 == 0)

    def _values(self, seed: int) -> dict[str, torch.Tensor]:
        kind, generator = self.kind, torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

        keys = kind.batch, kind.kv_heads, kind.kv_len
        values = {
            "query": normal(kind.batch, kind.q_heads, kind.q_len, kind.head_dim),
            "key": normal(*keys, kind.head_dim) + normal(kind.head_dim),
            "value": normal(*keys, kind.v_head_dim),
        }
        values = {name: x.to(self.device, kind.dtype) for name, x in values.items()}
        if kind.mask == "keys":
            values["mask"] = (normal(kind.batch, 1, 1, kind.kv_len) < 0.5).to(self.device)
        if kind.mask == "bool":  # a third of the rows may attend to no key
            allowed = normal(kind.batch, 1, kind.q_len, kind.kv_len) < 0.5
            values["mask"] = (allowed & (normal(kind.batch, 1, kind.q_len, 1) < 0.4)).to(self.device)
        if kind.mask == "additive":
            bias = normal(1, kind.q_heads, kind.q_len, kind.kv_len)
            values["mask"] = bias.masked_fill(bias > 1, -torch.inf).to(self.device, kind.dtype)
        return values


def call(kind: Kind, inputs: Inputs, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    """Make a call through its entry point; return the output, or it and the LSE."""
    mask, blocks = inputs.tensors.get("mask"), inputs.blocks
    options: dict[str, Any] = {"scale": kind.scale, "recipe": kind.recipe, "fallback": kind.fallback}
    if kind.entry_point == "packed":
        return _call_packed(kind, query, key, value, options)
    options["return_lse"] = kind.return_lse
    if kind.entry_point == "operator":
        options["is_causal"] = bool(inputs.is_causal)
        return ops.attention(query, key, value, mask=mask, blocks=blocks, **options)
    if kind.entry_point == "attend" and blocks is None:
        tensors = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        output, lse = attend_observed(*tensors, mask, None, Options(inputs.is_causal, tokens_first=True, **options))
        return (output, lse) if kind.return_lse else output
    return sage_attention(query, key, value, mask, 0.0, inputs.is_causal, enable_gqa=True, blocks=blocks, **options)


def _call_packed(
    kind: Kind, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
) -> torch.Tensor:
    device, sequences = query.device, kind.batch + 1
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)]
    starts = [
        torch.arange(sequences, dtype=torch.int32, device=device) * length for length in (kind.q_len, kind.kv_len)
    ]
    options |= {"is_causal": kind.mask == "causal"}
    lengths = *starts, kind.q_len, kind.kv_len
    if torch.is_grad_enabled() and any(x.requires_grad for x in packed) and RECIPES[kind.recipe].backward is not None:
        return training.packed_attention(*packed, *lengths, **options)
    return ops.packed_attention(*packed, *lengths, **options)[0]


class _Functions(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def entered(name: str) -> Iterator[None]:
    """Enter a context of LOCAL or SHARED."""
    backends = {
        "math alone": [SDPBackend.MATH],
        "flash alone": [SDPBackend.FLASH_ATTENTION],
        "without cudnn": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    }
    with contextlib.ExitStack() as stack:
        if name in backends:
            stack.enter_context(sdpa_kernel(backends[name]))
        elif name == "function mode":
            stack.enter_context(_Functions())
        elif name == "dispatch mode":
            stack.enter_context(_Operators())
        elif name == "default device":
            stack.enter_context(torch.device("meta"))
        elif name == "observed":
            stack.enter_context(record.observe(lambda call: None))
        elif name == "patched":
            stack.enter_context(mock.patch.object(F, "scaled_dot_product_attention", sage_attention))
        elif name == "default dtype":
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        elif name == "deterministic":
            stack.callback(torch.use_deterministic_algorithms, False)
            torch.use_deterministic_algorithms(True, warn_only=True)
        elif name == "tf32":
            stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("high")
        yield


def settings() -> dict[str, object]:
    """Return the state that a call must leave as it was."""
    return {
        "cudnn_sdp": torch.backends.cuda.cudnn_sdp_enabled(),
        "flash_sdp": torch.backends.cuda.flash_sdp_enabled(),
        "mem_efficient_sdp": torch.backends.cuda.mem_efficient_sdp_enabled(),
        "math_sdp": torch.backends.cuda.math_sdp_enabled(),
        "default dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "grad": torch.is_grad_enabled(),
        "autocast": torch._C._is_any_autocast_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "sdpa": F.scaled_dot_product_attention,
    }


def run_call(kind: Kind, mode: Mode, inputs: Inputs, freed: bool = False) -> Outcome:
    """Make one call; an error is an outcome too."""
    device, layer = inputs.device, torch.nn.Identity()
    tensors = [inputs.tensors[name] for name in NAMES[:3]]
    autocast = torch.autocast(device.type, dtype=mode.autocast, enabled=mode.autocast is not None)
    grads = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    gradient = grads[mode.grad]() if isinstance(mode.grad, str) else torch.enable_grad()
    function = partial(call, kind, inputs)
    tensors_of: dict[str, torch.Tensor] = {}
    facts: dict[str, object] = {}
    try:
        # `fresh` enters no bystander, so only what is made inside of one may differ by it.
        with gradient, autocast, entered(mode.context):
            before = settings()
            if mode.context == "torch.func.grad":

                def total(query: torch.Tensor) -> torch.Tensor:
                    result = function(query, *tensors[1:])
                    return (result[0] if isinstance(result, tuple) else result).float().sum()

                result = record.run_in_layer(layer, torch.func.grad(total), tensors[0])
            elif mode.context == "vmap":
                result = record.run_in_layer(layer, torch.func.vmap(function), *(x[None] for x in tensors))
            else:
                result = record.run_in_layer(layer, function, *tensors)
            facts |= {f"setting {name}": before[name] == now for name, now in settings().items()}
        results = result if isinstance(result, tuple) else (result,)
        first = "gradient of query" if mode.context == "torch.func.grad" else "output"
        tensors_of |= dict(zip((first, "lse"), results, strict=False))
        output = results[0]
        facts["differentiable"] = output.grad_fn is not None
        facts["inference tensor"] = output.is_inference()
        wanted = [x for x in inputs.tensors.values() if x.requires_grad]
        if mode.context == "vmap" and device.type == "cuda":
            wanted = []  # PyTorch's own gradients of mapped attention by cuDNN are wrong (2.11)
        if output.requires_grad and wanted:
            weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float32, device=device)
            weights = weights.view(output.shape).to(output.dtype)
            found = torch.autograd.grad(output, wanted, weights, allow_unused=True)
            names = [name for name, x in inputs.tensors.items() if x.requires_grad]
            tensors_of |= {f"gradient of {name}": x for name, x in zip(names, found, strict=True) if x is not None}
    except Exception as error:
        if "CUDA error" in str(error):
            raise
        return Outcome({}, {"error": f"{type(error).__name__}: {str(error)[:200]}"})
    plans = record.last_plans(layer)
    if not freed:
        facts["plan"] = [plan.outcome for plan in plans]
    for name, x in tensors_of.items():
        facts[f"form of {name}"] = x.dtype, tuple(x.shape), x.device.type
        if mode.context not in (*BYSTANDERS, "vmap") and x.numel():
            facts[f"strides of {name}"] = list(x.stride())
    if any(plan.numerics == "exact" for plan in plans):  # by PyTorch
        return Outcome(tensors_of, facts, frozenset(name for name in tensors_of if "gradient" in name))
    if any(plan.backward == CudaInt8Backward.name for plan in plans):
        unordered = () if torch.are_deterministic_algorithms_enabled() else ("gradient of query",)
        return Outcome(tensors_of, facts, frozenset(unordered))
    return Outcome(tensors_of, facts)


def compare(found: Outcome, expected: Outcome) -> list[str]:
    """Return in what two outcomes differ."""
    if "error" in found.facts or "error" in expected.facts:
        pair = found.facts.get("error"), expected.facts.get("error")
        return [] if pair[0] == pair[1] else [f"error: {pair[0]}, on its own {pair[1]}"]
    differences = []
    for name, x in found.facts.items():
        if name in expected.facts and x != expected.facts[name]:
            differences.append(f"{name}: {x}, on its own {expected.facts[name]}")
    missing = found.tensors.keys() ^ expected.tensors.keys()
    return differences + [f"{name} is in one alone" for name in missing] + compare_values(found, expected)


def compare_values(found: Outcome, expected: Outcome) -> list[str]:
    """Return which tensors differ; sums in no fixed order may by rounding."""
    differences = []
    for name, y in expected.tensors.items():
        x = found.tensors.get(name)
        if x is None or x.shape != y.shape or x.dtype != y.dtype:
            continue  # a fact
        if torch.equal(x.nan_to_num(2.0**10), y.nan_to_num(2.0**10)):
            continue
        distance, size = (x.double() - y.double()).abs().amax().item(), y.double().abs().amax().item()
        # Terms of a sum in another order; of keys in float32, each of which may be as large as the gradient.
        eps = max(2 * torch.finfo(x.dtype).eps, LONGEST * torch.finfo(torch.float32).eps)
        if name in found.unordered and distance <= eps * size:
            continue
        differences.append(f"values of {name} differ by {distance:.2g} of {size:.2g}")
    return differences


Expected = dict[tuple[Kind, Mode, int], Outcome]


def on_its_own(kind: Kind, mode: Mode, seed: int, device: torch.device) -> Outcome:
    """Return the outcome of a call when nothing is remembered, outside of bystanders."""
    if mode.context in BYSTANDERS:
        mode = replace(mode, context="")
    registry.forget_choices()
    return run_call(kind, mode, Inputs(kind, mode, seed, device))


def run(program: Program, device: torch.device) -> list[Finding]:
    """Run a program, and return what differed from each call on its own."""
    set_routing(program.routed)
    around = "" if program.around in BYSTANDERS else program.around
    expected: Expected = {}
    with entered(around):
        for step in program.steps:
            for seed in step.seeds:
                key = step.kind, step.mode, seed
                if key not in expected:
                    expected[key] = on_its_own(*key, device)
    registry.forget_choices()
    findings: list[Finding] = []
    with entered(program.around):
        if program.threads == 1:
            _run_steps(program, expected, device, findings)
        else:
            barrier = threading.Barrier(program.threads)

            def work() -> None:
                barrier.wait()
                _run_steps(program, expected, device, findings)

            threads = [threading.Thread(target=work) for _ in range(program.threads)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    return findings


def _run_steps(program: Program, expected: Expected, device: torch.device, findings: list[Finding]) -> None:
    stream = torch.cuda.Stream() if device.type == "cuda" and program.threads > 1 else None
    with torch.cuda.stream(stream):
        kept = []
        for index, step in enumerate(program.steps):
            inputs = None
            for count, seed in enumerate(step.seeds):
                if inputs is None or step.inputs == "new":
                    inputs = Inputs(step.kind, step.mode, seed, device)
                else:
                    inputs.write(seed)
                if step.freed and count == len(step.seeds) - 1:
                    inputs.tensors["key"].untyped_storage().resize_(0)
                    outcome = run_call(step.kind, step.mode, inputs, freed=True)
                    if "error" not in outcome.facts:
                        findings.append(Finding(index, "keys without memory: no error"))
                    continue
                outcome, own = run_call(step.kind, step.mode, inputs), expected[step.kind, step.mode, seed]
                differences = compare(outcome, own)
                findings += [Finding(index, what) for what in differences]
                if not differences:
                    kept.append((index, outcome, own))
        if stream is not None:
            stream.synchronize()
        for index, outcome, own in kept:
            findings += [Finding(index, f"in the end, {what}") for what in compare_values(outcome, own)]


def shrink(program: Program, device: torch.device) -> Program:
    """Return the program with the fewest steps and calls that still has a finding."""
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(program):
            if run(smaller, device):
                program, changed = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    for index in reversed(range(len(program.steps))):
        if len(program.steps) > 1:
            yield replace(program, steps=program.steps[:index] + program.steps[index + 1 :])
    if program.threads > 1:
        yield replace(program, threads=1)
    if program.around:
        yield replace(program, around="")
    for index, step in enumerate(program.steps):
        if len(step.seeds) > 1:
            one = replace(step, seeds=step.seeds[:-1])
            yield replace(program, steps=(*program.steps[:index], one, *program.steps[index + 1 :]))


def check(seed: int, device: torch.device) -> None:
    """Raise AssertionError with the fewest steps that show it if a call of the program depends on others."""
    program = draw(seed, device)
    findings = run(program, device)
    if findings:
        small = shrink(program, device)
        found = run(small, device) or findings
        raise AssertionError("\n".join([*dict.fromkeys(one.what for one in found), describe(small)]))


def describe(program: Program) -> str:
    """Return the program for readers, one step a line."""
    lines = [f"  seed {program.seed}, {program.threads} threads, around: {program.around!r}, routed: {program.routed}"]
    for step in program.steps:
        kind = ", ".join(f"{field.name}={getattr(step.kind, field.name)}" for field in fields(Kind))
        lines.append(f"  {step.mode}, values {step.seeds} {step.inputs}{', freed' if step.freed else ''}: {kind}")
    return "\n".join(lines)
