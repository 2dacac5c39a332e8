"""What the prediction of a linear's loss is if labels are drawn from the model instead of taken from the text.

    python -m examples.study.sampled_labels FOLDER layers.11.mlp.down_proj layers.29.mlp.down_proj

The loss divergence is T/2 sum_t (G_t dY_t)^2, with gradients G of the text's labels.  If labels are drawn from the
model, its expectation is the curvature of the loss along dY (Gauss-Newton).  With the text's labels, it also has the
square of what the change would do to the loss to first order.  That is small, except for a token that all later ones
read, such as an attention sink.  For each sequence and linear, this prints both predictions, and if you name linears,
what they predict: [L(+dY) + L(-dY)]/2 - L0, where +dY rounds input and weight.  No code is shared with the trainer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.study.judge import FORMATS, TEXTS, linears_of, losses, rounded, sequences_of

Row = dict[str, float]


class Shifted:
    """A linear whose output becomes Y + sign * dY; keeps dY and, with ``kept``, Y for a gradient."""

    def __init__(self, linear: Any, fmt: str) -> None:
        self.fmt, self.weight, self.sign, self.kept = fmt, rounded(linear.weight.detach(), fmt, "weight"), 0.0, False
        linear.register_forward_hook(self.shift)

    def shift(self, linear: Any, given: tuple[Tensor, ...], y: Tensor) -> Tensor:
        """The forward hook; y [1, S, N]."""
        if not (self.sign or self.kept):
            return y
        x = given[0].detach()
        low = rounded(x.flatten(0, -2), self.fmt, "input").view_as(x)
        self.error = (F.linear(low, self.weight) - F.linear(x, linear.weight)).detach()
        self.y = y.requires_grad_() if self.kept else y
        return self.y + self.sign * self.error


def predict(model: Any, all_shifted: Sequence[Shifted], each: Tensor, generator: torch.Generator) -> list[Row]:
    """What each linear is predicted to cost on a sequence [S + 1], in nats a token, and the token that weighs most."""
    rows: list[Row] = [{} for _ in all_shifted]
    for one in all_shifted:
        one.kept = True
    logits = model(each[None, :-1], use_cache=False).logits[0].float()
    drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
    for name, labels in (("the text's labels", each[1:]), ("drawn labels", drawn)):
        loss = F.cross_entropy(logits, labels, reduction="sum")
        gradients = torch.autograd.grad(loss, [one.y for one in all_shifted], retain_graph=labels is not drawn)
        for row, one, gradient in zip(rows, all_shifted, gradients, strict=True):
            change = (gradient * one.error).sum(-1)[0]  # of the sequence's whole loss, by each token's dY
            row[name] = float(change.square().sum() / 2 / len(labels))
            if labels is not drawn:
                row |= {"first order": float(change.mean()), "heaviest token": int(change.abs().argmax())}
    for one in all_shifted:
        one.kept = False
    return rows


@torch.no_grad()
def truth(model: Any, one: Shifted, sequences: Tensor) -> list[Row]:
    """What a linear costs on each of the sequences [N, S + 1] when it is rounded, and the part that is even in dY."""
    by_sign = []
    for one.sign in (1.0, -1.0, 0.0):
        by_sign.append(losses(model, sequences).mean(1))
    plus, minus, base = by_sign
    even = (plus + minus) / 2 - base
    return [{"rounded": more, "even part": half} for more, half in zip((plus - base).tolist(), even.tolist())]


def main(words: Sequence[str] | None = None) -> None:
    """Command line: a JSON line for each linear."""
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="Hugging Face folder with the texts of examples/study/real_model.py")
    parser.add_argument("linears", nargs="*", help="names as in a plan (default: all, without their truth)")
    parser.add_argument("--format", choices=FORMATS, default="fp4", help="(default: fp4)")
    parser.add_argument("--tokens", type=int, default=1024, help="held-out tokens of each text (default: 1024)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence (default: 512)")
    own = parser.parse_args(words)
    model = AutoModelForCausalLM.from_pretrained(own.folder, dtype=torch.float32, local_files_only=True).eval()
    model.requires_grad_(False)
    linears, generator = linears_of(model), torch.Generator().manual_seed(0)
    if unknown := sorted({*own.linears} - linears.keys()):
        parser.error(f"{own.folder} has no linear {unknown[0]}; it has {', '.join([*linears][:3])} and so on")
    sequences = torch.cat([sequences_of(own.folder, file, own.tokens, own.length) for file in TEXTS.values()])
    names = own.linears or [*linears]
    all_shifted = [Shifted(linears[name], own.format) for name in names]
    rows = [predict(model, all_shifted, each, generator) for each in sequences]
    for index, name in enumerate(names):
        found = [each[index] for each in rows]
        if own.linears:
            found = [{**a, **b} for a, b in zip(found, truth(model, all_shifted[index], sequences), strict=True)]
        print(json.dumps({"linear": name, "format": own.format, "sequences": found}), flush=True)


if __name__ == "__main__":
    main()
