"""SNIP as a callback of transformers' Trainer.

from megatron_snip.integrations.transformers import SnipCallback

Trainer(model, arguments, train_dataset=data, callbacks=[SnipCallback(target=0.75, start=100, every=500)]).train()
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

from megatron_snip.attach import Snip, attach, token_losses
from megatron_snip.errors import UserError

try:
    from transformers import TrainerCallback
except ImportError:
    raise UserError("SnipCallback needs transformers; pip install transformers") from None


class SnipCallback(TrainerCallback):
    """Plans the model's linears before the step after ``start``, and then every ``every`` steps.

    A probe reads one batch of the training data, the same one each time, and a trial tries the plan on another batch,
    if there is one.  target: share of the linears' FLOPs that a plan puts in FP4.  The other options are those of
    `attach`, such as ``options="fp8,fp4"``.  After `Trainer.train` begins, ``snip`` is the attached `Snip`, and
    ``snip.plan`` the plan in force, or None before the first.  Raises UserError for bad values.
    """

    def __init__(self, target: float = 0.75, start: int = 10, every: int = 100, **options: Any) -> None:
        for name, value, least in (("start", start, 0), ("every", every, 1)):
            if value < least:
                raise UserError(f"SnipCallback: {name} is {value}; give {least} or more steps")
        self.target, self.start, self.every, self.options = target, start, every, options
        self.snip: Snip | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Attach to the model, and take batches for probes and trials, without advancing training's own iterator."""
        self.snip = attach(given["model"], **self.options)
        self.snip.iteration = state.global_step + 1  # of the coming update; a resumed run does not begin with the first
        with torch.random.fork_rng([]):
            batches = list(islice(given["train_dataloader"], 2))
        self.batch, *self.others = [{name: x.to(args.device) for name, x in batch.items()} for batch in batches]

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Probe and plan if it is time.  A resumed run has no plan, and plans at once."""
        assert self.snip is not None
        since = state.global_step - self.start
        if since < 0 or (self.snip.plan is not None and since % self.every):
            return
        model, batch = given["model"], self.batch
        with torch.autocast(args.device.type, torch.bfloat16, enabled=args.bf16):
            self.snip.probe(lambda: model(**batch).loss)
            held_out = [lambda o=other: token_losses(model(**o).logits, o["labels"]) for other in self.others]
            self.snip.apply(self.snip.solve(self.target, held_out=held_out))

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Tell the attached linears that the weights have changed."""
        assert self.snip is not None
        self.snip.step()
