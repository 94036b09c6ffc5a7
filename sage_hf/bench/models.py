"""The models whose steps are measured: real architectures and sizes, with random weights, so nothing is downloaded."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sage_hf.bench.cases import BenchCase
from sage_hf.bench.model_inputs import (
    Draw,
    ModelInputs,
    cogvideox,
    flux,
    hunyuanvideo,
    mochi,
    qwen_image,
    sd3,
    sdxl,
    text,
    token_batch,
    wan,
)


@dataclass(frozen=True)
class BenchModel:
    """A model at one size of its input, and the step that is measured.

    Attributes:
        name: a short name for the command line.
        label: name in tables.
        library, class_name: where its class is.
        config: hyperparameters of the real checkpoint; for a transformers model, arguments of its configuration class.
        inputs: draws the arguments of forward.
        attention: its largest attention call; when decoding, its tokens are the keys.
        layers_of_model: number of transformer blocks of the real model.
        depths: names of the numbers in `config` that add up to `layers_of_model`, and shrink if fewer layers are
            measured; empty if the model is always measured whole.
        layers: number of blocks measured by default, so that a step takes less than half a second on a large GPU where
            possible; None: all.
        kind: "denoise" and "prefill" run forward; "decode" runs it for one token after `cache_tokens` of cache;
            "train" runs forward and backward.
        cache_tokens: see `kind`.
        checkpointing: use gradient checkpointing.
        masked: the longest attention calls have a mask.
        drops_mask: blocks are called without the mask that the model makes for its text; position of the mask among a
            block's arguments is `MASK_ARGUMENT`.
    """

    name: str
    label: str
    library: Literal["diffusers", "transformers"]
    class_name: str
    config: Mapping[str, Any]
    inputs: Callable[[Draw], ModelInputs]
    attention: BenchCase
    layers_of_model: int
    depths: tuple[str, ...] = ("num_layers",)
    layers: int | None = None
    kind: Literal["denoise", "prefill", "decode", "train"] = "denoise"
    cache_tokens: int = 0
    checkpointing: bool = False
    masked: bool = False
    drops_mask: bool = False

    @property
    def training(self) -> bool:
        """Return whether the step is a training step."""
        return self.kind == "train"

    @property
    def call(self) -> str:
        """Return the sizes of its largest attention call."""
        return f"{self.attention}, one query" if self.kind == "decode" else str(self.attention)

    def shortened(self, layers: int | None = None) -> tuple[dict[str, Any], int]:
        """Return (configuration with about that many blocks, keeping every kind of block; their number).

        Args:
            layers: largest number of blocks, but at least one of each kind; None: `self.layers`.
        """
        wanted = layers or self.layers
        if not self.depths or wanted is None or wanted >= self.layers_of_model:
            return dict(self.config), self.layers_of_model
        share = wanted / self.layers_of_model
        depths = {name: max(1, math.floor(self.config[name] * share)) for name in self.depths}
        return {**self.config, **depths}, sum(depths.values())


MASK_ARGUMENT = 3


@dataclass
class LoadedModel:
    """A model on a device, ready for its steps.

    Attributes:
        module: the model.
        layers: number of its transformer blocks.
        step: runs one step and returns its output.
        reset: prepares for repeating the same step, also after a failed step.
        advance: prepares for the next step: when decoding, the cache then has one more token.
    """

    module: nn.Module
    layers: int
    step: Callable[[], Tensor]
    reset: Callable[[], None] = field(default=lambda: None)
    advance: Callable[[], None] = field(default=lambda: None)


def load(model: BenchModel, device: torch.device, layers: int | None = None) -> LoadedModel:
    """Build a model in bfloat16 with random weights, and draw its inputs.

    Args:
        model: the model.
        device: device on which its weights are made.
        layers: see `BenchModel.shortened`.

    Raises:
        ModuleNotFoundError, AttributeError: the library is missing, or too old for the model.
        torch.OutOfMemoryError: the model is too large.
    """
    config, count = model.shortened(layers)
    with torch.device(device), _default_dtype(torch.bfloat16):
        build = _diffusers_model if model.library == "diffusers" else _transformers_model
        module: Any = build(model, config)
    module.train(model.training).requires_grad_(model.training)
    inputs = model.inputs(Draw(device))
    if "img_shapes" in inputs and "txt_seq_lens" in inspect.signature(module.forward).parameters:  # diffusers < 0.37
        inputs["txt_seq_lens"] = [inputs["encoder_hidden_states"].shape[1]]
    if model.drops_mask:
        _drop_masks(module)
    if model.checkpointing:
        module.enable_gradient_checkpointing()
    if model.kind == "decode":
        return _decoding(module, count, inputs, model, device)
    if model.kind == "prefill":
        return LoadedModel(module, count, lambda: module(**inputs).logits)
    if model.training:
        return _training(module, count, inputs)
    return LoadedModel(module, count, lambda: module(**inputs, return_dict=False)[0])


def _decoding(
    module: nn.Module, layers: int, inputs: ModelInputs, model: BenchModel, device: torch.device
) -> LoadedModel:
    config: Any = module.config
    cache = import_module("transformers").DynamicCache()
    draw, tokens = Draw(device), 0

    def add(count: int) -> None:
        nonlocal tokens
        size = (1, config.num_key_value_heads, count, config.hidden_size // config.num_attention_heads)
        for layer in range(layers):
            cache.update(draw.normal(*size), draw.normal(*size), layer)
        tokens += count

    def reset() -> None:
        """Cut each layer's cache to the first tokens, whether or not the step reached that layer."""
        for layer in cache.layers:
            if (added := layer.get_seq_length() - tokens) > 0:
                layer.crop(-added)

    def step() -> Tensor:
        logits: Tensor = module(**inputs, past_key_values=cache, use_cache=True).logits
        return logits

    add(model.cache_tokens)
    return LoadedModel(module, layers, step, reset, advance=partial(add, 1))


