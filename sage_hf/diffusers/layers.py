"""The computation that an attention module performs, recognised by its original processor.

A module's features do not distinguish families (CogVideoX, CogView4 and HunyuanVideo have the same); its processor
does.
"""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from huggingface_hub.utils import logging

from sage_hf import record
from sage_hf.diffusers.backends import backend_member, choosing
from sage_hf.diffusers.bridge import (
    DISPATCH,
    Overlay,
    fixed_backends,
    passes_parallel_config,
    set_parallel_config,
    takes_backend,
    with_backend,
)
from sage_hf.diffusers.errors import FixedBackendError, UnsupportedAttentionError
from sage_hf.diffusers.families import ADAPTERS, FAMILIES
from sage_hf.diffusers.fused_norms import agrees, prepare_fused_norms
from sage_hf.diffusers.shards import SplitTokens, across_processes, split_of
from sage_hf.diffusers.vsa import NO_VSA_SHARDS, VSAProcessor
from sage_hf.identity import name_in_diffusers
from sage_hf.sources import source_of
from sage_hf.sparse.layer import SparseLayer, log_dense_graphs, running
from sage_kernels.runtime import dynamo

logger = logging.get_logger(__name__)


class Sage(Protocol):
    """Interface of the processor that runs a layer."""

    fallback: str | None
    sparse: SparseLayer | None

    def recipe_of(self, attn: torch.nn.Module) -> str:
        """Return the recipe for an attention module in its current mode, training or evaluation."""

    def attend(self, attn: torch.nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Attend with the module's recipe, on (B, H, N, D) tensors."""


# diffusers' modules drop keyword arguments that `inspect.signature(processor.__call__)` does not name. Each family
# passes different keywords, so the signature of our processors names the parameters of every family recognised so far.
_shown = dict.fromkeys(("self", "attn"))
_shown_by: list[Callable[..., Any]] = []


def show_parameters_of_families(call: Callable[..., Any]) -> Callable[..., Any]:
    """Make the signature of `call`, a processor's `__call__`, name the parameters of every family recognised so far."""
    _shown_by.append(call)
    _write_signatures()
    return call


def _write_signatures() -> None:
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in _shown]
    for call in _shown_by:
        vars(call)["__signature__"] = inspect.Signature(parameters)


