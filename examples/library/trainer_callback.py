"""SNIP as a callback of transformers' Trainer, the form of the authors' script.

python examples/library/trainer_callback.py --data my.txt --output runs/trainer
"""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from megatron_snip.attach import Snip, attach, token_losses


class SnipCallback(TrainerCallback):
    """Plans the model's linears every ``every`` steps, from step ``start`` on, by one batch of the training data.

    Plans are tried on another batch, if there is one.
    """

    def __init__(self, target: float = 0.75, start: int = 10, every: int = 100, **options: Any) -> None:
        self.target, self.start, self.every, self.options = target, start, every, options
        self.snip: Snip | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Attach to the model, and take batches for probes and trials; training's own iterator is left alone."""
        self.snip = attach(given["model"], **self.options)
        self.snip.iteration = state.global_step + 1  # of the coming update; a resumed run does not begin with the first
        with torch.random.fork_rng([]):
            batches = list(islice(given["train_dataloader"], 2))
        self.batch, *self.others = [{name: x.to(args.device) for name, x in batch.items()} for batch in batches]

    def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Probe and plan, when it is time; a resumed run, which has no plan, does so at once."""
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
        """The weights have changed."""
        assert self.snip is not None
        self.snip.step()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="a file of text")
    parser.add_argument("--output", required=True, help="the Trainer's folder")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    ids = torch.tensor(list(Path(args.data).read_bytes()))
    rows = [ids[i : i + 128] for i in range(0, len(ids) - 127, 128)]
    if not rows:
        parser.error(f"--data {args.data} has {len(ids)} bytes, and a sample has 128; give more text")
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
    )
    callback = SnipCallback(every=25)
    options = TrainingArguments(
        args.output, max_steps=args.steps, per_device_train_batch_size=4, learning_rate=1e-3, bf16=True,
        use_cpu=not torch.cuda.is_available(),
        logging_steps=10, report_to=[], save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    Trainer(LlamaForCausalLM(config), options, train_dataset=data, callbacks=[callback]).train()
    assert callback.snip is not None and callback.snip.plan is not None
    print(f"{callback.snip.plan.achieved:.1%} of the linears' FLOPs in FP4")


if __name__ == "__main__":
    main()
