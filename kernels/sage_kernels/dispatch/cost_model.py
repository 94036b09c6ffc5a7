"""Costs of attention calls on a GPU: measured tables, and whether low bits are faster than exact attention.

A table holds a `curves.CostCurve` for each provider (a low-bit recipe with its kernels, an exact kernel, or one of
PyTorch's backends), kind of mask, causality and regime. `sage-hf tune` measures the GPU at hand and stores its table in
the user's cache folder; the folder `cost_tables` holds the tables that ship, by compute capability. Without a table,
fixed limits decide.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..runtime.cache_folder import cache_folder
from .curves import CallSizes, CostCurve, CostWeights, ItemSchedule, Regime

if TYPE_CHECKING:
    from .request import Request

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).parents[1] / "cost_tables"
BACKENDS = ("cudnn", "flash", "efficient")
"""PyTorch's exact backends, as tables name them; the first is not for growing lengths."""

SPLIT_KV = "splitkv_forward"
"""Exact kernel whose programs divide the keys, and read them at the speed of memory: best for few queries."""
MIN_KEYS_PER_QUERY = 4
"""Keys per query from which SPLIT_KV runs, without a table."""
TRAINING = ", forward and backward"
"""Suffix of the name of a provider whose calls compute gradients."""

# Host time of a call: it is hidden behind the GPU's work only if that work takes longer.
LOW_BIT_HOST_US = 45.0
EXACT_HOST_US = 20.0
LOW_BIT_TRAINING_HOST_US = 275.0  # forward and backward
EXACT_TRAINING_HOST_US = 157.0
MARGIN = 0.98
"""A provider takes another's place if its time is below this share of the other's time."""
LOW_BIT_MARGIN = 0.92
"""Share of exact attention's time from which low bits are not worth their error: about the error of two curves."""
LONG_US, LONG_MARGIN = 500.0, 1.02
"""Exact attention's time from which calls are long, and the same share for long calls: low bits leave more of the power
to a model's matrix products. CogVideoX-2B's calls take 1 % longer than by FlashAttention 3, and its step 8 % less."""

EXACT_KERNEL_MARGINS = {"none": 0.98, "keys": 1.0, "bool": 1.0, "additive": 1.0, "blocks": 0.0, "block_keys": 0.0}
"""Share of PyTorch's time below which another exact kernel runs, by kind of mask."""

# Without a table: the sizes from which low bits run. On an H200, whose exact attention is fast, low bits gain from
# about half as many keys.
UNMEASURED_Q_LEN = 1024
UNMEASURED_KV_LEN = 4096
UNMEASURED_SCORES = 2**28
UNMEASURED_HEAD_DIMS = (33, 128)

DECODED_QUERIES = 16
"""Queries below which a call is a step of decoding: the next step has another number of keys."""
FA3 = "fa3"
FA3_HOST_US = 45.0
"""Host time of a call by FlashAttention 3, whose operator takes 27 to 45 µs more than PyTorch's."""
NEW_LENGTH_US = 22.0
"""Host time, in each layer, to prepare one of our kernels for the next length behind a growing cache: 0.7 ms for 32
layers. The GPU's work hides it if that work takes longer. Operators of other packages, such as FlashAttention 3, take
any length."""
GROWING_CACHE_BYTES = 2**28
"""Bytes of a layer's K and V from which the GPU's work hides that time, without a table."""

NOMINAL_HEADS = 32
_LENGTHS = tuple(round(2 ** (exponent / 4)) for exponent in range(32, 61))
"""Tokens, 256 to 32,768, among which a break-even is sought."""

_MASKED = {
    "none": "",
    "keys": ", with a key-padding mask",
    "bool": ", with a bool mask",
    "additive": ", with an additive mask",
}
_EXACT_DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class CostTable:
    """Costs that were measured on one GPU.

    Attributes:
        gpu, capability: name and compute capability of the GPU.
        versions: of torch, triton and cuDNN, and the date.
        curves: at least one for each provider, kind of mask, causality and regime.
        origin: where the table was read from.
    """

    gpu: str
    capability: tuple[int, int]
    versions: Mapping[str, str]
    curves: tuple[CostCurve, ...]
    origin: str = ""

    @cached_property
    def _by_kind(self) -> dict[tuple[str, str, bool, Regime], list[CostCurve]]:
        kinds: dict[tuple[str, str, bool, Regime], list[CostCurve]] = {}
        for curve in sorted(self.curves, key=lambda curve: curve.head_dims[1] - curve.head_dims[0]):
            kinds.setdefault((curve.provider, curve.mask, curve.causal, curve.regime), []).append(curve)
        return kinds

    def curve(self, provider: str, mask: str, causal: bool, head_dim: int, regime: Regime = "") -> CostCurve | None:
        """Find a provider's curve for such calls, for the fewest head_dims; None if such calls were not measured."""
        curves = self._by_kind.get((provider, mask, causal, regime), ())
        return next((curve for curve in curves if curve.head_dims[0] <= head_dim <= curve.head_dims[1]), None)

    def write(self, path: Path) -> None:
        """Write the table as JSON; `read_table` reads it. Folders are made."""
        facts = {"gpu": self.gpu, "capability": list(self.capability), "versions": dict(self.versions)}
        lines = ",\n".join(f"  {json.dumps(_rounded(asdict(curve)))}" for curve in self.curves)
        text = json.dumps(facts)[:-1] + f', "curves": [\n{lines}\n]}}\n'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _rounded(fact: Any) -> Any:
    """Give each number five digits."""
    if isinstance(fact, Mapping):
        return {name: _rounded(one) for name, one in fact.items()}
    if isinstance(fact, (list, tuple)):
        return [_rounded(one) for one in fact]
    return float(f"{fact:.5g}") if isinstance(fact, float) else fact


