"""The providers that are compared: our recipes and the attention kernels of others, each behind one function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_kernels import ops
from sage_kernels.dispatch.registry import Plan, Quantizer, get_forward, get_quantizer, select
from sage_kernels.dispatch.run import request_of
from sage_kernels.exact import sdpa
from sage_kernels.spec.call import Call
from sage_kernels.spec.recipe import get_recipe

E4M3_MAX = 448.0
QUANTIZERS = {"sage1": "int8_quantize", "sage2": "int8_quantize", "sage3": "nvfp4_quantize"}
"""The portable quantiser of each recipe."""


@dataclass(frozen=True)
class Prepared:
    """A call that is ready to be timed.

    Attributes:
        call: computes the output (batch, q_heads, q_len, head_dim); may be called repeatedly.
        kernel: name of the kernel that runs.
        output_scale: factor by which the output has to be multiplied to be attention's.
    """

    call: Callable[[], Tensor]
    kernel: str
    output_scale: float = 1.0


Prepare = Callable[[Tensor, Tensor, Tensor, bool], Prepared]
"""(query, key, value, is_causal) -> Prepared; the tensors are bfloat16 (batch, heads, tokens, head_dim), contiguous.
It raises if the provider is not installed or refuses the call; it may keep the tensors, but must not write to them."""


@dataclass(frozen=True)
class Provider:
    """Provider of attention: one column of the comparison.

    Attributes:
        name: name in the JSON.
        label: name in tables and plots.
        scope: "end_to_end": bfloat16 in and out, quantisation included; "kernel": the operands are quantised before,
            and only attention is timed. A 16-bit kernel quantises nothing, and has only "end_to_end".
        prepare: does everything that is not timed.
    """

    name: str
    label: str
    scope: Literal["end_to_end", "kernel"]
    prepare: Prepare


def _call(query: Tensor, key: Tensor, value: Tensor, is_causal: bool, recipe: str) -> Call:
    return Call(query, key, value, get_recipe(recipe), is_causal=is_causal, scale=query.shape[-1] ** -0.5)


def _plan(call: Call) -> Plan:
    return select(request_of(call), "error")


def _quantizer(name: str) -> Quantizer:
    quantizer = get_quantizer(name)
    assert quantizer is not None
    return quantizer


def _ours(recipe: str) -> Prepare:
    def prepare(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Prepared:
        plan = _plan(_call(query, key, value, is_causal, recipe))
        return Prepared(
            lambda: ops.attention(query, key, value, is_causal=is_causal, recipe=recipe, fallback="error")[0],
            plan.kernel,
        )

    return prepare


def ours_in_triton(recipe: str) -> Prepare:
    """Prepare the portable Triton kernel, on GPUs for which another kernel is preferred."""

    def prepare(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Prepared:
        call = _call(query, key, value, is_causal, recipe)
        portable, quantizer = get_forward("int8_forward"), _quantizer("int8_quantize")
        if _plan(call).kernel == portable.name:
            raise RuntimeError(f"{recipe} runs in Triton here as it is")
        return Prepared(lambda: portable.attend(call, quantizer)[0], portable.name)

    return prepare


def _our_int8_kernel(recipe: str) -> Prepare:
    def prepare(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Prepared:
        from sage_kernels.cuda import int8_forward as hopper
        from sage_kernels.triton import int8_forward as portable

        call = _call(query, key, value, is_causal, recipe)
        plan = _plan(call)
        operands = _quantizer("int8_quantize").quantize(call)
        output = torch.empty_like(query)
        if plan.kernel == "int8_forward_hopper":
            attend = partial(hopper.forward, operands, output, None, call)
        else:
            capability = torch.cuda.get_device_capability(query.device)
            attend = partial(portable.forward, operands, output, None, call, capability)

        def run() -> Tensor:
            attend()
            return output

        return Prepared(run, plan.kernel)

    return prepare


def prepare_sdpa(backend: SDPBackend) -> Prepare:
    """Prepare PyTorch's scaled_dot_product_attention with one backend; the call raises if that does not support it."""

    def prepare(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Prepared:
        grouped = query.shape[1] != key.shape[1]

        def call() -> Tensor:
            with sdpa_kernel(backend):
                return sdpa.pytorch_sdpa(query, key, value, is_causal=is_causal, enable_gqa=grouped)

        return Prepared(call, f"scaled_dot_product_attention, {backend.name}")

    return prepare


def _fa3(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Prepared:
    import_module("fa3_fwd._C")
    # Tokens before heads, by strides, without a copy.
    tensors = [x.transpose(1, 2) for x in (query, key, value)]
    scale = query.shape[-1] ** -0.5

    def call() -> Tensor:
        return torch.ops.fa3_fwd.fwd(*tensors, softmax_scale=scale, is_causal=is_causal, num_splits=1)[0].transpose(
            1, 2
        )

    return Prepared(call, "fa3_fwd.fwd")


def _fa3_fp8(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Prepared:
    import_module("fa3_fwd._C")
    group = query.shape[1] // key.shape[1]
    # One scale per key head, also for the queries of its group.
    q, q_descale = to_e4m3(query.unflatten(1, (-1, group)), (2, 3, 4))
    q = q.flatten(1, 2)
    k, k_descale = to_e4m3(key, (2, 3))
    v, v_descale = to_e4m3(value, (2, 3))
    tensors = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    scale = query.shape[-1] ** -0.5

    def call() -> Tensor:
        return torch.ops.fa3_fwd.fwd(
            *tensors,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            softmax_scale=scale,
            is_causal=is_causal,
            num_splits=1,
        )[0].transpose(1, 2)

    return Prepared(call, "fa3_fwd.fwd, e4m3")


def _cudnn_fp8(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Prepared:
    cudnn: Any = import_module("cudnn")
    types = cudnn.data_type
    codes, descales = zip(*(to_e4m3(x, (0, 1, 2, 3)) for x in (query, key, value)), strict=True)
    # P is at most 1; 256 of e4m3's 448 leaves room for a maximum that is updated late.
    p_scale = torch.tensor(256.0, device=query.device)
    # An output row is a weighted mean of V, so no element exceeds V's largest, and V's scale serves both.
    scalars = [*descales, 1 / p_scale, p_scale, 1 / descales[2]]
    output = torch.empty_like(codes[0])

    handle = _cudnn_handle(query.device)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(query.device).cuda_stream)
    graph = cudnn.pygraph(
        io_data_type=types.FP8_E4M3, intermediate_data_type=types.FLOAT, compute_data_type=types.FLOAT, handle=handle
    )
    q, k, v = (
        graph.tensor(dim=list(x.shape), stride=list(x.stride()), data_type=types.FP8_E4M3, name=name)
        for x, name in zip(codes, "qkv", strict=True)
    )
    one = [1, 1, 1, 1]
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    scales = {name: graph.tensor(dim=one, stride=one, data_type=types.FLOAT, name=name) for name in names}
    o, _, *maxima = graph.sdpa_fp8(
        q=q,
        k=k,
        v=v,
        **scales,
        attn_scale=query.shape[-1] ** -0.5,
        generate_stats=False,
        diagonal_alignment=cudnn.diagonal_alignment.TOP_LEFT,
        right_bound=0 if is_causal else None,
    )
    o.set_output(True).set_dim(list(output.shape)).set_stride(list(output.stride())).set_data_type(types.FP8_E4M3)
    for amax in maxima:
        amax.set_output(True).set_dim(one).set_stride(one).set_data_type(types.FLOAT)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()

    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=query.device)
    buffers: dict[Any, Tensor] = dict(zip((q, k, v, *scales.values()), (*codes, *scalars), strict=True))
    buffers |= {o: output} | {amax: torch.empty(1, device=query.device) for amax in maxima}

    def call() -> Tensor:
        graph.execute(buffers, workspace, handle=handle)
        return output

    return Prepared(call, "cudnn sdpa_fp8", descales[2].item())


@cache
def _cudnn_handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return import_module("cudnn").create_handle()


def to_e4m3(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Quantise each slice over `dims` to e4m3; return the codes, and the slices' float32 descales (amax / 448)."""
    descale = x.abs().amax(dims, keepdim=True).float().clamp(min=1e-12) / E4M3_MAX
    return (x / descale).to(torch.float8_e4m3fn), descale.flatten() if len(dims) == x.ndim else descale.squeeze(dims)


def _sageattention1(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Prepared:
    module = sageattention(1)
    key = key.clone()  # It subtracts the mean from the caller's keys.
    return Prepared(
        lambda: module.sageattn(query, key, value, tensor_layout="HND", is_causal=is_causal), "sageattn, Triton"
    )


def _sageattention1_kernel(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Prepared:
    package = sageattention(1).__name__
    quantize = import_module(f"{package}.quant_per_block").per_block_int8
    forward = import_module(f"{package}.attn_qk_int8_per_block{'_causal' if is_causal else ''}").forward
    q, q_scale, k, k_scale = quantize(query, key - key.mean(2, keepdim=True))
    v = value.half()
    return Prepared(lambda: forward(q, k, v, q_scale, k_scale, output_dtype=query.dtype), "attn_qk_int8_per_block")


def _sageattention2(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Prepared:
    module = sageattention(2)
    return Prepared(
        lambda: module.sageattn(query, key, value, tensor_layout="HND", is_causal=is_causal), "sageattn, CUDA"
    )


def _sageattention2_kernel(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Prepared:
    if torch.cuda.get_device_capability(query.device) != (9, 0):
        raise RuntimeError("its kernel alone is measured on sm_90 only")
    package = sageattention(2).__name__
    quantize_qk = import_module(f"{package}.triton.quant_per_thread").per_thread_int8
    quantize_v = import_module(f"{package}.quant").per_channel_fp8
    forward = import_module(f"{package}.sm90_compile").qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf
    mean = key.mean(2, keepdim=True)
    q, q_scale, k, k_scale = quantize_qk(query, key, mean, BLKQ=64, WARPQ=16, BLKK=128, WARPK=128)
    v, v_scale, _ = quantize_v(F.pad(value, (0, 0, 0, -value.shape[2] % 128)), smooth_v=False)
    output = torch.empty_like(query)
    heads_first, per_thread, no_lse = 1, 3, 0
    scale = query.shape[-1] ** -0.5

    def call() -> Tensor:
        forward(q, k, v, output, q_scale, k_scale, v_scale, heads_first, int(is_causal), per_thread, scale, no_lse)
        return output

    return Prepared(call, "qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf")


def sageattention(generation: Literal[1, 2]) -> ModuleType:
    """Import the authors' package of one generation.

    Both generations are called `sageattention`; to have both, one may be installed with its generation in the name, as
    `sageattention2`.
    """
    for name in (f"sageattention{generation}", "sageattention"):
        try:
            module = import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            continue
        if hasattr(module, "sageattn_qk_int8_pv_fp8_cuda") == (generation == 2):
            return module
    raise ModuleNotFoundError(f"SageAttention {generation} is not installed")


PROVIDERS: tuple[Provider, ...] = (
    Provider("sdpa_fa2", "FA2", "end_to_end", prepare_sdpa(SDPBackend.FLASH_ATTENTION)),
    Provider("cudnn", "cuDNN", "end_to_end", prepare_sdpa(SDPBackend.CUDNN_ATTENTION)),
    Provider("fa3", "FA3", "end_to_end", _fa3),
    Provider("sageattention1", "SageAttn1", "end_to_end", _sageattention1),
    Provider("sageattention2", "SageAttn2", "end_to_end", _sageattention2),
    Provider("sage_hf:sage1", "sage1", "end_to_end", _ours("sage1")),
    Provider("sage_hf:sage2", "sage2", "end_to_end", _ours("sage2")),
    Provider("sage_hf:sage3", "sage3", "end_to_end", _ours("sage3")),
    Provider("sage_hf:sage1_triton", "sage1, Triton", "end_to_end", ours_in_triton("sage1")),
    Provider("sage_hf:sage2_triton", "sage2, Triton", "end_to_end", ours_in_triton("sage2")),
    Provider("fa3_fp8", "FA3 FP8", "kernel", _fa3_fp8),
    Provider("cudnn_fp8", "cuDNN FP8", "kernel", _cudnn_fp8),
    Provider("sageattention1", "SageAttn1", "kernel", _sageattention1_kernel),
    Provider("sageattention2", "SageAttn2", "kernel", _sageattention2_kernel),
    Provider("sage_hf:sage1", "sage1", "kernel", _our_int8_kernel("sage1")),
    Provider("sage_hf:sage2", "sage2", "kernel", _our_int8_kernel("sage2")),
)


def quantizers(
    query: Tensor, key: Tensor, value: Tensor, recipes: Sequence[str] = tuple(QUANTIZERS), only_preferred: bool = False
) -> dict[str, tuple[Callable[[], object], int]]:
    """Return the quantisers of some recipes: name -> (function that quantises a call's operands, bytes that it moves).

    With `only_preferred` the portable ones are left out where this GPU has others. Those named "K and V" leave Q to the
    attention kernel. Q is read once, K and V twice (first for their means), and each operand is written once.
    """
    from sage_kernels.cuda import quantize as hopper

    found: dict[str, tuple[Callable[[], object], int]] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for recipe in recipes:
        call = _call(query, key, value, False, recipe)
        preferred = select(request_of(call)).quantizer
        if not only_preferred or preferred != "int8_quantize_hopper":
            calls[f"operands of {recipe}"] = partial(_quantizer(QUANTIZERS[recipe]).quantize, call)
        if recipe != "sage3" and preferred == "int8_quantize_hopper":
            calls[f"operands of {recipe}, Hopper"] = partial(_quantizer(preferred).quantize, call)
            if recipe == "sage2":  # whose attention kernel may quantise Q
                calls[f"K and V of {recipe}, Hopper"] = partial(hopper.quantize_operands, call, leaves_query=True)
    for name, quantize in calls.items():
        operands = [x for x in vars(quantize()).values() if isinstance(x, Tensor)]
        left = any(x is query for x in operands)
        moved = [key, key, value, value, *(x for x in operands if x is not query), *([] if left else [query])]
        found[name] = quantize, sum(x.numel() * x.element_size() for x in moved)
    return found
