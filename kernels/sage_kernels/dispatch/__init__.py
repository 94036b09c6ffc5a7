"""Who serves a call, and why: requests, the registry of kernels, costs, and the run of a plan."""
