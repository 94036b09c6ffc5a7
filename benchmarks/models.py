"""Measure steps of whole models: as they come, with others' attention, and with our recipes, on this GPU.

python benchmarks/models.py --output benchmarks/results
python benchmarks/models.py --model flux-1024 sdxl --output benchmarks/results
python benchmarks/models.py --render benchmarks/results/nvidia-h200-models.json

The first command measures all models and writes <gpu>-models.json, as `sage-hf bench --model all` does on a user's GPU;
the second adds to that file, or replaces, the rows of two models. The third prints the tables of a JSON.
"""

import forward

if __name__ == "__main__":
    forward.main(__doc__, model=["all"])
