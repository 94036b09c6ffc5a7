"""Context-parallel plans (cp_plans) for models for which diffusers has none: they split tokens among processes.

The video or the image is split after its embedding, and put together after the output projection. The text is on every
process: it is short, its length need not be divisible, and its mask and its place in the sequence are as in one
process. diffusers' processors for these models attend only to their own process's tokens, so a cp_plan needs our
processors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from sage_hf.attributes import SPLIT
from sage_hf.changes import inner
from sage_hf.diffusers.bridge import Shards, cp_plan_of, gathered_tokens, parallel_config_of, split_tokens
from sage_hf.diffusers.errors import UnsupportedAttentionError, naming
from sage_hf.diffusers.parallel import check_layer
from sage_hf.diffusers.processor import attention_layers, bind, exchange_processor, layer_of, sage_of
from sage_hf.diffusers.shards import SplitTokens, split_of
from sage_hf.identity import name_in_diffusers

RESIDUALS = "block_controlnet_hidden_states"
"""Argument of SD 3's forward pass: the residuals that a ControlNet adds to the image tokens after each block."""


class SharedTextCPPlan(dict[str, Any]):
    """Context-parallel plan of sage-hf, in which all processes have the text."""


@dataclass(frozen=True)
class _Family:
    """Models of one class.

    Attributes:
        cp_plan: makes the context-parallel plan of a model.
        blocks: the modules in which tokens are split.
        text_first: whether attention gets [text, video], not [video, text].
    """

    cp_plan: Callable[[Any], dict[str, Any]]
    blocks: tuple[str, ...]
    text_first: bool = False


def _split_at_first_block() -> dict[str, Any]:
    return {"transformer_blocks.0": {"hidden_states": split_tokens(1, 3)}}


def _split_rope(dims: int) -> dict[str, Any]:
    return {"rope": {i: split_tokens(0, dims, output=True) for i in range(2)}}


def _cogvideox(model: Any) -> dict[str, Any]:
    rotates = model.config.use_rotary_positional_embeddings
    rope = {"": {"image_rotary_emb": [split_tokens(0, 2), split_tokens(0, 2)]}} if rotates else {}
    return rope | _split_at_first_block() | {"proj_out": gathered_tokens()}


def _hunyuan_video(model: Any) -> dict[str, Any]:
    if model.config.image_condition_type == "token_replace":
        raise UnsupportedAttentionError(
            "HunyuanVideo with image_condition_type='token_replace' treats the tokens of the first frame apart, which "
            "are all on one process in context parallelism: run this model without enable_parallelism()"
        )
    return _split_rope(2) | _split_at_first_block() | {"proj_out": gathered_tokens()}


def _mochi(model: Any) -> dict[str, Any]:
    return _split_rope(3) | _split_at_first_block() | {"proj_out": gathered_tokens()}


def _sd3(model: Any) -> dict[str, Any]:
    # A guider may skip the first block.
    return {"pos_embed": {0: split_tokens(1, 3, output=True)}, "proj_out": gathered_tokens()}


FAMILIES = {
    "CogVideoXTransformer3DModel": _Family(_cogvideox, ("transformer_blocks",), text_first=True),
    "HunyuanVideoTransformer3DModel": _Family(_hunyuan_video, ("transformer_blocks", "single_transformer_blocks")),
    "MochiTransformer3DModel": _Family(_mochi, ("transformer_blocks",)),
    "SD3Transformer2DModel": _Family(_sd3, ("transformer_blocks",)),
}
"""Class name in diffusers -> the split of its tokens."""


