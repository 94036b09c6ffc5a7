"""Families that make sounds."""

from __future__ import annotations

from tests.helpers.families.family import Family
from tests.helpers.families.inputs import BATCH, half, normal, rope, valid, with_text

SOUNDS: tuple[Family, ...] = (
    Family(
        "stable-audio",
        "StableAudioDiTModel",
        dict.fromkeys(("time_proj_dim", "global_states_input_dim", "cross_attention_input_dim"), 16)
        | {"num_attention_heads": 4, "num_key_value_attention_heads": 2, "cross_attention_dim": 64},
        lambda: with_text(
            *(4, 40),
            timestep=half(),
            global_hidden_states=normal(BATCH, 1, 16),
            rotary_embedding=rope(41, 16),
            attention_mask=valid((40, 25), 40).bool(),
            encoder_attention_mask=valid((13, 5), 13).bool(),
        ),
    ),
)
