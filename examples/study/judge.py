"""What a plan costs a real model, by an evaluator that shares no code with the trainer.

    python -m examples.study.judge FOLDER fp8 fp4 plans/plan_75.json --tokens 4096

It runs transformers' own model of a Hugging Face folder, with the forward of each linear of a block replaced: input
and weight are rounded to the format, by the definitions of docs/numerics.md, written here a second time.  A plan is
the name of a format, for all linears, or a plan file, of whose linears it reads "fprop".  The figure is the mean
increase of the loss over unrounded linears in nats a token, with its standard error over tokens, paired.

--alone FORMAT also judges each linear in that format with all others unrounded, which takes a pass over the text for
each.  The model computes in float32 from weights in BF16, which on most CPUs is faster than BF16.  --dtype bfloat16 is
the trainer's own.  Scales of NVFP4 depend on what is rounded at once: here one sequence.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

#: Rows and columns of the blocks of an input and of a weight.
BLOCKS = {
    "fp8": ((1, 128), (128, 128)),
    "fp4": ((1, 128), (128, 128)),
    "mxfp8": ((1, 32), (1, 32)),
    "nvfp4_plain": ((1, 16), (1, 16)),
    "nvfp4": ((1, 16), (16, 16)),
    "nvfp4_4over6": ((1, 16), (16, 16)),
}
FORMATS = tuple(BLOCKS)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E4M3_MAX, E2M1_MAX = 448.0, 6.0
TEXTS = {"prose": "held_out_prose.txt", "code": "held_out_code.txt"}


def to_e4m3(x: Tensor) -> Tensor:
    """x [...] on the grid of E4M3; torch's own cast rounds to nearest, ties to even."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def to_e2m1(x: Tensor) -> Tensor:
    """x [...] on the grid of E2M1: the code is the number of midpoints below |x|, a tie goes to the even code."""
    grid = torch.tensor(E2M1)
    midpoints = (grid[1:] + grid[:-1]) / 2
    midpoints[1::2] = torch.nextafter(midpoints[1::2], torch.zeros(()))  # at the midpoint above an odd code: upwards
    return torch.copysign(grid[torch.bucketize(x.abs(), midpoints)], x)


def blocked(x: Tensor, rows: int, cols: int) -> Tensor:
    """x [R, C] in blocks, the last ones filled up with zeros: [row blocks, rows, column blocks, cols]."""
    padded = F.pad(x, (0, -x.shape[1] % cols, 0, -x.shape[0] % rows))
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // cols, cols)


