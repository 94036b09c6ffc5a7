"""Replay of repeated calls: what a call allocated and launched is done again, without its host code."""
