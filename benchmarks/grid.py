"""Time some hundred attention calls of every kind: ours beside the fastest other attention, on this GPU.

python benchmarks/grid.py --output benchmarks/results
python benchmarks/grid.py --part 2/3 --output benchmarks/results
python benchmarks/grid.py --unseen 33 --calls 100 --output benchmarks/results
python benchmarks/grid.py --render benchmarks/results/nvidia-h200-grid.json

The first command times all calls and writes <gpu>-grid.json and .png, as `sage-hf bench --grid` does on a user's GPU;
the second adds a third of them to that file. The third times calls that a seed draws, for <gpu>-unseen.json. The
last one draws the heat map of a JSON again and prints its tables.
"""

import forward

if __name__ == "__main__":
    forward.main(__doc__, grid=True)