def _read_curve(facts: Mapping[str, Any]) -> CostCurve:
    schedule = ItemSchedule(**{**facts["schedule"], "widths": tuple(facts["schedule"]["widths"])})
    parsed = {"head_dims": tuple(facts["head_dims"]), "schedule": schedule, "weights": CostWeights(*facts["weights"])}
    return CostCurve(**{**facts, **parsed})


def read_table(path: Path) -> CostTable:
    """Read a file of `CostTable.write`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file holds no such table.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        major, minor = content["capability"]
        curves = tuple(map(_read_curve, content["curves"]))
        return CostTable(content["gpu"], (major, minor), content["versions"], curves, str(path))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no table of costs ({type(error).__name__}: {error})") from error


def shipped_path(capability: tuple[int, int]) -> Path:
    """Return the path of the table that ships for a compute capability; the file need not exist."""
    return SHIPPED / f"{capability[0]}.{capability[1]}.json"


def tuned_path(gpu: str) -> Path:
    """Return the path of `sage-hf tune`'s table for a GPU and this PyTorch, in the user's cache folder."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    version = re.sub(r"[^0-9.]+.*", "", torch.__version__)
    return cache_folder() / "costs" / f"{name}-torch{version}.json"


@lru_cache(maxsize=16)
def table_of(capability: tuple[int, int] | None) -> CostTable | None:
    """Return the table for GPUs of a compute capability: tuned on the first such GPU here, else the shipped table.

    Return None if there is neither. `select.select` remembers its choices: clear its cache together with this cache.
    """
    if capability is None:
        return None
    paths = [shipped_path(capability)]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        if torch.cuda.get_device_capability(index) == capability:
            paths.insert(0, tuned_path(torch.cuda.get_device_name(index)))
            break
    for path in paths:
        try:
            return read_table(path)
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            logger.warning("a table of costs is ignored (`sage-hf tune` makes a new one): %s", error)
    return None


def describe_costs(capability: tuple[int, int] | None) -> str:
    """Return a line that names the table by which calls on such a GPU choose between low bits and exact attention."""
    table = table_of(capability)
    if table is None:
        return "costs: none measured, so low bits run in long calls only; `sage-hf tune` measures this GPU"
    measured = ", ".join(f"{name} {version}" for name, version in table.versions.items())
    return f"costs: {table.origin} ({table.gpu}, {measured})"


def low_bit_provider(recipe: str, kernel: str, quantizer: str) -> str:
    """Return the provider's name of a recipe with its kernels."""
    return f"{recipe} by {kernel}, {quantizer}"


def sizes_of(request: Request) -> CallSizes:
    """Return the sizes of a request."""
    return CallSizes(
        batch=request.batch,
        q_heads=request.q_heads,
        kv_heads=request.kv_heads,
        q_len=request.q_len,
        kv_len=request.kv_len,
        head_dim=max(request.head_dim, request.v_head_dim),
    )


def why_slower(request: Request, provider: str, exact_kernels: Sequence[str] = ()) -> str:
    """Return why low bits by `provider` would not be faster than exact attention; "" if they would.

    Low bits count as faster, without a measurement, for packed sequences, which exact attention runs one by one, and if
    the LSE is wanted, which exact attention computes separately.

    Args:
        request: the facts of the call.
        provider: the low-bit provider, see `low_bit_provider`.
        exact_kernels: the names of the exact kernels, except PyTorch's, that serve the call.
    """
    if request.packed or request.return_lse or request.device_type != "cuda":
        return ""
    if fastest_exact(request, exact_kernels) == SPLIT_KV:
        return "few queries: exact attention that splits the keys among programs is faster"
    low_bit, sizes = _curves(request, [provider]), sizes_of(request)
    rivals = (*_curves(request, exact_kernels), *_pytorch_curves(request))
    if not low_bit or not rivals or request.dtype not in _EXACT_DTYPES:
        return _why_below_limits(request, sizes)
    return "" if is_faster(low_bit[0], rivals, sizes) else _why_exact_is_faster(low_bit[0], rivals, sizes.head_dim)


