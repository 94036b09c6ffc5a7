"""One of several processes that run an example on CPUs: `example_processes.py FAILING EXAMPLE ARGUMENTS...`.

The process whose number is FAILING raises an error in its second denoising step.
"""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any

import torch

from sage_hf import attention


def _fail_later() -> None:
    attend, calls = attention.kernels_attend, iter(range(10**9))

    def failing(*args: Any) -> Any:
        if next(calls) == 10:
            raise MemoryError("this process fails")
        return attend(*args)

    attention.kernels_attend = failing


if __name__ == "__main__":
    torch.accelerator.device_count = lambda: 1  # diffusers divides by it
    _, failing, *sys.argv = sys.argv
    if os.environ["RANK"] == failing:
        _fail_later()
    runpy.run_path(sys.argv[0], run_name="__main__")
