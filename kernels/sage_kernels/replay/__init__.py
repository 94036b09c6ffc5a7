"""Replay of calls that differ only in addresses: allocate and launch as the first call did, without its host code."""
