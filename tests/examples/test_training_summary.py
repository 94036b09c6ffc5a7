"""The README's table of the training experiments is that of their results."""

import json
from pathlib import Path

from training_summary import summary

ROOT = Path(__file__).parents[2]


def test_the_readmes_table_is_that_of_the_results():
    results = (
        json.loads((ROOT / f"examples/results/{name}.json").read_text()) for name in ("language_model", "tiny_video")
    )
    assert summary(*results) in (ROOT / "README.md").read_text()
