"""The examples are scripts beside one another: import them the way Python does when one is run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
