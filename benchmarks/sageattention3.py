"""Public SageAttention3's preparation of Q, K and V, from a checkout of github.com/thu-ml/SageAttention.

Its `preprocess_qkv` (PyTorch and Triton) subtracts means, three CUDA kernels quantise. Its build refuses GPUs before
Blackwell, but these kernels compile for them: only the conversion to e2m1 is left out there, whose codes are zeros. So
their time is a lower bound then, mostly that of reading and writing.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor

NAME = "sageattention3"
FOLDER = "sageattention3_blackwell"
API = "sageattn3/api.py"
KERNELS = "sageattn3/quantization/fp4_quantization_4d.cu"
FIRST_LINE, LINE_BEHIND = "constexpr int CVT_FP4_ELTS_PER_THREAD", "void scaled_fp4_quant("
CONVERTING = (10, 0)  # the compute capability from which on a GPU converts to e2m1
TOKENS = 128  # of a block
SMOOTHING = ("smooth_key", "smooth_query")
QUANTIZERS = ("query", "key", "value")

# Compile flags are those of the checkout's setup.py that concern these kernels.
FLAGS = ("-O3", "-std=c++17", "--use_fast_math", "--expt-relaxed-constexpr", "-shared", "-Xcompiler", "-fPIC")

LAUNCHER = """
#include <cstdint>
#include <type_traits>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
%s
template <int HEAD_DIM>
void launch(int kind, const nv_bfloat16* x, uint8_t* codes, uint8_t* scales, int batch, int heads, int tokens,
            cudaStream_t stream) {
  const dim3 grid(tokens / 128, batch, heads), threads(128 * HEAD_DIM / CVT_FP4_ELTS_PER_THREAD);
  const int head = tokens * HEAD_DIM, row = kind == 2 ? tokens : HEAD_DIM;
  auto run = [&](auto kernel) {
    kernel<<<grid, threads, 0, stream>>>(x, codes, scales, batch, heads, tokens, heads * head, head, HEAD_DIM,
                                         heads * head / 2, head / 2, row / 2, heads * head / 16, head / 16, row / 16);
  };
  if (kind == 0) run(scaled_fp4_quant_kernel<HEAD_DIM, 128, false, nv_bfloat16>);
  if (kind == 1) run(scaled_fp4_quant_kernel<HEAD_DIM, 128, true, nv_bfloat16>);
  if (kind == 2) run(scaled_fp4_quant_trans_kernel<HEAD_DIM, 128, nv_bfloat16>);
}
extern "C" int quantize(int kind, int head_dim, void* x, void* codes, void* scales, int batch, int heads, int tokens,
                        void* stream) {
  const auto launch_it = head_dim == 64 ? launch<64> : launch<128>;
  launch_it(kind, static_cast<nv_bfloat16*>(x), static_cast<uint8_t*>(codes), static_cast<uint8_t*>(scales), batch,
            heads, tokens, static_cast<cudaStream_t>(stream));
  return cudaGetLastError();
}
"""

Call = Callable[[], object]


class Unavailable(Exception):
    """The reason why something of the checkout does not run here."""


def architecture_flag(capability: tuple[int, int]) -> str:
    """Return the flag that names the architecture, as the checkout's setup.py does for those that it knows."""
    name = f"{capability[0]}{capability[1]}" + ("a" if capability >= CONVERTING else "")
    return f"-gencode=arch=compute_{name},code=sm_{name}"


def launcher_source(checkout: Path) -> str:
    """Return C++ with the checkout's kernels that quantise, and a function that launches them without PyTorch's API.

    Raises:
        Unavailable: the checkout has no such file, or its kernels are not where they were.
    """
    path = checkout / FOLDER / KERNELS
    if not path.is_file():
        raise Unavailable(f"{FOLDER}/{KERNELS} is missing")
    text = path.read_text(encoding="utf-8")
    first, behind = text.find(FIRST_LINE), text.find(LINE_BEHIND)
    if not 0 <= first < behind:
        raise Unavailable(f"the kernels of {KERNELS} do not lie between {FIRST_LINE!r} and {LINE_BEHIND!r}")
    return LAUNCHER % text[first:behind]


def compile_quantizers(checkout: Path, folder: Path, capability: tuple[int, int]) -> Path:
    """Compile the checkout's quantisers into `folder` and return the shared library.

    Raises:
        Unavailable: there is no nvcc, or it refuses them.
    """
    source, library = folder / f"{NAME}.cu", folder / f"{NAME}.so"
    source.write_text(launcher_source(checkout), encoding="utf-8")
    if (nvcc := shutil.which("nvcc")) is None:
        raise Unavailable("nvcc is missing")
    command = [nvcc, *FLAGS, architecture_flag(capability), str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if "error" in line]
        raise Unavailable(f"nvcc: {(errors or done.stderr.splitlines() or ['failed'])[0]}")
    return library


def load_api(checkout: Path) -> ModuleType:
    """Import the checkout's Python without its compiled extensions, which only attention and `scale_and_quant_*` call.

    Raises:
        Unavailable: it is missing, or it cannot be imported.
    """
    path = checkout / FOLDER / API
    specification = importlib.util.spec_from_file_location(f"{NAME}_api", path)
    if not path.is_file() or specification is None or specification.loader is None:
        raise Unavailable(f"{FOLDER}/{API} is missing")
    module = importlib.util.module_from_spec(specification)
    extensions = {name: ModuleType(name) for name in ("fp4attn_cuda", "fp4quant_cuda")}
    with mock.patch.dict(sys.modules, extensions):
        try:
            specification.loader.exec_module(module)
        except ImportError as error:
            raise Unavailable(f"{API}: {error}") from error
    return module


def smoothing(api: ModuleType, query: Tensor, key: Tensor) -> dict[str, Call]:
    """Return calls of what `preprocess_qkv` does to whole blocks of tokens: the phases SMOOTHING, and "delta_scores".

    Args:
        query, key: bfloat16 (batch, heads, tokens, head_dim); a call of "smooth_key" changes the key.
    """
    _, means = api.triton_group_mean(query)
    return {
        "smooth_key": lambda: key.sub_(key.mean(dim=-2, keepdim=True)),
        "smooth_query": lambda: api.triton_group_mean(query),
        "delta_scores": lambda: torch.matmul(means, key.transpose(-2, -1)).to(torch.float32).contiguous(),
    }


def quantizers(library: Path, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Call]:
    """Return calls of the kernels that quantise Q, K and V, the phases QUANTIZERS.

    Args:
        library: of `compile_quantizers`.
        query, key, value: contiguous bfloat16 (batch, heads, tokens, head_dim), head_dim 64 or 128, whole blocks of
            128 tokens.
    """
    quantize = ctypes.CDLL(str(library)).quantize

    def caller(kind: int, x: Tensor) -> Call:
        batch, heads, tokens, head_dim = x.shape
        codes = torch.empty(x.numel() // 2, dtype=torch.uint8, device=x.device)
        scales = torch.empty(x.numel() // 16, dtype=torch.uint8, device=x.device)

        def call() -> None:
            pointers = (ctypes.c_void_p(y.data_ptr()) for y in (x, codes, scales))
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            if error := quantize(kind, head_dim, *pointers, batch, heads, tokens, stream):
                raise RuntimeError(f"{NAME} cannot quantise: CUDA error {error}")

        return call

    return {name: caller(kind, x) for kind, (name, x) in enumerate(zip(QUANTIZERS, (query, key, value), strict=True))}
