"""Registers the kernels of every backend, in order of preference; `sage_hf` imports names of backends from here."""

from __future__ import annotations

from .cuda.registration import CONSUMER_BLACKWELL, enforce_nvfp4_forward
from .cuda.registration import register_kernels as register_cuda
from .external.flash_attention3 import register_kernels as register_flash3
from .reference.registration import register_kernels as register_reference
from .triton.registration import register_kernels as register_triton
from .triton.registration import router_kernels

__all__ = ["CONSUMER_BLACKWELL", "enforce_nvfp4_forward", "router_kernels"]

register_cuda()
register_triton()
register_reference()
register_flash3()
