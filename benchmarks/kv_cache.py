"""Measure append and decode of one layer with a low-bit KV cache, and compare with exact 16-bit attention.

With --model, measure a whole model instead, and compare with transformers' caches. With --dry, run
one small shape on a CPU, to check that the program runs; nothing is written.

A row's time is the GPU time of a step, by replaying a graph of many copies of the layer, which are several times as
large as the L2 cache. A provider that is not installed or fails is left out, and named. A model's time is the wall time
of a token's forward pass, with random weights and 8 of Llama-3-8B's 32 layers. Growing caches run in eager mode; static
caches run in the model that transformers compiles for decoding. transformers' own `QuantizedCache` runs with each
installed backend, in 4 bits or FP8; its bytes are the memory that it leaves allocated.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM, QuantizedCache, StaticCache

from sage_hf import QuantizedKVCache
from sage_hf.bench import command, results
from sage_hf.bench.providers import fa3_attention
from sage_hf.bench.timing import TimingStream, synchronize
from sage_hf.transformers.kv_cache import cache_keyword
from sage_kernels import kv_cache
from sage_kernels.spec.kv_cache import KVCache
from sage_kernels.spec.kv_format import get_format

SHAPES = [(batch, tokens) for batch in (1, 4, 16) for tokens in (4096, 32768, 131072) if batch * tokens <= 2**19]
HEADS = [(32, 8, 128), (32, 8, 64), (32, 32, 128), (32, 16, 128), (64, 8, 128)]
MODEL_SHAPES = [*((batch, tokens) for batch in (1, 8) for tokens in (8192, 32768)), (1, 131072)]
BACKENDS = ("quanto", "hqq", "fp8")
"""Backends of transformers' QuantizedCache."""
MODEL = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, "vocab_size": 128256}
MODEL_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
TINY_MODEL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
TINY_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
REPLAY_MS, REPLAYS = 25.0, 5
"""Time of one replay of a graph of all layers, and number of replays."""
WARM_STEPS = 5
"""Number of steps before the measured steps, including a step that compiles and a step that is captured."""
COLD_BYTES = 2.2e8
"""Bytes of the caches that take turns: several times the L2 cache."""

Step = Callable[[], Any]


class Shape:
    """Tensors of one shape: K and V of all tokens; the newest token is the step's."""

    def __init__(self, batch: int, tokens: int, heads: tuple[int, int, int], device: str) -> None:
        self.batch, self.tokens, (self.q_heads, self.kv_heads, self.head_dim) = batch, tokens, heads
        generator = torch.Generator(device).manual_seed(0)

        def normal(heads: int, tokens: int) -> Tensor:
            size = batch, heads, tokens, self.head_dim
            return torch.randn(size, generator=generator, device=device, dtype=torch.bfloat16)

        self.key = normal(self.kv_heads, tokens) + 3 * normal(self.kv_heads, 1)
        self.value, self.query = normal(self.kv_heads, tokens), normal(self.q_heads, 1)
        self.new = self.key[:, :, -1:].clone(), self.value[:, :, -1:].clone()

    def copies(self, size: float) -> int:
        """Return the number of layers of this size to measure."""
        return max(1, min(48, math.ceil(COLD_BYTES / size)))


def quantized_steps(shape: Shape, format: str) -> list[Step]:
    """Return a step for each layer's cache; each appends the same token again."""
    caches: list[KVCache] = []
    while not caches or len(caches) < shape.copies(caches[0].bytes):
        cache = KVCache(get_format(format), shape.key)
        cache.reserve(shape.tokens)
        kv_cache.store(cache, None, shape.key[:, :, :-1], shape.value[:, :, :-1])
        caches.append(cache)
    coded_columns, length = caches[0].coded_columns, caches[0].length

    def step_of(cache: KVCache) -> Step:
        def step() -> tuple[Tensor, str, str]:
            cache.coded_columns, cache.length = coded_columns, length
            return kv_cache.decode(cache, shape.query, *shape.new, None, shape.head_dim**-0.5)

        return step

    return [step_of(cache) for cache in caches]


