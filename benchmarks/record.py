"""What a results file says of the source and the machine."""

from __future__ import annotations

import subprocess
from datetime import date
from pathlib import Path

import torch


def git_commit() -> str:
    """Of the checkout; "" where there is none."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    return subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()


def cpu_facts() -> dict[str, str]:
    """Of a table of errors made on a CPU."""
    return {"device": "cpu", "torch": torch.__version__, "commit": git_commit(), "date": date.today().isoformat()}
