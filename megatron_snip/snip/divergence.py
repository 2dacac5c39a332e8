"""Divergences [L, O] from statistics: pure functions.

    loss divergence    dL(l, o)    = T/2 * sum_t (sum_n G[t,n] dY_f[t,n])^2           f = o.fprop    nats
                                     (q, k, v: at the attention's output)
    weight divergence  rho^2(l, o) = own^2 + prop^2 + fwd^2                                         1
        own^2(l, o)    = |u(g + E_w,f) - u(g)|_F^2 / U^2                              f = o.wgrad
        prop^2(l, o)   = (eps^2(l, f) Gamma^2(l) + near^2(l, f)) / U^2                f = o.dgrad
        fwd^2(l, o)    = kappa dL(l, o) / U^2                                         f = o.fprop
        U^2            = sum over all linears k of |u(g_k)|_F^2

eps is the size of dgrad's error in the residual stream; Gamma^2 = sum over linears k before it of |Delta u_k|^2 by
|Delta R|^2, what noise in the residual stream's gradient there does to all updates further back.  near, of o_proj and
down_proj, is what their dgrad's error does to the linears between them and the residual stream.  kappa is the squared
change of all updates by a nat of loss divergence, as measured with every linear's fprop in one format.
Source: SNIP, arXiv 2602.01410, as worked out in docs/numerics.md.
Convention: T tokens of the global batch, L0 its loss, bf16 costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_snip.formats import get_format
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.names import FUSED_GROUPS, block_of
from megatron_snip.snip.stats import LinearStats, ProbeStats

Floats = NDArray[np.float64]


class NonFiniteStatistics(ValueError):
    """Some linears' statistics are NaN or infinite; ``names`` are theirs.  Hold them at the base option."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(names)
        shown = ", ".join(self.names[:8]) + (", ..." if len(self.names) > 8 else "")
        super().__init__(
            f"statistics of {len(self.names)} linears are not finite: {shown}; hold them at the base option"
        )


def loss_divergence(stats: ProbeStats, names: Sequence[str], options: Sequence[LinearPrecision]) -> Floats:
    """dL [L, O] in nats: what each option's fprop adds to the loss.

    Raises ValueError if a linear or a format was not measured, NonFiniteStatistics as it says.
    """

    def value(linear: LinearStats, option: LinearPrecision) -> float | None:
        return _entry(linear.token_square_sum, option.fprop)

    return stats.tokens / 2 * _matrix(stats, names, options, value)


def weight_divergence(stats: ProbeStats, names: Sequence[str], options: Sequence[LinearPrecision]) -> Floats:
    """rho^2 [L, O]: squared change of all updates by each option's GEMMs, relative to the whole update.

    Raises ValueError if a linear, a format or one of the passes was not measured, NonFiniteStatistics as it says.
    """
    own, prop = own_divergence(stats, names, options), prop_divergence(stats, names, options)
    return own + prop + fwd_divergence(stats, names, options)


def own_divergence(stats: ProbeStats, names: Sequence[str], options: Sequence[LinearPrecision]) -> Floats:
    """own^2 [L, O]: wgrad's error in the linear's own update.  Raises as ``weight_divergence``."""

    def value(linear: LinearStats, option: LinearPrecision) -> float | None:
        return _entry(linear.own_sq, option.wgrad)

    return _relative_to_update(_matrix(stats, names, options, value), stats)


def prop_divergence(stats: ProbeStats, names: Sequence[str], options: Sequence[LinearPrecision]) -> Floats:
    """prop^2 [L, O]: dgrad's error in the updates of all linears before it.  Raises as ``weight_divergence``."""
    known = {id(stats.linears[name]): (name, residual_gain(stats, name)) for name in names if name in stats.linears}

    def value(linear: LinearStats, option: LinearPrecision) -> float | None:
        error = _entry(linear.dgrad_error_sq, option.dgrad)
        if error is None or not get_format(option.dgrad).quantised:
            return error
        name, gain = known[id(linear)]
        return error * gain + near_change(stats, name, option.dgrad)

    return _relative_to_update(_matrix(stats, names, options, value), stats)


def fwd_divergence(stats: ProbeStats, names: Sequence[str], options: Sequence[LinearPrecision]) -> Floats:
    """fwd^2 [L, O]: fprop's error in all updates, through other losses, activations and gradients.

    How a linear's share in it depends on the linear is that of its loss divergence.  Raises as ``weight_divergence``.
    """
    return _relative_to_update(update_change_by_nat(stats) * loss_divergence(stats, names, options), stats)


def knows_fwd(stats: ProbeStats) -> bool:
    """Whether the pass with quantised fprop was made, and not every update of it is NaN or infinite."""
    changes = [change for linear in stats.linears.values() for change in (linear.fprop_update_sq or {}).values()]
    return stats.has("quantised_fprop") and (not changes or any(map(np.isfinite, changes)))


def update_change_by_nat(stats: ProbeStats) -> float:
    """kappa: squared change of all updates by a nat of loss divergence; 0 where there is no loss divergence.

    The linears that made the change are those with finite statistics; all others took part in BF16.
    Raises ValueError if the pass with quantised fprop was not made, or all of its updates are NaN or infinite.
    """
    changes: list[float] = []
    nats = 0.0
    for name, linear in stats.linears.items():
        if linear.fprop_update_sq is None:
            raise ValueError(
                f"statistics of iteration {stats.iteration} have no quantised fprop, which the weight divergence "
                f"needs, for {name}; collect them with an objective such as snip"
            )
        changes += linear.fprop_update_sq.values()
        if linear.is_finite:
            nats += stats.tokens / 2 * sum(linear.token_square_sum[fmt] for fmt in linear.fprop_update_sq)
    if not knows_fwd(stats):
        raise ValueError(
            f"statistics of iteration {stats.iteration}: every update with quantised fprop is NaN or infinite; plan by "
            "--snip-objective snip_loss"
        )
    return _ratio(sum(change for change in changes if np.isfinite(change)), nats)


