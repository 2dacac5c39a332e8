"""The probe: passes over the coming batch in BF16 format, without an update, from which divergences are predicted.

    statistics       one forward and backward; each linear's LinearProbe sees X, W, G and every format's error
    backward noise   the loss is <noise, residual stream after the last block>: the backward is linear in its seed,
                     so gradients are the Deltas themselves; gives the change of all updates by noise in that stream
    quantised fprop  gradients with every linear's fprop in one format, against those without; gives the change of all
                     updates by a nat of loss divergence
    sampled labels   the statistics' token sums anew, with labels that the model drew (for "ggn")
    forward noise    gradients with noise after the last block, against those without (for "paper")

The clip coefficient is always the unperturbed pass's.  Sums over microbatches come first, squares are summed over dp
and tp.  Nothing of the training state is changed.  Source: docs/numerics.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from megatron_snip.formats import get_format
from megatron_snip.mesh import Mesh
from megatron_snip.parallel.tensor import Region
from megatron_snip.quant import LinearObserver, LinearPrecision, LinearShape
from megatron_snip.snip.attention_probe import Attend, AttentionProbe
from megatron_snip.snip.linear_probe import OPERANDS, LinearProbe, Place, square
from megatron_snip.snip.names import FUSED_GROUPS, block_of
from megatron_snip.snip.residual import ResidualProbe
from megatron_snip.snip.stats import LinearStats, ProbeStats
from megatron_snip.snip.updates import Updates

#: Noise after the last block, relative to the rms of the last linear's output or of the gradient there.
NOISE = 0.1
#: Passes beside the statistics, by name.
PASSES = ("backward_noise", "quantised_fprop", "sampled_labels", "forward_noise")


class ProbedLinear(Protocol):
    """What a probe needs of a parallel linear."""

    precision: LinearPrecision
    impl: str
    observer: LinearObserver | None
    split_dim: int

    def register_forward_hook(self, hook: Any) -> Any:
        """torch.nn.Module's."""
        ...


class ProbedBlock(Protocol):
    """What a probe needs of a block: a place for observers of the residual stream before its two halves."""

    observers: tuple[Any, Any] | None


@dataclass(frozen=True)
class Pass:
    """What a forward and backward over a batch gives on every process."""

    loss: float  # nats, over the global batch
    grad_norm: float  # of the whole model, before clipping
    clip: float  # what gradients are multiplied by


class PassRunner(Protocol):
    """Runs the coming batch forward and backward and leaves gradients, unperturbed or as ``kind`` says."""

    def __call__(self, kind: str | None = None, scale: float = 0.0, draw: int = 0) -> Pass:
        """``kind`` is None or a Perturbation's; scale and draw are the noise's."""
        ...


def _half(name: str) -> int:
    """0 for a linear of the attention, 1 for one of the SwiGLU."""
    return 0 if ".self_attn." in name else 1


def reads_norm(name: str) -> bool:
    """Whether a linear's input is a norm's output: q, k, v, gate and up."""
    return any(name.rpartition(".")[2] in group for group in FUSED_GROUPS)