def is_measured_faster(request: Request, provider: str, other_provider: str) -> bool:
    """Return whether the table has both providers for such a call, and the first is faster."""
    us = [curve.us(sizes_of(request)) for curve in _curves(request, (provider, other_provider))]
    return len(us) == 2 and us[0] < us[1]


def measured_us(request: Request, providers: Sequence[str]) -> float | None:
    """Return the time in µs of a call by the fastest of the providers; None if the table has none of them."""
    return min((curve.us(sizes_of(request)) for curve in _curves(request, providers)), default=None)


def regime_of(is_causal: bool, sizes: CallSizes) -> Regime:
    """Return the regime, as in `CostCurve.regime`, of a call without gradients.

    Steps of decoding are a regime, because they wait for memory. Causal calls behind a cache are a regime too, because
    some of their kernels divide the keys.
    """
    if sizes.q_len < DECODED_QUERIES:
        return "few queries"
    return "behind a cache" if is_causal and sizes.q_len < sizes.kv_len else ""


def training_provider(recipe: str, kernel: str, quantizer: str, backward: str) -> str:
    """Return the provider's name of the forward and the backward pass of a recipe by these kernels."""
    return f"{low_bit_provider(recipe, kernel, quantizer)}, {backward}{TRAINING}"


def why_slower_training(
    request: Request, recipe: str, kernel: str, quantizer: str, backward: str, checkpointed: bool = False
) -> str:
    """Return why these kernels would not train faster than exact attention; "" if they would.

    Low bits count as faster for packed sequences and if the LSE is wanted: see `why_slower`.

    Args:
        request: the facts of the call.
        recipe, kernel, quantizer, backward: the recipe and kernels that would run.
        checkpointed: the forward pass runs again before the backward pass; ignored if not measured.
    """
    if request.packed or request.return_lse:
        return ""
    table, sizes = table_of(request.capability), sizes_of(request)
    if table is None or request.dtype not in _EXACT_DTYPES:
        return _why_below_limits(request, sizes)
    forward, training = (
        low_bit_provider(recipe, kernel, quantizer),
        training_provider(recipe, kernel, quantizer, backward),
    )
    low_bit_us = _training_us(table, request, forward, training, checkpointed)
    exact_us = min(_training_us(table, request, name, name + TRAINING, checkpointed) for name in BACKENDS)
    if math.inf in (low_bit_us, exact_us):
        if checkpointed:
            return why_slower_training(request, recipe, kernel, quantizer, backward)
        return _why_below_limits(request, sizes)
    low_bit_us, exact_us = max(low_bit_us, LOW_BIT_TRAINING_HOST_US), max(exact_us, EXACT_TRAINING_HOST_US)
    return "" if low_bit_us < MARGIN * exact_us else f"{recipe} by {kernel}: exact attention trains faster here"


def _training_us(table: CostTable, request: Request, forward: str, training: str, checkpointed: bool) -> float:
    """Return the time of a call with gradients by the provider of these names; infinity if it was not measured."""
    sizes = sizes_of(request)
    providers = [training, forward] if checkpointed else [training]
    curves = [table.curve(provider, request.mask, request.is_causal, sizes.head_dim) for provider in providers]
    return sum(math.inf if curve is None else curve.us(sizes) for curve in curves)


def is_faster(low_bit: CostCurve, exact: Sequence[CostCurve], sizes: CallSizes) -> bool:
    """Return whether low bits are faster than the fastest exact backend, host time included."""
    exact_us = max(min(curve.us(sizes) for curve in exact), EXACT_HOST_US)
    margin = LOW_BIT_MARGIN if exact_us < LONG_US else LONG_MARGIN
    return max(low_bit.us(sizes), LOW_BIT_HOST_US) < margin * exact_us


@lru_cache(maxsize=256)
def _why_exact_is_faster(low_bit: CostCurve, exact: tuple[CostCurve, ...], head_dim: int) -> str:
    """Return the reason for calls of the curves' kind, with the limit of self-attention with NOMINAL_HEADS."""
    heads = NOMINAL_HEADS
    gains = [is_faster(low_bit, exact, CallSizes(1, heads, heads, n, n, head_dim)) for n in _LENGTHS]
    regime = f", {low_bit.regime}" if low_bit.regime else ""
    kind = f"at head_dim {head_dim}{', causal' * low_bit.causal}{_MASKED[low_bit.mask]}{regime}"
    if all(gains):
        return f"exact attention is faster here for few heads or tokens {kind}"
    if not gains[-1]:
        return f"exact attention is faster here {kind}"
    tokens = _LENGTHS[len(gains) - gains[::-1].index(False)]
    return f"exact attention is faster here below about {float(f'{tokens:.2g}'):,.0f} tokens of {heads} heads {kind}"