def to_nvfp4(blocks: Tensor, wanted: Tensor, whole: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values [R, r, C, c] on the grid of E2M1, their scales, and the blocks' squared errors [R, 1, C, 1] times whole^2.

    wanted [R, 1, C, 1]: the blocks' scales before they are rounded to E4M3; whole []: one over the tensor's scale.
    """
    one = torch.ones(())
    stored = to_e4m3(wanted)
    scale = stored * torch.div(one, whole)
    encode = torch.div(one, scale).clamp(max=torch.finfo(torch.float32).max)
    values = to_e2m1((blocks * encode).clamp(-E2M1_MAX, E2M1_MAX))
    return values, scale, (values * stored - blocks * whole).square().sum((1, 3), keepdim=True)


def rounded(x: Tensor, fmt: str, role: str) -> Tensor:
    """x [R, C] of an fprop, rounded to a format along C, in x's dtype; role is "input" or "weight"."""
    with x.device:  # of the constants
        return _rounded(x, fmt, role)


def _rounded(x: Tensor, fmt: str, role: str) -> Tensor:
    rows, cols = BLOCKS[fmt][role == "weight"]
    blocks = blocked(x.float(), rows, cols)
    amax = blocks.abs().amax((1, 3), keepdim=True)
    one = torch.ones(())
    if fmt == "mxfp8":
        mantissa, exponent = torch.frexp(torch.div(amax, torch.tensor(E4M3_MAX)))  # scales are rounded up
        exponent = torch.where(amax > 0, exponent - (mantissa == 0.5).int(), -127).clamp(-127, 127)
        scale, encode = torch.exp2(exponent.float()), torch.exp2(-exponent.float())
        values = to_e4m3(blocks * encode)
    elif fmt == "nvfp4_4over6":  # a block's amax becomes 6, or 4 with 1.5 times the scale: the smaller error
        whole = torch.div(torch.tensor(256 * E2M1_MAX), amax.max())
        wanted = torch.div(amax, torch.tensor(E2M1_MAX)) * whole
        (six, by_six, more), (four, by_four, less) = (to_nvfp4(blocks, each, whole) for each in (wanted, wanted * 1.5))
        values, scale = torch.where(less < more, four, six), torch.where(less < more, by_four, by_six)
    elif fmt.startswith("nvfp4"):
        whole = torch.div(torch.tensor(E4M3_MAX * E2M1_MAX), amax.max())
        values, scale, _ = to_nvfp4(blocks, amax * (whole * torch.div(one, torch.tensor(E2M1_MAX))), whole)
    else:
        largest = E4M3_MAX if fmt == "fp8" else E2M1_MAX
        encode = torch.div(torch.tensor(largest), amax).clamp(max=torch.finfo(torch.float32).max)
        scale = torch.where(amax > 0, torch.div(one, encode), 0.0)
        values = (to_e4m3 if fmt == "fp8" else to_e2m1)((blocks * encode).clamp(-largest, largest))
    out = (values * scale).flatten(2).flatten(0, 1)
    return out[: x.shape[0], : x.shape[1]].to(x.dtype)


def linears_of(model: Any) -> dict[str, Any]:
    """The linears that a plan names: those of the blocks."""
    found = {name.removeprefix("model."): module for name, module in model.named_modules()}
    return {name: module for name, module in found.items() if re.fullmatch(r"layers\.\d+\..*_proj", name)}


def formats_of(word: str, names: Sequence[str]) -> dict[str, str]:
    """Format of each linear's fprop: of a format's name, or of a plan file.  SystemExit for anything else."""
    if word in (*FORMATS, "bf16"):
        return dict.fromkeys(names, word)
    try:
        found = {name: entry["fprop"] for name, entry in json.loads(Path(word).read_text())["linears"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        sys.exit(f"{word} is no plan file ({error!r}); give one, or a format of {', '.join(FORMATS)}")
    if found.keys() != set(names):
        sys.exit(f"{word} is a plan of {len(found)} linears and the model has {len(names)}, or others; give its own")
    if unknown := sorted({*map(str, found.values())} - {*FORMATS, "bf16"}):
        sys.exit(f"{word} has {unknown[0]}, which this judge cannot round to; it knows {', '.join(FORMATS)}")
    return found


@contextmanager
def in_formats(model: Any, chosen: Mapping[str, str]) -> Iterator[None]:
    """Inside, linears multiply rounded operands.  q, k and v, and gate and up, read one input: it is rounded once."""
    last: dict[str, Any] = {}

    def forward(linear: Any, fmt: str, weight: Tensor, x: Tensor) -> Tensor:
        if last.get("x") is not x or last["fmt"] != fmt:
            last.update(x=x, fmt=fmt, rounded=rounded(x.flatten(0, -2), fmt, "input").view_as(x))
        return F.linear(last["rounded"], weight, linear.bias)

    linears = linears_of(model)
    changed = [name for name, fmt in chosen.items() if fmt != "bf16"]
    try:
        for name in changed:
            linear, fmt = linears[name], chosen[name]
            weight = rounded(linear.weight.detach(), fmt, "weight")
            linear.forward = lambda x, linear=linear, fmt=fmt, weight=weight: forward(linear, fmt, weight, x)
        yield
    finally:
        for name in changed:
            linears[name].__dict__.pop("forward", None)


@torch.no_grad()
def losses(model: Any, sequences: Tensor) -> Tensor:
    """Loss of each token in nats, one sequence at a time: sequences [N, S + 1] -> float64 [N, S]."""
    found = []
    for each in sequences:
        logits = model(each[None, :-1], use_cache=False).logits[0].float()
        found.append(F.cross_entropy(logits, each[1:], reduction="none").double())
    return torch.stack(found)


def sequences_of(folder: Path, file: str, tokens: int, length: int) -> Tensor:
    """Sequences at equal distances in a text: [tokens / length, length + 1].  SystemExit if it is too short."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    try:
        text = (folder / file).read_text(encoding="utf-8")
    except OSError as error:
        sys.exit(f"{folder / file}: {error.strerror}; python -m examples.study.real_model writes it")
    ids, count = tokenizer.encode(text, add_special_tokens=False).ids, max(1, tokens // length)
    apart = (len(ids) - 1) // count
    if apart < length:
        sys.exit(f"{folder / file} has {len(ids)} tokens; give --tokens {len(ids) // length * length} or less")
    return torch.tensor([ids[i * apart : i * apart + length + 1] for i in range(count)])


def mean_and_error(differences: Tensor) -> tuple[float, float]:
    """Mean and its standard error of differences [...] that were paired by token."""
    return float(differences.mean()), float(differences.std() / math.sqrt(differences.numel()))


def judge(model: Any, texts: Mapping[str, Tensor], plans: Mapping[str, Mapping[str, str]]) -> Iterator[dict[str, Any]]:
    """Loss of the unrounded model, then each plan's increase, on each text and on all."""
    base = {name: losses(model, sequences) for name, sequences in texts.items()}
    yield {"plan": "bf16", "loss": {name: mean_and_error(loss) for name, loss in base.items()}}
    for plan, formats in plans.items():
        begin = time.perf_counter()
        with in_formats(model, formats):
            more = {name: losses(model, sequences) - base[name] for name, sequences in texts.items()}
        more["all"] = torch.cat([each.flatten() for each in more.values()])
        seconds = round(time.perf_counter() - begin, 1)
        yield {"plan": plan, "increase": {k: mean_and_error(v) for k, v in more.items()}, "seconds": seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: a line for each plan, as JSON with --json."""
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="Hugging Face folder with the texts of examples/study/real_model.py")
    parser.add_argument("plans", nargs="*", help=f"plan files, or formats: {', '.join(FORMATS)}")
    parser.add_argument("--tokens", type=int, default=4096, help="held-out tokens of each text (default: 4096)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a sequence (default: 512)")
    parser.add_argument("--texts", nargs="+", choices=TEXTS, default=list(TEXTS), help="(default: both)")
    parser.add_argument("--alone", choices=FORMATS, help="a format, to judge each linear in it alone")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="(default: float32)")
    parser.add_argument("--json", action="store_true", help="a JSON object a line")
    own = parser.parse_args(arguments)
    model = AutoModelForCausalLM.from_pretrained(own.folder, dtype=getattr(torch, own.dtype), local_files_only=True)
    names = list(linears_of(model.eval()))
    plans = {word: formats_of(word, names) for word in own.plans}
    if own.alone:
        plans |= {f"{name}={own.alone}": {name: own.alone} for name in names}
    texts = {name: sequences_of(own.folder, TEXTS[name], own.tokens, own.length) for name in own.texts}
    for row in judge(model, texts, plans):
        shown = ", ".join(f"{k} {m:.4f} +- {e:.4f}" for k, (m, e) in row.get("increase", row.get("loss")).items())
        print(json.dumps(row) if own.json else f"{row['plan']}: {shown}", flush=True)


if __name__ == "__main__":
    main()