def exact_steps(
    shape: Shape, attend: Callable[[Tensor, Tensor, Tensor], Tensor], tokens_first: bool = False
) -> list[Step]:
    """Return steps that write the newest token into a 16-bit cache and attend.

    Args:
        shape: tensors of one shape.
        attend: function of query, key and value (batch, heads, tokens, head_dim).
        tokens_first: in memory, the cache's tokens come before its heads.
    """

    def cached(x: Tensor) -> Tensor:
        return (
            x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2)
            if tokens_first
            else x.clone()
        )

    def step_of(key: Tensor, value: Tensor) -> Step:
        def step() -> Tensor:
            for x, new_token in zip((key, value), shape.new, strict=True):
                x.narrow(2, shape.tokens - 1, 1).copy_(new_token)
            return attend(shape.query, key, value)

        return step

    number = shape.copies(2 * shape.key.nbytes)
    return [step_of(cached(shape.key), cached(shape.value)) for _ in range(number)]


def sdpa(backend: SDPBackend) -> Callable[..., Tensor]:
    """Return PyTorch's attention with one backend."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return attend


def flash_attention3(shape: Shape) -> list[Step]:
    """Return steps of FlashAttention 3, which chooses its number of splits."""
    import_module("fa3_fwd._C")
    return exact_steps(shape, fa3_attention, tokens_first=True)


PROVIDERS: dict[tuple[str, str], Callable[[Shape], list[Step]]] = {
    ("fa3", "bf16"): flash_attention3,
    ("cudnn", "bf16"): lambda shape: exact_steps(shape, sdpa(SDPBackend.CUDNN_ATTENTION)),
    ("sdpa_fa2", "bf16"): lambda shape: exact_steps(shape, sdpa(SDPBackend.FLASH_ATTENTION)),
    ("sage_hf", "int8"): lambda shape: quantized_steps(shape, "int8"),
    ("sage_hf", "int4"): lambda shape: quantized_steps(shape, "int4"),
}


def milliseconds(steps: list[Step], stream: TimingStream) -> float:
    """Return the GPU's time of one step, if all layers take turns."""

    def all_layers() -> None:
        for step in steps:
            step()

    return stream.gpu_us(all_layers, REPLAY_MS, REPLAYS) * 1e-3 / len(steps)


def model_of(sizes: dict[str, int], device: str) -> LlamaForCausalLM:
    """Make a model with random weights."""
    config = LlamaConfig(**sizes, max_position_embeddings=2**20)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


@torch.no_grad()
def model_row(
    model: LlamaForCausalLM, batch: int, tokens: int, format: str, static: bool, steps: int
) -> dict[str, Any]:
    """Return the provider, layers, time and cache bytes of a model's tokens after a prompt.

    Args:
        model: a model with random weights.
        batch, tokens: batch and length of the prompt.
        format: format of our cache; "bf16": transformers' default cache; an entry of BACKENDS: its QuantizedCache.
            Caches of transformers run with its SDPA.
        static: whether the cache has a static shape; BACKENDS have none.
        steps: number of timed tokens.
    """
    device, config = model.device, model.config
    ids = torch.randint(0, config.vocab_size, (batch, tokens), device=device)
    length = tokens + WARM_STEPS + steps
    cache: Cache
    if format == "bf16":
        cache, attention = StaticCache(config, length) if static else DynamicCache(config=config), "sdpa"
    elif format in BACKENDS:
        cache, attention = QuantizedCache(format, config), "sdpa"
    else:
        cache, attention = QuantizedKVCache(config, format, max_cache_len=length if static else None), "sage2"
    model.set_attn_implementation(attention)
    name = cache_keyword(model)
    torch.compiler.reset()
    decode = model.get_compiled_call(None) if static and device.type == "cuda" else model

    def forward(ids: Tensor) -> float:
        start = time.perf_counter()
        (decode if ids.shape[1] == 1 else model)(ids, **{name: cache}, logits_to_keep=1)
        return 1000 * (synchronize(device) - start)

    before = torch.cuda.memory_allocated()
    forward(ids)
    held_bytes = torch.cuda.memory_allocated() - before
    for _ in range(WARM_STEPS):
        forward(ids[:, :1])
    taken = statistics.median(forward(ids[:, :1]) for _ in range(steps))
    if isinstance(cache, QuantizedKVCache):
        size, provider = sum(cache.record.bytes.values()), f"sage_hf ({', '.join(cache.record.kernels)})"
    elif format in BACKENDS:
        size, provider = held_bytes, "transformers"
    else:
        size, provider = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers), "transformers"
    return {"provider": provider, "layers": config.num_hidden_layers, "ms_per_token": taken, "cache_bytes": size}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `execute` but the output's to the parser."""
    parser.add_argument("--dry", action="store_true", help="run one small shape on a CPU")
    parser.add_argument("--model", action="store_true", help="measure a whole model")