def _training(module: nn.Module, layers: int, inputs: ModelInputs) -> LoadedModel:
    def step() -> Tensor:
        output = module(**inputs, return_dict=False)[0]
        output.backward(torch.ones_like(output))
        return output.detach()

    return LoadedModel(module, layers, step, lambda: module.zero_grad(set_to_none=True))


def _diffusers_model(model: BenchModel, config: dict[str, Any]) -> nn.Module:
    module_class = getattr(import_module("diffusers"), model.class_name)
    module = module_class(**config)
    # As from_pretrained(torch_dtype=torch.bfloat16) leaves them.
    float32_names = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    for name, parameter in module.named_parameters():
        if float32_names.intersection(name.split(".")):
            parameter.data = parameter.data.float()
    return module


def _transformers_model(model: BenchModel, config: dict[str, Any]) -> nn.Module:
    module_class = getattr(import_module("transformers"), model.class_name)
    return module_class(module_class.config_class(**config))


def _drop_masks(module: nn.Module) -> None:
    def without_mask(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*args[:MASK_ARGUMENT], None, *args[MASK_ARGUMENT + 1 :])

    for blocks in module.children():
        if isinstance(blocks, nn.ModuleList):
            for block in blocks:
                if list(inspect.signature(block.forward).parameters)[MASK_ARGUMENT] != "attention_mask":
                    raise TypeError(f"{type(block).__name__} does not take its mask where {MASK_ARGUMENT = } says")
                block.register_forward_pre_hook(without_mask)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# Configurations of the real checkpoints; values that they leave out are the class's defaults.

