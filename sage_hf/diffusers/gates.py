"""Gates of VSA in diffusers' Wan transformers: `enable_vsa` adds them, and reads them from checkpoints."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import logging
from safetensors import safe_open
from torch import nn

from sage_hf.changes import Change, Undo, changes_of, inner
from sage_hf.diffusers.bridge import is_offloaded_in_groups, parallel_config_of
from sage_hf.diffusers.errors import UnsupportedAttentionError
from sage_hf.diffusers.parallel import splits_tokens
from sage_hf.diffusers.processor import layer_of, sage_of
from sage_hf.diffusers.vsa import GATE, NO_VSA_SHARDS, VSAModel, VSAProcessor, mark_rotary
from sage_hf.identity import name_in_diffusers
from sage_hf.targets import DENOISERS

logger = logging.get_logger(__name__)

MODELS = ("WanTransformer3DModel",)
_KEY = re.compile(rf"blocks\.\d+\.{GATE}\.(weight|bias)")


class VSAHandle:
    """Handle of `enable_vsa`.

    Attributes:
        loaded: number of blocks whose gate was read from a checkpoint; the other gates were 0.
    """

    def __init__(self, shared: VSAModel, changes: list[_VSA]) -> None:
        self._shared = shared
        self._changes = changes
        self.loaded = sum(change.loaded for change in changes)

    @property
    def sparsity(self) -> float:
        """Return the share of tiles that the fine stage leaves out; it may be assigned between calls."""
        return self._shared.sparsity

    @sparsity.setter
    def sparsity(self, sparsity: float) -> None:
        self._shared.sparsity = _checked(sparsity)

    def restore(self) -> None:
        """Put back the attention from before, and remove the gates; undo a later `sage_hf.apply` first.

        If another `enable_vsa` has replaced this one, the model is not changed. A second call does nothing.
        """
        for change in self._changes:
            change.undo()


class _VSA(Change):
    """Change that `enable_vsa` made to a model.

    Attributes:
        loaded: number of blocks whose gate was read from a checkpoint.
    """

    def __init__(self, model: nn.Module, undo: Undo, loaded: int) -> None:
        super().__init__(model, undo)
        self.loaded = loaded


def enable_vsa(pipe_or_model: object, sparsity: float = 0.8, *, checkpoint: str | Path | None = None) -> VSAHandle:
    """Give the self-attention of Wan transformers VSA (arXiv 2505.13389), with a gate in each block.

    Each block gets `to_gate_compress`, a Linear(dim, dim), as in FastVideo's checkpoints: `save_pretrained` keeps it,
    but `from_pretrained` ignores weights that the class does not know, so the gates are read again here. A gate that no
    checkpoint has is 0: the model then attends to the chosen tiles alone, until it is trained. The fine stage is exact;
    `sage_hf.apply(pipe_or_model, "sage2")` afterwards runs it, and cross-attention, in low bits. A second `enable_vsa`
    replaces the first, undoes such an `apply`, and keeps the gates unless it names a checkpoint.

    Args:
        pipe_or_model: a WanTransformer3DModel, or a pipeline with one or two.
        sparsity: share of the tiles that the fine stage leaves out, in [0, 1).
        checkpoint: the folder, safetensors file or Hub repository that has the gates; in a pipeline's folder, each
            denoiser's subfolder. None: the place from which `from_pretrained` read the model, if it has gates.

    Returns:
        A handle: `restore()` undoes the change, `loaded` counts the gates that were read.

    Raises:
        TypeError: pipe_or_model is neither a pipeline with a denoiser nor a model.
        ValueError: sparsity is not in [0, 1), or the checkpoint has no gates, lacks some, or has gates of another size.
        UnsupportedAttentionError: the model is no Wan transformer, has gates that are not ours, has processors that
            replaced its own, runs under context parallelism, or has weights that accelerate offloads one by one or
            diffusers offloads in groups.
    """
    models = _denoisers(pipe_or_model)
    for model in models.values():
        _check(model, makes_gates=checkpoint is not None or _vsa_of(model) is None)
    shared = VSAModel(_checked(sparsity))
    read = {
        name: {} if checkpoint is None and _vsa_of(model) else _gates_of(model, name, checkpoint)
        for name, model in models.items()
    }
    return VSAHandle(shared, [_enable(model, shared, read[name]) for name, model in models.items()])


def _enable(model: Any, shared: VSAModel, gates: dict[str, torch.Tensor]) -> _VSA:
    """Give one model VSA, with the gates that were read, or else with its existing gates, or else with gates of 0."""
    loaded, existing_gates = len(gates) // 2, [None] * len(model.blocks)
    if (earlier := _vsa_of(model)) is not None:
        if not gates:
            loaded, existing_gates = earlier.loaded, [getattr(block, GATE) for block in model.blocks]
        earlier.undo()
    undo: Undo = []
    change = _VSA(model, undo, loaded)
    for number, (block, gate) in enumerate(zip(model.blocks, existing_gates, strict=True)):
        key = f"blocks.{number}.{GATE}"
        weight, bias = gates.get(f"{key}.weight"), gates.get(f"{key}.bias")
        setattr(block, GATE, gate or _make_gate(block, model.dtype, weight, bias))
        undo.append(partial(delattr, block, GATE))
        undo.append(partial(_put_back, block.attn1, block.attn1.processor))
        block.attn1.set_processor(VSAProcessor(block, shared))
    undo.append(model.register_forward_pre_hook(shared.follow, with_kwargs=True).remove)
    undo.append(model.rope.register_forward_hook(partial(mark_rotary, model)).remove)
    return change


def _put_back(module: Any, original: Any) -> None:
    """Put back a processor of diffusers in place of VSA's, even if a processor of ours was set over VSA's by hand."""
    if sage_of(module) is not None:
        module.set_processor(layer_of(module).original)
    module.set_processor(original)


def _vsa_of(model: nn.Module) -> _VSA | None:
    """Return the change of an `enable_vsa` that is in force."""
    return next((change for change in changes_of(model) if isinstance(change, _VSA)), None)


def read_gates(source: Path) -> dict[str, torch.Tensor]:
    """Return the gates' weights and biases by key, from a safetensors file or from all files of a folder."""
    files = sorted(source.glob("*.safetensors"), key=lambda path: len(path.name)) if source.is_dir() else [source]
    gates: dict[str, torch.Tensor] = {}
    for path in files:  # of two variants of a file, the shorter name wins
        with safe_open(path, "pt") as file:
            keys = [key for key in list(file.keys()) if _KEY.fullmatch(key) and key not in gates]
            gates |= {key: file.get_tensor(key) for key in keys}
    return gates


