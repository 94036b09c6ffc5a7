"""benchmarks/first_calls.py: each call in a process of its own, with caches that hold nothing."""

import inspect
import itertools
import json
import subprocess
import sys
from types import SimpleNamespace

import first_calls
import pytest


def test_each_call_starts_from_empty_caches_and_again_from_full_ones(monkeypatch):
    folders, seconds = [], itertools.count(1)

    def run(command, env, **options):
        assert command == [sys.executable, first_calls.__file__, "plain"]
        folders.append(tuple(env[name] for name in ("TRITON_CACHE_DIR", "SAGE_KERNELS_CACHE", "CUDA_CACHE_PATH")))
        printed = f"a warning\n{json.dumps({'first_s': next(seconds)})}\n"
        return SimpleNamespace(returncode=0, stdout=printed, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    rows = [first_calls.run_alone("plain") for _ in range(2)]
    assert rows == [{"call": "plain", "first_s": 2 * n + 1, "cached_s": 2 * n + 2} for n in range(2)]
    assert folders[0] == folders[1] != folders[2] == folders[3]
    assert len({folder for caches in folders for folder in caches}) == 6


def test_a_call_that_fails_says_why(monkeypatch):
    failed = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nRuntimeError: no GPU\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    assert first_calls.run_alone("plain") == {"call": "plain", "unavailable": "RuntimeError: no GPU"}


@pytest.mark.parametrize("name", first_calls.CALLS)
def test_each_call_is_one_that_can_be_measured(name):
    inspect.signature(first_calls.measure_call).bind(**first_calls.CALLS[name])
