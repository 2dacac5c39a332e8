"""All-gathers of weights as the codes that fprop and dgrad multiply (--fp8-param-gather).

Each rank casts its rows of a weight, and FSDP2 gathers bytes and scales in place of BF16: half the bytes in FP8, a
quarter in FP4.  A weight is gathered as codes if these have the bits that a cast of the whole weight has, otherwise in
BF16.  `CodeGathers.before_pass` decides that for each weight and each pass, from what all ranks know.  It reduces what
a cast has to know of other ranks' rows: the largest magnitudes of the whole weight, and of blocks that ranks cut.

FSDP2 gathers what a parameter's local tensor hands it in ``fsdp_pre_all_gather``.  It makes the whole parameter and its
buffers once.  Here, the whole parameter is a view of BF16's buffer, which has no memory while codes are gathered, and
linears read `ColumnParallelLinear.codes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatron_snip.mesh import Mesh
from megatron_snip.parallel.data import local_of
from megatron_snip.parallel.tensor import ColumnParallelLinear, RowParallelLinear
from megatron_snip.quant import LINEAR_IMPLS, LinearPrecision, Sizes, StepContext
from megatron_snip.quant.casts.cast import Form
from megatron_snip.quant.casts.codes import Sent
from megatron_snip.quant.casts.scales import tensor_scale
from megatron_snip.quant.kernels import op
from megatron_snip.quant.kernels.dispatch import cast
from megatron_snip.quant.linears.operands import weight_codes

_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


class Cuts:
    """The blocks of ``side`` rows that are cut where each rank has as many of a weight's rows [N, K].

    A rank casts its rows among zeros that complete its blocks.  In each block that is cut, one of these rows gets
    ``largest``.  So all ranks cast with the scale that the whole block has, if it follows from the largest magnitude.

    blocks: those that are cut.  largest: of all ranks, as ``largest_of`` finds one rank's.
    """

    def __init__(self, rows: int, ranks: int, rank: int, side: int, device: torch.device) -> None:
        self.each = each = rows // ranks
        self.first, self.side, firsts = rank * each, side, range(0, rows, each)
        self.blocks = sorted({(first + each) // side for first in firsts if (first + each) % side})
        self._most = max(-(-(first % side + each) // side) for first in firsts)  # blocks that a rank has rows of
        self.largest: Tensor | None = None
        blocks = torch.arange(-(-rows // side), device=device)[:, None]
        holders = blocks * side // each + torch.arange(-(-side // each) + 1, device=device)
        holders = holders.minimum((blocks * side + side - 1).clamp(max=rows - 1) // each)
        self._gathered = holders * self._most + blocks - holders * each // side  # each block's scales, from all holders

    def largest_of(self, own: Tensor, dtype: torch.dtype) -> Tensor:
        """The largest finite magnitudes of this rank's rows [n, K] in each column of ``blocks``: [blocks, K]."""
        found = own.new_zeros((len(self.blocks), own.shape[1]), dtype=dtype)
        for i, block in enumerate(self.blocks):
            above = block * self.side - self.first
            part = own[max(above, 0) : max(above + self.side, 0)].to(dtype)
            if len(part):
                found[i] = torch.where(part.isfinite(), part.abs(), 0.0).amax(dim=0)
        return found

    def send(self, own: Tensor, form: Form, amax: Tensor | None) -> tuple[Tensor, Tensor]:
        """Bytes of this rank's rows [n, K], and scales of the same number of blocks on each rank."""
        assert self.largest is not None
        above = self.first % self.side
        whole = self.largest.new_zeros((self._most * self.side, own.shape[1]))
        whole[above : above + self.each] = own
        for end, row in ((self.first, above - 1), (self.first + self.each, above + self.each)):
            if end % self.side:
                whole[row] = self.largest[self.blocks.index(end // self.side)]
        data, scales = op.to_send(cast(whole, [form], amax=amax)[0])
        return data[above : above + self.each], scales

    def scales(self, gathered: Tensor) -> Tensor:
        """The weight's scales, in the memory of all ranks'.  Those of a block are the same, unless one is NaN."""
        return gathered[: len(self._gathered)].copy_(gathered[self._gathered].amax(dim=1))


class _Weight:
    """One linear's weight [N, K], and how it is gathered: as codes in ``forms``, or in BF16 if there are none.

    unit, parameter: FSDP2's module and its record of the weight.  amax: of the whole weight, float32 scalar.
    """

    def __init__(self, linear: Any, unit: FSDPModule, parameter: Any, mesh: Mesh, dtype: torch.dtype) -> None:
        self.linear, self.unit, self.parameter, self.mesh, self.dtype = linear, unit, parameter, mesh, dtype
        self.forms: tuple[Form, ...] = ()
        self.amax: Tensor | None = None
        self.cuts: dict[Form, Cuts] = {}
        self._in_bf16: list[Tensor] = []  # FSDP2's buffer for the whole weight
        shape = [linear.out_features, linear.in_features]
        shape[linear.split_dim] //= mesh.tp.size
        self.shape = shape

    def choice(self, precision: LinearPrecision, tokens: int) -> tuple[tuple[Form, ...], str]:
        """The forms to gather it in under a precision, and if there are none, why."""
        forms, (rows, columns), ranks = weight_codes(precision), self.shape, self.mesh.shard.size
        if not forms:
            return (), "a GEMM needs the weight itself, or codes for both GEMMs are not smaller"
        if columns % 2:
            return (), "codes of 4 bits need an even number of columns"
        sizes, device = Sizes(tokens, columns, rows), self.parameter.device
        if LINEAR_IMPLS[self.linear.impl].runs_whole(precision, device, sizes):
            return (), "Transformer Engine casts them"
        if rows % ranks:
            return (), f"{rows} rows cannot be divided by {ranks} ranks"
        for form in forms:
            if rows // ranks % form.block[0] and (form.by_rows or form.fmt.scale == "e4m3_4over6"):
                scale = "scales of whole columns" if form.by_rows else "blocks whose scales depend on all elements"
                return (), f"{rows} rows on {ranks} ranks cut {scale}"
        return forms, ""

    @property
    def is_whole(self) -> bool:
        """Whether the last gather's result is still there."""
        return self.linear.weight is getattr(self.parameter, "_unsharded_param", None)

    @property
    def shard(self) -> Tensor:
        """This rank's rows [n, K]."""
        return local_of(self.parameter.sharded_param).detach()

    def gather_as(self, forms: tuple[Form, ...]) -> None:
        """Gather it in these forms from now on.  Its unit must be sharded."""
        held, hooked = self.parameter, local_of(self.linear.weight)
        if not hasattr(held, "_unsharded_param"):
            numel, ranks = held._sharded_param_data.numel(), self.mesh.shard.size
            held.init_all_gather_outputs([numel], [self.dtype], ranks, held.device)
            held.init_unsharded_param()
            held.free_unsharded_param()
        if not self.forms:
            self._in_bf16 = held.all_gather_outputs
        held.all_gather_outputs = [] if forms else self._in_bf16  # FSDP2 makes those of codes, whose sizes differ
        for name, hook in zip(_HOOKS, (self._before, self._after), strict=True):
            if forms:
                setattr(hooked, name, hook)
            elif hasattr(hooked, name):
                delattr(hooked, name)
        held._init_extensions()
        self.forms, self.linear.codes, rows, shard = forms, {}, self.shape[0], self.mesh.shard
        self.cuts = {
            form: Cuts(rows, shard.size, shard.rank, form.block[0], held.device)
            for form in forms
            if rows // shard.size % form.block[0]
        }

    def _before(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> tuple[tuple[Tensor, ...], None]:
        made = iter(
            cast(self.shard, [form for form in self.forms if form not in self.cuts], amax=self.amax, dtype=self.dtype)
        )
        sent = [
            self.cuts[form].send(self.shard, form, self.amax) if form in self.cuts else op.to_send(next(made))
            for form in self.forms
        ]
        return tuple(part for parts in sent for part in parts), None

    def _after(self, outputs: Sequence[Tensor], metadata: None, dtype: torch.dtype, *, out: Tensor) -> None:
        made = {}
        for form, data, scales in zip(self.forms, outputs[::2], outputs[1::2], strict=True):
            # not the cast's own, whose memory belongs to FSDP2's copy-in stream and may be written too early
            whole = tensor_scale(self.amax, form.fmt) if form.scaled and self.amax is not None else None
            made[form] = Sent(data, self.cuts[form].scales(scales) if form in self.cuts else scales, whole)
        self.linear.codes = made


class CodeGathers:
    """The gathers of all quantisable weights of this rank's stages, for two or more ranks that shard them.

    Every rank must make the same calls.

    tokens: of a microbatch, that linears multiply on this rank.
    """

    def __init__(self, stages: Iterable[nn.Module], mesh: Mesh, dtype: torch.dtype, tokens: int) -> None:
        self._mesh, self._tokens, self._dtype = mesh, tokens, dtype
        self._weights = [
            _Weight(parameter._module_info.module, unit, parameter, mesh, dtype)
            for stage in stages
            for unit in stage.modules()
            if isinstance(unit, FSDPModule)
            for parameter in _parameters(unit)
            if isinstance(parameter._module_info.module, (ColumnParallelLinear, RowParallelLinear))
        ]

    @torch.no_grad()
    def before_pass(self, context: StepContext) -> None:
        """Choose how this pass gathers each weight."""
        changed = []
        for weight in self._weights:
            precision = context.precision or weight.linear.precision
            forms = weight.choice(precision, self._tokens)[0]
            assert not (forms and context.observed), "observers read weights, so probes run in bf16"
            if forms != weight.forms:
                changed.append((weight, forms))
        for unit in dict.fromkeys(weight.unit for weight, _ in changed):
            unit.reshard()  # weights that an evaluation has left whole
        for weight, forms in changed:
            weight.gather_as(forms)
        due = [weight for weight in self._weights if not weight.is_whole]
        if cuts := [(cut, weight.shard) for weight in due for cut in weight.cuts.values()]:
            found = [cut.largest_of(shard, self._dtype) for cut, shard in cuts]
            largest = torch.cat([one.flatten() for one in found])
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self._mesh.shard.group)
            for (cut, _), own, part in zip(cuts, found, largest.split([own.numel() for own in found]), strict=True):
                cut.largest = part.view_as(own)
        if scaled := [weight for weight in due if any(form.scaled for form in weight.forms)]:
            amaxes = torch.stack([op.finite_amax(one.shard, self._dtype) for one in scaled])
            for axis in (self._mesh.shard, self._mesh.tp):
                if axis.size > 1:
                    dist.all_reduce(amaxes, op=dist.ReduceOp.MAX, group=axis.group)
            for one, amax in zip(scaled, amaxes, strict=True):
                one.amax = amax

    def told(self, precisions: Mapping[str, Sequence[LinearPrecision]]) -> list[str]:
        """Lines that say which kinds of linears gather codes in which precisions, and why others do not.

        precisions: by the linear's name.
        """
        found: dict[str, dict[str, set[str]]] = {}
        for weight in self._weights:
            for precision in precisions[weight.linear.name]:
                forms, why = weight.choice(precision, self._tokens)
                by_precision = found.setdefault(
                    "gathered as codes" if forms else f"not gathered as codes, because {why}", {}
                )
                by_precision.setdefault(str(precision), set()).add(weight.linear.name.rsplit(".", 1)[1])
        lines = []
        for how, by_precision in found.items():
            by_kinds: dict[str, list[str]] = {}
            for name, kinds in by_precision.items():
                by_kinds.setdefault(", ".join(sorted(kinds)), []).append(name)
            which = "; ".join(f"{kinds} in {', '.join(names)}" for kinds, names in by_kinds.items())
            lines.append(f"weights {how}: {which}")
        return lines


def _parameters(unit: FSDPModule) -> list[Any]:
    """FSDP2's records of a unit's parameters; their place depends on PyTorch's release."""
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups
    return [parameter for group in groups if group is not None for parameter in group.fsdp_params]
