"""Judge a kernel's gradients by its recipe's reference, and by exact attention's in float64.

Kernel and reference have the same INT8 of Q and K to the bit, and gradients of the same tiles. What differs is the
order of float32 sums and, where the forward's tiles differ, which weights share a scale. So the kernel's errors are as
large as the reference's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from sage_hf import record
from sage_kernels import training
from sage_kernels.dispatch import execution
from sage_kernels.dispatch.examination import uncertainty
from sage_kernels.exact.gradients import Gradients, exact_gradients
from sage_kernels.reference import backward as reference_backward
from sage_kernels.spec.block_list import BlockList
from sage_kernels.spec.call import BackwardCall, Call
from sage_kernels.spec.layout import Lengths, padded_channels, padded_rows, sequence_slices
from sage_kernels.spec.operands import Saved
from sage_kernels.spec.recipe import RECIPES
from sage_kernels.triton.configs import int8_bwd_dkdv_config, int8_bwd_dq_config, limit_to_list
from tests.helpers.calls import new_backward_call, new_call
from tests.helpers.judge import NO_KERNELS, Error

TRAINING = [name for name, recipe in RECIPES.items() if recipe.backward is not None]
NAMES = ("output", "query", "key", "value")


@dataclass(frozen=True)
class TrainingCall:
    """One call with gradients; shapes and meanings as in `call.Call` and `call.BackwardCall`."""

    recipe: str
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output_gradient: torch.Tensor
    lengths: Lengths | None = None
    key_mask: torch.Tensor | None = None
    blocks: BlockList | None = None
    is_causal: bool = False
    causal_offset: int = 0
    scale: float | None = None

    @property
    def options(self):
        return {
            "lengths": self.lengths,
            "key_mask": self.key_mask,
            "blocks": self.blocks,
            "is_causal": self.is_causal,
            "causal_offset": self.causal_offset,
            "scale": self.scale,
        }

    @property
    def forward(self) -> Call:
        return new_call(self.query, self.key, self.value, self.recipe, **self.options)

    def backward(self, output: torch.Tensor, saved: Saved) -> BackwardCall:
        head_dim = self.query.shape[3]
        return new_backward_call(self.output_gradient, self.value, output, saved, self.recipe, head_dim, **self.options)


def train(query, key, value, output_gradient, recipe, attend=training.attention, **options):
    """Output and gradients of the recipe by a GPU kernel, native or emulated, through the operators and autograd."""
    inputs = [x.detach().requires_grad_() for x in (query, key, value)]
    layer = torch.nn.Identity()
    result = record.run_in_layer(layer, attend, *inputs, recipe=recipe, fallback="emulate", **options)
    (plan,) = record.last_plans(layer)
    assert plan.recipe == recipe
    assert plan.kernel not in NO_KERNELS
    output = result[0] if isinstance(result, tuple) else result
    return Gradients(output.detach(), *torch.autograd.grad(output, inputs, output_gradient))


def assert_equal(found, expected):
    """Output and gradients, or gradients alone, are equal to the bit."""
    for name, x, y in zip(NAMES[-len(found) :], found, expected, strict=True):
        assert torch.equal(x, y), name


def of_kernel(call: TrainingCall, backward: str = "") -> tuple[Gradients, Saved]:
    """By the kernels that serve the call, or with gradients by the backward kernel of that name."""
    plan = execution.select_training(execution.request_of(call.forward, grad=True), "emulate")
    assert plan.recipe == call.recipe
    assert plan.kernel not in NO_KERNELS
    output, saved = execution.attend_and_save(call.forward, "emulate")
    return Gradients(output, *execution.backward(call.backward(output, saved), backward or plan.backward)), saved


def of_reference(call: TrainingCall) -> tuple[Gradients, Saved]:
    """By the recipe's specification, with the tiles of the kernel."""
    block_m, block_n = blocks_of(call)
    output, saved = reference_backward.forward(call.forward)
    gradients = reference_backward.backward(call.backward(output, saved), block_m, block_n)
    return Gradients(output, *gradients), saved


def blocks_of(call: TrainingCall) -> tuple[int, int]:
    """Queries of a tile that share a scale in dV and dK, and keys that do in dQ."""
    capability = torch.cuda.get_device_capability(call.query.device)
    channels = padded_channels(max(call.query.shape[3], call.value.shape[3]))
    facts = capability, channels, RECIPES[call.recipe].backward == "int8"
    configs = [int8_bwd_dkdv_config(*facts), int8_bwd_dq_config(*facts)]
    if call.blocks is not None:
        configs = [limit_to_list(config, *call.blocks[2:]) for config in configs]
    return configs[0].block_m, configs[1].block_n


