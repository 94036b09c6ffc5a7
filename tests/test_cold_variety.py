"""benchmarks/cold_variety.py: drawn calls, and what they compile, counted without a GPU."""

import json
from pathlib import Path

import cold_variety
import pytest


def test_more_calls_begin_with_the_same_ones():
    assert cold_variety.draw(9, 1)[:4] == cold_variety.draw(4, 1) != cold_variety.draw(4, 2)


def test_what_calls_would_compile_is_counted_without_a_gpu(forks):
    """Calls that differ in lengths, numbers of heads and strides share all variants."""
    pytest.importorskip("sage_kernels.gluon.int8_backward", exc_type=ImportError)
    code = f"""
import json, sys
from dataclasses import replace
sys.path.insert(0, {str(Path(cold_variety.__file__).parent)!r})
import cold_variety
dtype, packed, wide = cold_variety.torch.float16, ("packed",) * 3, ("wide",) * 3
one = cold_variety.Drawn("sage2", 1, 2, 2, 1500, 1500, 72, 40, dtype, packed, "keys", True)
calls = [one, replace(one, batch=2, kv_heads=3, q_len=1777, kv_len=1777), replace(one, layouts=wide)]
kernels, rows = cold_variety.plan(calls)
print(json.dumps([{{name: len(kernel.variants) for name, kernel in kernels.items()}}, [row[1] for row in rows]]))
"""
    variants, ran = json.loads(forks.run(code))
    assert ran == ["int8_forward"] * 3
    assert variants.pop("block_statistics") == 2  # of K and of V
    assert {"query_squares", "quantize_key_int8", "int8_forward"} <= set(variants) and set(variants.values()) == {1}