def residual_gain(stats: ProbeStats, name: str) -> float:
    """Squared change of all updates before a linear by its squared dgrad error, as ``dgrad_error_sq`` has it.

    0 where nothing comes before.  For o_proj and down_proj the error is that of their input and reaches the
    residual stream through q, k, v or gate, up: its relative size is kept, the signal's size there is theirs.
    Raises ValueError if the backward noise was not measured.
    """
    linear = stats.linears[name]
    if linear.noise_update_sq is None or linear.residual_noise_sq is None:
        raise ValueError(
            f"statistics of iteration {stats.iteration} have no backward noise, which the weight divergence needs; "
            "collect them with an objective such as snip"
        )
    place = place_of(name)
    changes = [other.noise_update_sq or 0.0 for key, other in stats.linears.items() if place_of(key) < place]
    before = sum(change for change in changes if np.isfinite(change))
    gain = _ratio(before, linear.residual_noise_sq)
    if between := _linears_between(stats, name):
        signal = sum(other.dgrad_signal_sq for other in between if np.isfinite(other.dgrad_signal_sq))
        gain *= _ratio(signal, linear.dgrad_signal_sq)
    return gain


def near_change(stats: ProbeStats, name: str, fmt: str) -> float:
    """near^2: squared change of q's, k's and v's (gate's and up's) updates by o_proj's (down_proj's) dgrad in ``fmt``.

    The error, relative to its signal, is the relative error of their output gradients; what errors of that kind do
    to an update is known from their own wgrad, whose operands have relative errors too.  Those are random from token to
    token.  The part of down_proj's that its weight's error makes is not: the tokens' products add up as the gradient's
    own do.  o_proj's passes the attention, whose sums over queries average it against the gradient as wgrad's sum over
    tokens does.  0 for other linears.
    """
    linear, total = stats.linears[name], 0.0
    relative = _ratio(linear.dgrad_error_sq[fmt], linear.dgrad_signal_sq)
    systematic = 0.0
    if name.endswith("down_proj"):
        of_weight, of_grad = (
            _ratio(linear.error_sq[f"{fmt}/dgrad/{role}"], linear.norm_sq[tensor])
            for role, tensor in (("weight", "W"), ("grad_output", "G"))
        )
        systematic = _ratio(of_weight, of_weight + of_grad)
    for other in _linears_between(stats, name):
        errors = [
            _ratio(other.error_sq[f"{fmt}/wgrad/{role}"], other.norm_sq[tensor])
            for role, tensor in (("grad_output", "G"), ("input", "X"))
        ]
        if other.is_finite and sum(errors) > 0:
            # 1 if the tokens' products in G^T X had random signs
            coherence = _ratio(other.norm_sq["dW"] * stats.tokens, other.norm_sq["G"] * other.norm_sq["X"])
            factor = 1.0 + systematic * (coherence - 1.0) if name.endswith("down_proj") else _ratio(1.0, coherence)
            total += other.own_sq[fmt] * relative / sum(errors) * factor
    return total


def _ratio(a: float, b: float) -> float:
    return a / b if b > 0 else 0.0


def _linears_between(stats: ProbeStats, name: str) -> list[LinearStats]:
    """The linears between o_proj or down_proj and the residual stream in front of it; none for the others."""
    block, _, kind = name.rpartition(".")
    if any(kind in group for group in FUSED_GROUPS):
        return []
    names = [f"{block}.{other}" for other in FUSED_GROUPS[place_of(name)[1]]]
    return [stats.linears[other] for other in names if other in stats.linears]


def place_of(name: str) -> tuple[int, int]:
    """Where a linear's half of a block reads the residual stream: (block, 0 for attention or 1 for the SwiGLU)."""
    return block_of(name) or 0, 0 if ".self_attn." in name else 1


def _relative_to_update(values: Floats, stats: ProbeStats) -> Floats:
    """[L, O] by U^2, the squared update of all linears whose own is finite."""
    norms = np.array([linear.update_norm_sq for linear in stats.linears.values()])
    total = float(norms[np.isfinite(norms)].sum())
    # No update at all (learning has not begun): relative to nothing, but no error of it either.
    return values / total if total > 0 else np.zeros_like(values)


def non_finite_linears(stats: ProbeStats, names: Sequence[str]) -> tuple[str, ...]:
    """Those of ``names`` that have a NaN or infinite statistic, in their order."""
    return tuple(name for name in names if name in stats.linears and not stats.linears[name].is_finite)


def _entry(values: Mapping[str, float], fmt: str) -> float | None:
    return values.get(fmt) if get_format(fmt).quantised else 0.0


def _matrix(
    stats: ProbeStats,
    names: Sequence[str],
    options: Sequence[LinearPrecision],
    value: Callable[[LinearStats, LinearPrecision], float | None],
) -> Floats:
    """[L, O] of ``value``; None means that the option's format was not measured."""
    if missing := [name for name in names if name not in stats.linears]:
        raise ValueError(f"statistics of iteration {stats.iteration} have no such linears: {missing}")
    if bad := non_finite_linears(stats, names):
        raise NonFiniteStatistics(bad)
    result = np.empty((len(names), len(options)))
    for row, name in enumerate(names):
        for column, option in enumerate(options):
            entry = value(stats.linears[name], option)
            if entry is None:
                raise ValueError(
                    f"statistics of iteration {stats.iteration} lack a format of option {option} for {name}; "
                    "probe with these options"
                )
            result[row, column] = entry
    return result
