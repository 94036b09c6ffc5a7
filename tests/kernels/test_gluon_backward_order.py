"""gluon/int8_backward.py: in which order the programs of dQ come."""

import pytest
import torch

from sage_kernels.spec.operands import Saved
from tests.helpers.calls import new_backward_call

gluon_backward = pytest.importorskip("sage_kernels.gluon.int8_backward", exc_type=ImportError)  # Triton 3.6


def call_of(batch, q_heads, kv_heads, tokens, head_dim, is_causal=True):
    output, key = (torch.empty(batch, heads, tokens, head_dim, device="meta") for heads in (q_heads, kv_heads))
    saved = Saved(output, output, key, key, key, output)
    return new_backward_call(output, key, output, saved, "sage_bwd", head_dim, is_causal=is_causal)


@pytest.mark.parametrize(
    ("sizes", "together"),
    [
        ((1, 32, 8, 8192, 128), 8),
        ((1, 32, 8, 32768, 128), 4),
        ((1, 16, 16, 8192, 128), 4),
        ((2, 16, 16, 4096, 64), 8),
        ((1, 28, 4, 4096, 128), 14),
        ((1, 64, 1, 4096, 128), 128),
    ],
)
def test_heads_whose_keys_the_cache_holds_are_worked_through_together(sizes, together):
    assert gluon_backward.heads_together(call_of(*sizes)) == together
    assert gluon_backward.heads_together(call_of(*sizes, is_causal=False)) == 1