def _denoisers(pipe_or_model: object) -> dict[str, Any]:
    """Return the denoisers by their names in the pipeline; a model alone has the name "transformer"."""
    if isinstance(pipe_or_model, nn.Module):
        return {DENOISERS[0]: inner(pipe_or_model)}
    parts = {name: getattr(pipe_or_model, name, None) for name in DENOISERS}
    models = {name: inner(part) for name, part in parts.items() if isinstance(part, nn.Module)}
    if not models:
        raise TypeError(f"expected a pipeline with a denoiser, or a model; got {type(pipe_or_model).__name__}")
    return models


def _check(model: Any, makes_gates: bool) -> None:
    if name_in_diffusers(type(model)) not in MODELS:
        raise UnsupportedAttentionError(f"VSA is for {', '.join(MODELS)}; got {type(model).__name__}")
    if splits_tokens(parallel_config_of(model)):
        raise UnsupportedAttentionError(f"{type(model).__name__}: {NO_VSA_SHARDS}")
    if any(block.attn1.to_q.weight.is_meta and hasattr(block.attn1.to_q, "_hf_hook") for block in model.blocks):
        raise UnsupportedAttentionError(
            "accelerate keeps the weights elsewhere until they are used, and a gate made now would be left out: "
            "call enable_vsa before enable_sequential_cpu_offload()"
        )
    if makes_gates and is_offloaded_in_groups(model):
        raise UnsupportedAttentionError(
            "diffusers moves the weights that the model had, and a gate made now would be left out: call enable_vsa "
            "before enable_group_offload()"
        )
    if _vsa_of(model) is not None:
        return
    for block in model.blocks:
        if hasattr(block, GATE):
            raise UnsupportedAttentionError(f"the blocks of this model have a {GATE} already, which is not ours")
        processor = type(block.attn1.processor)
        if name_in_diffusers(processor, "__call__") != "WanAttnProcessor":
            raise UnsupportedAttentionError(
                f"self-attention has {processor.__name__}, which is not diffusers' WanAttnProcessor: call enable_vsa "
                "first, and then set others"
            )


