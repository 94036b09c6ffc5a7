"""Render prompts with HunyuanVideo: `generate_video.py` with defaults for this model.

    python examples/generate_hunyuanvideo.py --prompt "A cat walks on the grass, realistic."
    torchrun --nproc-per-node 2 examples/generate_hunyuanvideo.py --ulysses 2 --prompt "A cat walks on the grass."

Attention runs as `configs/hunyuanvideo.json` says; choose otherwise with `--recipe sage3` or `--config my.json`.
Needs a GPU.
"""

import sys

from sage_hf.app.cli import generate_main

if __name__ == "__main__":
    sys.exit(
        generate_main(
            description=__doc__,
            config="hunyuanvideo",
            pretrained="hunyuanvideo-community/HunyuanVideo",
            height=320,
            width=512,
            frames=61,
            steps=30,
            cpu_offload=True,
            vae_tiling=True,
            fps=15,
        )
    )
