"""tests/gpu: what runs on a GPU alone can be imported anywhere, so that a name that is gone is missed at once."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.audit
def test_every_gpu_test_is_collected_without_a_gpu():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert collected.returncode == 0, collected.stdout[-2000:] + collected.stderr[-2000:]
    assert "tests collected" in collected.stdout
