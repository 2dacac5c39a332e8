"""AdamW over FP32 master weights, or over BF16 weights without a master (bf16_adamw.py).  Source: arXiv 1711.05101.

The optimiser works on local shards as plain tensors: apex does not know DTensor, and plain tensors cost less.  Saving
restores the sharding.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megatron_snip.config import TrainingConfig
from megatron_snip.errors import UserError
from megatron_snip.mesh import Mesh
from megatron_snip.parallel.data import first_element, local_of, sharded_as
from megatron_snip.parallel.tags import tags_of
from megatron_snip.quant import RoundingKey, name_stream
from megatron_snip.quant.adamw.expansion import LOW
from megatron_snip.quant.adamw.step import Scalars
from megatron_snip.train.bf16_adamw import WEIGHT_LOW, Bf16AdamW
from megatron_snip.train.host_states import HostCopies
from megatron_snip.train.lost_updates import LostUpdates

MOMENTS = ("exp_avg", "exp_avg_sq")


def _fused_adam_of_apex() -> Any:
    """NVIDIA's FusedAdam.  Raises UserError if it is not installed."""
    build = "build NVIDIA's from source (github.com/NVIDIA/apex), or use --optimizer-impl torch"
    try:
        return importlib.import_module("apex.optimizers").FusedAdam
    except (ImportError, AttributeError) as error:
        found = importlib.util.find_spec("apex")
        if found is None:
            raise UserError(f"--optimizer-impl apex: apex is not installed; {build}") from error
        raise UserError(
            f"--optimizer-impl apex: the apex at {found.origin} is not NVIDIA's (PyPI's apex is an "
            f"unrelated web toolkit); uninstall it and {build}"
        ) from error


def check_optimizer_impl(t: TrainingConfig) -> None:
    """Raise UserError if the chosen implementation cannot run here."""
    if t.optimizer_impl == "apex":
        _fused_adam_of_apex()
        if not torch.cuda.is_available():
            raise UserError("--optimizer-impl apex needs a GPU, and there is none; use --optimizer-impl torch")


