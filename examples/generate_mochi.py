"""Render prompts with Mochi 1: `generate_video.py` with defaults for this model.

    python examples/generate_mochi.py --prompt "A cat walks on the grass, realistic."

Attention runs as `configs/mochi.json` says; choose otherwise with `--recipe sage3` or `--config my.json`.
Needs a GPU.
"""

import sys

from sage_hf.app.cli import generate_main

if __name__ == "__main__":
    sys.exit(
        generate_main(
            description=__doc__,
            config="mochi",
            pretrained="genmo/mochi-1-preview",
            frames=85,
            steps=50,
            cpu_offload=True,
            vae_tiling=True,
            fps=30,
        )
    )
