"""transformers' cache with low-bit keys and values, and `generate` with such a cache."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, StaticCache, StaticLayer

from sage_hf import kv_record
from sage_hf.transformers.kv_layer import QuantizedLayer, warn_once
from sage_hf.transformers.static_kv_layer import StaticQuantizedLayer
from sage_kernels.spec.kv_cache import STRIP
from sage_kernels.spec.kv_format import get_format
from sage_kernels.spec.layout import round_up


class QuantizedKVCache(Cache):
    """Cache of low-bit keys and values for `generate`, and for a model's `forward`.

    With our attention (`attn_implementation="sage2"` and similar names, or `sage_hf.apply`), decoding reads the codes;
    with other attention, K and V are dequantised at each step, with one warning. Some layers keep transformers' own
    16-bit layers, with a warning: layers with a sliding window, with another state than K and V, with a head_dim
    outside 64…128, or with another head_dim for V. Attention within a prompt uses its 16-bit K and V.

    A copy by `copy.deepcopy` is an independent cache of the same model, so a prompt can be processed once for many
    answers. `pickle` and `torch.save` include the tokens.

    Args:
        config: the model's config, `model.config`.
        format: the name of a format in `sage_kernels.spec.kv_format.FORMATS`.
        max_cache_len: capacity in tokens, rounded up to a multiple of 512, for static shapes: `generate` compiles
            decoding as it does with transformers' `StaticCache`. None: the cache grows with its tokens.
        offloading: not supported.

    With static shapes, memory is taken at once, and decoding from whole K and V is refused: attention must be ours,
    without a keyword, mask or bias that the codes cannot serve. If there is no room for a token, ValueError is raised;
    in compiled steps on a GPU, for which the host does not wait, the result is NaN instead.

    Raises:
        ValueError: the format is unknown, max_cache_len is below 1, offloading is asked for, the model is an
            encoder-decoder, its layers share keys and values, or it reads the cache itself (Mllama).

    Example:
        >>> cache = sage_hf.QuantizedKVCache(model.config, "int4")
        >>> model.generate(**inputs, cache=cache)  # past_key_values=cache before transformers 5.24
        >>> cache = sage_hf.QuantizedKVCache(model.config, "int4", max_cache_len=8192)
        >>> model.generate(**inputs, cache=cache)  # compiles decoding; transformers 5.24
    """

    def __init__(
        self, config: Any, format: str = "int4", *, max_cache_len: int | None = None, offloading: bool = False
    ) -> None:
        get_format(format)
        if max_cache_len is not None and max_cache_len < 1:
            raise ValueError(f"max_cache_len must be 1 token at least, got {max_cache_len}")
        if offloading:
            raise ValueError("a quantised KV cache is not offloaded: it is kept small so that it fits on the GPU")
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError(f"{type(config).__name__}: the KV cache of an encoder-decoder model is not quantised")
        config = config.get_text_config(decoder=True)
        shared = "reuse" in (getattr(config, "kv_sharing_modes", None) or ())
        if shared or getattr(config, "num_kv_shared_layers", None):
            raise ValueError(f"{type(config).__name__}: layers share keys and values, which are not quantised")
        if getattr(config, "cross_attention_layers", None):
            raise ValueError(f"{type(config).__name__}: the model itself reads cached K and V of cross-attention")
        self.record = kv_record.KVRecord(format)
        self.is_static = max_cache_len is not None
        layers: list[Any] = list(
            DynamicCache(config=config).layers
            if max_cache_len is None
            else StaticCache(config, round_up(max_cache_len, STRIP)).layers
        )
        latest: QuantizedLayer | None = None
        for number, layer in enumerate(layers):
            if type(layer) is DynamicLayer:
                layers[number] = latest = QuantizedLayer(config, self.record, number, latest)
            elif type(layer) is StaticLayer:
                layers[number] = latest = StaticQuantizedLayer(config, self.record, number, latest, layer, layers)
            else:
                self.record.exact_layers.setdefault(_kind_of(layer), []).append(number)
        super().__init__(layers=layers)
        for reason, numbers in self.record.exact_layers.items():
            warn_once(f"KV cache: layers {', '.join(map(str, numbers))} stay in 16 bits: {reason}")

    @property
    def is_compileable(self) -> bool:
        """Return whether all layers have static shapes, so that `generate` compiles decoding."""
        return self.is_static and super().is_compileable

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest tokens: a negative number is the number to remove, a positive number the number to keep.

        Raises:
            RuntimeError: a layer of transformers has dropped tokens that would be needed again, or an exception ended
                the latest step. The cache is not changed.
        """
        if tokens_to_remove > 0:
            tokens_to_remove -= int(self.get_seq_length())
            if tokens_to_remove >= 0:
                return
        quantized = [layer for layer in self.layers if isinstance(layer, QuantizedLayer)]
        plain_layers = [(layer, vars(layer).copy()) for layer in self.layers if not isinstance(layer, QuantizedLayer)]
        for layer in quantized:
            layer.settle()
        if self.is_static and not all(getattr(layer, "is_croppable", True) for layer, _ in plain_layers):
            raise RuntimeError("a layer with a sliding window does not track past states, and cannot be cropped")
        try:
            for layer, _ in plain_layers:
                layer.crop(tokens_to_remove)
        except Exception:  # undo for any error, and raise it again
            for layer, before in plain_layers:
                vars(layer).update(before)
            raise
        for layer in quantized:
            layer.crop(tokens_to_remove)