class Layer:
    """Computation of an attention module: layer(sage, attn, ...) runs it with the recipe of the processor `sage`.

    Attributes:
        original: the processor of diffusers for the same computation.
        parameters: names of the arguments of the computation.
        holds_weights: whether `original` is a module (an IP-Adapter), which has to stay in the model.
        heads_first: norms get (batch, heads, tokens, head_dim), not (batch, tokens, heads, head_dim).
    """

    heads_first = False

    def __init__(self, original: Any, parameters: Iterable[str]) -> None:
        self.original = original
        self.parameters = tuple(parameters)
        self._names = frozenset(self.parameters)
        self.holds_weights = isinstance(original, torch.nn.Module)
        self._show_parameters()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._show_parameters()

    def _show_parameters(self) -> None:
        if not self.holds_weights and not _shown.keys() >= set(self.parameters):
            _shown.update(dict.fromkeys(self.parameters))
            _write_signatures()

    def expected(self, attn: torch.nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Leave out the keywords of a call that the module would not have passed to the original processor.

        diffusers' modules drop keywords that their processor's signature does not name, and our signature names more.
        """
        if kwargs.keys() <= self._names:
            return kwargs
        module_class: Any = type(attn)
        ignored = [name for name in kwargs if name not in self._names and drops(module_class, name)]
        if ignored:
            log_ignored_keywords(type(self.original).__name__, *ignored)
        return {name: value for name, value in kwargs.items() if name not in ignored}

    def check_parallel(self) -> None:
        """Raise UnsupportedAttentionError if the layer would see only one process's tokens in context parallelism."""
        raise UnsupportedAttentionError(
            f"context parallelism is enabled, but {type(self.original).__name__} does not support it, and would see "
            "only the tokens in its process: run this model without enable_parallelism()"
        )

    def check_split(self) -> None:
        """Raise UnsupportedAttentionError if the layer would see only one process's tokens under our cp_plan."""

    def parallelize(self, config: Any) -> None:
        """Attend across processes as diffusers' ParallelConfig says; so does the original processor, once it is put
        back.

        Raises:
            UnsupportedAttentionError: see `check_parallel`.
        """
        self.check_parallel()
        set_parallel_config(self.original, config)

    def _with_own_norms(
        self, sage: Sage, attn: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], run: Callable[..., Any]
    ) -> Any:
        """Return `run(attn, *args, **kwargs)`; if possible, a kernel computes QK-norm and RoPE in it."""
        if torch.compiler.is_compiling() or sage.recipe_of(attn) == "exact":
            return run(attn, *args, **kwargs)
        fused = prepare_fused_norms(self.original, attn, self.parameters[1:], args, kwargs, self.heads_first)
        if fused is None:
            return run(attn, *args, **kwargs)
        run_original = partial(self._run_original, sage, attn, *args, **kwargs)
        run_fused = partial(run, Overlay(attn, fused.norms), **fused.arguments)
        if not agrees(fused, attn, run_original, run_fused):
            return run(attn, *args, **kwargs)
        record.with_qk_norm_rope.add(attn)
        return run_fused()

    def _run_original(self, sage: Sage, attn: Any, *args: Any, **kwargs: Any) -> Any:
        """Run diffusers' processor, with our attention if the processor leaves the choice of backend to diffusers."""
        with choosing(backend_member(sage.recipe_of(attn), sage.fallback)):
            return type(self.original).__call__(self.original, attn, *args, **kwargs)

    def __call__(self, sage: Sage, attn: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


@dynamo.assume_constant_result
@functools.cache
def drops(module_class: Any, keyword: str) -> bool:
    """Check whether modules of a class drop a keyword that their processor's signature does not name."""
    code = inspect.unwrap(module_class.forward).__code__
    return "signature" in code.co_names and keyword not in code.co_varnames[: code.co_argcount]


@dynamo.assume_constant_result
@functools.cache
def log_ignored_keywords(family: str, *names: str) -> None:
    """Log once that a processor does not get these keywords; diffusers logs it at each call."""
    logger.warning(f"attention keywords {list(names)} are not expected by {family} and will be ignored")


class ExplicitLayer(Layer):
    """Layer that attends by one of our own functions."""

    heads_first = True

    def __init__(self, original: Any, function: Callable[..., Any]) -> None:
        names = [
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind != parameter.KEYWORD_ONLY
        ]
        super().__init__(original, names[1:])
        self.function = function
        self._known_call: Any = type(original).__call__

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_known_call": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        original: Any = type(self.original)
        self._known_call = original.__call__ if name_in_diffusers(original, "__call__") else None

    def _is_patched(self) -> bool:
        """Check whether the processor's class has other code than the code that our function repeats."""
        return type(self.original).__call__ is not self._known_call

    def _run_patched(self, attn: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the code that the processor's class has now, with its own attention."""
        patched = f"{type(self.original).__name__}.__call__, which was patched since sage_hf replaced it,"
        if split_of(attn) is not None:
            raise UnsupportedAttentionError(f"{patched} sees only the tokens in its process")
        if not torch.compiler.is_compiling():
            record.note_bypassed(f"{patched} ran as it is")
        return type(self.original).__call__(self.original, attn, *args, **kwargs)

    def __call__(self, sage: Sage, attn: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._is_patched():
            return self._run_patched(attn, *args, **kwargs)
        attend = across_processes(attn, partial(sage.attend, attn), _first_of(args, kwargs))
        return self._with_own_norms(sage, attn, args, kwargs, partial(self.function, attend))


class AdapterLayer(ExplicitLayer):
    """Layer that attends with an IP-Adapter, by one of our own functions and with the adapter's weights."""

    def __call__(self, sage: Sage, attn: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._is_patched():
            return self._run_patched(attn, *args, **kwargs)
        attend = across_processes(attn, partial(sage.attend, attn), _first_of(args, kwargs))
        return self.function(attend, attn, self.original, *args, **kwargs)


class DispatchLayer(Layer):
    """Layer that attends by the family's own processor, which calls one of our backends through diffusers' dispatch.

    Attributes:
        leaves_choice: the processor calls attention without naming a backend, at least once.
        calls_super: the processor calls `super()`, which the compiler can follow only in the processor itself.
    """

    def __init__(self, original: Any) -> None:
        super().__init__(original, inspect.signature(original.__call__).parameters)
        self.leaves_choice = _leaves_choice(type(original).__call__)
        self.calls_super = "__class__" in inspect.unwrap(type(original).__call__).__code__.co_freevars

    def check_parallel(self) -> None:
        """Raise UnsupportedAttentionError if the family's processor does not pass the configuration to the dispatch."""
        if not passes_parallel_config(self.original):
            super().check_parallel()

    check_split = check_parallel

    def __call__(self, sage: Sage, attn: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self._with_own_norms(sage, attn, args, kwargs, partial(self._run_original, sage))

    def _run_original(self, sage: Sage, attn: Any, *args: Any, **kwargs: Any) -> Any:
        backend = backend_member(sage.recipe_of(attn), sage.fallback)
        split = split_of(attn)
        original = with_backend(self.original, backend, split and split.in_call(_first_of(args, kwargs)))
        run = partial(type(self.original).__call__, original, attn, *args, **kwargs)
        if torch.compiler.is_compiling():
            if sage.sparse is not None:
                log_dense_graphs()
            if self.calls_super:
                return self._run_compiled_as_it_is(split, attn, *args, **kwargs)
            if self.leaves_choice:
                log_graphs_without_recipe(f"{type(self.original).__name__} names no attention backend in some calls")
            return run()
        with running(sage.sparse), choosing(backend) as choice:
            output = run()
        if not choice.reached:
            record.note_bypassed(f"{type(self.original).__name__} attended by no backend that sage_hf can choose")
        return output

    def _run_compiled_as_it_is(self, split: SplitTokens | None, attn: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the processor of diffusers, with the attention that diffusers chooses."""
        family = type(self.original).__name__
        if split is not None:
            raise UnsupportedAttentionError(
                f"{family} calls super(), and a compiled graph of it sees only the tokens in its process: run this "
                "model without torch.compile, or without enable_parallelism()"
            )
        log_graphs_without_recipe(f"{family} calls super() in some calls")
        return type(self.original).__call__(self.original, attn, *args, **kwargs)


class VSALayer(Layer):
    """Layer that attends by VSA, whose fine stage runs the recipe."""

    def __init__(self, original: VSAProcessor) -> None:
        super().__init__(original, inspect.signature(original.__call__).parameters)

    def check_parallel(self) -> None:
        """Raise UnsupportedAttentionError: tiles are chosen among all tokens."""
        raise UnsupportedAttentionError(NO_VSA_SHARDS)

    def __call__(self, sage: Sage, attn: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.original.attend(attn, *args, **kwargs, recipe=sage.recipe_of(attn), fallback=sage.fallback)


def _first_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the hidden states from the arguments of diffusers' processors."""
    return args[0] if args else kwargs["hidden_states"]


def calls_dispatch(processor: Any) -> bool:
    """Check whether a processor of diffusers attends through `dispatch_attention_fn`."""
    code = getattr(type(processor).__call__, "__code__", None)
    return code is not None and DISPATCH in code.co_names


@functools.cache
def _leaves_choice(call: Callable[..., Any]) -> bool:
    """Check whether a processor's code calls diffusers' dispatch without a backend, or with None."""
    tree = source_of(call)
    if tree is None:
        return False
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_name(node.func)]
    backends = [
        {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}.get("backend", "None") for node in calls
    ]
    return "None" in backends


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == DISPATCH


@dynamo.assume_constant_result
@functools.cache
def log_graphs_without_recipe(processors: str) -> None:
    """Log once that compiled processors attend as before; the text `processors` names their class and the reason."""
    logger.warning(
        f"{processors}, which attend as before inside a compiled graph: call the model within diffusers' "
        '`with attention_backend("sage2"):` to run them in low bits'
    )


def fixed_backend(processor: Any) -> str:
    """Return the reason why a processor attends only by a backend of its own choice; "" if it accepts other backends.

    Processors that need FlexAttention's block masks list the backends that they run with, or name them in their code.
    """
    if not calls_dispatch(processor):
        return ""
    family = type(processor).__name__
    if supported := fixed_backends(processor):
        return f"{family} works with the attention backends {', '.join(supported)} alone"
    code = type(processor).__call__.__code__
    if "AttentionBackendName" in code.co_names or "flex" in code.co_consts:
        return f"{family} chooses its attention backend itself"
    return ""


def recognize(module: torch.nn.Module, original: Any) -> Layer:
    """Return the computation that `original`, the processor of `module`, performs.

    Raises:
        FixedBackendError: the processor attends by a backend of its own choice.
        UnsupportedAttentionError: low-bit attention cannot serve it; the message names module and processor.
    """
    if original is None:
        raise UnsupportedAttentionError(
            f"{type(module).__name__} has no processor yet to take over from: construct the module with its "
            "own processor, then set this one"
        )
    if isinstance(original, VSAProcessor):
        return VSALayer(original)
    if reason := fixed_backend(original):
        raise FixedBackendError(reason)
    if calls_dispatch(original) and takes_backend(original):
        return DispatchLayer(original)
    family = name_in_diffusers(type(original), "__call__")
    if family in FAMILIES:
        return ExplicitLayer(original, FAMILIES[family])
    if calls_dispatch(original):
        return DispatchLayer(original)
    if family in ADAPTERS:
        return AdapterLayer(original, ADAPTERS[family])
    if isinstance(original, torch.nn.Module):
        reason = (
            "replacing it would drop the weights that it holds, and it is none of the IP-Adapters that can be "
            f"run in low bits ({', '.join(ADAPTERS)} and those that let their attention backend be chosen)"
        )
    else:
        reason = (
            f"known are {', '.join(FAMILIES)}, and every processor that lets its attention backend be chosen "
            "(linear attention has no softmax to quantise)"
        )
    raise UnsupportedAttentionError(
        f"{type(module).__name__} with processor {type(original).__name__} is not supported: {reason}. "
        "Leave this layer as it is: give set_attn_processor a dictionary that holds the layer's present processor."
    )
