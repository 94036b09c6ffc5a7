"""Examination of kernels: small drawn calls, compared with the reference and with exact attention in float64.

A correct kernel and the reference are two roundings of one result: they differ by √2 times the reference's error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

import torch

from ..exact import sdpa
from ..exact.gradients import exact_gradients
from ..spec import transforms
from ..spec.block_list import BlockList
from ..spec.call import NO_MASK, AttentionOutput, BackwardCall, Call, Mask, MaskKind, softmax_scale
from ..spec.kv_cache import KVCache
from ..spec.kv_format import get_format
from ..spec.layout import Lengths, ceil_div, sequence_slices
from ..spec.masks import with_causality
from ..spec.qk_norm_rope import Norm, Rope
from ..spec.recipe import Recipe, get_recipe
from . import kv_kernels
from .plan import Plan
from .qk_norm_rope_kernels import reference_qk_norm_rope_kernel, select_qk_norm_rope_kernel
from .registry import fitting_quantizers, get_backward, get_exact, get_forward, get_quantizer

Found = TypeVar("Found")

Q_LEN, KV_LEN = 200, 333
"""Queries and keys of a case: more than a tile, but no multiple of one, and more keys than heavy keys."""
STEP = 3
"""Tokens of a step of decoding from a KV cache."""
RAISED = float("inf")
"""Distance, in units of the tolerance, of a kernel that raises or returns non-finite numbers."""

# The largest relative error of rounding an element to a format; for INT8, of an element a third of the largest.
ROUNDING = {"nvfp4": 2**-2, "fp8": 2**-4, "int8": 2**-6, "fp16": 2**-11}


@dataclass(frozen=True)
class CheckCase:
    """A small call with random tensors; fields as in `Request`."""

    recipe: str
    dtype: torch.dtype = torch.bfloat16
    head_dim: int = 64
    v_head_dim: int = 64
    q_heads: int = 2
    kv_heads: int = 2
    mask: MaskKind = "none"
    is_causal: bool = False
    causal_offset: int = 0
    packed: bool = False
    grad: bool = False
    return_lse: bool = True
    aligned: bool = True
    list_sizes: tuple[int, int] = (128, 128)

    @classmethod
    def like(cls, plan: Plan) -> CheckCase:
        """Return a case that runs the kernels of a plan as its request does."""
        request, groups = plan.request, 2 if plan.request.q_heads > plan.request.kv_heads else 1
        return cls(
            recipe=plan.recipe,
            dtype=request.dtype,
            head_dim=request.head_dim,
            v_head_dim=request.v_head_dim,
            q_heads=2 * groups,
            mask="none" if request.packed else request.mask,
            is_causal=request.is_causal,
            causal_offset=KV_LEN - Q_LEN if request.lower_right else 7 if request.shifted else 0,
            packed=request.packed and not request.grad,
            grad=request.grad,
            return_lse=request.return_lse,
            aligned=request.aligned or request.device_type != "cuda",
            list_sizes=request.list_sizes,
        )

    def draw(self, device: torch.device) -> Call:
        """Draw a call with two sequences; the call is the same each time."""
        generator = torch.Generator("cpu").manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            drawn = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device, self.dtype)
            if self.aligned:
                return drawn
            return torch.cat((drawn.new_zeros(1), drawn.flatten()))[1:].view(shape)

        batch, tokens = (1, 2) if self.packed else (2, 1)
        query = normal(batch, self.q_heads, tokens * Q_LEN, self.head_dim)
        key = normal(batch, self.kv_heads, tokens * KV_LEN, self.head_dim)
        key = key.add_(normal(1, self.kv_heads, 1, self.head_dim))
        value = normal(batch, self.kv_heads, tokens * KV_LEN, self.v_head_dim)
        lengths = None
        if self.packed:
            q_starts, k_starts = (torch.arange(3, dtype=torch.int32, device=device) * n for n in (Q_LEN, KV_LEN))
            lengths = Lengths(q_starts, k_starts, Q_LEN, KV_LEN)
        return Call(
            query,
            key,
            value,
            get_recipe(self.recipe),
            self._mask(normal),
            is_causal=self.is_causal,
            causal_offset=self.causal_offset,
            scale=softmax_scale(None, self.head_dim),
            lengths=lengths,
            return_lse=self.return_lse and not self.grad,  # gradients get a saved LSE
        )

    def _mask(self, normal: Callable[..., torch.Tensor]) -> Mask:
        keys = normal(2, 1, 1, KV_LEN) < 1
        if self.mask in ("blocks", "block_keys"):
            rows, tiles = (ceil_div(size, block) for size, block in zip((Q_LEN, KV_LEN), self.list_sizes, strict=True))
            kept = normal(1, 1, rows, tiles) < 0.5
            kept[..., 0] = True
            return Mask.of_blocks(
                BlockList.of_kept(kept, *self.list_sizes), keys if self.mask == "block_keys" else None, KV_LEN
            )
        if self.mask == "keys":
            return Mask.of(keys, KV_LEN)
        if self.mask == "bool":
            return Mask.of(normal(2, 1, Q_LEN, KV_LEN) < 1, KV_LEN)
        return Mask.of(normal(1, self.q_heads, Q_LEN, KV_LEN), KV_LEN) if self.mask == "additive" else NO_MASK


class Verdict(NamedTuple):
    """Verdict on a kernel.

    Attributes:
        kernel: its name.
        distance: its distance from the reference, in units of the tolerance; RAISED if it fails.
        reason: why it must not run; "" if it is correct.
    """

    kernel: str
    distance: float
    reason: str = ""


def examine(plan: Plan, case: CheckCase, device: torch.device) -> list[Verdict]:
    """Run the kernels of a plan on a case; return a verdict on each, unless another kernel's failure blocked it.

    If the forward pass is wrong, the quantiser is at fault if another quantiser makes it correct; otherwise the forward
    kernel is.

    Raises:
        OutOfMemoryError: the device has no room for the case, which takes some megabytes.
    """
    verdict = _judge_kernel(plan.kernel, case, device, plan.kernel, plan.quantizer)
    if verdict.reason:
        request = replace(plan.request, recipe=plan.recipe)
        others = [name for name in fitting_quantizers(plan.kernel, request) if name != plan.quantizer]
        blames_quantizer = any(_forward_is_correct(plan.kernel, other, case, device) for other in others)
        return [verdict._replace(kernel=plan.quantizer) if blames_quantizer else verdict]
    verdicts = [verdict]
    if plan.quantizer:
        verdicts.append(verdict._replace(kernel=plan.quantizer))
    if plan.backward:
        verdicts.append(_judge_kernel(plan.backward, case, device, plan.kernel, plan.quantizer, plan.backward))
    return verdicts


def examine_exact(kernel: str, case: CheckCase, device: torch.device) -> Verdict:
    """Run a kernel of exact attention on a case, and compare it with PyTorch's."""
    exact_kernel = get_exact(kernel)
    assert exact_kernel is not None
    with _in_default_modes(device):
        call = case.draw(device)
        tensors, mask = (call.query, call.key, call.value), call.mask.tensor
        if call.is_causal:
            mask = with_causality(mask, call.query, call.key, call.causal_offset)
        expected = sdpa.sdpa(*tensors, mask=mask, scale=call.scale, enable_gqa=True)
        truth = sdpa.attention(*tensors, mask=mask, scale=call.scale)[0]
        noise = uncertainty(call, None, 0.0)[0]

        def distance(output: torch.Tensor) -> float:
            return _head_distance(output, expected, truth, noise, 0.0)

        return _judge(kernel, lambda: exact_kernel.attend(call), distance, device)


