"""Registers the kernels of every backend, in order of preference."""

from __future__ import annotations

from .cuda.registration import register_kernels as register_cuda
from .external.flash_attention3 import register_kernels as register_flash3
from .reference.registration import register_kernels as register_reference
from .triton.registration import register_kernels as register_triton

register_cuda()
register_triton()
register_reference()
register_flash3()
