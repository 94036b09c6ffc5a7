"""The machine code of nvfp4_forward.cu, its fragments, and the requests that it takes. Needs no GPU."""

import re
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
import torch

from sage_kernels import backends  # noqa: F401 - `backends` registers the kernels
from sage_kernels.cuda import compiler, nvfp4_forward, smooth_q_scores
from sage_kernels.cuda.registration import NOT_FASTER, CudaNVFP4Forward, enforce_nvfp4_forward
from sage_kernels.dispatch import cost_model
from sage_kernels.dispatch.request import Request
from sage_kernels.dispatch.select import select, set_routing
from sage_kernels.spec.recipe import get_recipe
from sage_kernels.testing.aot import machine_code
from sage_kernels.triton import registration

compiles = pytest.mark.skipif(bool(compiler.unavailable()), reason=compiler.unavailable())
CONFIG = nvfp4_forward.NVFP4ForwardConfig(
    channels=128,
    is_causal=False,
    padded=False,
    return_lse=False,
    smooth_q=True,
    quantized_denominator=True,
    heavy=True,
    native=True,
)
# Of a causal call of `sage3` with at least 128 keys.
CAUSAL = replace(CONFIG, is_causal=True, late_keys=16, recent=True)
SHARED_MEMORY = 99 * 1024  # of a block on compute capability 12.x


def compiled(config, arch="sm_120f", dtype=torch.bfloat16):
    return nvfp4_forward.kernel(config, dtype).source.compile(arch)


def inner_loops(code, opcodes=frozenset({"OMMA"})):
    """Loops over tiles, without the loop over items around them."""
    return [loop for loop in code.loops if loop.matrix_opcodes == opcodes]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SAGE_KERNELS_CACHE", str(tmp_path))


@pytest.mark.audit
@compiles
@pytest.mark.parametrize(
    ("channels", "return_lse", "budget", "least", "products"),
    [(128, False, 620, 550, 64), (64, False, 530, 490, 32), (128, True, 630, 560, 66), (64, True, 540, 500, 34)],
)
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_main_loop_is_lean(channels, is_causal, return_lse, budget, least, products):
    """Count those of 128 × 128 scores and a warp: measured 604 and 514, and 615 and 527 with the log-sum-exp.

    What attends to heavy, late and recent keys takes no registers from it. Its sums of quantised weights are two
    products more. `least` is that of a tile in which no maximum grew. To measure again: print `loop.total` and
    `loop.least`.
    """
    config = replace(CAUSAL if is_causal else CONFIG, channels=channels, return_lse=return_lse)
    code = machine_code(compiled(config).image)
    loop = min(inner_loops(code), key=lambda loop: loop.total)
    assert loop.matrix_products == products
    assert loop.total <= budget and loop.least <= least
    assert loop.counts["LDG"] == loop.counts["LDGSTS"] == loop.counts["LDC"] == 0
    assert loop.counts["MUFU"] <= 73  # 64 weights, 4 scales with their logarithms, a rescaling
    # With recent keys, 128 channels keep more numbers than there are registers: measured 5, outside of the loops, and
    # 17 for the log-sum-exp.
    assert code.instructions.spills <= (20 if return_lse else 5) * (is_causal and channels == 128)
    # A block's consumers take registers from its producer, which the assembler leaves out where functions are called.
    assert code.instructions.counts["USETMAXREG"] == 2


@pytest.mark.audit
@compiles
@pytest.mark.parametrize(("channels", "budget", "products"), [(128, 635, 64), (64, 440, 32)])
def test_the_loop_over_recent_keys_is_lean(channels, budget, products):
    """Count those of 32 keys and a warp's 16 rows: measured 616 and 422."""
    (loop,) = inner_loops(machine_code(compiled(replace(CAUSAL, channels=channels)).image), {"HMMA"})
    assert loop.matrix_products == products and loop.total <= budget
    assert loop.spills == 0 and loop.counts["LDG"] == channels // 16  # Q's


VARIANTS = [
    *product(("sm_120f",), (64, 128), (False,), (False,), (False, True), (False, True), (True,)),
    *product(("sm_120f",), (64, 128), (True,), (True,), (False, True), (False, True), (False, True)),
    *((arch, 128, False, True, True, True, False) for arch in ("sm_120a", "sm_121a")),
    *((arch, 64, False, False, False, False, False) for arch in ("sm_120a", "sm_121a")),
]