def _why_below_limits(request: Request, sizes: CallSizes) -> str:
    """Return the limit, for kinds of calls that were not measured, that this call is below; "" if it is below none."""
    advice = "no costs were measured for such calls: `sage-hf tune` measures this GPU"
    if request.mask in ("bool", "additive"):
        return f"an attention bias; {advice}"
    low, high = UNMEASURED_HEAD_DIMS
    if not low <= sizes.head_dim <= high:
        return f"head_dim outside {low}…{high}; {advice}"
    scores = sizes.batch * sizes.q_heads * sizes.q_len * sizes.kv_len
    if sizes.q_len < UNMEASURED_Q_LEN or sizes.kv_len < UNMEASURED_KV_LEN or scores < UNMEASURED_SCORES:
        return (
            f"fewer than {UNMEASURED_Q_LEN:,} queries, {UNMEASURED_KV_LEN:,} keys or {UNMEASURED_SCORES:,} scores; "
            f"{advice}"
        )
    return ""


def _curves(request: Request, providers: Sequence[str]) -> list[CostCurve]:
    """Find the curves of these providers that were measured for such calls."""
    table, sizes = table_of(request.capability), sizes_of(request)
    if table is None:
        return []
    kind = request.mask, request.is_causal, sizes.head_dim, regime_of(request.is_causal, sizes)
    return [curve for provider in providers if (curve := table.curve(provider, *kind)) is not None]


def _pytorch_curves(request: Request) -> list[CostCurve]:
    """Find the curves of the backends that PyTorch would choose for a call."""
    if request.lower_right or request.shifted:  # other backends need a mask as large as the scores
        return _curves(request, ["flash"])
    curves = _curves(request, BACKENDS[1:] if is_growing_step(request) else BACKENDS)
    if any(curve.provider == "flash" for curve in curves):  # PyTorch prefers flash
        return [curve for curve in curves if curve.provider != "efficient"]
    return curves


def fastest_exact(request: Request, exact_kernels: Sequence[str]) -> str:
    """Return the name, as in `plan.Plan`, of the fastest exact kernel for a call.

    Args:
        request: the facts of the call.
        exact_kernels: the names of the exact kernels, except PyTorch's, that serve the call.
    """
    sizes, is_growing = sizes_of(request), is_growing_step(request)
    us = {curve.provider: curve.us(sizes) for curve in _curves(request, exact_kernels)}
    if SPLIT_KV in exact_kernels and SPLIT_KV not in us and MIN_KEYS_PER_QUERY * sizes.q_len <= sizes.kv_len:
        key_value_bytes = 2 * request.dtype.itemsize * sizes.batch * sizes.kv_heads * sizes.kv_len * sizes.head_dim
        if not is_growing or key_value_bytes >= GROWING_CACHE_BYTES:
            return SPLIT_KV
    least_us = EXACT_HOST_US + NEW_LENGTH_US if is_growing else 0.0
    us = {name: max(time, FA3_HOST_US if name == FA3 else least_us) for name, time in us.items()}
    pytorch_us = min((curve.us(sizes) for curve in _pytorch_curves(request)), default=0.0)
    fastest = min(us, key=us.__getitem__, default="")
    if fastest and us[fastest] < EXACT_KERNEL_MARGINS[request.mask] * pytorch_us:
        return fastest
    return "sdpa_without_cudnn" if is_slower_by_cudnn(request) else "sdpa"


def is_growing_step(request: Request) -> bool:
    """Return whether a call may be a step behind a growing cache, so that the next call has another length."""
    return request.q_len < DECODED_QUERIES and request.mask == "none"


def is_slower_by_cudnn(request: Request) -> bool:
    """Return whether a PyTorch backend other than cuDNN's can serve an exact call, and is faster.

    cuDNN makes a plan for every new length, so cuDNN never pays for steps of decoding.
    """
    ungrouped = request.q_heads == request.kv_heads or request.mask != "none"
    served = ungrouped or request.head_dim == request.v_head_dim
    if request.dtype not in _EXACT_DTYPES or not served:
        return False
    if request.q_len < DECODED_QUERIES:
        return True
    sizes = sizes_of(request)
    us = {curve.provider: curve.us(sizes) for curve in _curves(request, BACKENDS)}
    # Without cuDNN, PyTorch takes flash if flash serves the call, else the memory-efficient kernel.
    other = us.get("flash", us.get("efficient"))
    return "cudnn" in us and other is not None and other < MARGIN * us["cudnn"]
