"""Providers of attention to compare: our recipes and other libraries' kernels, in inference, training and the grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sage_hf.attention import attend_observed, sage_attention
from sage_hf.bench.cases import BenchCase, CaseInputs
from sage_hf.drop_in import REPLACEMENT_MODULES
from sage_kernels.dispatch.cost_model import DECODED_QUERIES
from sage_kernels.dispatch.execution import request_of
from sage_kernels.dispatch.kernels import Quantizer
from sage_kernels.dispatch.plan import KernelUnavailableError, Plan
from sage_kernels.dispatch.registry import get_forward, get_quantizer
from sage_kernels.dispatch.select import select
from sage_kernels.exact import sdpa
from sage_kernels.spec.call import Call
from sage_kernels.spec.options import Options

PYTORCH = "scaled_dot_product_attention"
E4M3_MAX = 448.0
QUANTIZERS = {"sage1": "int8_quantize", "sage2": "int8_quantize", "sage3": "nvfp4_quantize"}
"""The portable quantiser of each recipe."""
MOST_MATH_SCORES = 2**25
"""Number of scores from which PyTorch's own arithmetic is too slow to try."""
LARGE = 1e11
"""Operations from which kernels that are never the fastest are not tried, if a faster kernel takes the call."""
FEW_QUERIES = 64
"""Number of queries up to which FlashAttention 3 chooses its number of splits."""


@dataclass(frozen=True)
class PreparedCall:
    """A call that is ready to be timed.

    Attributes:
        call: computes the output (batch, q_heads, q_len, head_dim); may be called repeatedly. Where the inputs
            require gradients, the output has a backward pass.
        kernel: name of the kernel that runs; "" if the plan names it that sage-hf announces with each call.
        output_scale: factor by which to multiply the output to get attention's output.
    """

    call: Callable[[], Tensor]
    kernel: str = ""
    output_scale: float = 1.0


PrepareCall = Callable[[CaseInputs], PreparedCall]
"""Function that raises an error if the provider is missing or refuses the call; it leaves the inputs unchanged."""


def _any(case: BenchCase) -> bool:
    return True


@dataclass(frozen=True)
class Provider:
    """Provider of attention.

    Attributes:
        name: name in the JSON.
        label: name in tables and plots.
        prepare: does all work that is not timed.
        scope: "end_to_end": bfloat16 in and out, quantisation included; "kernel": the operands are already quantised,
            and only attention is timed. A 16-bit kernel quantises nothing, and has only "end_to_end".
        context: made anew for each use; calls run inside it, and its cost does not count.
        suits: whether the grid tries the provider for a call.
    """

    name: str
    label: str
    prepare: PrepareCall
    scope: Literal["end_to_end", "kernel"] = "end_to_end"
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    suits: Callable[[BenchCase], bool] = _any

    @property
    def ours(self) -> bool:
        """Return whether the provider is sage-hf."""
        return self.name.startswith("sage_hf:")


