"""Train a small Llama under SNIP in transformers' Trainer.

python examples/library/trainer_callback.py --data my.txt --output runs/trainer
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from megatron_snip.integrations.transformers import SnipCallback


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
