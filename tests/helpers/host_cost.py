"""Count what a call does on its host: functions in Python, tensors that it allocates."""

import sys

import torch


def python_calls(function) -> list[str]:
    """The functions in Python of our own that a call runs."""
    names = []

    def trace(frame, event, argument):
        if event == "call" and any(package in frame.f_code.co_filename for package in ("sage_kernels", "sage_hf")):
            names.append(frame.f_code.co_qualname)

    sys.setprofile(trace)
    try:
        function()
    finally:
        sys.setprofile(None)
    return names


def allocations(function) -> int:
    """Count the tensors that a call allocates."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    return sum(event.count for event in profile.key_averages() if event.key in ("aten::empty", "aten::empty_strided"))
