"""Choose who serves a call, and say why: requests, the registry of kernels, costs, and the run of a plan."""
