"""`sage-hf bench`: speed, error and memory of low-bit attention and of its peers on the GPU that is here."""
