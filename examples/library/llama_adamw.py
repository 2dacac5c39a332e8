"""Train transformers' own Llama with plain AdamW, its linears re-planned by SNIP every so many steps.

    python examples/library/llama_adamw.py --model llama/ --data my.txt --steps 200

Without --model a tiny Llama with random weights learns the bytes of the text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from megatron_snip.attach import attach, token_losses


def load(folder: str | None, text: str) -> tuple[torch.nn.Module, torch.Tensor]:
    """The model, and the text as token ids [tokens]."""
    if folder is not None:
        ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[0]
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), ids
    config = LlamaConfig(
        vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4
    )
    return LlamaForCausalLM(config), torch.tensor(list(text.encode()))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a Hugging Face Llama's folder")
    parser.add_argument("--data", required=True, help="a file of text")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=50, help="steps between two plans")
    parser.add_argument("--target", type=float, default=0.75, help="share of the linears' FLOPs in FP4")
    args = parser.parse_args()
    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, ids = load(args.model, Path(args.data).read_text())
    if len(ids) <= 128:
        parser.error(f"--data {args.data} has {len(ids)} tokens, and a sample has 128; give more text")
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 if args.model is None else 2e-5)
    snip = attach(model)

    def draw(samples: int) -> torch.Tensor:
        starts = torch.randint(len(ids) - 128, (samples,))
        return torch.stack([ids[i : i + 128] for i in starts.tolist()]).to(device)

    for step in range(args.steps):
        batch = draw(4)
        with torch.autocast(device, torch.bfloat16):
            if step >= 10 and (step - 10) % args.every == 0:
                stats = snip.probe(lambda batch=batch: model(input_ids=batch, labels=batch).loss)
                other = draw(16)  # for a trial, which needs some thousand tokens
                held_out = lambda other=other: token_losses(model(input_ids=other).logits, other)  # noqa: E731
                snip.apply(snip.solve(args.target, held_out=held_out))
                print(f"step {step}: loss {stats.loss:.4f}, {snip.plan.achieved:.1%} of the linears' FLOPs in FP4")
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        snip.step()
    print(f"loss after {args.steps} steps: {loss.item():.4f}")


if __name__ == "__main__":
    main()
