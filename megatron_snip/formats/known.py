"""The formats that this package ships.  One literal each; format.py says what the fields mean."""

from __future__ import annotations

from megatron_snip.formats.element import E2M1, E4M3, E5M2
from megatron_snip.formats.format import Format, register

BF16 = register(Format(name="bf16", element=None))
FP8 = register(Format(name="fp8", element=E4M3))
# Gradients are rounded stochastically in FP4: their small values would all fall to zero otherwise.
FP4 = register(Format(name="fp4", element=E2M1, stochastic_roles=frozenset({"grad_output"})))
FP8_E5M2 = register(Format(name="fp8_e5m2", element=E5M2))