def within(provider: Provider, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a call that runs inside the provider's context, made anew for each call."""

    def run() -> Tensor:
        with provider.context():
            return call()

    return run


def ours(recipe: str, fallback: Literal["error", "native"] = "error") -> PrepareCall:
    """Prepare our attention: by the recipe's own kernel or an error; with "native", as in a user's call."""

    def prepare(inputs: CaseInputs) -> PreparedCall:
        (query, key, value), mask, case = inputs.tensors, inputs.mask, inputs.case
        options: dict[str, Any] = {"enable_gqa": inputs.grouped, "recipe": recipe, "fallback": fallback}
        if case.mask == "lower_right":  # as in transformers, whose masks state causality
            behind = Options(is_causal=True, causal_offset=case.causal_offset, **options)
            return PreparedCall(lambda: attend_observed(query, key, value, None, None, behind)[0])
        options["is_causal"] = case.upper_left
        return PreparedCall(lambda: sage_attention(query, key, value, mask, **options))

    return prepare


def _plan(call: Call) -> Plan:
    return select(request_of(call), "error")


def _quantizer(name: str) -> Quantizer:
    quantizer = get_quantizer(name)
    assert quantizer is not None
    return quantizer


def ours_in_triton(recipe: str) -> PrepareCall:
    """Prepare the portable Triton kernel, on GPUs for which another kernel is preferred."""

    def prepare(inputs: CaseInputs) -> PreparedCall:
        call = inputs.call(recipe)
        portable, quantizer = get_forward("int8_forward"), _quantizer("int8_quantize")
        if _plan(call).kernel == portable.name:
            raise RuntimeError(f"{recipe} runs in Triton here as it is")
        return PreparedCall(lambda: portable.attend(call, quantizer)[0], portable.name)

    return prepare


def _our_int8_kernel(recipe: str) -> PrepareCall:
    def prepare(inputs: CaseInputs) -> PreparedCall:
        from sage_kernels.cuda import int8_forward as hopper
        from sage_kernels.triton import int8_forward as portable

        call = inputs.call(recipe)
        kernel = "int8_forward_hopper" if _plan(call).kernel == "int8_forward_hopper" else "int8_forward"
        operands = _quantizer("int8_quantize").quantize(call)
        output = torch.empty_like(inputs.query)
        if kernel == "int8_forward_hopper":
            launch = partial(hopper.forward, operands, output, None, call, hopper.Int8ForwardConfig.of_call(call))
        else:
            capability = torch.cuda.get_device_capability(inputs.query.device)
            launch = partial(portable.forward, operands, output, None, call, capability)

        def run() -> Tensor:
            launch()
            return output

        return PreparedCall(run, kernel)

    return prepare


def _sdpa(inputs: CaseInputs, mask: Any) -> Callable[[], Tensor]:
    query, key, value = inputs.tensors
    options: dict[str, Any] = {"is_causal": inputs.case.upper_left, "enable_gqa": inputs.grouped}
    return lambda: sdpa.pytorch_sdpa(query, key, value, attn_mask=mask, **options)


def _pytorch(name: str, label: str, backend: SDPBackend, suits: Callable[[BenchCase], bool] = _any) -> Provider:
    """Return PyTorch's scaled_dot_product_attention with one backend; an unsupported call raises an error."""

    def prepare(inputs: CaseInputs) -> PreparedCall:
        flash = backend == SDPBackend.FLASH_ATTENTION and inputs.case.mask == "lower_right"
        return PreparedCall(_sdpa(inputs, inputs.lower_right if flash else inputs.mask), f"{PYTORCH}, {backend.name}")

    return Provider(name, label, prepare, context=lambda: sdpa_kernel(backend), suits=suits)


def fa3_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    lengths: Tensor | None = None,
) -> Tensor:
    """Compute attention by FlashAttention 3, whose causality puts the last query at the last key.

    Args:
        query, key, value: (batch, heads, tokens, head_dim), float16 or bfloat16.
        is_causal, scale: as in PyTorch's function.
        lengths: int32 (batch,), the number of keys of each sample; None: all.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    # It takes tokens before heads. The views are part of the call, because all providers get the same tensors.
    tensors = [(x if x.stride(-1) == 1 else x.contiguous()).transpose(1, 2) for x in (query, key, value)]
    # 0 splits: FlashAttention 3 chooses, which matters for few queries.
    options: dict[str, Any] = {"num_splits": 0 if query.shape[2] <= FEW_QUERIES else 1}
    if lengths is not None:
        options["seqused_k"] = lengths
    output: Tensor = torch.ops.fa3_fwd.fwd(*tensors, softmax_scale=scale, is_causal=is_causal, **options)[0]
    return output.transpose(1, 2)


def _fa3(inputs: CaseInputs) -> PreparedCall:
    import_module("fa3_fwd._C")
    if inputs.case.mask not in ("none", "causal", "lower_right", "lengths"):
        raise RuntimeError(f"fa3_fwd takes no mask such as {inputs.case.mask}")
    is_causal = inputs.case.mask in ("causal", "lower_right")
    return PreparedCall(lambda: fa3_attention(*inputs.tensors, is_causal, lengths=inputs.lengths), "fa3_fwd.fwd")


def _fa3_training(inputs: CaseInputs) -> PreparedCall:
    try:
        module = import_module("flash_attn_interface")
    except ModuleNotFoundError as error:
        if error.name != "flash_attn_interface":
            raise
        message = "FlashAttention 3 with a backward pass is not installed (flash_attn_interface; fa3_fwd has none)"
        raise ModuleNotFoundError(message) from error

    def call() -> Tensor:
        output = module.flash_attn_func(*(x.transpose(1, 2) for x in inputs.tensors), causal=inputs.case.upper_left)
        return (output[0] if isinstance(output, tuple) else output).transpose(1, 2)

    return PreparedCall(call, "flash_attn_interface.flash_attn_func")


def _fa3_fp8(inputs: CaseInputs) -> PreparedCall:
    (query, key, value), is_causal = inputs.tensors, inputs.case.upper_left
    import_module("fa3_fwd._C")
    group = query.shape[1] // key.shape[1]
    # One scale per key head, also used for the queries of its group.
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

    return PreparedCall(call, "fa3_fwd.fwd, e4m3")


def _cudnn_fp8(inputs: CaseInputs) -> PreparedCall:
    (query, key, value), is_causal = inputs.tensors, inputs.case.upper_left
    cudnn: Any = import_module("cudnn")
    types = cudnn.data_type
    codes, descales = zip(*(to_e4m3(x, (0, 1, 2, 3)) for x in (query, key, value)), strict=True)
    # P is at most 1; scaling to 256 of e4m3's 448 leaves room for a maximum that is updated late.
    p_scale = torch.tensor(256.0, device=query.device)
    # An output row is a weighted mean of V, so no element exceeds V's largest, and V's scale also fits the output.
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
    scalar_size = [1, 1, 1, 1]
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    scales = {
        name: graph.tensor(dim=scalar_size, stride=scalar_size, data_type=types.FLOAT, name=name) for name in names
    }
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
        amax.set_output(True).set_dim(scalar_size).set_stride(scalar_size).set_data_type(types.FLOAT)
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

    return PreparedCall(call, "cudnn sdpa_fp8", descales[2].item())


@cache
def _cudnn_handle(device: torch.device) -> Any:
    with torch.cuda.device(device):
        return import_module("cudnn").create_handle()


def to_e4m3(x: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Quantise each slice over `dims` to e4m3; return the codes, and the slices' float32 descales (amax / 448)."""
    descale = x.abs().amax(dims, keepdim=True).float().clamp(min=1e-12) / E4M3_MAX
    return (x / descale).to(torch.float8_e4m3fn), descale.flatten() if len(dims) == x.ndim else descale.squeeze(dims)