def examine_qk_norm_rope(head_dim: int, device: torch.device) -> Verdict:
    """Run the kernel `qk_norm_rope`, forward and backward; compare with PyTorch's operators."""
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device)

    with _in_default_modes(device):
        x, gradient = (normal(2, 33, 3, head_dim).bfloat16() for _ in range(2))
        cosine, sine = normal(33, head_dim // 2), normal(33, head_dim // 2)
        weight, bias = (1 + normal(head_dim) / 4).bfloat16(), normal(head_dim).bfloat16()
        norm, rope = Norm("layer", 1e-5, weight, bias), Rope(cosine, sine)
        kernel, reference = select_qk_norm_rope_kernel(x, norm, rope, grad=True), reference_qk_norm_rope_kernel()

        def by_operators(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
            inputs = [one.to(dtype).requires_grad_() for one in (x, weight, bias)]
            tables = Rope(cosine.to(dtype), sine.to(dtype)) if dtype == torch.float64 else rope
            with torch.enable_grad():
                output = reference.forward(inputs[0], replace(norm, weight=inputs[1], bias=inputs[2]), tables)
            return output.detach(), *torch.autograd.grad(output, inputs, gradient.to(dtype))

        expected, truths = by_operators(x.dtype), by_operators(torch.float64)

        def run() -> tuple[torch.Tensor | None, ...]:
            if kernel is reference:
                return expected
            return kernel.forward(x, norm, rope), *kernel.backward(gradient, x, norm, rope)

        def distance(results: tuple[torch.Tensor | None, ...]) -> float:
            distances = []
            for y, z, truth in zip(results, expected, truths, strict=True):
                assert y is not None  # the norm has weight and bias
                shape, noise = (1, -1, truth.shape[-1]), 2**-18 * truth.abs().sum().item()
                distances.append(_head_distance(y.view(shape), z.view(shape), truth.view(shape), noise, 0.0))
            return max(distances)

        return _judge(kernel.name, run, distance, device)


def examine_kv(format: str, head_dim: int, device: torch.device) -> Verdict:
    """Run the kernel of a KV cache: store a prompt, then decode; compare bits and outputs with the reference."""
    generator = torch.Generator("cpu").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(device)

    with _in_default_modes(device):
        query, key, value = (normal(2, heads, KV_LEN, head_dim).bfloat16() for heads in (4, 2, 2))
        mean, factors, scale = normal(2, 2, head_dim), normal(2, 2, head_dim).exp(), softmax_scale(None, head_dim)
        reference = kv_kernels.reference_kv_kernel()

        def new_cache() -> KVCache:
            cache = KVCache(get_format(format), key)
            cache.key_mean[..., :head_dim], cache.equalizer[..., :head_dim], cache.is_frozen = mean, factors, True
            return cache

        def decode(kernel: kv_kernels.KVKernel, cache: KVCache, dtype: torch.dtype) -> torch.Tensor:
            tokens = KV_LEN - STEP
            kernel.append(cache, key[:, :, :tokens], value[:, :, :tokens])
            new_query, new_key, new_value = (x[:, :, tokens:] for x in (query.to(dtype), key, value))
            return kernel.decode(cache, new_query, new_key, new_value, None, scale)

        kernel_cache, reference_cache = new_cache(), new_cache()
        expected, truth = decode(reference, reference_cache, query.dtype), decode(reference, new_cache(), torch.float64)
        kernel, _ = kv_kernels.select_kv_kernel(kernel_cache, query[:, :, -STEP:])

        def distance(output: torch.Tensor) -> float:
            caches = kernel_cache, reference_cache
            stored = ([getattr(cache, name).view(torch.uint8) for name in KVCache.STORED] for cache in caches)
            is_stored = all(itertools.starmap(torch.equal, zip(*stored, strict=True)))
            return _head_distance(output, expected, truth, 0.0, 0.0) if is_stored else RAISED

        return _judge(kernel.name, lambda: decode(kernel, kernel_cache, query.dtype), distance, device)


@contextmanager
def _in_default_modes(device: torch.device) -> Iterator[None]:
    """Run without the modes that callers may have switched on: gradients, inference mode, autocast."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def _judge(name: str, run: Callable[[], Found], distance_of: Callable[[Found], float], device: torch.device) -> Verdict:
    """Return the verdict on a kernel by its results; the kernel may raise any exception."""
    try:
        results = run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # a kernel may raise any error: its verdict holds it
        return Verdict(name, RAISED, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}")
    distance = distance_of(results)
    if distance <= 1:
        return Verdict(name, distance)
    return Verdict(
        name, distance, f"its difference from the reference is {distance:.3g} times the largest that rounding explains"
    )


def _judge_kernel(
    name: str, case: CheckCase, device: torch.device, forward: str, quantizer: str = "", backward: str = ""
) -> Verdict:
    """Return the verdict on the kernel of this name, which must be among the kernels that run."""
    with _in_default_modes(device):
        call = case.draw(device)
        if backward:
            return _judge_gradients(name, call, device, forward, quantizer, backward)
        expected, expected_lse = _attend(call, case.grad, "reference", "")
        mask, options = _mask_and_options(call)
        truth, _ = _for_each_sequence(
            call, lambda one: (sdpa.attention(one.query, one.key, one.value, mask=mask, **options)[0], None)
        )
        noise, is_reference = uncertainty(call, None, 0.0)[0], forward == "reference"

        def distance(results: AttentionOutput) -> float:
            rounding = rounding_of(call.recipe, 4) if is_reference else 0.0
            of_output = _head_distance(results[0], expected, truth, noise, rounding)
            return (
                max(of_output, _lse_distance(call, results[1], expected_lse))
                if call.return_lse and not case.grad
                else of_output
            )

        return _judge(name, lambda: _attend(call, case.grad, forward, quantizer), distance, device)


def _forward_is_correct(forward: str, quantizer: str, case: CheckCase, device: torch.device) -> bool:
    try:
        return not _judge_kernel(forward, case, device, forward, quantizer).reason
    except RuntimeError:  # an earlier kernel's failure left the GPU unusable
        return False


def _judge_gradients(
    name: str, call: Call, device: torch.device, forward: str, quantizer: str, backward: str
) -> Verdict:
    generator = torch.Generator("cpu").manual_seed(1)
    shape = (*call.query.shape[:3], call.value.shape[3])
    gradient = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(call.query)
    mask, options = _mask_and_options(call)
    truths = exact_gradients(gradient, call.query, call.key, call.value, mask=mask, **options)[1:]
    expected = _gradients(call, gradient, "reference", "", "reference_backward")
    noises = uncertainty(call, gradient, 0.0)[1:]
    rounding = rounding_of(call.recipe, 7) if backward == "reference_backward" else 0.0

    def distance(gradients: tuple[torch.Tensor, ...]) -> float:
        return max(_head_distance(*parts, rounding) for parts in zip(gradients, expected, truths, noises, strict=True))

    return _judge(name, lambda: _gradients(call, gradient, forward, quantizer, backward), distance, device)


def _mask_and_options(call: Call) -> tuple[torch.Tensor | None, dict[str, Any]]:
    """Return the mask of a call, including its block list, and the options of exact attention."""
    mask = call.mask.tensor
    if call.mask.blocks is not None:
        listed = call.mask.blocks.mask(call.kv_len, 0, call.q_len)
        mask = listed if mask is None else listed & mask
    return mask, {"is_causal": call.is_causal, "causal_offset": call.causal_offset, "scale": call.scale}


def _head_distance(
    actual: torch.Tensor, expected: torch.Tensor, truth: torch.Tensor, noise: float, rounding: float
) -> float:
    """Return the largest quotient of a head's distance and its tolerance.

    Args:
        noise: the float32 uncertainty of a head's sum.
        rounding: relative error that the reference may have against float64, if that is tested; else 0.
    """
    if actual.shape != truth.shape or not actual.isfinite().all():
        return RAISED

    def per_head(x: torch.Tensor) -> torch.Tensor:
        return x.double().abs().sum((-2, -1))

    allowed = torch.finfo(actual.dtype).eps * per_head(truth) + noise
    if rounding:
        return (per_head(actual - truth) / (rounding * per_head(truth) + allowed)).max().item()
    return (per_head(actual.double() - expected) / (2**0.5 * per_head(expected - truth) + allowed)).max().item()


def _lse_distance(call: Call, lse: torch.Tensor | None, expected: torch.Tensor | None) -> float:
    if lse is None or expected is None or not torch.equal(lse == -torch.inf, expected == -torch.inf):
        return RAISED
    moved = (lse - expected)[expected > -torch.inf].abs()
    tolerance = lse_tolerance(call.query, call.key, call.mask.tensor, call.scale)
    tolerance = tolerance + code_error(call.query, call.key, call.recipe, call.scale)
    return float(moved.max() / tolerance) if moved.isfinite().all() else RAISED


def _attend(call: Call, grad: bool, forward: str, quantizer: str) -> AttentionOutput:
    """Return output and LSE of a kernel; with `grad`, by the pass that saves tensors for gradients."""
    kernel = get_forward(forward)
    if grad:
        return cast(Any, kernel).attend_and_save(call, get_quantizer(quantizer))[0], None
    if kernel.packs:
        return kernel.attend(call, get_quantizer(quantizer))
    return _for_each_sequence(call, lambda one: kernel.attend(one, get_quantizer(quantizer)))


def _gradients(
    call: Call, output_gradient: torch.Tensor, forward: str, quantizer: str, backward: str
) -> tuple[torch.Tensor, ...]:
    output, saved = cast(Any, get_forward(forward)).attend_and_save(call, get_quantizer(quantizer))
    backward_call = BackwardCall(
        output_gradient,
        call.value,
        output,
        saved,
        call.query.shape[3],
        call.recipe,
        call.mask,
        is_causal=call.is_causal,
        causal_offset=call.causal_offset,
        scale=call.scale,
    )
    return get_backward(backward).backward(backward_call)


def _for_each_sequence(call: Call, attend: Callable[[Call], AttentionOutput]) -> AttentionOutput:
    """Return output and LSE: of packed sequences one after another, of an ordinary batch at once."""
    if call.lengths is None:
        return attend(call)
    parts = [
        attend(replace(call, query=call.query[:, :, i], key=call.key[:, :, j], value=call.value[:, :, j], lengths=None))
        for i, j in sequence_slices(call.lengths)
    ]
    lses = [lse for _, lse in parts if lse is not None]
    return torch.cat([output for output, _ in parts], 2), torch.cat(lses, 2) if lses else None


def rounding_of(recipe: Recipe, operands: int) -> float:
    """Return the relative error of a result of so many rounded operands, which round independently."""
    coarsest = max(ROUNDING.get(recipe.qk, 0.0), ROUNDING.get(recipe.pv, 0.0))
    return float(operands**0.5 * coarsest)


def lse_tolerance(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None = None, scale: float | None = None
) -> torch.Tensor:
    """Bound the float32 rounding of the scores, sums of head_dim products, and of their exponentials' sum."""
    head_dim, kv_len = query.shape[-1], key.shape[2]
    scale = head_dim**-0.5 if scale is None else abs(scale)
    largest = scale * query.double().norm(dim=-1).amax() * key.double().norm(dim=-1).amax() + 1
    if mask is not None and mask.dtype != torch.bool:
        largest = largest + torch.where(mask == -torch.inf, 0.0, mask).abs().amax()
    return 2**-20 * (head_dim + kv_len**0.5 + 8) * largest


def code_error(query: torch.Tensor, key: torch.Tensor, recipe: Recipe, scale: float | None) -> torch.Tensor | float:
    """Bound a score's change if a rotated element rounds to the next INT8 code, as another order of sums may cause."""
    if recipe.qk != "int8" or not recipe.rotate:
        return 0.0
    scale = query.shape[-1] ** -0.5 if scale is None else abs(scale)
    largest_query, largest_key = (transforms.rotate(x.float()).abs().amax() for x in (query, key))
    return 2 * scale * largest_query * largest_key / 127


def uncertainty(call: Call, output_gradient: torch.Tensor | None, rounding: float) -> tuple[float, float, float, float]:
    """Bound the uncertainty that float32, and the output's rounding, leave in a head's Σ|O|, Σ|dQ|, Σ|dK|, Σ|dV|.

    Rows of P sum to 1, and rows of |dS| to at most 2·|dO_i|·max|V_j|; P is as uncertain as its scores.
    """
    if 0 in (*call.query.shape, *call.key.shape):
        return 0.0, 0.0, 0.0, 0.0
    scale, rows, group = abs(call.scale), call.query.shape[2], call.query.shape[1] // call.key.shape[1]

    def largest(x: torch.Tensor | None, order: int) -> float:
        return 0.0 if x is None else x.double().nan_to_num().norm(order, -1).amax().item()

    unit = 2**-18 * (1 + scale * largest(call.query, 2) * largest(call.key, 2))
    value, gradient = largest(call.value, 2), largest(output_gradient, 2)
    ds = (2 * unit + rounding) * value * gradient * rows * scale
    output = unit * largest(call.value, 1) * rows
    value_gradient = unit * largest(output_gradient, 1) * rows * group
    return output, ds * largest(call.key, 1), ds * largest(call.query, 1) * group, value_gradient