class Optimizer:
    """AdamW on this rank's shards of the parameters, named as in the checkpoint.

    moments: whether to allocate them; without them, updates are impossible.
    mesh: of the layout that shards the parameters; without one, they are whole.
    host: names of the parameters that are updated on the host, where their state lies.
    """

    def __init__(
        self,
        modules: Iterable[nn.Module],
        config: TrainingConfig,
        *,
        moments: bool = True,
        mesh: Mesh | None = None,
        host: Collection[str] = (),
    ) -> None:
        self.config = config
        self.steps = 0  # updates made; skipped iterations do not count
        self.samples = 0  # samples in those updates; schedules use it
        modules = list(modules)
        self.parameters = {name: p for module in modules for name, p in module.named_parameters()}
        self.tags = tags_of(*modules)
        shards = {name: local_of(p.detach()) for name, p in self.parameters.items()}
        self._host = HostCopies({name: shard for name, shard in shards.items() if moments and name in host})
        # shares memory with the parameter, so that an in-place update changes the parameter; on the host, a copy
        self._local = {name: nn.Parameter(shard) for name, shard in shards.items()} | self._host.weights
        decayed = [p for name, p in self._local.items() if self.tags[name].weight_decay]
        others = [p for name, p in self._local.items() if not self.tags[name].weight_decay]
        groups = [
            {"params": decayed, "weight_decay": config.weight_decay, "decays": True},
            {"params": others, "weight_decay": 0.0, "decays": False},
        ]
        options: dict[str, Any] = {
            "lr": config.lr,
            "betas": (config.adam_beta1, config.adam_beta2),
            "eps": config.adam_eps,
        }
        groups = [group for group in groups if group["params"]]
        if config.optimizer_precision != "fp32":
            self._adam: Any = Bf16AdamW(groups, config.optimizer_precision, **options)
            for name, p in self._local.items():
                place = (0, 0) if mesh is None else first_element(self.parameters[name], mesh)
                self._adam.keys[p] = RoundingKey(config.seed, 0, name_stream(name), *place)
        elif config.optimizer_impl == "apex":
            self._adam = _fused_adam_of_apex()(groups, adam_w_mode=True, **options)
        else:
            self._adam = torch.optim.AdamW(groups, fused=True, **options)
        self._has_moments = moments
        low = self._adam.low_parts if isinstance(self._adam, Bf16AdamW) else ()
        self._stored = (*MOMENTS, *low)
        for p in self._local.values() if moments else ():  # allocated now, so that a checkpoint can be read in place
            self._adam.state[p] = {name: torch.zeros_like(p) for name in self._stored}
        self.set_steps(0)

    def set_steps(self, steps: int, samples: int | None = None) -> None:
        """Set the number of updates so far, for Adam's bias correction, and the number of samples in them.

        Call it after writing weights or state.  samples: by default, full batches.
        """
        self.steps, self._host.stale = steps, True
        self.samples = steps * self.config.global_batch_size if samples is None else samples
        if isinstance(self._adam, Bf16AdamW):
            self._adam.steps = steps
        elif self.config.optimizer_impl == "apex":
            for group in self._adam.param_groups:
                group["step"] = steps
        else:
            for p in self._local.values():
                self._adam.state[p]["step"] = torch.tensor(float(steps), device=p.device)

    @torch.no_grad()
    def step(
        self,
        lr: float,
        coefficient: float,
        weight_decay: float | None = None,
        samples: int = 0,
        lost: LostUpdates | None = None,
    ) -> None:
        """Update with the gradients of a batch of `samples`, times `coefficient` (the clipping of the whole mesh).

        weight_decay: for matrices; by default --weight-decay.  lost: measures what reaches the weights.
        """
        grads = {name: self.gradient(name) for name, p in self.parameters.items() if p.grad is not None}
        self._host.fetch({name: grads.pop(name) for name in self._host.weights if name in grads})
        for group in self._adam.param_groups:
            group["lr"] = lr
            if group["decays"]:
                group["weight_decay"] = self.config.weight_decay if weight_decay is None else weight_decay
        self._update(grads, coefficient, lost)
        for names in self._host.arrived():
            self._update({name: self._host.grads[name] for name in names}, coefficient, lost)
            self._host.send(names)
        self._host.finish()
        self.steps += 1
        self.samples += samples

    def _update(self, grads: Mapping[str, Tensor], coefficient: float, lost: LostUpdates | None) -> None:
        """Update the parameters that have one of these gradients, local shards [...]."""
        if isinstance(self._adam, Bf16AdamW):
            self._adam.clip = coefficient
        elif coefficient != 1.0 and grads:
            torch._foreach_mul_(list(grads.values()), coefficient)
        if lost is None:
            self._run_adam(grads)
            return
        t, groups = self.config, self._adam.param_groups
        lr, decays = groups[0]["lr"], {p: group["weight_decay"] for group in groups for p in group["params"]}
        for name, grad in grads.items():  # one after the other, so that one copy of a weight is in memory at a time
            p, state = self._local[name], self._adam.state[self._local[name]]
            weight = [p.detach(), *([state[WEIGHT_LOW]] if WEIGHT_LOW in state else [])]
            before = [one.clone() for one in weight]
            self._run_adam({name: grad})
            scalars = Scalars.of(self.steps + 1, lr, decays[p], (t.adam_beta1, t.adam_beta2), t.adam_eps)
            lost.add(name, before, weight, state["exp_avg"], state["exp_avg_sq"], scalars)

    def _run_adam(self, grads: Mapping[str, Tensor]) -> None:
        """A step of the optimiser on the parameters that have one of these gradients."""
        if not grads:
            return
        if isinstance(self._adam, Bf16AdamW):
            self._adam.steps = self.steps
        for name, p in self._local.items():
            p.grad = grads.get(name)
        self._adam.step()
        for p in self._local.values():
            p.grad = None

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for p in self.parameters.values():
            p.grad = None

    def stored(self, name: str) -> dict[str, Tensor]:
        """What is stored beside a weight, by its name in a checkpoint, local shards [...]."""
        state = self._adam.state[self._local[name]]
        return {part: state[part] for part in self._stored}

    def moments(self, name: str) -> tuple[Tensor, ...]:
        """Adam's m and v of a parameter, and v's low part if there is one, local shards [...]."""
        return tuple(one for part, one in self.stored(name).items() if part != WEIGHT_LOW)

    def state(self, *, host: bool = False) -> list[Tensor]:
        """Everything that the device, or the host, stores beside the weights, local shards [...]."""
        names = [name for name in self._local if (name in self._host.weights) == host]
        return [one for name in names for one in self.stored(name).values()]

    def pinned(self) -> list[Tensor]:
        """Main weights and gradients on the host, local shards [...]."""
        return [*(p.detach() for p in self._host.weights.values()), *self._host.grads.values()]

    def low_parts(self) -> dict[str, Tensor]:
        """The low parts of the weights that have them, by parameter, local shards [...]."""
        there = self._has_moments and WEIGHT_LOW in self._stored
        return {name: self._adam.state[p][WEIGHT_LOW] for name, p in self._local.items() if there}

    def gradient(self, name: str) -> Tensor:
        """The local shard of a parameter's current gradient, [...]."""
        grad = self.parameters[name].grad
        assert grad is not None, f"{name} has no gradient"
        return local_of(grad)

    def tensors(self) -> dict[str, Tensor]:
        """The state as `optim.<parameter>.<moment>`, sharded like its parameter, for a checkpoint.

        The low part of a tensor has its name and `.low`; that of a weight is `model.<parameter>.low`.
        """
        out: dict[str, Tensor] = {}
        for name, p in self.parameters.items() if self._has_moments else ():
            for part, local in self.stored(name).items():
                value = sharded_as(p, local)
                out[f"model.{name}{LOW}" if part == WEIGHT_LOW else f"optim.{name}.{part}"] = value
        return out