def _sageattention1(inputs: CaseInputs) -> PreparedCall:
    (query, key, value), is_causal = inputs.tensors, inputs.case.upper_left
    module = sageattention(1)
    key = key.clone()  # It subtracts the mean from the caller's keys in place.
    return PreparedCall(
        lambda: module.sageattn(query, key, value, tensor_layout="HND", is_causal=is_causal), "sageattn, Triton"
    )


def _sageattention1_kernel(inputs: CaseInputs) -> PreparedCall:
    (query, key, value), is_causal = inputs.tensors, inputs.case.upper_left
    package = sageattention(1).__name__
    quantize = import_module(f"{package}.quant_per_block").per_block_int8
    forward = import_module(f"{package}.attn_qk_int8_per_block{'_causal' if is_causal else ''}").forward
    q, q_scale, k, k_scale = quantize(query, key - key.mean(2, keepdim=True))
    v = value.half()
    return PreparedCall(lambda: forward(q, k, v, q_scale, k_scale, output_dtype=query.dtype), "attn_qk_int8_per_block")


def _sageattention2(inputs: CaseInputs) -> PreparedCall:
    (query, key, value), is_causal = inputs.tensors, inputs.case.upper_left
    module = sageattention(2)
    return PreparedCall(
        lambda: module.sageattn(query, key, value, tensor_layout="HND", is_causal=is_causal), "sageattn, CUDA"
    )


def _sageattention2_kernel(inputs: CaseInputs) -> PreparedCall:
    (query, key, value), is_causal = inputs.tensors, inputs.case.upper_left
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

    return PreparedCall(call, "qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf")


def sageattention(generation: Literal[1, 2]) -> ModuleType:
    """Import the authors' package of one SageAttention generation.

    Both generations are called `sageattention`; to have both, one may be installed with its generation in the name,
    such as `sageattention2`.
    """
    for name in (f"sageattention{generation}", "sageattention"):
        try:
            module = import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            continue
        is_ours = (module.__file__ or "").startswith(REPLACEMENT_MODULES)
        if not is_ours and hasattr(module, "sageattn_qk_int8_pv_fp8_cuda") == (generation == 2):
            return module
    raise ModuleNotFoundError(f"SageAttention {generation} is not installed")


def _is_small(case: BenchCase) -> bool:
    return case.scores <= MOST_MATH_SCORES


def _is_open(case: BenchCase) -> bool:
    """Return whether any kernel may be the fastest: if FlashAttention takes no such mask, or if the call is small."""
    return case.mask not in ("none", "causal", "lower_right") or case.dense_operations < LARGE