@pytest.mark.audit
@compiles
@pytest.mark.parametrize(("arch", "channels", "recent", "is_causal", "return_lse", "padded", "heavy"), VARIANTS)
def test_no_variant_spills_in_its_loops(arch, channels, recent, is_causal, return_lse, padded, heavy):
    config = replace(
        CONFIG,
        channels=channels,
        is_causal=is_causal,
        return_lse=return_lse,
        padded=padded,
        quantized_denominator=heavy,
        heavy=heavy,
        late_keys=16 * (heavy and is_causal),
        recent=recent,
    )
    cubin = compiled(config, arch, torch.float16)
    assert not re.search(r"warning|C75\d\d", cubin.log, re.IGNORECASE), cubin.log
    # Of padded batches an item keeps a few more numbers, and for the log-sum-exp with recent keys; then some are
    # reloaded in the loops.
    more = padded or (recent and return_lse)
    assert int(re.search(r"(\d+) bytes spill stores", cubin.log)[1]) <= (64 if more else 8 * recent), cubin.log
    loops = [loop for opcodes in ({"OMMA"}, {"HMMA"}) for loop in inner_loops(machine_code(cubin.image), opcodes)]
    assert all(loop.spills <= 4 * (more and (recent or return_lse)) for loop in loops)
    static = int(re.search(r"(\d+) bytes smem", cubin.log)[1])
    assert static + config.shared_bytes <= SHARED_MEMORY


@pytest.mark.audit
@compiles
@pytest.mark.parametrize(("channels", "dtype"), product((64, 128), (torch.bfloat16, torch.float16)))
@pytest.mark.parametrize("arch", ["sm_90a", "sm_120a", "sm_121a"])
def test_scores_of_means_spill_nothing(channels, dtype, arch):
    cubin = smooth_q_scores.kernel(channels, dtype, choice=True).source.compile(arch)
    assert machine_code(cubin.image).instructions.spills == 0


def request():
    """A call so long that low bits are chosen where no costs are known."""
    made = Request("sage3", "cuda", (12, 0), torch.bfloat16, 2, 32, 8, 20_000, 20_000, 128, 128, "none", False, False)
    return replace(made, aligned=True)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, ""),
        ({"head_dim": 80, "v_head_dim": 128}, ""),
        ({"head_dim": 40, "v_head_dim": 64, "dtype": torch.float16}, ""),
        ({"recipe": "sage3_paper", "return_lse": True, "is_causal": True}, ""),
        ({"is_causal": True}, ""),
        ({"capability": (9, 0)}, "12.0 or 12.1"),
        ({"head_dim": 64}, "both"),
        ({"head_dim": 256, "v_head_dim": 256}, "both"),
        ({"v_head_dim": 100}, "16 bytes"),
        ({"aligned": False}, "16 bytes"),
        ({"dtype": torch.float32}, "dtype"),
        ({"packed": True}, "packed"),
        ({"mask": "keys"}, ""),
        ({"mask": "bool"}, "no masks"),
        ({"mask": "blocks"}, "no masks"),
        ({"batch": 2**18}, "tokens of Q or K"),
    ],
    ids=str,
)
def test_serves_what_it_can_read(can_compile, facts, reason):
    changes = dict(facts)
    capability = changes.pop("capability", (12, 0))
    aligned = changes.pop("aligned", True)
    with enforce_nvfp4_forward(True):
        found = CudaNVFP4Forward().unsupported(replace(request(), **changes, capability=capability, aligned=aligned))
    assert reason in found and bool(reason) == bool(found)


@pytest.mark.parametrize("ours", [None, 50.0, 200.0], ids=["not measured", "faster", "slower"])
def test_runs_where_the_gpus_own_table_says_that_it_is_faster(can_compile, monkeypatch, ours):
    """Triton's kernel takes 100 µs."""
    monkeypatch.setattr(registration, "triton_version", lambda: (3, 6))  # whose Triton kernel is native
    measured = {"nvfp4_forward": 100.0} | ({} if ours is None else {"nvfp4_forward_cuda": ours})
    curves = {cost_model.low_bit_provider("sage3", name, "nvfp4_quantize_cuda"): us for name, us in measured.items()}

    class Curve(NamedTuple):
        fixed: float

        def us(self, sizes):
            return self.fixed

    class Table:
        def curve(self, provider, *kind):
            return Curve(curves[provider]) if provider in curves else None

    monkeypatch.setattr(cost_model, "table_of", lambda capability: Table())
    set_routing(False)  # exact attention was not measured
    plan = select(request())
    set_routing(True)
    if ours == 50.0:
        assert (plan.recipe, plan.kernel, plan.numerics) == ("sage3", "nvfp4_forward_cuda", "native")
    else:
        assert plan.kernel == "nvfp4_forward"
        assert ("sage3 by nvfp4_forward_cuda", NOT_FASTER) in plan.passed_over


@pytest.mark.parametrize("missing", ["nvfp4_forward.cu", "smooth_q_scores.cu", "find_spans.cu"])
def test_serves_only_if_all_its_kernels_can_be_had(monkeypatch, missing):
    monkeypatch.setattr(compiler, "unavailable", lambda source, *_: f"no {source}" if source == missing else "")
    assert CudaNVFP4Forward().unsupported(replace(request(), mask="keys")) == f"no {missing}"


def test_serves_the_recipes_in_nvfp4():
    kernel = CudaNVFP4Forward()
    assert [name for name in ("sage3", "sage3_paper", "sage2", "sage1") if kernel.serves(get_recipe(name))] == [
        "sage3",
        "sage3_paper",
    ]