def cache_keyword(model: Any) -> str:
    """Return the keyword by which a model's `forward` and `generate` take a cache; it depends on transformers'
    version."""
    return "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"


class GenerateWithCache:
    """`generate` of a model, with a quantised cache unless the caller passes a cache or asks for another kind.

    Attributes:
        before: the function that the user had assigned as the model's `generate`; None: the class's method runs.
    """

    def __init__(self, model: Any, format: str) -> None:
        QuantizedKVCache(model.config, format)
        self.model, self.format, self.longest = model, format, 0
        self.before: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate; arguments as in the model's class.

        Raises:
            ValueError: `cache_implementation` names another cache than "static", or it is "static" and no argument
                gives the cache's length.
        """
        model = self.model
        generation_config = kwargs.get("generation_config") or next(iter(args[1:2]), None)

        def setting(name: str) -> Any:
            values = (
                kwargs.get(name),
                getattr(generation_config, name, None),
                getattr(model.generation_config, name, None),
            )
            return next((value for value in values if value is not None), None)

        has_cache = any(kwargs.get(key) is not None for key in ("cache", "past_key_values"))
        if not has_cache and setting("use_cache") is not False:
            implementation, length = setting("cache_implementation"), None
            if implementation == "static":
                length = self._static_length(args, kwargs, setting)
                kwargs["cache_implementation"] = None  # overrides the configs, which then name no cache
            elif implementation not in (None, "hybrid"):  # "hybrid", of older files, is transformers 5's default cache
                raise ValueError(
                    f"cache_implementation={implementation!r} and kv_cache={self.format!r} name two caches; the "
                    'quantised one grows with its tokens, or has static shapes by cache_implementation="static", and '
                    "is not offloaded: leave cache_implementation out, or pass the other cache itself"
                )
            cache = QuantizedKVCache(model.config, self.format, max_cache_len=length)
            if getattr(generation_config, "is_assistant", False) and hasattr(cache, "activate_past_recording"):
                cache.activate_past_recording()  # as `generate` does for the caches of its assistants
            kwargs[cache_keyword(model)] = cache
        return type(model).generate(model, *args, **kwargs) if self.before is None else self.before(*args, **kwargs)

    def _static_length(self, args: Any, kwargs: dict[str, Any], setting: Callable[[str], Any]) -> int:
        """Return the number of tokens that a static cache must hold; never fewer than in earlier calls, whose compiled
        code then serves again.

        Raises:
            ValueError: neither `max_new_tokens`, `max_length` nor `max_cache_len` is set.
        """
        prompts = [*args[:1], *(kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds"))]
        tokens = sum(prompt.shape[1] for prompt in prompts if prompt is not None)
        max_new_tokens, max_length, cache_length = map(setting, ("max_new_tokens", "max_length", "max_cache_len"))
        if max_new_tokens is None and max_length is None and cache_length is None:
            raise ValueError(
                f'cache_implementation="static" and kv_cache={self.format!r}: set max_new_tokens or max_cache_len, or '
                f'pass cache=sage_hf.QuantizedKVCache(model.config, "{self.format}", max_cache_len=…)'
            )
        self.longest = max(
            self.longest, cache_length or 0, (max_length or 0) if max_new_tokens is None else tokens + max_new_tokens
        )
        return self.longest


def _kind_of(layer: Any) -> str:
    return "sliding window" if getattr(layer, "is_sliding", False) else f"{type(layer).__name__} of transformers"
