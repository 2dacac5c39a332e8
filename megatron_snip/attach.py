"""SNIP in your own training loop, for any torch model with ``nn.Linear``: single process, DDP or FSDP2.

    snip = attach(model)                                   # nothing changes yet
    for step, batch in enumerate(batches):
        if step % 100 == 10:
            snip.probe(lambda: model(**batch).loss)        # one more forward and backward, thrown away
            snip.apply(snip.solve(target=0.75))            # 75% of the linears' FLOPs in FP4
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        snip.step()

``solve(target=0.75, held_out=lambda: token_losses(model(**other).logits, other["labels"]))`` runs the plan over a batch
that the probe did not see, and others if it costs more than predicted, and returns the best.

Linears, probe and solver are those of ``pretrain_llama.py``.  The loss must be a mean over tokens.  In Hugging Face's
Llama and Qwen3, errors of q, k and v are judged at the attention's output, assuming causal attention over whole
sequences without padding.  Other models' linears are judged at their own output.  Only the trainer measures the weight
divergence.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from megatron_snip.config import SnipConfig
from megatron_snip.errors import UserError
from megatron_snip.interop.any_model import shapes_of, unwrapped
from megatron_snip.interop.attached_linear import PLAIN_PRECISION, AttachedLinear, chosen_linears
from megatron_snip.interop.held_out import TokenLosses, check_held_out, losses_of, token_losses
from megatron_snip.interop.huggingface import attention_of
from megatron_snip.mesh import data_parallel_mesh
from megatron_snip.quant import PLAIN, StepContext, check_linear
from megatron_snip.quant.casts.rounding import mix64
from megatron_snip.snip.max_loss import LEAST_PASSES, proposals
from megatron_snip.snip.measure.preserve_grads import Untouched, untouched
from megatron_snip.snip.measure.probe import Pass, Probe
from megatron_snip.snip.measure.statistics import Statistics
from megatron_snip.snip.plan.options import check_choices, device_options, read_choices
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.planner import ask, pending_of
from megatron_snip.snip.predict.divergence import Predictions
from megatron_snip.snip.predict.objectives import get_objective
from megatron_snip.snip.trial import Propose, TrialFailed, Trials, try_plan

__all__ = ["Snip", "attach", "token_losses"]

LOGGER = logging.getLogger("megatron_snip")

#: Options of SnipConfig, without ``snip_``, that define a plan.
_SOLVED_BY = ("churn", "fix", "granularity", "objective", "options", "trials")


def attach(
    model: nn.Module,
    linears: Sequence[str] | Callable[[str, nn.Linear], bool] | None = None,
    *,
    options: str = "auto",
    seed: int = 1234,
    impl: str = "auto",
) -> Snip:
    """Prepare the linears of a model for plans.  Until you apply a plan, they compute what they did before.

    linears: name patterns, such as "model.layers.*", or a predicate of name and linear.  By default, all linears except
    the output layer (the result of ``get_output_embeddings``, or a module named lm_head).  Weights of other modules,
    such as experts in one tensor, stay unquantised and do not count in a plan's shares.
    options: precisions that a linear may take, as --snip-options.  seed: for stochastic rounding.  impl: as
    --linear-impl.

    Call it on every rank, once the model is on its device and torch.distributed has started: after FSDP2's
    ``fully_shard``, before or after DDP and torch.compile, which breaks its graphs at quantised linears.  A copy of the
    model has its original linears.  If any of these linears was attached before, the earlier ``Snip`` is detached.
    Raises UserError if no linear is left, if one has its own forward, or if an option is unknown or cannot run here.
    """
    model = unwrapped(model)
    taken = chosen_linears(model, linears)
    prefix = "model." if all(name.startswith("model.") for name in taken) else ""
    named = {name.removeprefix(prefix): linear for name, linear in taken.items()}
    return Snip(model, named, options=options, seed=seed, impl=impl)


class Snip:
    """A model's linears with their probe and plans; ``attach`` returns it.

    If your loop resumes from a checkpoint, apply the plan that you saved with ``snip.plan.save(path)``, and set
    ``snip.iteration`` to the number of the next update, counted from 1.  Otherwise linears stay unquantised until the
    next plan, and random bits start over.
    """

    def __init__(self, model: nn.Module, linears: Mapping[str, nn.Linear], *, options: str, seed: int, impl: str):
        self.model, self.iteration = model, 1  # of the next update
        self.plan: Plan | None = None
        self.statistics: Statistics | None = None
        self.lengths: dict[int, int] = {}  # tokens per sequence in the current pass, by its first row
        self.context = PLAIN  # of the current pass, since other models do not pass a context to their linears
        device = next(iter(linears.values())).weight.device
        self._mesh = data_parallel_mesh()
        self.seed = mix64(seed) ^ self._mesh.rank  # ranks have different tokens
        self.impl, self._plain_seed = impl, seed
        self.sharded = bool(_fsdp(model))
        attends = attention_of(model, self.lengths.__getitem__) or {}
        self.shapes, attends = shapes_of(linears, attends)
        words = device_options(options, device)
        self._options = SnipConfig(snip_options=words)
        choices = read_choices(self._options, self.shapes)
        if choices.formats <= {"bf16"}:
            raise UserError(f"attach: options {options} quantise nothing; name a format, such as fp8,fp4")
        for option in choices.options:
            check_linear(impl, option, device)
        for linear in linears.values():
            if isinstance(linear.forward, AttachedLinear):
                linear.forward.snip.detach()
        self.linears = {
            name: AttachedLinear(self, name, linear, keeps=not self.sharded) for name, linear in linears.items()
        }
        self._probe = Probe(
            self.linears, attends, shapes=self.shapes, formats=choices.formats,
            mesh=self._mesh, tokens=0, device=device, own_attends=False,
        )  # fmt: skip

    def probe(self, *losses: Callable[[], Tensor]) -> Statistics:
        """Measure.  Each of ``losses`` runs the model forward over a batch and returns its mean loss.

        The statistics are for the mean of these losses over all ranks, whatever the number of tokens of each.  Pass
        each microbatch that has its own mean as its own loss: within a loss, all tokens have equal weight.

        ``probe`` runs backward itself.  It leaves gradients, buffers, weights and torch's random numbers unchanged.
        Under FSDP2, call it between updates, when no gradients are accumulated.  Call it on every rank.  It raises
        ProbeFailed (of megatron_snip.snip.measure.probe) on every rank if a loss is not finite, backward does not reach
        a linear, or memory runs out.  Catch it to continue with the current plan.
        """
        if not losses:
            raise UserError("probe: no loss; give what runs the model, as probe(lambda: model(**batch).loss)")
        if given := [type(loss).__name__ for loss in losses if not callable(loss)]:
            raise UserError(
                f"probe: a {given[0]} is not a function; give lambda: model(**batch).loss, which runs the model"
            )
        if not torch.is_grad_enabled():
            raise UserError("probe: gradients are off; call it outside torch.no_grad()")
        self._check_wrapped()
        self._forget_forwards()
        rows = {name: linear.rows_seen for name, linear in self.linears.items()}
        device = self._probe.device
        devices = [device] if device.type == "cuda" else []  # otherwise fork_rng saves every GPU of the node
        try:
            with torch.random.fork_rng(devices), untouched(self.model) as kept:

                def run_pass(ahead: int, context: StepContext) -> Pass:
                    with self._in(context):
                        return self._pass(losses[ahead], kept)

                found = self._probe.run(run_pass, kept.zero_grad, self.iteration, len(losses), updates=False)
        finally:
            self._forget_rows()
            for name, linear in self.linears.items():
                linear.rows_seen = rows[name]
        self.statistics = found
        return found

    def _pass(self, loss_of: Callable[[], Tensor], kept: Untouched) -> Pass:
        """Forward and backward of one batch.  The gradient is that of the mean over all ranks."""
        self._forget_rows()
        loss, size = loss_of(), self._mesh.dp.size
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            raise UserError(f"probe: the loss is a {type(loss).__name__} without a gradient; return the model's loss")
        if loss.numel() != 1:
            raise UserError(f"probe: the loss has shape {list(loss.shape)}; return one number, the mean over tokens")
        seen = self._most_rows()
        kept.note(loss)
        (loss / size).sum().backward()
        # recomputation counts rows again, or, if reentrant, for the first time
        rows = seen or self._most_rows()
        mean = float(loss.detach().double().sum()) / size
        sums = torch.tensor([mean, rows], dtype=torch.float64, device=loss.device)
        if size > 1:
            dist.all_reduce(sums)
        mean, tokens = sums.tolist()
        self._probe.tokens = round(tokens)
        return Pass(loss=mean, grad_norm=0.0, clip=1.0, tokens=size * rows)

    def _most_rows(self) -> int:
        return max(linear.rows_seen for linear in self.linears.values())

    def _check_wrapped(self) -> None:
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != self._mesh.world_size:
            raise UserError(
                f"the number of processes was {self._mesh.world_size} when attach was called and is {world} now; call "
                "attach after torch.distributed is started"
            )
        if not self.sharded and _fsdp(self.model):
            raise UserError("the model was sharded by FSDP2 after attach; call attach after fully_shard")
        now = next(iter(self.linears.values())).module.weight.device
        if now != self._probe.device:
            raise UserError(f"the model has moved from {self._probe.device} to {now} since attach; call attach again")
        for name, linear in self.linears.items():
            if vars(linear.module).get("forward") is not linear:
                raise UserError(f"{name} is no longer attached; call attach again")

    def solve(
        self,
        target: float | None = None,
        *,
        max_loss: float | None = None,
        held_out: TokenLosses | Sequence[TokenLosses] | None = None,
        **options: Any,
    ) -> Plan:
        """The best plan, by the last probe, with a share ``target`` of the linears' FLOPs in FP4: 0.75 by default.

        If bf16 is an option, ``target`` is the share of modelled time that the plan saves.
        max_loss: in place of a target, for the largest share whose measured loss stays below so many nats above
        BF16's, as --snip-max-loss.  It needs ``held_out``.
        held_out: for a trial.  Each runs the model forward over a batch that the probe did not see, and returns the
        losses of its tokens, as ``token_losses`` gives them; some thousand tokens are enough.  With it, the plan is run
        before it is returned, and others beside it if it costs more than predicted, as docs/how_snip_decides.md says.
        The one that measures best is returned, with the record of all in ``plan.trial``.  If the trial fails, one line
        is logged, and the plan in force is returned.  trials=0 switches it off.
        options: churn, fix, granularity, objective, options and trials, as --snip-churn and so on, such as
        granularity="linear" or fix="layers.0.*=fp8".

        Call it on every rank.  Raises UserError on every rank if the options cannot be met.
        """
        if target is not None and (not isinstance(target, (int, float)) or not 0 <= target <= 1):
            raise UserError(f"solve: target is {target!r}; give a share, 0 to 1")
        named = {f"snip_{name}": value for name, value in options.items()}
        if unknown := sorted(options.keys() - set(_SOLVED_BY)):
            known = f"snip_{unknown[0]}" in {field.name for field in dataclasses.fields(SnipConfig)}
            what = f"{unknown[0]!r} is only for the trainer" if known else f"unknown option {unknown[0]!r}"
            raise UserError(f"solve: {what}; options are {', '.join(_SOLVED_BY)}")
        share = 0.75 if target is None else float(target)
        snip = dataclasses.replace(self._options, snip_target=share, snip_max_loss=max_loss, **named)
        snip = dataclasses.replace(snip, snip_options=device_options(snip.snip_options, self._probe.device))
        if not isinstance(snip.snip_trials, int) or snip.snip_trials < 0:
            raise UserError(f"solve: trials is {snip.snip_trials!r}; give a number of forward passes, 0 or more")
        losses, propose = check_held_out(held_out), None
        predictions = self._predictions(snip.snip_objective) if losses else None
        if max_loss is not None:
            _check_max_loss(snip, target, predictions is not None)
        answer: list[Any] = [None, ""]
        failed: Exception | None = None
        if self._mesh.rank == 0:
            try:
                plan, propose = self._solved(snip)
                answer[0] = plan.to_dict()
            except Exception as error:  # must not raise: the other ranks are blocked in the broadcast
                failed, answer[1] = error, str(error) or repr(error)
        if self._mesh.world_size > 1:
            dist.broadcast_object_list(answer, src=0)
        if failed is not None:
            raise failed
        if answer[1]:
            raise UserError(answer[1])
        plan = Plan.from_dict(answer[0], "plan from rank 0")
        if predictions is None or snip.snip_trials < 2:
            return plan
        return self._best(plan, propose, losses, snip, predictions)

    def _predictions(self, objective: str) -> Predictions | None:
        """Of the last probe; None if an objective does not use it."""
        if self.statistics is None or not get_objective(objective).needs_stats:
            return None
        return Predictions.of(self.statistics)

    def _solved(self, snip: SnipConfig) -> tuple[Plan, Propose]:
        """The solver's plan, and what a trial runs with it."""
        if get_objective(snip.snip_objective).needs_operands:
            raise UserError(
                f"solve: objective {snip.snip_objective!r} needs what only the trainer measures; choose snip"
            )
        choices = check_choices(snip, self.shapes)
        request, _ = ask(snip, self.shapes, choices, self.statistics, seed=self._plain_seed, current=self.plan)
        pending = pending_of(snip, choices, request, self.iteration)
        plan = pending.plan_of(request.solve(), self.shapes, "nominal")
        return plan, proposals(pending, plan, self.shapes, "nominal", self.plan)

    def _best(
        self, plan: Plan, propose: Propose | None, held_out: Sequence[TokenLosses], snip: SnipConfig, known: Predictions
    ) -> Plan:
        """The best plan by measurement, of the solver's and others, or the one in force if the trial fails."""
        self._check_wrapped()

        def run(context: StepContext = PLAIN) -> Tensor:
            with self._in(context):
                return losses_of(held_out, self._mesh, self._probe.device)

        best, why = None, "no plan has a finite loss"
        self._forget_forwards()
        try:
            with untouched(self.model):
                trials = Trials(run, self.linears, self._mesh, self._probe.device)
                _, best = try_plan(trials, propose, snip.snip_trials, plan, known, snip.snip_max_loss)
        except TrialFailed as error:
            why = str(error)
        finally:
            self._forget_forwards()
        if best is None and self._mesh.rank == 0:
            LOGGER.warning(f"update {self.iteration}: the trial failed, keeping the current plan: {why}")
        unplanned = dict.fromkeys(self.linears, PLAIN_PRECISION)
        return best or self.plan or Plan.by_hand(unplanned, self.shapes, iteration=self.iteration)

    def _forget_forwards(self) -> None:
        """Free what a forward without backward leaves: parameters gathered by FSDP2, and casts of weights."""
        for module in _fsdp(self.model):
            module.reshard()
        self._forget_casts()

    def _forget_casts(self) -> None:
        for linear in self.linears.values():
            if linear.casts is not None:
                linear.casts.clear()

    def apply(self, plan: Plan | str | Path) -> None:
        """Run the linears under a plan or plan file.  Raises UserError if its linears differ or it cannot run here."""
        self._check_wrapped()
        source = "plan" if isinstance(plan, Plan) else str(plan)
        plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        plan.check_names(self.linears, source)
        for name, linear in self.linears.items():
            check_linear(self.impl, plan.linears[name], linear.module.weight.device)
        for name, linear in self.linears.items():
            linear.precision = plan.linears[name]
        self.plan = plan

    def step(self) -> None:
        """Call it after every update of the weights: it advances the random bits and drops the weight casts."""
        self.iteration += 1
        self._forget_rows()

    def _forget_rows(self) -> None:
        self.lengths.clear()
        for linear in self.linears.values():
            linear.rows_seen = 0
        self._forget_casts()

    def detach(self) -> None:
        """Restore the model's original linears.  Weights stay as they are."""
        for linear in self.linears.values():
            if vars(linear.module).get("forward") is linear:
                del linear.module.forward

    @contextmanager
    def unquantised(self) -> Iterator[None]:
        """Within the block, linears compute as without SNIP.  With activation recomputation, include backward."""
        with self._in(StepContext(precision=PLAIN_PRECISION)):
            yield

    @contextmanager
    def _in(self, context: StepContext) -> Iterator[None]:
        before, self.context = self.context, context
        try:
            yield
        finally:
            self.context = before


def _check_max_loss(snip: SnipConfig, target: float | None, tries: bool) -> None:
    """UserError for a loss that is no number above 0, that nothing measures, or that is given beside a target."""
    nats = snip.snip_max_loss
    if not isinstance(nats, (int, float)) or not 0 < nats < float("inf"):
        raise UserError(f"solve: max_loss is {nats!r}; give a number of nats above 0")
    if target is not None:
        raise UserError("solve: target and max_loss are alternatives, and both are given; drop one")
    if not tries:
        raise UserError(
            "solve: max_loss is about what trials measure, and nothing is tried; give held_out, after a probe, and an "
            "objective that uses it, such as snip"
        )
    if snip.snip_trials < LEAST_PASSES:
        raise UserError(
            f"solve: max_loss is about what trials measure, and trials is {snip.snip_trials}; give {LEAST_PASSES} or "
            "more"
        )


def _fsdp(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
