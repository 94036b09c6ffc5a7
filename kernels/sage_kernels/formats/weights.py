"""Factor of P before quantisation, by format of P·V: it makes P fill the format's range."""

from __future__ import annotations

from .fp8 import E4M3_MAX
from .nvfp4 import E2M1_MAX

P_SCALE = {"nvfp4": E4M3_MAX * E2M1_MAX, "fp8": E4M3_MAX, "int8": 1.0, "fp16": 1.0}
"""By format of P·V. For NVFP4 this factor is the first of two levels (arXiv 2505.11594, section 3.2): the second level,
the e4m3 scales of the groups, then uses its full range."""