class StatisticsProbe:
    """Runs the passes; every process makes one over the linears and blocks of its own stages and calls it alike."""

    def __init__(
        self,
        linears: Mapping[str, ProbedLinear],
        blocks: Mapping[int, ProbedBlock],
        attends: Mapping[int, Attend],
        *,
        shapes: Sequence[LinearShape],
        formats: Iterable[str],
        updates: Updates,
        mesh: Mesh,
        region: Region,
        tokens: int,
        device: torch.device,
        wide: bool,
        noise_draws: int = 1,
    ) -> None:
        self.linears, self.blocks, self.attends, self.updates = linears, blocks, attends, updates
        self.shapes = {shape.name: shape for shape in shapes}  # of the whole model
        self.names = list(self.shapes)
        self.formats = sorted(set(formats) - {"bf16"})
        self.mesh, self.region, self.tokens, self.device = mesh, region, tokens, device
        self.wide, self.noise_draws = wide, noise_draws  # wide: with Region.wide, where the compute is float32

    def run(
        self,
        run_pass: PassRunner,
        zero_grad: Callable[[], None],
        iteration: int,
        passes: Iterable[str] = ("backward_noise",),
        draws: int | None = None,
    ) -> ProbeStats:
        """Measure.  ``run_pass`` leaves gradients, ``zero_grad`` drops them again; ``passes``: beside the first.

        draws: of each noise, by default ``noise_draws``.
        """
        passes, draws = set(passes), draws or self.noise_draws
        assert passes <= set(PASSES), f"unknown passes {passes - set(PASSES)}"
        norms = {index: (ResidualProbe(self.region), ResidualProbe(self.region)) for index in self.blocks}
        with self._measuring(norms, zero_grad):
            result, sums, grads = self._statistics(run_pass, norms)
            zero_grad()
            noise_sq = {}
            for kind in sorted(passes & {"backward_noise", "forward_noise"}):
                noise_sq[kind] = self._noise(kind, run_pass, zero_grad, draws, result.clip, sums, grads, norms)
            if "quantised_fprop" in passes and self.formats:
                self._quantised_fprop(run_pass, zero_grad, result.clip, sums, grads)
            del grads
            if "sampled_labels" in passes:
                self._sampled_labels(run_pass, zero_grad, sums)
            return self._reduce(sums, result, noise_sq, iteration, passes)

    @contextmanager
    def _measuring(
        self, norms: Mapping[int, tuple[ResidualProbe, ResidualProbe]], zero_grad: Callable[[], None]
    ) -> Iterator[None]:
        """Inside, linears run in BF16 format and blocks are observed; afterwards nothing is left."""
        before = {name: (linear.precision, linear.impl) for name, linear in self.linears.items()}
        try:
            for linear in self.linears.values():
                linear.precision = LinearPrecision.uniform("bf16")
            for index, block in self.blocks.items():
                block.observers = norms[index]
            self.region.wide = self.wide
            yield
        finally:
            self.region.wide = False
            for name, linear in self.linears.items():
                (linear.precision, linear.impl), linear.observer = before[name], None
            for block in self.blocks.values():
                block.observers = None
            zero_grad()

    @contextmanager
    def _observed(
        self, norms: Mapping[int, tuple[ResidualProbe, ResidualProbe]], *, loss_only: bool = False
    ) -> Iterator[dict[str, LinearProbe]]:
        """Inside, every linear shows its operands to a LinearProbe, and its output's norm is taken."""
        probes, hooks = {}, []
        attentions = {index: AttentionProbe(attend) for index, attend in self.attends.items()}
        for name, linear in self.linears.items():
            norm = norms[block_of(name) or 0][_half(name)] if reads_norm(name) and not loss_only else None
            attention = attentions[block_of(name) or 0] if _half(name) == 0 else None
            place = Place(
                self.mesh.tp, linear.split_dim == 0, self.mesh.dp.size, norm, attention, self._shard_like_optimizer
            )
            kind = name.rpartition(".")[2]
            probes[name] = linear.observer = LinearProbe(kind, self.formats, place, loss_only=loss_only)
            hooks.append(linear.register_forward_hook(self._output_norm(probes[name], place)))
        try:
            yield probes
        finally:
            for hook in hooks:
                hook.remove()
            for linear in self.linears.values():
                linear.observer = None

    def _shard_like_optimizer(self, part: Tensor) -> Tensor:
        """This process's part [N/tp, K] of a sum over dp -> the rows of the whole sum that its optimiser holds."""
        if self.mesh.dp.size == 1:
            return part
        partial = DTensor.from_local(part, self.mesh.device_mesh["dp"], [Partial()], run_check=False)
        return partial.redistribute(placements=[Shard(0)]).to_local()

    def _output_norm(self, probe: LinearProbe, place: Place) -> Callable[..., None]:
        """A forward hook that adds |Y|^2 once, recompute or not."""
        sharded = place.column_parallel or self.region.sequence_parallel
        share = 1.0 if sharded or self.mesh.tp.is_first else 0.0

        def hook(module: Any, args: Any, y: Tensor) -> None:
            if torch._C._current_graph_task_id() == -1:
                probe.sums.add("norm/Y", square(y.detach()), share)

        return hook

    def _statistics(
        self, run_pass: PassRunner, norms: Mapping[int, tuple[ResidualProbe, ResidualProbe]]
    ) -> tuple[Pass, dict[str, dict[str, float]], dict[str, Tensor]]:
        """The first pass: its result, this process's share of every sum, and the gradients as they came."""
        with self._observed(norms) as probes:
            result = run_pass()
        grads = {name: self.updates.optimizer.gradient(f"{name}.weight") for name in self.linears}
        for pair in norms.values():
            for place in pair:
                place.forget()
        token = self._token_square_sums(probes)
        sums: dict[str, dict[str, float]] = {}
        for name, probe in probes.items():
            row = {f"token/{fmt}": value for fmt, value in token[name].items()}
            errors = [probe.weight_error.pop(fmt) for fmt in self.formats]
            row["update"], *own = self.updates.changes(name, grads[name], errors, result.clip)
            row |= {f"own/{fmt}": value for fmt, value in zip(self.formats, own, strict=True)}
            row["norm/dW"] = float(square(grads[name]))
            sums[name] = row | probe.sums.read()
        return result, sums, grads

    def _noise(
        self,
        kind: str,
        run_pass: PassRunner,
        zero_grad: Callable[[], None],
        draws: int,
        clip: float,
        sums: dict[str, dict[str, float]],
        grads: Mapping[str, Tensor],
        norms: Mapping[int, tuple[ResidualProbe, ResidualProbe]],
    ) -> float:
        """Adds each linear's |u(g + D) - u(g)|^2 to ``sums``; returns the squared norm of the noise."""
        square_of = "norm/G" if kind == "backward_noise" else "norm/Y"
        total, elements = self._sum(*(sums.get(self.names[-1], {}).get(key, 0.0) for key in (square_of, "elements/G")))
        scale = NOISE * math.sqrt(total / elements) if elements and math.isfinite(total) else 0.0
        for draw in range(draws):
            run_pass(kind, scale, draw)
            for name in self.linears:
                noise = self.updates.optimizer.gradient(f"{name}.weight")
                if kind == "forward_noise":
                    noise = noise - grads[name]
                _, change = self.updates.changes(name, grads[name], [noise], clip)
                residual = norms[block_of(name) or 0][_half(name)]
                row = sums[name]
                row[f"{kind}/update"] = row.get(f"{kind}/update", 0.0) + change / draws
                if kind == "backward_noise" and self._is_first_of_half(name):
                    row[f"{kind}/residual"] = row.get(f"{kind}/residual", 0.0) + residual.take_gradient_square() / draws
            for pair in norms.values():
                for place in pair:
                    place.forget()
            zero_grad()
        return scale * scale * elements

    def _quantised_fprop(
        self,
        run_pass: PassRunner,
        zero_grad: Callable[[], None],
        clip: float,
        sums: dict[str, dict[str, float]],
        grads: Mapping[str, Tensor],
    ) -> None:
        """Adds each linear's |u(g') - u(g)|^2 to ``sums``, g' with every fprop in the coarsest format.

        A linear with a sum that is not finite stays in BF16, so that its NaNs do not reach the others.
        """
        bad = [not all(map(math.isfinite, sums.get(name, {}).values())) for name in self.names]
        held = {name for name, count in zip(self.names, self._sum(*map(float, bad)), strict=True) if count}
        for name, linear in self.linears.items():
            if name not in held:  # dgrad and wgrad in BF16 are a mixture that fused implementations need not have
                linear.precision, linear.impl = LinearPrecision(self.coarsest, "bf16", "bf16"), "emulated"
        run_pass()
        for name in self.linears:
            change = self.updates.optimizer.gradient(f"{name}.weight") - grads[name]
            sums[name][f"fprop/{self.coarsest}"] = self.updates.changes(name, grads[name], [change], clip)[1]
        zero_grad()
        for linear in self.linears.values():
            linear.precision = LinearPrecision.uniform("bf16")

    @property
    def coarsest(self) -> str:
        """The format of fewest bits among those that are measured: what it does stands out of BF16's rounding."""
        return min(self.formats, key=lambda fmt: (get_format(fmt).bits_per_element, fmt))

    @staticmethod
    def _is_first_of_half(name: str) -> bool:
        return name.rpartition(".")[2] in (group[0] for group in FUSED_GROUPS)

    def _sampled_labels(
        self, run_pass: PassRunner, zero_grad: Callable[[], None], sums: dict[str, dict[str, float]]
    ) -> None:
        """Token sums once more, of the gradient of labels that the model drew."""
        with self._observed({}, loss_only=True) as probes:
            run_pass("sampled_labels")
        zero_grad()
        for name, values in self._token_square_sums(probes).items():
            sums[name] |= {f"sampled/{fmt}": value for fmt, value in values.items()}

    def _token_square_sums(self, probes: Mapping[str, LinearProbe]) -> dict[str, dict[str, float]]:
        """Per linear and format; one all-reduce over tp, since a square of a partial sum would be wrong."""
        if not probes or not self.formats:
            return {name: {} for name in probes}
        sums = torch.stack([torch.cat(probe.token_sums[fmt]) for probe in probes.values() for fmt in self.formats])
        if self.mesh.tp.size > 1:
            dist.all_reduce(sums, group=self.mesh.tp.group)
        squares = sums.double().square().sum(dim=1).tolist()
        share = 1.0 if self.mesh.tp.is_first else 0.0  # equal on all of tp: counted once
        it = iter(squares)
        return {name: {fmt: next(it) * share for fmt in self.formats} for name in probes}

    def _sum(self, *shares: float) -> list[float]:
        """Sums over all processes, in double precision; every process calls it."""
        vector = torch.tensor(shares, dtype=torch.float64, device=self.device)
        dist.all_reduce(vector, group=self.mesh.world)
        return [float(value) for value in vector]

    def _columns(self, passes: set[str]) -> list[str]:
        """Names of all sums, the same on every process."""
        fmts = self.formats
        columns = ["update", "dgrad/signal", "elements/G", *(f"norm/{n}" for n in ("X", "W", "Y", "G", "dX", "dW"))]
        columns += [f"{kind}/{fmt}" for kind in ("token", "own", "dgrad/error") for fmt in fmts]
        for kind in ("error", "nonzero", "underflow", "saturated"):
            columns += [f"{kind}/{fmt}/{operand}" for fmt in fmts for operand in OPERANDS]
        columns += [f"sampled/{fmt}" for fmt in fmts if "sampled_labels" in passes]
        columns += [f"fprop/{self.coarsest}"] if "quantised_fprop" in passes and fmts else []
        columns += [f"{kind}/update" for kind in sorted(passes & {"backward_noise", "forward_noise"})]
        return columns + (["backward_noise/residual"] if "backward_noise" in passes else [])

    def _reduce(
        self,
        sums: Mapping[str, Mapping[str, float]],
        result: Pass,
        noise_sq: dict[str, float],
        iteration: int,
        passes: set[str],
    ) -> ProbeStats:
        """One all-reduce over the world of a matrix indexed by global linear."""
        columns = self._columns(passes)
        table = torch.tensor(
            [[sums.get(name, {}).get(column, 0.0) for column in columns] for name in self.names], dtype=torch.float64
        ).to(self.device)
        dist.all_reduce(table, group=self.mesh.world)
        rows = {
            name: dict(zip(columns, row, strict=True)) for name, row in zip(self.names, table.tolist(), strict=True)
        }
        linears = {name: self._linear_stats(name, rows, passes) for name in self.names}
        return ProbeStats(iteration, result.loss, self.tokens, linears, noise_sq)

    def _linear_stats(self, name: str, rows: Mapping[str, Mapping[str, float]], passes: set[str]) -> LinearStats:
        """One linear's statistics from the whole table; infinities count as NaN."""
        row = {key: value if math.isfinite(value) else math.nan for key, value in rows[name].items()}
        operands = [f"{fmt}/{operand}" for fmt in self.formats for operand in OPERANDS]
        nonzero = {key: max(row[f"nonzero/{key}"], 1.0) for key in operands}
        first = name.rpartition(".")[0] + "." + FUSED_GROUPS[_half(name)][0]

        def by_format(kind: str) -> dict[str, float]:
            return {fmt: row[f"{kind}/{fmt}"] for fmt in self.formats}

        shape = self.shapes[name]
        return LinearStats(
            out_features=shape.out_features,
            in_features=shape.in_features,
            token_square_sum=by_format("token"),
            update_norm_sq=row["update"],
            own_sq=by_format("own"),
            dgrad_error_sq=by_format("dgrad/error"),
            dgrad_signal_sq=row["dgrad/signal"],
            norm_sq={key.split("/")[1]: value for key, value in row.items() if key.startswith("norm/")},
            error_sq={key: row[f"error/{key}"] for key in operands},
            underflow={key: row[f"underflow/{key}"] / nonzero[key] for key in operands},
            saturated={key: row[f"saturated/{key}"] / nonzero[key] for key in operands},
            noise_update_sq=row.get("backward_noise/update"),
            residual_noise_sq=rows.get(first, row).get("backward_noise/residual"),
            sampled_square_sum=by_format("sampled") if "sampled_labels" in passes else None,
            fprop_update_sq=(
                {key.split("/")[1]: row[key] for key in row if key.startswith("fprop/")}
                if "quantised_fprop" in passes
                else None
            ),
            forward_update_sq=row.get("forward_noise/update"),
        )
