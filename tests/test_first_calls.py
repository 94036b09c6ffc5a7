"""benchmarks/first_calls.py: each call in a process of its own, with caches that hold nothing."""

import inspect
import json
import subprocess
import sys
from types import SimpleNamespace

import first_calls
import pytest


def test_each_call_starts_from_empty_caches(monkeypatch):
    folders = []

    def run(command, env, **options):
        assert command[:2] == [sys.executable, first_calls.__file__] and command[-1] == "plain"
        folders.append([env[name] for name in ("TRITON_CACHE_DIR", "SAGE_KERNELS_CACHE", "CUDA_CACHE_PATH")])
        return SimpleNamespace(returncode=0, stdout=f"a warning\n{json.dumps({'first_s': 1.5})}\n", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    rows = [first_calls.run_alone("plain") for _ in range(2)]
    assert rows == [{"call": "plain", "first_s": 1.5}] * 2
    assert len({folder for caches in folders for folder in caches}) == 6


def test_a_call_that_fails_says_why(monkeypatch):
    failed = SimpleNamespace(returncode=1, stdout="", stderr="Traceback\nRuntimeError: no GPU\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    assert first_calls.run_alone("plain") == {"call": "plain", "unavailable": "RuntimeError: no GPU"}


@pytest.mark.parametrize("name", first_calls.CALLS)
def test_each_call_is_one_that_can_be_measured(name):
    inspect.signature(first_calls.measure_call).bind(**first_calls.CALLS[name])