def _checked(sparsity: float) -> float:
    if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float)) or not 0 <= sparsity < 1:
        raise ValueError(f"sparsity must be in [0, 1); got {sparsity!r}")
    return sparsity


def _gates_of(model: Any, name: str, checkpoint: str | Path | None) -> dict[str, torch.Tensor]:
    """Return a model's gates from the checkpoint, or from the place that the model came from; {} if it has none.

    Raises:
        ValueError: the given checkpoint has no gates, or a checkpoint's gates do not fit this model.
    """
    origin = model.config.get("_name_or_path") if checkpoint is None else checkpoint
    gates = next(
        (tensors for source in _sources(origin, name, checkpoint is None) if (tensors := read_gates(source))), {}
    )
    if not gates and checkpoint is not None:
        raise ValueError(f"{checkpoint} has no keys blocks.N.{GATE}.weight in safetensors files")
    if not gates:
        return {}
    for number, block in enumerate(model.blocks):
        dim = block.attn1.inner_dim
        for part, shape in (("weight", (dim, dim)), ("bias", (dim,))):
            key = f"blocks.{number}.{GATE}.{part}"
            if key not in gates:
                raise ValueError(f"{origin} has gates, but not {key}")
            if tuple(gates[key].shape) != shape:
                raise ValueError(f"{origin}: {key} has shape {tuple(gates[key].shape)}; this model's is {shape}")
    logger.info(f"read {len(model.blocks)} gates from {origin}")
    return {key: gates[key] for key in gates if int(key.split(".")[1]) < len(model.blocks)}


def _sources(origin: str | Path | None, name: str, local: bool) -> Iterator[Path]:
    """Yield the folders, or the file, that may hold a denoiser's gates: its subfolder first."""
    if not origin:
        return
    path = Path(origin)
    if not path.exists():
        patterns = [f"{name}/*.safetensors", "diffusion_pytorch_model*.safetensors"]
        try:
            path = Path(snapshot_download(str(origin), allow_patterns=patterns, local_files_only=local))
        except (LocalEntryNotFoundError, ValueError):
            if local:
                return
            raise
    if (path / name).is_dir():
        yield path / name
    yield path


def _make_gate(block: Any, computed: torch.dtype, weight: torch.Tensor | None, bias: torch.Tensor | None) -> nn.Linear:
    """Return a gate like the block's projections; 0 without weights.

    Its dtype is the projections' dtype; if they are stored in fewer bits, the dtype in which the model computes.
    """
    query = block.attn1.to_q.weight
    dtype = query.dtype if query.is_floating_point() and query.dtype.itemsize > 1 else computed
    gate = nn.Linear(block.attn1.inner_dim, block.attn1.inner_dim, device=query.device, dtype=dtype)
    with torch.no_grad():
        for parameter, values in ((gate.weight, weight), (gate.bias, bias)):
            if values is None:
                parameter.zero_()
            else:
                parameter.copy_(values)
    return gate.train(block.training)
