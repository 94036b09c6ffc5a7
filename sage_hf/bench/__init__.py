"""`sage-hf bench`: low-bit attention beside its peers, on the GPU that is here. Also the code of benchmarks."""
