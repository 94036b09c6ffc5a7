"""Measure attention forward and backward: our recipes with gradients beside SDPA, cuDNN and FA3, on this GPU.

python benchmarks/forward_backward.py --output benchmarks/results
python benchmarks/forward_backward.py --render benchmarks/results/nvidia-h200-forward_backward.json

The first command measures and writes <gpu>-forward_backward.json and .png, as `sage-hf bench --training` does on a
user's GPU. The second draws the plot of a JSON again and prints its tables.
"""

import forward

if __name__ == "__main__":
    forward.main(__doc__, training=True)
