"""Processors that keep an IP-Adapter's place in a model while a SageAttnProcessor attends for it.

An IP-Adapter's processor is a module whose weights must stay in the model, and diffusers checks its class.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from sage_hf.diffusers.bridge import BackendProcessor, parallel_config_of, set_parallel_config


class ServedAdapter(BackendProcessor):
    """Base of IP-Adapter processors whose attention a SageAttnProcessor computes; see `serve`.

    All other attributes are the adapter's, in one shared dictionary: reading or assigning an attribute here reads or
    assigns it there.

    Attributes:
        adapter: the processor of diffusers that this object replaces, with the same weights and scale.
        sage: the SageAttnProcessor that computes the attention.
    """

    __slots__ = ("adapter", "sage")

    adapter: torch.nn.Module
    sage: Any

    @property
    def parallel_config(self) -> Any:
        """Return the adapter's ParallelConfig, which `enable_parallelism` assigns."""
        return parallel_config_of(self.adapter)

    @parallel_config.setter
    def parallel_config(self, config: Any) -> None:
        set_parallel_config(self.adapter, config)

    @property
    def attention_backend(self) -> Any:
        """Return the backend of the processor that computes attention."""
        return self.sage.attention_backend

    def __reduce__(self) -> tuple[Any, ...]:
        return serve, (self.adapter, self.sage)


@functools.cache
def _served_class(family: Any) -> Any:
    @functools.wraps(family.__call__)  # diffusers' modules read the signature
    def call(self: ServedAdapter, attn: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.sage(attn, *args, **kwargs)

    return type(f"Served{family.__name__}", (ServedAdapter, family), {"__call__": call})


def serve(adapter: Any, sage: Any) -> Any:
    """Return a processor of the adapter's class that shares its attributes and whose attention `sage` computes."""
    family: Any = type(adapter)
    served_class = _served_class(family)
    served = served_class.__new__(served_class)
    for name, value in {"__dict__": vars(adapter), "adapter": adapter, "sage": sage}.items():
        object.__setattr__(served, name, value)  # not as submodules: the weights are submodules already
    return served
