"""Shipped configurations, one JSON file per model family; installed as `sage_hf.configs`."""
