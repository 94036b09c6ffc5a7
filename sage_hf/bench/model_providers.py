"""Providers that are compared in whole models: the model's own attention, other libraries' attention, and ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_hf.apply import apply
from sage_hf.bench.models import BenchModel
from sage_hf.bench.providers import PYTORCH, fa3_attention, sageattention
from sage_hf.config import SageConfig
from sage_hf.diffusers.processor import attention_layers, sage_of
from sage_hf.explain import explain
from sage_hf.nominal import nominal_request
from sage_hf.sparse.config import Sparse
from sage_hf.sparse.grids import layout_of
from sage_kernels import qk_norm_rope
from sage_kernels.dispatch.registry import exacts, forwards, without
from sage_kernels.dispatch.select import select
from sage_kernels.external.flash_attention3 import is_installed

ModelStep = Callable[[], Tensor]
KernelCounts = dict[str, int]
"""Names of the attention kernels of a step -> number of calls."""
Observe = Callable[[ModelStep], tuple[Tensor, KernelCounts]]
"""Function that runs a step, and returns its output and the kernels that ran."""
AttendFunction = Callable[[Tensor, Tensor, Tensor, bool, float | None], Tensor]
"""(query, key, value, is_causal, scale) -> output, all (batch, heads, tokens, head_dim)."""


@dataclass(frozen=True)
class ModelProvider:
    """Provider of attention in whole models.

    Attributes:
        name: name in the JSON.
        label: name in tables.
        use: (model, module) -> context in which this provider computes the module's attention; the context yields an
            `Observe`. It raises an error if the provider is not installed or does not suit the model.
    """

    name: str
    label: str
    use: Callable[[BenchModel, nn.Module], AbstractContextManager[Observe]]

    @property
    def ours(self) -> bool:
        """Return whether the provider is sage-hf."""
        return self.name.startswith("sage_hf:")


@contextmanager
def replaced_sdpa(attend: Callable[..., Tensor]) -> Iterator[None]:
    """Replace torch.nn.functional.scaled_dot_product_attention, which libraries call, by `attend`."""
    original = F.scaled_dot_product_attention
    setattr(F, PYTORCH, attend)
    try:
        yield
    finally:
        setattr(F, PYTORCH, original)


def _pytorch(*backends: SDPBackend) -> Callable[[BenchModel, nn.Module], AbstractContextManager[Observe]]:
    """Use PyTorch's attention unchanged, or with the first of these backends that supports a call."""

    @contextmanager
    def use(model: BenchModel, module: nn.Module) -> Iterator[Observe]:
        def observe(step: ModelStep) -> tuple[Tensor, KernelCounts]:
            output, kernels = _observe_pytorch(step)
            if backends and backends[0].name not in kernels:
                raise RuntimeError(f"{backends[0].name} serves none of this model's attention calls")
            return output, kernels

        with sdpa_kernel(list(backends), set_priority=True) if backends else nullcontext():
            yield observe

    return use


def _observe_pytorch(step: ModelStep) -> tuple[Tensor, KernelCounts]:
    kernels: Counter[str] = Counter()
    original: Any = F.scaled_dot_product_attention

    def attend(*arguments: Any, **options: Any) -> Tensor:
        kernels[SDPBackend(torch._fused_sdp_choice(*arguments, **options)).name] += 1
        output: Tensor = original(*arguments, **options)
        return output

    with replaced_sdpa(attend):
        return step(), dict(kernels)