def of_exact_attention(call: TrainingCall) -> Gradients:
    """Compute exact attention and its gradients in float64."""
    options = {"is_causal": call.is_causal, "causal_offset": call.causal_offset, "scale": call.scale}
    tensors = call.output_gradient, call.query, call.key, call.value
    if call.lengths is None:
        mask = None if call.key_mask is None else call.key_mask[:, None, None]
        if call.blocks is not None:
            listed = call.blocks.mask(call.key.shape[2], 0, call.query.shape[2])
            mask = listed if mask is None else mask & listed
        return exact_gradients(*tensors, mask=mask, **options)
    found = Gradients(*(torch.zeros_like(x, dtype=torch.float64) for x in tensors))
    for queries, keys in sequence_slices(call.lengths):
        spans = queries, queries, keys, keys
        parts = exact_gradients(*(x[:, :, span] for x, span in zip(tensors, spans, strict=True)), **options)
        for whole, part, span in zip(found, parts, spans, strict=True):
            whole[:, :, span] = part
    return found


@dataclass
class GradientErrors:
    """`Error` of the output and of each gradient, by the names of `Gradients`."""

    of: dict[str, Error]

    @classmethod
    def none(cls):
        return cls({name: Error() for name in NAMES})

    def __add__(self, other):
        return GradientErrors({name: self.of[name] + other.of[name] for name in NAMES})

    def assert_as_small_as_the_references(self):
        """A kernel and its reference differ by roundings that fall differently; on average they are equally far off."""
        for name, error in self.of.items():
            assert error.kernel <= 1.05 * error.reference + 2**-20 * error.size, (name, error)


def judge_training(call: TrainingCall, backward: str = "") -> GradientErrors:
    """`judge_gradients` of the kernels that serve the call, or of the backward kernel of that name."""
    return judge_gradients(call, of_kernel(call, backward)[0])


def judge_gradients(call: TrainingCall, found: Gradients) -> GradientErrors:
    """Assert that every head's output and gradients are as near to the reference's as those are to exact attention's.

    Where roundings fall differently, kernel and reference are two of one distribution around exact attention, √2 of
    its size apart. Float32 sums in another order add `uncertainty`, and a rounded output, of which δ is made, its own.

    Returns the call's errors, without the heads that are far below what float32 can tell from 0: there the error is
    one order of sums against another. dQ and dK are such where each row attends to one key.
    """
    (expected, _), truth = of_reference(call), of_exact_attention(call)
    errors = {}
    float32 = uncertainty(call.forward, call.output_gradient, 0.0)
    rounded = uncertainty(call.forward, call.output_gradient, torch.finfo(call.query.dtype).eps)
    noises = zip(float32, rounded, strict=True)
    for name, x, y, exact, (smallest, noise) in zip(NAMES, found, expected, truth, noises, strict=True):
        assert x.shape == exact.shape, name
        assert x.dtype == call.query.dtype, name
        assert x.isfinite().all(), name

        def per_head(difference):
            return difference.double().abs().sum((-2, -1))

        distance, own = per_head(x.double() - y), per_head(y - exact)
        rounding = torch.finfo(x.dtype).eps * per_head(exact)
        assert (distance <= 2**0.5 * own + rounding + noise).all(), (name, distance, own, rounding, noise)
        # `uncertainty` adds up largest elements, which is 1000 times too much for long sequences.
        counted = per_head(exact) > 2**-10 * smallest
        sums = (part[counted].sum().item() for part in (per_head(x - exact), own, per_head(exact)))
        errors[name] = Error(*sums)
    return GradientErrors(errors)


def rows_of_sequences(spans: Sequence[slice], rows: int) -> torch.Tensor:
    """Which rows of a packed `Saved` belong to a sequence, its padding included: bool (rows,)."""
    belongs = torch.zeros(rows, dtype=torch.bool)
    for index, span in enumerate(spans):
        first = padded_rows(span.start, index)
        belongs[first : first + padded_rows(span.stop - span.start)] = True
    return belongs


class Draw:
    """Standard normal tensors of one generator, other values at every call."""

    def __init__(self, device: torch.device, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> None:
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device, self._dtype = device, dtype

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator, device=self._device).to(self._dtype)

    def uniform(self, *shape: int) -> torch.Tensor:
        """Float32 in [0, 1)."""
        return torch.rand(*shape, generator=self._generator, device=self._device)

    def lengths(self, q_lengths: list[int], k_lengths: list[int], used: list[int] | None = None) -> Lengths:
        """Packed sequences of these lengths, of whose keys only so many are used."""

        def tensor(numbers):
            return torch.tensor(list(numbers), dtype=torch.int32, device=self._device)

        starts = (tensor(accumulate(lengths, initial=0)) for lengths in (q_lengths, k_lengths))
        return Lengths(*starts, max(q_lengths), max(k_lengths), None if used is None else tensor(used))

    def call(
        self, recipe: str, batch: int, q_heads: int, kv_heads: int, q_len: int, kv_len: int, *dims: int, **options
    ) -> TrainingCall:
        """A call with such sizes; dims: head_dim and, where it differs, v_head_dim. K and V have means."""
        head_dim, v_head_dim = dims[0], dims[-1]
        normal = partial(self, batch)
        return TrainingCall(
            recipe,
            normal(q_heads, q_len, head_dim),
            normal(kv_heads, kv_len, head_dim) + self(1, kv_heads, 1, head_dim),
            normal(kv_heads, kv_len, v_head_dim) + self(1, kv_heads, 1, v_head_dim) / 2,
            normal(q_heads, q_len, v_head_dim),
            **options,
        )
