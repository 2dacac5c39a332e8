"""Measures the linears of one block together: token sums, reduced over tp and squared at the end of each microbatch.

    s[t] = <(G_o W_o)_t, A(q + dq, k, v)_t - A(q, k, v)_t>      for q, one number per query token; likewise for k and v

A is the attention, G_o W_o the gradient of its output O [T, A D].  Measuring at the outputs of q, k and v would not
work.  The softmax is nonlinear within errors as large as FP4's, and ignores what all keys have in common.  An error of
one key or value also affects the losses of many queries, which are independent of each other.  Source:
docs/numerics.md.  T local tokens, A query and G key/value heads on this rank, D channels per head, F formats.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_snip.mesh import Axis
from megatron_snip.quant import Operands
from megatron_snip.snip.measure.linear_probe import LinearProbe, Shown

#: q [T, A D], k and v [cp T, G D] of whole sequences, and the row of the first token, which identifies the
#: microbatch -> [T, A D]
Attend = Callable[..., Tensor]


class Failure:
    """The first failure in this rank's part of a probe; "" for none.

    Stores text, because an exception would keep the memory of its frames.  A failure also frees ``probes``.
    ``elsewhere``: another rank failed, and this one cannot continue without it.
    """

    def __init__(self) -> None:
        self.text = ""
        self.elsewhere = False
        self.probes: list[LinearProbe] = []

    @property
    def happened(self) -> bool:
        """Whether to stop measuring."""
        return self.elsewhere or bool(self.text)

    def note(self, error: BaseException | str) -> None:
        """Record the first failure, and free all measurements: the pass itself may need the memory."""
        self.free()
        kind = f"{type(error).__name__}: " if isinstance(error, BaseException) else ""
        self.text = self.text or f"{kind}{str(error).strip()}".splitlines()[0]

    def free(self) -> None:
        """Free all measurements."""
        for probe in self.probes:
            probe.weight_error.clear()


class BlockProbe:
    """Measures a block's linears; ``see``, with its name, observes each linear.

    attend: None if no linear is of kind q, k or v.  own: whether it is the model's own attention, with the same bits.
    gather: all-gather over cp, local tokens of sequences [T, C] -> whole sequences [cp T, C]; None without cp.
    progress: called after each linear of each microbatch.

    Failures here are recorded and the pass continues, with the same number of collectives as on other ranks.
    """

    def __init__(
        self,
        probes: Mapping[str, LinearProbe],
        attend: Attend | None,
        tp: Axis,
        failure: Failure,
        *,
        own: bool = True,
        cp: Axis | None = None,
        gather: Callable[[Tensor], Tensor] | None = None,
        progress: Callable[[], object] | None = None,
    ) -> None:
        self.probes, self.attend, self.failure, self.own = dict(probes), attend, failure, own
        self.tp, self.cp, self.gather, self.progress = tp, cp, gather, progress
        self.formats = next(iter(self.probes.values())).formats
        # by the global row of a microbatch's first token, since several microbatches may be in flight
        self._shown: dict[int, dict[str, Shown | None]] = {}

    @torch.no_grad()
    def see(self, name: str, operands: Operands) -> None:
        """Backward of one linear over one microbatch.  After a block's last linear, adds its squared token sums."""
        assert operands.call.key is not None, "the key tells the microbatch"
        row0, counted = operands.call.key.row0, _Counted(operands)
        shown = self._shown.setdefault(row0, {})
        shown[name] = None
        if not self.failure.happened:
            try:
                shown[name] = self.probes[name].measure(counted.operands)
            except Exception as error:
                self._give_up(error)
        counted.make_up(self.probes[name])
        if self.progress is not None:
            self.progress()
        if len(shown) == len(self.probes):
            self._add(self._shown.pop(row0), row0, len(operands.x))

    def _give_up(self, error: Exception) -> None:
        self.failure.note(error)
        self._forget()

    def _forget(self) -> None:
        """Free all measurements."""
        self.failure.free()
        for shown in self._shown.values():
            shown.update(dict.fromkeys(shown))

    def _add(self, shown: Mapping[str, Shown | None], row0: int, tokens: int) -> None:
        """Add the squares of a microbatch's token sums [7 F, T], summed over tp."""
        if not self.formats:
            return
        device = next(iter(self.probes.values())).device
        sums = None
        if self.gather is not None and self.cp is not None and self.attend is not None:
            shown = self._with_whole_sequences(shown, self.cp, self.gather)
        if not self.failure.happened:
            try:
                sums = self._token_sums(shown, row0)
            except Exception as error:
                self._give_up(error)
        if sums is None:
            sums = torch.zeros(len(self.probes) * len(self.formats), tokens, device=device)
        if self.tp.size > 1:
            dist.all_reduce(sums, group=self.tp.group)
        squares = sums.double().square()
        found = [squares.sum(dim=1), squares.square().sum(dim=1), squares.amax(dim=1)]
        share = 1.0 if self.tp.is_first else 0.0  # equal on all tp ranks, so counted once
        places = [(probe, fmt) for probe in self.probes.values() for fmt in self.formats]
        for (probe, fmt), total, spread, top in zip(places, *found, strict=True):
            probe.sums.add(f"token/{fmt}", total, share)
            probe.sums.add(f"spread/{fmt}", spread, share)
            probe.sums.most(f"top_token/{fmt}", top)

    def _with_whole_sequences(
        self, shown: Mapping[str, Shown | None], cp: Axis, gather: Callable[[Tensor], Tensor]
    ) -> Mapping[str, Shown | None]:
        """Gather outputs and errors of k and v over cp, [cp T, G D], in one collective of all cp ranks or none."""
        keys = [name for name in self.probes if self.probes[name].shape.kind in ("k", "v")]
        parts = None
        if not self.failure.happened:
            try:
                ones = {name: cast(Shown, shown[name]) for name in keys}
                tensors = [x for one in ones.values() for x in (one.output, *one.errors.values()) if x is not None]
                parts = torch.cat(tensors, dim=1)
                parts.new_empty(2 * cp.size, *parts.shape)  # memory for the all-gather, before other ranks wait for it
            except Exception as error:
                self._give_up(error)
        failed = torch.tensor([float(parts is None)], device=next(iter(self.probes.values())).device)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=cp.group)
        if failed.item() or parts is None:
            self.failure.elsewhere = True
            self._forget()
            return shown
        wholes = iter(gather(parts).chunk(len(tensors), dim=1))
        for name, one in ones.items():
            output = next(wholes)
            ones[name] = dataclasses.replace(one, output=output, errors={fmt: next(wholes) for fmt in one.errors})
        return {**shown, **ones}

    def _token_sums(self, shown: Mapping[str, Shown | None], row0: int) -> Tensor:
        """[7 F, T] for all linears and formats, partial over tp."""
        known = {self.probes[name].shape.kind: one for name, one in shown.items() if one is not None}
        behind = {kind: known[kind] for kind in ("q", "k", "v") if kind in known}
        plain = [one.output for one in behind.values()]
        if behind and not self.own:  # rounding of another implementation is not an error of q and k
            assert self.attend is not None
            known["o"] = dataclasses.replace(known["o"], read=self.attend(*cast(list[Tensor], plain), row0))
        rows = []
        for probe in self.probes.values():
            kind = probe.shape.kind
            if kind not in behind:
                rows += [known[kind].token_sums[fmt] for fmt in self.formats]
                continue
            judged: dict[int, Tensor] = {}  # by an error's identity, since formats may share it
            for error in (behind[kind].errors[fmt] for fmt in self.formats):
                if id(error) not in judged:
                    place = list(behind).index(kind)
                    judged[id(error)] = self._behind_attention(kind, plain, place, error, known["o"], row0)
                rows.append(judged[id(error)])
        return torch.stack(rows)

    def _behind_attention(
        self, kind: str, plain: Sequence[Tensor | None], place: int, error: Tensor, read: Shown, row0: int
    ) -> Tensor:
        """[T] for one error [T, N] of q, k or v, whose outputs are ``plain``."""
        q_k_v = [output for output in plain if output is not None]
        assert self.attend is not None and len(q_k_v) == 3 and read.read is not None and read.read_grad is not None
        if kind == "v":  # attention is linear in v, so this avoids a difference of nearly equal numbers
            change = self.attend(*_replaced(q_k_v, place, error), row0)
        else:
            change = self.attend(*_replaced(q_k_v, place, q_k_v[place] + error), row0).sub_(read.read)
        # products are rounded to the compute dtype, which is negligible in a sum over thousands
        return change.mul_(read.read_grad).sum(dim=1, dtype=torch.float32)


class _Counted:
    """Operands that count their collectives over tp, so that a failed rank can make up for those it skipped."""

    def __init__(self, operands: Operands) -> None:
        self._made = made = Counter[str]()

        # holds the counter, not its owner: a reference cycle would keep operands until the garbage collector runs
        def counted(whole: Callable[[Tensor], Tensor], amax: Tensor) -> Tensor:
            made["collectives"] += 1
            return whole(amax)

        reduce = {role: partial(counted, whole) for role, whole in operands.call.reduce_amax.items()}
        self.operands = dataclasses.replace(operands, call=operands.call._replace(reduce_amax=reduce))
        self._plain, self._device = operands.call.reduce_amax, operands.x.device

    def make_up(self, probe: LinearProbe) -> None:
        """Join the remaining collectives of other ranks for this linear, with 0 as the neutral element of max."""
        missing = probe.collectives(self._plain.keys()) - self._made["collectives"]
        for whole in list(self._plain.values())[:1]:
            for _ in range(missing):
                whole(torch.zeros((), device=self._device))


def _replaced(tensors: Sequence[Tensor], place: int, by: Tensor) -> list[Tensor]:
    return [*tensors[:place], by, *tensors[place + 1 :]]
