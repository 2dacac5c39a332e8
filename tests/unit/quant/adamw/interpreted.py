"""Runs the Triton kernel of AdamW in Triton's interpreter against the specification: bit for bit, on small tensors.

``python -m tests.unit.quant.adamw.interpreted`` with TRITON_INTERPRET=1; test_triton.py starts it in a process of its
own.  Prints what differs and exits 1 if anything does.
"""

from __future__ import annotations

import sys

from megatron_snip.quant.adamw import triton_step
from megatron_snip.quant.adamw.step import Scalars, reference
from tests.unit.quant.adamw.numbers_of import STORED, copy_of, differences, parameter
from tests.unit.quant.kernels.instructions import as_instructions_round


def main() -> int:
    """Number of parameters that differ, at most 1."""
    found, steps = [], 0
    for precision in STORED:
        for step, shape in enumerate([(37, 111), (1, 5), (64, 1), (5, 1024)], 1):
            stored, grad = parameter(precision, step, *shape)
            odd = step % 2
            s = Scalars.of(step, 10.0**-step, 0.1 * odd, (0.9, (0.95, 0.999)[odd]), 1e-8, (1, 0.3)[odd])
            expected, made = copy_of(stored), copy_of(stored)
            reference(expected, grad, s)
            with as_instructions_round():
                triton_step.run(made, grad, s)
            steps += 1
            found += [f"{precision} {shape}: {name}" for name in differences(expected, made)]
    print("\n".join(found))
    print(f"{steps} steps, {len(found)} differences")
    return min(1, len(found))


if __name__ == "__main__":
    sys.exit(main())