COGVIDEOX_2B: dict[str, Any] = {"num_attention_heads": 30, "num_layers": 30}
COGVIDEOX_5B: dict[str, Any] = {
    "num_attention_heads": 48,
    "num_layers": 42,
    "use_rotary_positional_embeddings": True,
}
HUNYUANVIDEO: dict[str, Any] = {
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "num_layers": 20,
    "num_single_layers": 40,
    "guidance_embeds": True,
}
MOCHI: dict[str, Any] = {"num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 48}
WAN_1_3B: dict[str, Any] = {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 30}
WAN_14B: dict[str, Any] = {"num_attention_heads": 40, "attention_head_dim": 128, "ffn_dim": 13824, "num_layers": 40}
FLUX_DEV: dict[str, Any] = {
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "num_layers": 19,
    "num_single_layers": 38,
    "guidance_embeds": True,
}
SD_3_5_LARGE: dict[str, Any] = {
    "num_attention_heads": 38,
    "attention_head_dim": 64,
    "num_layers": 38,
    "caption_projection_dim": 2432,
    "pos_embed_max_size": 192,
    "qk_norm": "rms_norm",
}
SDXL: dict[str, Any] = {
    "sample_size": 128,
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
QWEN_IMAGE: dict[str, Any] = {"num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 60}
LLAMA_3_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def _diffusers(
    name: str,
    label: str,
    class_name: str,
    config: dict[str, Any],
    inputs: Callable[[Draw], ModelInputs],
    attention: tuple[int, int, int, int],
    layers_of_model: int,
    **options: Any,
) -> BenchModel:
    batch, heads, tokens, head_dim = attention
    case = BenchCase.square(name, (batch, heads, heads, tokens, head_dim))
    return BenchModel(name, label, "diffusers", class_name, config, inputs, case, layers_of_model, **options)


def _llama(name: str, label: str, tokens: int, class_name: str = "LlamaForCausalLM", **options: Any) -> BenchModel:
    case = BenchCase.square(name, (1, 32, 8, tokens, 128), causal=options.get("kind") != "decode")
    inputs = text(tokens, LLAMA_3_8B["vocab_size"])
    options = {"depths": ("num_hidden_layers",), "kind": "prefill", "inputs": inputs, **options}
    return BenchModel(
        name, label, "transformers", class_name, LLAMA_3_8B, attention=case, layers_of_model=32, **options
    )


_HUNYUANVIDEO: dict[str, Any] = {
    "class_name": "HunyuanVideoTransformer3DModel",
    "config": HUNYUANVIDEO,
    "inputs": hunyuanvideo,
    "attention": (1, 24, 119056, 128),
    "layers_of_model": 60,
    "depths": ("num_layers", "num_single_layers"),
    "layers": 3,
}
_COGVIDEOX_2B = ("CogVideoXTransformer3DModel", COGVIDEOX_2B)
_FLUX = ("FluxTransformer2DModel", FLUX_DEV)
_FLUX_DEPTHS = ("num_layers", "num_single_layers")

MODELS: tuple[BenchModel, ...] = (
    _diffusers(
        "cogvideox-2b",
        "CogVideoX-2B, 480×720, 49 frames",
        *_COGVIDEOX_2B,
        cogvideox(2),
        (2, 30, 17776, 64),
        30,
        layers=10,
    ),
    _diffusers(
        "cogvideox-5b",
        "CogVideoX-5B, 480×720, 49 frames",
        "CogVideoXTransformer3DModel",
        COGVIDEOX_5B,
        cogvideox(2, rotary=True),
        (2, 48, 17776, 64),
        42,
        layers=6,
    ),
    _diffusers("hunyuanvideo-720p", "HunyuanVideo, 720×1280, 129 frames", **_HUNYUANVIDEO, masked=True),
    _diffusers(
        "hunyuanvideo-720p-unmasked",
        "HunyuanVideo, 720×1280, 129 frames, without its text mask",
        **_HUNYUANVIDEO,
        drops_mask=True,
    ),
    _diffusers(
        "mochi",
        "Mochi, 480×848, 163 frames",
        "MochiTransformer3DModel",
        MOCHI,
        mochi,
        (1, 24, 44776, 128),
        48,
        layers=2,
    ),
    _diffusers(
        "wan-1.3b",
        "Wan 2.1 1.3B, 480×832, 81 frames",
        "WanTransformer3DModel",
        WAN_1_3B,
        wan(21, 60, 104),
        (1, 12, 32760, 128),
        30,
        layers=10,
    ),
    _diffusers(
        "wan-14b",
        "Wan 2.1 14B, 720×1280, 81 frames",
        "WanTransformer3DModel",
        WAN_14B,
        wan(21, 90, 160),
        (1, 40, 75600, 128),
        40,
        layers=2,
    ),
    _diffusers("flux-1024", "Flux, 1024²", *_FLUX, flux(1024), (1, 24, 4608, 128), 57, depths=_FLUX_DEPTHS),
    _diffusers("flux-512", "Flux, 512²", *_FLUX, flux(512), (1, 24, 1536, 128), 57, depths=_FLUX_DEPTHS),
    _diffusers("sd3.5-large", "SD 3.5 large, 1024²", "SD3Transformer2DModel", SD_3_5_LARGE, sd3, (2, 38, 4429, 64), 38),
    _diffusers("sdxl", "SDXL, 1024²", "UNet2DConditionModel", SDXL, sdxl, (2, 10, 4096, 64), 70, depths=()),
    _diffusers(
        "qwen-image",
        "Qwen-Image, 1024²",
        "QwenImageTransformer2DModel",
        QWEN_IMAGE,
        qwen_image,
        (1, 24, 4224, 128),
        60,
    ),
    _llama("llama-3-prefill-1k", "Llama 3 8B, prefill of 1k", 1024),
    _llama("llama-3-prefill-8k", "Llama 3 8B, prefill of 8k", 8192),
    _llama("llama-3-prefill-32k", "Llama 3 8B, prefill of 32k", 32768, layers=8),
    _llama(
        "llama-3-decode-8k",
        "Llama 3 8B, one token after 8k",
        8193,
        kind="decode",
        cache_tokens=8192,
        inputs=text(1, LLAMA_3_8B["vocab_size"]),
    ),
    _diffusers(
        "cogvideox-2b-training",
        "CogVideoX-2B, training with checkpointing",
        *_COGVIDEOX_2B,
        cogvideox(1),
        (1, 30, 17776, 64),
        30,
        layers=5,
        kind="train",
        checkpointing=True,
    ),
    _llama(
        "llama-3-training-8k",
        "Llama 3 8B, training on 8k without its head",
        8192,
        class_name="LlamaModel",
        layers=8,
        kind="train",
        inputs=token_batch(8192, LLAMA_3_8B["vocab_size"]),
    ),
)