def execute(args: argparse.Namespace) -> None:
    """Measure, and write <gpu>-kv_cache.json after each row; a file of the same commit is continued.

    With --model, the file is <gpu>-kv_cache_models.json.
    """
    if args.dry:
        run_dry()
        return
    facts = results.facts(command.gpu("cuda"))
    path = results.path_of(args.output, facts, "kv_cache_models" if args.model else "kv_cache")
    stored = results.ResumedResult(path, facts, ("rows",))
    if args.model:
        measure_models(stored)
    else:
        measure_layers(stored)


def run_dry() -> None:
    """Print a step of one small shape, and of a tiny model."""
    steps = quantized_steps(Shape(1, 300, (4, 2, 64), "cpu"), "int4")
    start = time.perf_counter()
    print(steps[0]()[1:], f"{time.perf_counter() - start:.3f} s")
    tiny = model_of(TINY_MODEL | TINY_HEADS, "cpu")
    for format, static in itertools.product(("bf16", "int4"), (False, True)):
        print(model_row(tiny, 1, 150, format, static, 1))


def measure_layers(stored: results.ResumedResult) -> None:
    """Measure append and decode of a layer, for all shapes and providers."""
    with TimingStream(torch.device("cuda")).entered() as stream:
        for heads in HEADS:
            for batch, tokens in SHAPES if heads == HEADS[0] else [(1, 32768), (16, 4096)]:
                shape = Shape(batch, tokens, heads, "cuda")
                for (provider, format), prepare in PROVIDERS.items():
                    row: dict[str, Any] = {"batch": batch, "tokens": tokens, "format": format, "provider": provider}
                    row |= dict(zip(("q_heads", "kv_heads", "head_dim"), heads, strict=True))
                    if stored.has("rows", **row):
                        continue
                    try:
                        steps = prepare(shape)
                        if provider == "sage_hf":
                            row["kernel"] = steps[0]()[1]
                        stored.add("rows", row | {"ms": milliseconds(steps, stream)})
                    except Exception as error:  # A provider may raise any error: other rows go on.
                        print(f"left out: {row}: {results.reason(error)}", flush=True)
                    steps = []
                    torch.cuda.empty_cache()


def measure_models(stored: results.ResumedResult) -> None:
    """Measure a model's tokens, for all shapes and formats."""
    model = model_of(MODEL | MODEL_HEADS, "cuda")
    for batch, tokens in MODEL_SHAPES:
        ours = itertools.product(("bf16", "int8", "int4"), (False, True))
        for format, static in (*ours, *((backend, False) for backend in BACKENDS)):
            row = {"batch": batch, "tokens": tokens, "format": format, "static": static}
            if stored.has("rows", **row):
                continue
            try:
                stored.add("rows", row | model_row(model, batch, tokens, format, static, 20))
            except Exception as error:  # A provider may raise any error: other rows go on.
                print(f"left out: {row}: {results.reason(error)}", flush=True)
            torch.cuda.empty_cache()
