"""The providers that are compared in training: our recipes with gradients, and others' attention with a backward pass.

A provider's call is the forward pass; autograd differentiates it. Query, key and value require gradients.
"""

from __future__ import annotations

from importlib import import_module

from torch import Tensor
from torch.nn.attention import SDPBackend

from sage_hf.attention import sage_attention
from sage_hf.bench.peers import Prepare, Prepared, Provider, prepare_sdpa
from sage_kernels.dispatch.registry import Request, select


def _ours(recipe: str) -> Prepare:
    def prepare(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Prepared:
        grouped = query.shape[1] != key.shape[1]
        plan = select(Request.of(query, key, value, is_causal=is_causal, recipe=recipe, grad=True), "error")

        def call() -> Tensor:
            return sage_attention(
                query, key, value, is_causal=is_causal, enable_gqa=grouped, recipe=recipe, fallback="error"
            )

        return Prepared(call, plan.kernel)

    return prepare


def prepare_sdpa_backward(backend: SDPBackend, backward: str) -> Prepare:
    """Prepare PyTorch's attention with one backend; the call raises unless its backward pass is named `backward`."""

    def prepare(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Prepared:
        forward = prepare_sdpa(backend)(query, key, value, is_causal)

        def call() -> Tensor:
            output = forward.call()
            name = "nothing" if output.grad_fn is None else output.grad_fn.name()
            if not name.startswith(backward):
                raise RuntimeError(f"the backward pass is {name}, not {backward}")
            return output

        return Prepared(call, forward.kernel)

    return prepare


def prepare_fa3(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Prepared:
    try:
        module = import_module("flash_attn_interface")
    except ModuleNotFoundError as error:
        if error.name != "flash_attn_interface":
            raise
        message = "FlashAttention 3 with a backward pass is not installed (flash_attn_interface; fa3_fwd has none)"
        raise ModuleNotFoundError(message) from error

    def call() -> Tensor:
        # Tokens before heads, by strides, without a copy.
        output = module.flash_attn_func(*(x.transpose(1, 2) for x in (query, key, value)), causal=is_causal)
        return (output[0] if isinstance(output, tuple) else output).transpose(1, 2)

    return Prepared(call, "flash_attn_interface.flash_attn_func")


TRAINING_PROVIDERS: tuple[Provider, ...] = (
    Provider(
        "sdpa_fa2",
        "FA2",
        "end_to_end",
        prepare_sdpa_backward(SDPBackend.FLASH_ATTENTION, "ScaledDotProductFlashAttentionBackward"),
    ),
    Provider(
        "cudnn",
        "cuDNN",
        "end_to_end",
        prepare_sdpa_backward(SDPBackend.CUDNN_ATTENTION, "ScaledDotProductCudnnAttentionBackward"),
    ),
    Provider("fa3", "FA3", "end_to_end", prepare_fa3),
    Provider("sage_hf:sage_bwd", "sage_bwd", "end_to_end", _ours("sage_bwd")),
    Provider("sage_hf:sage_bwd_int8", "sage_bwd_int8", "end_to_end", _ours("sage_bwd_int8")),
)
