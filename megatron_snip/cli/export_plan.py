r"""Write a plan in the form that another trainer or quantiser reads.

    megatron-snip export PLAN.json --to megatron --output DIR [--pipeline-model-parallel-size 4]
    megatron-snip export PLAN.json --to torchtitan|transformer-engine|modelopt|torchao --output DIR

If the other program cannot express something, a note says so, and you get the more precise choice: a linear whose
GEMMs differ takes its most precise format, and so do linears that the program fuses (q, k and v; gate and up).  A
format without a counterpart becomes the nearest one.  Plans with --snip-granularity fused and --snip-options
mxfp8,nvfp4 lose the least.  Files and notes say how much FP4 is left: as a share of FLOPs if you name the model (by
--load or the trainer's options), else by number of GEMMs.

Programs change: the files are for the version that is installed here, or else the newest one that we know.  To choose
another version (of Transformer Engine for --to megatron), give --for-version.

--own-casts, for megatron and transformer-engine, keeps every format.  Where Transformer Engine lacks one, as fp4 or, on
Hopper, mxfp8 and nvfp4, its modules cast by this package's quantizer, which must be installed where you train.  Their
GEMMs multiply in BF16: you see what the plan does to the loss, and save no time.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from megatron_snip.cli import parsers
from megatron_snip.cli.command import reported
from megatron_snip.errors import UserError
from megatron_snip.files.io import check_output
from megatron_snip.files.json import write_atomic
from megatron_snip.interop.counterparts import Request, Version
from megatron_snip.interop.exports import BY_GEMM, TARGETS, Target
from megatron_snip.model.spec import linear_place
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train.run.run_folder import options_of
from megatron_snip.train.setup import snip_shapes


def version_of(target: Target, wanted: str | None) -> Version:
    """The version to write for: ``wanted``, the installed one, or the newest one that we know.

    Raises UserError for an unknown version.
    """
    text, source = wanted, f"--for-version {wanted}"
    if text is None:
        try:
            text = metadata.version(target.distribution)
        except metadata.PackageNotFoundError:
            return target.last
        source = f"{target.distribution} {text} is installed"
    numbers = re.match(r"(\d+)\.(\d+)", text)
    version = (int(numbers[1]), int(numbers[2])) if numbers else None
    if version is None or not target.first <= version <= target.last:
        first, last = (".".join(map(str, each)) for each in (target.first, target.last))
        known = first if first == last else f"{first} to {last}"
        raise UserError(
            f"{source}: this tool knows {target.distribution} {known}; install one of these, or give --for-version "
            f"{last} to write for it"
        )
    return version


def check_own_casts(to: str, version: Version) -> None:
    """Raise UserError if a version of a program cannot run our casts."""
    if TARGETS[to].distribution != "transformer-engine":
        raise UserError(
            f"--own-casts does not go with --to {to}: it has no place for quantizers of others; leave it out"
        )
    if version < BY_GEMM:
        raise UserError(
            f"--own-casts needs Transformer Engine 2.19 or newer, not {version[0]}.{version[1]}; leave it out, or give "
            "--for-version"
        )


def request_of(path: str, words: Sequence[str], version: Version) -> Request:
    """Read the plan and the trainer's options.  Raises UserError for a plan of another model."""
    plan, config = Plan.load(path), options_of(words, ("model",))
    if others := [name for name in plan.linears if linear_place(name) is None]:
        raise UserError(f"{path}: {others[0]!r} is not a linear of a Llama or Qwen3; give a plan for one of these")
    if not (config.checkpoint.load or config.model.hidden_size):
        return Request(plan, config.parallel, version)
    shapes = snip_shapes(config)
    plan.check_names((shape.name for shape in shapes), path)
    return Request(plan, config.parallel, version, shapes)


@reported
def main(arguments: Sequence[str] | None = None) -> int:
    """Command line.  Returns the exit status."""
    options, rest = parsers.export().parse_known_args(arguments)
    target = TARGETS[options.to]
    version = version_of(target, options.for_version)
    if options.own_casts:
        check_own_casts(options.to, version)
    request = replace(request_of(options.plan, rest, version), own_casts=options.own_casts)
    files, notes = target.write(request)
    for name, text in files.items():
        path = Path(options.output) / name
        check_output("--output", path)
        write_atomic(path, text)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print("\n".join(str(Path(options.output) / name) for name in files))
    return 0
