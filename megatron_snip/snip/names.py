"""Places of linears by name, for probes.py and divergence.py, until they read them off the shapes."""

from __future__ import annotations

import re

#: Linears that kernels run as one GEMM, by the end of their names.
FUSED_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def block_of(name: str) -> int | None:
    """The block's index in a linear's name: 3 for layers.3.mlp.up_proj, None where there is none."""
    found = re.match(r"layers\.(\d+)\.", name)
    return int(found[1]) if found else None
