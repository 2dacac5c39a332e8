"""The options of each linear and the constraints of a plan, from the command line.  Only this module reads them.

    --snip-options fp8,fp4 --snip-granularity gemm --snip-fix "layers.0.*=fp8,layers.*.down_proj=bf16"
    -> Choices(options [O], ties [L], fixed [L], reserved [O]) -> SolveRequest

Convention: columns of matrices are options.  Formats that appear only in --snip-fix are columns at the end, reserved
for the linears fixed to them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import numpy as np
import torch

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UserError
from megatron_snip.formats import get_format
from megatron_snip.quant import GEMMS, LinearPrecision, LinearShape, check_linear
from megatron_snip.snip.plan.cost import (
    NOMINAL,
    PUBLISHED,
    GemmTimes,
    efficiency,
    fused_ties,
    linear_options,
    modelled_time,
    stages,
)
from megatron_snip.snip.plan.ilp import InfeasibleTarget, check_target
from megatron_snip.snip.plan.program import Bools, Floats, Ints, Limit
from megatron_snip.snip.plan.recipes import RECIPES_WORD, is_recipes, recipe_options
from megatron_snip.snip.plan.solver import SolveRequest
from megatron_snip.snip.predict.objectives import get_objective

#: Values of --snip-options auto: formats of tensor cores that read block scales themselves, and the default elsewhere.
BLOCK_SCALED, AUTO = "mxfp8,nvfp4", "fp8,fp4"


@dataclass(frozen=True, eq=False)
class Choices:
    """Columns of the matrices, and which linears may take them.

    ties [L] as in Terms, or None.  fixed [L]: index of the option that a linear is fixed to, -1 if free.
    reserved [O]: true for an option that only linears fixed to it may take.  measure: the target's unit, in MEASURES.
    """

    options: tuple[LinearPrecision, ...]
    ties: Ints | None
    fixed: Ints
    reserved: Bools
    measure: str

    @property
    def free(self) -> list[LinearPrecision]:
        """Options that a linear may pick."""
        return [option for option, taken in zip(self.options, self.reserved) if not taken]

    @property
    def formats(self) -> set[str]:
        """All formats of all options."""
        return {getattr(option, gemm) for option in self.options for gemm in GEMMS}


#: Further constraints: options, linears and choices -> limits, none if no option asks for any.  See CONTRIBUTING.md.
LIMITS: tuple[Callable[[SnipConfig, Sequence[LinearShape], Choices], Sequence[Limit]], ...] = ()


def measure_of(options: Sequence[LinearPrecision], unit: str = "auto") -> str:
    """The unit of a target, from --snip-target-unit and what a linear may pick.

    auto: FP4's share of FLOPs, or modelled time if BF16 is an option, because then FP8 saves too.
    """
    if unit != "auto":
        return unit
    return "time" if any(not get_format(getattr(o, gemm)).quantised for o in options for gemm in GEMMS) else "fp4"


def device_options(words: str, device: torch.device) -> str:
    """--snip-options with auto and recipes resolved for a device."""
    try:
        for name in BLOCK_SCALED.split(","):
            check_linear("scaled_mm", LinearPrecision.uniform(name), device)
    except ValueError:
        return _resolved(words, blackwell=False)
    return _resolved(words, blackwell=True)


def measured_options(words: str, formats: Iterable[str]) -> str:
    """--snip-options with auto and recipes resolved from the formats in statistics."""
    return _resolved(words, blackwell=set(BLOCK_SCALED.split(",")) <= set(formats))


def _resolved(words: str, *, blackwell: bool) -> str:
    recipes = f"{RECIPES_WORD}:{'blackwell' if blackwell else 'hopper'}"
    return {"auto": BLOCK_SCALED if blackwell else AUTO, RECIPES_WORD: recipes}.get(words, words)


def read_choices(snip: SnipConfig, shapes: Sequence[LinearShape]) -> Choices:
    """Read --snip-options, --snip-granularity and --snip-fix for these linears.

    If auto has not been resolved for a device, it means the CPU's options.

    Raises UserError for unknown formats, for fixes that match nothing, conflict or split a tie, and for granularity
    fused if no linears read the same input.
    """
    words = _resolved(snip.snip_options, blackwell=False)
    try:
        if is_recipes(words):
            free = recipe_options(words, measured=snip.snip_weight > 0)
        else:
            free = linear_options([text.strip() for text in words.split(",")], snip.snip_granularity)
    except UserError as error:
        raise UserError(f"--snip-options {snip.snip_options}: {error}") from None
    _check_recasts(snip, free)
    names = [shape.name for shape in shapes]
    fixes = read_fixes(snip.snip_fix, names)
    options = tuple(dict.fromkeys([*free, *fixes.values()]))
    ties = fused_ties(shapes) if snip.snip_granularity == "fused" else None
    fixed = np.array([options.index(fixes[name]) if name in fixes else -1 for name in names], np.int64)
    if ties is not None:
        if (ties < 0).all():
            raise UserError(
                f"--snip-granularity fused: it is not known which of {', '.join(names[:3])}, ... read the same input; "
                "choose granularity linear, or attach transformers' own Llama or Qwen3"
            )
        fixed = _fix_whole_ties(ties, fixed, names, options)
    measure = measure_of(free, snip.snip_target_unit)
    return Choices(options, ties, fixed, np.arange(len(options)) >= len(free), measure)


def _check_recasts(snip: SnipConfig, options: Iterable[LinearPrecision]) -> None:
    """Raise UserError where backward's errors count and an option has an operand that was cast from another format's.

    A probe measures each format alone: what a format casts again is its own cast.
    """
    if snip.snip_weight <= 0 and not get_objective(snip.snip_objective).needs_operands:
        return
    for option in options:
        for (gemm, role), first in option.sources.items():
            if (fmt := getattr(option, gemm)) != getattr(option, first):
                raise UserError(
                    f"--snip-options: in {option}, {fmt} makes {gemm}'s {role} of what {first} multiplies in another "
                    f"format, whose errors no probe measures; give {first} the same, or --snip-weight 0 and "
                    "--snip-objective snip"
                )


def read_fixes(text: str, names: Sequence[str]) -> dict[str, LinearPrecision]:
    """Parse "PATTERN=PRECISION,..." into linear -> precision; patterns are names or globs.

    Raises UserError for an invalid part, a pattern that matches no linear, and conflicting patterns.
    """
    fixes: dict[str, tuple[str, LinearPrecision]] = {}
    for part in (part.strip() for part in text.split(",") if part.strip()):
        pattern, equals, wanted = (word.strip() for word in part.partition("="))
        if not (pattern and equals and wanted):
            raise UserError(f"--snip-fix part {part!r} cannot be read; write PATTERN=PRECISION, as layers.0.*=fp8")
        try:
            precision = LinearPrecision.parse(wanted)
        except ValueError as error:
            raise UserError(f"--snip-fix part {part!r}: {error}") from None
        matched = [name for name in names if fnmatchcase(name, pattern)]
        if not matched:
            near = ", ".join(difflib.get_close_matches(pattern, names, n=3, cutoff=0.0))
            raise UserError(f"--snip-fix pattern {pattern!r} matches no linear; names are such as {near}")
        for name in matched:
            before = fixes.setdefault(name, (part, precision))
            if before[1] != precision:
                raise UserError(f"--snip-fix parts {before[0]!r} and {part!r} disagree on {name}; narrow one of them")
    return {name: precision for name, (_, precision) in fixes.items()}


def _fix_whole_ties(ties: Ints, fixed: Ints, names: Sequence[str], options: Sequence[LinearPrecision]) -> Ints:
    """Extend the fix of one linear to all linears tied to it."""
    fixed = fixed.copy()
    for tie in np.unique(ties[ties >= 0]):
        rows = np.flatnonzero(ties == tie)
        wanted = sorted(set(fixed[rows].tolist()) - {-1})
        if len(wanted) > 1:
            said = ", ".join(f"{names[row]}={options[fixed[row]]}" for row in rows.tolist() if fixed[row] >= 0)
            raise UserError(
                f"--snip-granularity fused ties linears that --snip-fix fixes to different precisions: {said}; "
                "fix them alike, or choose granularity linear"
            )
        fixed[rows] = wanted[0] if wanted else -1
    return fixed


def read_times(snip: SnipConfig) -> GemmTimes:
    """Load --gemm-times, or the nominal ones.  Raises UserError for an unusable file or an unknown table."""
    if not snip.gemm_times:
        return NOMINAL
    if snip.gemm_times.startswith(PUBLISHED):
        return GemmTimes.published(snip.gemm_times.removeprefix(PUBLISHED))
    return GemmTimes.load(snip.gemm_times)


def check_choices(snip: SnipConfig, shapes: Sequence[LinearShape]) -> Choices:
    """``read_choices``; also raises UserError for a table without their formats or a target out of reach."""
    choices = read_choices(snip, shapes)
    times = read_times(snip)
    times.check(choices.formats)
    saved = efficiency(shapes, choices.options, choices.measure, times)
    most = float(saved[:, ~choices.reserved].max(axis=1).sum())
    target = snip.snip_target if snip.snip_max_loss is None else 0.0
    if target > most * (1 + 1e-9):
        raise UserError(
            f"--snip-target {snip.snip_target} is more than the options {snip.snip_options} can save ({most:.3f}); "
            "lower it or add an option"
        )
    try:
        check_target(solve_request(snip, shapes, choices, np.zeros_like(saved), times=times))
    except InfeasibleTarget as error:
        each = _stage_constraint(snip, shapes) == "each"
        way_out = "; or let the whole reach it, by --snip-stage-constraint none" if each else ""
        raise UserError(f"--snip-target with --snip-fix {snip.snip_fix!r}: {error}{way_out}") from None
    return choices


def solve_request(
    snip: SnipConfig,
    shapes: Sequence[LinearShape],
    choices: Choices,
    quality_loss: Floats,
    *,
    times: GemmTimes = NOMINAL,
    held: Ints | None = None,
    current: Mapping[str, LinearPrecision] | None = None,
) -> SolveRequest:
    """The solver's request; quality_loss [L, O] over ``choices.options``.

    held [L]: options of linears without finite statistics, -1 for others.  --snip-fix takes precedence, and ties extend
    both.  current: precisions in force, for --snip-churn.  Under --snip-max-loss, the target is the highest reachable.
    """
    fixed = choices.fixed if held is None else _with_held(choices, held)
    constraint = _stage_constraint(snip, shapes)
    column = {option: index for index, option in enumerate(choices.options)}
    now = None if current is None else np.array([column.get(current[shape.name], -1) for shape in shapes], np.int64)
    request = SolveRequest(
        quality_loss=quality_loss,
        efficiency=efficiency(shapes, choices.options, choices.measure, times),
        target=snip.snip_target,
        stage=stages(shapes) if constraint != "none" else None,
        time=modelled_time(shapes, choices.options, times) if constraint == "makespan" else None,
        ties=choices.ties,
        fixed=fixed if (fixed >= 0).any() else None,
        reserved=choices.reserved if choices.reserved.any() else None,
        current=now if snip.snip_churn > 0 else None,
        churn=snip.snip_churn * changed_gemms(choices.options) if snip.snip_churn > 0 else 0.0,
        limits=tuple(limit for make in LIMITS for limit in make(snip, shapes, choices)),
    )
    return request if snip.snip_max_loss is None else replace(request, target=request.most())


def _stage_constraint(snip: SnipConfig, shapes: Sequence[LinearShape]) -> str:
    """The constraint on each stage: none, each or makespan."""
    auto = "each" if len({shape.stage for shape in shapes}) > 1 else "none"
    return auto if snip.snip_stage_constraint == "auto" else snip.snip_stage_constraint


def _with_held(choices: Choices, held: Ints) -> Ints:
    fixed = np.where(choices.fixed >= 0, choices.fixed, held)
    for tie in () if choices.ties is None else np.unique(choices.ties[choices.ties >= 0]):
        rows = np.flatnonzero(choices.ties == tie)
        fixed[rows] = fixed[rows].max()  # within a tie, all fixed ones agree, and so do all held ones
    return fixed


def changed_gemms(options: Sequence[LinearPrecision]) -> Floats:
    """[O, O]: share of a linear's three GEMMs whose format differs between two options."""
    return np.array(
        [[sum(getattr(a, gemm) != getattr(b, gemm) for gemm in GEMMS) / len(GEMMS) for b in options] for a in options]
    )
