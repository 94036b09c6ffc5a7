"""Render prompts with low-bit attention, and with exact attention if asked, and report kernels and times.

    python examples/generate_video.py --compare --prompt "a red circle moving left"

renders with the tiny model of this repository, in the mix of recipes that `sage-hf calibrate` found for it. Any
text-to-video or text-to-image pipeline of diffusers works too:

    python examples/generate_video.py --compare --pretrained zai-org/CogVideoX-2b --config cogvideox-2b --cpu-offload \\
        --vae-tiling --prompt "A panda plays the guitar in a bamboo forest."

In your own code it takes one more line:

    pipe = DiffusionPipeline.from_pretrained("zai-org/CogVideoX-2b", dtype=torch.bfloat16).to("cuda")
    handle = sage_hf.apply(pipe, "sage3")
    video = pipe("A panda plays the guitar in a bamboo forest.").frames[0]
    print(sage_hf.explain(pipe))
    handle.restore()
"""

import sys
from pathlib import Path

from sage_hf.app.cli import generate_main

TINY_VIDEO = Path(__file__).parent / "tiny_video"

if __name__ == "__main__":
    calibrated = str(TINY_VIDEO / "calibrated.json")
    sys.exit(generate_main(description=__doc__, own_config=calibrated, pretrained=str(TINY_VIDEO)))
