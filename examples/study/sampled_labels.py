"""What the prediction of a linear's loss is if labels are drawn from the model instead of taken from the text.

    python -m examples.study.sampled_labels FOLDER layers.11.mlp.down_proj layers.29.mlp.down_proj

The loss divergence is T/2 sum_t (G_t dY_t)^2, with gradients G of the text's labels.  If labels are drawn from the
model, its expectation is the curvature of the loss along dY (Gauss-Newton).  With the text's labels, it also has the
square of what the change would do to the loss to first order.  That is small, except for a token that all later ones
read, such as an attention sink.  For each sequence and linear, this prints both predictions, and what they predict:
[L(+dY) + L(-dY)]/2 - L0, where +dY rounds input and weight.  No code is shared with the trainer.
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


class Shifted:
    """A linear whose output becomes Y + sign * dY; keeps dY and, if ``kept``, Y for a gradient."""

    def __init__(self, linear: Any, fmt: str) -> None:
        self.fmt, self.weight, self.sign, self.kept = fmt, rounded(linear.weight.detach(), fmt, "weight"), 0.0, False
        self.hook = linear.register_forward_hook(self.shift)

    def shift(self, linear: Any, given: tuple[Tensor, ...], y: Tensor) -> Tensor:
        """The forward hook; y [1, S, N]."""
        x = given[0].detach()
        low = rounded(x.flatten(0, -2), self.fmt, "input").view_as(x)
        self.error = (F.linear(low, self.weight) - F.linear(x, linear.weight)).detach()
        self.y = y.detach().requires_grad_() if self.kept else y
        return self.y + self.sign * self.error


def compare(model: Any, linear: Any, fmt: str, sequences: Tensor, generator: torch.Generator) -> list[dict[str, Any]]:
    """For each of the sequences [N, S + 1], in nats a token: predictions, the truth, and the token that weighs most."""
    shifted = Shifted(linear, fmt)
    with torch.no_grad():
        by_sign = []
        for shifted.sign in (0.0, 1.0, -1.0):
            by_sign.append(losses(model, sequences).mean(1))
    base, plus, minus = by_sign
    shifted.sign, shifted.kept, found = 0.0, True, []
    for index, each in enumerate(sequences):
        logits = model(each[None, :-1], use_cache=False).logits[0].float()
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator)[:, 0]
        row: dict[str, Any] = {"rounded": float(plus[index] - base[index])}
        row["even part"] = float((plus + minus)[index] / 2 - base[index])
        for name, labels in (("the text's labels", each[1:]), ("drawn labels", drawn)):
            (gradient,) = torch.autograd.grad(
                F.cross_entropy(logits, labels, reduction="sum"), shifted.y, retain_graph=True
            )
            change = (gradient * shifted.error).sum(-1)[0]  # of the sequence's whole loss, by each token's dY
            row[name] = float(change.square().sum() / 2 / len(labels))
            if labels is not drawn:
                row |= {"first order": float(change.mean()), "heaviest token": int(change.abs().argmax())}
        found.append(row)
    shifted.hook.remove()
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Command line: a JSON line for each linear."""
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="Hugging Face folder with the texts of examples/study/real_model.py")
    parser.add_argument("linears", nargs="+", help="names as in a plan")
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
    for name in own.linears:
        rows = compare(model, linears[name], own.format, sequences, generator)
        print(json.dumps({"linear": name, "format": own.format, "sequences": rows}), flush=True)


if __name__ == "__main__":
    main()
