"""Families that make sounds."""

from __future__ import annotations

import torch

from .family import Family
from .inputs import BATCH, normal, rope, valid

SOUNDS: tuple[Family, ...] = (
    Family(
        "stable-audio",
        "StableAudioDiTModel",
        {
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "attention_head_dim": 32,
            "num_attention_heads": 4,
            "num_key_value_attention_heads": 2,
            "cross_attention_dim": 64,
            "time_proj_dim": 16,
            "global_states_input_dim": 16,
            "cross_attention_input_dim": 16,
        },
        lambda: {
            "hidden_states": normal(BATCH, 4, 40),
            "timestep": torch.full((BATCH,), 0.5),
            "encoder_hidden_states": normal(BATCH, 13, 16),
            "global_hidden_states": normal(BATCH, 1, 16),
            "rotary_embedding": rope(41, 16),
            "attention_mask": valid((40, 25), 40).bool(),
            "encoder_attention_mask": valid((13, 5), 13).bool(),
        },
    ),
)
