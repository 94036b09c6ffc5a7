"""Replay of repeated calls: allocate and launch as the first call did, without running its host code."""