def _has_plans(case: BenchCase) -> bool:
    """Return whether to try cuDNN. It makes a plan for each length, and each step of decoding has a new length."""
    return case.training or case.q_len >= DECODED_QUERIES or case.mask in ("lengths", "keys")


_FA2 = _pytorch("sdpa_fa2", "FA2", SDPBackend.FLASH_ATTENTION)
_CUDNN = _pytorch("cudnn", "cuDNN", SDPBackend.CUDNN_ATTENTION, _has_plans)
_FA3 = Provider("fa3", "FA3", _fa3)
# The fastest providers come first: the grid compares others with them before it measures these in full.
_BACKENDS = (
    _CUDNN,
    _FA2,
    _pytorch("sdpa_efficient", "efficient", SDPBackend.EFFICIENT_ATTENTION, _is_open),
    _pytorch("sdpa_math", "math", SDPBackend.MATH, _is_small),
)

PROVIDERS: tuple[Provider, ...] = (
    _FA2,
    _CUDNN,
    _FA3,
    Provider("sageattention1", "SageAttn1", _sageattention1),
    Provider("sageattention2", "SageAttn2", _sageattention2),
    *(Provider(f"sage_hf:{recipe}", recipe, ours(recipe)) for recipe in ("sage1", "sage2", "sage3")),
    *(Provider(f"sage_hf:{name}_triton", f"{name}, Triton", ours_in_triton(name)) for name in ("sage1", "sage2")),
    Provider("fa3_fp8", "FA3 FP8", _fa3_fp8, "kernel"),
    Provider("cudnn_fp8", "cuDNN FP8", _cudnn_fp8, "kernel"),
    Provider("sageattention1", "SageAttn1", _sageattention1_kernel, "kernel"),
    Provider("sageattention2", "SageAttn2", _sageattention2_kernel, "kernel"),
    *(Provider(f"sage_hf:{recipe}", recipe, _our_int8_kernel(recipe), "kernel") for recipe in ("sage1", "sage2")),
)
"""Providers of forward passes at named shapes, which get contiguous tensors."""

TRAINING_PROVIDERS: tuple[Provider, ...] = (
    _FA2,
    _CUDNN,
    Provider("fa3", "FA3", _fa3_training),
    *(Provider(f"sage_hf:{recipe}", recipe, ours(recipe)) for recipe in ("sage_bwd", "sage_bwd_int8")),
)
"""Providers of forward and backward passes at named shapes."""

GRID_PROVIDERS: tuple[Provider, ...] = (Provider("sage_hf:sage2", "sage2", ours("sage2", "native")), _FA3, *_BACKENDS)
GRID_TRAINING_PROVIDERS: tuple[Provider, ...] = (
    Provider("sage_hf:sage_bwd", "sage_bwd", ours("sage_bwd", "native")),
    *_BACKENDS,
)
"""Providers of the grid's calls; sage-hf chooses exact attention where that is faster."""


def quantizers(
    inputs: CaseInputs, recipes: Sequence[str] = tuple(QUANTIZERS)
) -> dict[str, tuple[Callable[[], object], int]]:
    """Return the quantisers of some recipes: name -> (function that quantises a call's operands, bytes that it moves).

    For a recipe without a kernel on this GPU, the portable quantiser runs. Quantisers named "K and V" leave Q to the
    attention kernel. Q is read once, K and V twice (first for their means), and each operand is written once.
    """
    from sage_kernels.cuda import quantize as hopper

    calls: dict[str, Callable[[], Any]] = {}
    for recipe in recipes:
        call = inputs.call(recipe)
        try:
            name = _plan(call).quantizer
        except KernelUnavailableError:
            name = QUANTIZERS[recipe]
        if name == "int8_quantize_hopper":
            calls[f"operands of {recipe}, Hopper"] = partial(_quantizer(name).quantize, call)
            if recipe == "sage2":  # whose attention kernel may quantise Q itself
                calls[f"K and V of {recipe}, Hopper"] = partial(hopper.quantize_operands, call, leaves_query=True)
        else:
            calls[f"operands of {recipe}"] = partial(_quantizer(name).quantize, call)
    quantizer_calls: dict[str, tuple[Callable[[], object], int]] = {}
    query, key, value = inputs.tensors
    for name, quantize in calls.items():
        operands = [x for x in vars(quantize()).values() if isinstance(x, Tensor)]
        leaves_query = any(x is query for x in operands)
        moved = [key, key, value, value, *(x for x in operands if x is not query), *([] if leaves_query else [query])]
        quantizer_calls[name] = quantize, sum(x.nbytes for x in moved)
    return quantizer_calls
