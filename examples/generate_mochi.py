"""Mochi 1: `generate_video.py` with the defaults that this model wants.

    python examples/generate_mochi.py --prompt "A cat walks on the grass, realistic."

Attention runs as `configs/mochi.json` says; `--recipe sage3` or `--config my.json` to have it otherwise.
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