def in_place_of_pytorch(
    kernel: str, load: Callable[[], AttendFunction]
) -> Callable[[BenchModel, nn.Module], AbstractContextManager[Observe]]:
    """Use another library's attention for the calls that it serves: 16-bit calls without mask or dropout."""

    @contextmanager
    def use(model: BenchModel, module: nn.Module) -> Iterator[Observe]:
        if model.masked:
            raise RuntimeError("it takes no mask, and this model's longest calls have one")
        theirs = load()
        original: Any = F.scaled_dot_product_attention
        kernels: Counter[str] = Counter()

        def attend(
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attn_mask: Tensor | None = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Tensor:
            same_length = query.shape[-2] == key.shape[-2]
            half = query.dtype in (torch.bfloat16, torch.float16)
            if attn_mask is None and not dropout_p and half and query.ndim == 4 and (same_length or not is_causal):
                kernels[kernel] += 1
                return theirs(query, key, value, is_causal, scale)
            kernels[PYTORCH] += 1
            return original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

        def observe(step: ModelStep) -> tuple[Tensor, KernelCounts]:
            kernels.clear()
            output = step()
            if not kernels[kernel]:
                raise RuntimeError("it serves none of this model's attention calls")
            return output, dict(kernels)

        with replaced_sdpa(attend):
            yield observe

    return use


def _load_fa3() -> AttendFunction:
    import_module("fa3_fwd._C")
    return fa3_attention


def _load_sageattention2() -> AttendFunction:
    module = sageattention(2)

    def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Tensor:
        return module.sageattn(query, key, value, tensor_layout="HND", is_causal=is_causal, sm_scale=scale)

    return attend


def _ours(
    recipe: str, only_native: bool = False, low_bits: bool = True, norms: bool = True, fa3: bool = True
) -> Callable[[BenchModel, nn.Module], AbstractContextManager[Observe]]:
    """Use `sage_hf.apply`.

    Args:
        recipe: name of the recipe.
        only_native: raise an error on a GPU that runs a fallback.
        low_bits: use low-bit kernels; if False, calls run by the fastest exact kernel.
        norms: compute QK-norm and RoPE by one kernel.
        fa3: use FlashAttention 3, if a package of it is installed.
    """
    left_out = () if fa3 else tuple(name for name in exacts if name.startswith("fa3"))

    @contextmanager
    def use(model: BenchModel, module: nn.Module) -> Iterator[Observe]:
        device = next(module.parameters()).device
        if only_native:
            select(nominal_request(recipe, device), "error")
        if not fa3 and not is_installed():
            raise RuntimeError("FlashAttention 3 is not installed, so nothing is left out")

        def observe(step: ModelStep) -> tuple[Tensor, KernelCounts]:
            before = _calls(module)
            output = step()
            return output, dict(_calls(module) - before)

        without_any = without(*left_out, *(() if low_bits else forwards))
        qk_norm_rope.set_enabled(norms)
        try:
            with nullcontext() if fa3 and low_bits else without_any, apply(module, recipe):
                yield observe
        finally:
            qk_norm_rope.set_enabled(True)

    return use


def ours_sparse(recipe: str, sparse: Sparse) -> Callable[[BenchModel, nn.Module], AbstractContextManager[Observe]]:
    """Use `sage_hf.apply` with sparse self-attention, where the model's grid of tokens is known.

    The kept weight is not measured, because that would add to the time of the first steps.
    """

    @contextmanager
    def use(model: BenchModel, module: nn.Module) -> Iterator[Observe]:
        if layout_of(module) is None:
            raise RuntimeError("this model's grid of video tokens is unknown")
        with apply(module, SageConfig(recipe, sparse=sparse)):
            processors = [sage_of(layer) for layer in attention_layers(module).values()]
            layers = [sage.sparse for sage in processors if sage is not None and sage.sparse is not None]
            for layer in layers:
                layer.model.measured_calls = 0

            def observe(step: ModelStep) -> tuple[Tensor, KernelCounts]:
                before = _calls(module)
                output = step()
                if not any(layer.statistics.calls for layer in layers):
                    raise RuntimeError("none of this model's attention calls is sparse")
                return output, dict(_calls(module) - before)

            yield observe

    return use


def _calls(module: nn.Module) -> Counter[str]:
    calls: Counter[str] = Counter()
    for row in explain(module).rows:
        if row.kernel:
            calls[row.kernels] += row.calls
    return calls


DEFAULT = ModelProvider("default", "baseline", _pytorch())
CUDNN = ModelProvider(
    "cudnn",
    "cuDNN",
    _pytorch(SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH),
)

MODEL_PROVIDERS: tuple[ModelProvider, ...] = (
    DEFAULT,
    CUDNN,
    ModelProvider("fa3", "FA3", in_place_of_pytorch("fa3_fwd.fwd", _load_fa3)),
    ModelProvider("sageattention2", "SageAttn2", in_place_of_pytorch("sageattn", _load_sageattention2)),
    ModelProvider("sage_hf:sage2", "sage2", _ours("sage2")),
    ModelProvider("sage_hf:sage2, no fa3", "sage2 without FA3", _ours("sage2", fa3=False)),
    ModelProvider("sage_hf:sage2, no low bits", "exact, fused norms", _ours("sage2", low_bits=False)),
    ModelProvider("sage_hf:sage2, no low bits, no norms", "exact", _ours("sage2", low_bits=False, norms=False)),
    ModelProvider("sage_hf:sage3", "sage3", _ours("sage3", only_native=True)),
    ModelProvider("sage_hf:sage2 keep .25", "sage2 keep .25", ours_sparse("sage2", Sparse("subblock", 0.25))),
)
TRAINING_MODEL_PROVIDERS: tuple[ModelProvider, ...] = (
    DEFAULT,
    CUDNN,
    ModelProvider("sage_hf:sage_bwd", "sage_bwd", _ours("sage_bwd")),
    ModelProvider("sage_hf:sage_bwd, no low bits", "exact, fused norms", _ours("sage_bwd", low_bits=False)),
)