def context_parallel_plan(model: torch.nn.Module) -> dict[str, Any]:
    """Return the context-parallel plan by which `model.enable_parallelism(cp_plan=...)` splits a model's tokens.

    After `sage_hf.apply(model, ...)`, it need not be passed. In a model without our processors, our plan sets
    processors with the recipe "exact", which attend as diffusers does, across processes.

    Returns:
        diffusers' plan, `model._cp_plan`, if there is one; otherwise ours.

    Raises:
        UnsupportedAttentionError: neither diffusers nor sage_hf has a context-parallel plan for this model.

    Example:
        >>> cp_plan = sage_hf.context_parallel_plan(pipe.transformer)
        >>> pipe.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2), cp_plan=cp_plan)
    """
    model = inner(model)
    if (cp_plan := cp_plan_of(model)) is not None:
        return cp_plan
    if (family := _family_of(model)) is None:
        raise UnsupportedAttentionError(
            f"neither diffusers nor sage_hf has a context-parallel plan for {type(model).__name__}: pass "
            "cp_plan=..., or run this model without enable_parallelism()"
        )
    return SharedTextCPPlan(family.cp_plan(model))


def _family_of(model: torch.nn.Module) -> _Family | None:
    return FAMILIES.get(name_in_diffusers(type(model), "forward"))


def _split_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Return the attention modules whose tokens our cp_plan splits, by dotted name."""
    family = _family_of(model)
    blocks = () if family is None else family.blocks
    return {name: layer for name, layer in attention_layers(model).items() if name.split(".")[0] in blocks}


def check_split(model: torch.nn.Module, config: Any) -> None:
    """Raise UnsupportedAttentionError if attention cannot be split by our cp_plan; nothing is changed.

    Args:
        model: the model for which the cp_plan was made.
        config: diffusers' ParallelConfig or ContextParallelConfig.
    """
    layers = _split_layers(model)
    if not layers:
        raise UnsupportedAttentionError(f"this cp_plan was made for another model than {type(model).__name__}")
    check_layers(layers, config, by_our_cp_plan=True)


def check_layers(modules: dict[str, Any], config: Any, *, by_our_cp_plan: bool) -> None:
    """Raise UnsupportedAttentionError, with the layer's name, if a layer cannot attend across processes.

    Args:
        modules: attention modules by dotted name.
        config: diffusers' ParallelConfig or ContextParallelConfig.
        by_our_cp_plan: whether our cp_plan splits the tokens.
    """
    shards = Shards.of(config)
    for name, module in modules.items():
        sage = sage_of(module)
        is_sparse = sage is not None and sage.sparse is not None
        with naming(name):
            check_layer(module, layer_of(module), shards, by_our_cp_plan=by_our_cp_plan, is_sparse=is_sparse)


def split_attention(model: torch.nn.Module) -> None:
    """Let a model's layers attend across processes, after `enable_parallelism` has split its tokens by our cp_plan.

    Layers without our processor get a processor with the recipe "exact": now, and before each forward pass, for example
    after `restore` put diffusers' processors back.
    """
    config = parallel_config_of(model).context_parallel_config
    split = SplitTokens(Shards.of(config), FAMILIES[name_in_diffusers(type(model), "forward")].text_first)
    for module in (model, *_split_layers(model).values()):
        setattr(module, SPLIT, split)
    _attend_across_processes(model)
    model.register_forward_pre_hook(_before_forward, with_kwargs=True)


def _before_forward(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Replace other processors by ours, and split the residuals that a ControlNet adds to the tokens."""
    if not torch.compiler.is_compiling():
        _attend_across_processes(model)
    split, residuals = split_of(model), kwargs.get(RESIDUALS)
    if split is not None and residuals is not None:
        shards = split.shards
        kwargs[RESIDUALS] = [x.tensor_split(shards.ring * shards.ulysses, dim=1)[shards.part] for x in residuals]
    return args, kwargs


def _attend_across_processes(model: torch.nn.Module) -> None:
    for name, layer in _split_layers(model).items():
        if sage_of(layer) is None:
            exchange_processor(layer, _bind_exact(name, layer))


def _bind_exact(name: str, layer: torch.nn.Module) -> Any:
    """Return a processor that computes the same as diffusers' processor of a layer.

    Raises:
        UnsupportedAttentionError: diffusers' processor is not known, or would see only the tokens of one process; the
            message names the layer.
    """
    with naming(name):
        layer_of(layer).check_split()
        return bind(layer, "exact")
