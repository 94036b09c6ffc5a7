"""Render prompts with CogVideoX-2B: `generate_video.py` with defaults for this model.

    python examples/generate_cogvideox.py --prompt "A panda plays the guitar in a bamboo forest."

Attention runs as `configs/cogvideox-2b.json` says; choose otherwise with `--recipe sage3` or `--config my.json`.
Needs a GPU.
"""

import sys

from sage_hf.app.cli import generate_main

if __name__ == "__main__":
    sys.exit(
        generate_main(
            description=__doc__,
            config="cogvideox-2b",
            pretrained="zai-org/CogVideoX-2b",
            dtype="float16",
            steps=50,
            frames=49,
            guidance_scale=6.0,
            cpu_offload=True,
            vae_tiling=True,
            fps=8,
        )
    )
