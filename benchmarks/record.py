"""Facts about the source and the machine, for results files."""

from __future__ import annotations

import os
import subprocess
from datetime import date
from pathlib import Path

import torch


def git_commit() -> str:
    """Return the commit of the checkout; $SAGE_HF_COMMIT, or "", if there is no checkout."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        found = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:  # no git
        found = ""
    return found or os.environ.get("SAGE_HF_COMMIT", "")


def cpu_facts() -> dict[str, str]:
    """Return the facts for a table of errors that is computed on a CPU."""
    return {"device": "cpu", "torch": torch.__version__, "commit": git_commit(), "date": date.today().isoformat()}
