"""Everything that only a GPU can tell, in ten minutes: one command for the first contact and for every GPU after it.

    python benchmarks/gpu.py --output gpu-h200         # the first GPU of this machine
    python benchmarks/gpu.py --rehearse --output try   # every step on a CPU, small, to find typos

OUTPUT/gpu.json and gpu.md are written anew after each step.  A step that fails is told of and the next one begins; a
step that would begin after --minutes is left out.  The exit status is 1 if a step failed or bits differed.

A rehearsal runs Triton's interpreter, the emulation in place of the tensor cores, and training on a CPU: its times mean
nothing, but every line of these files has run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
from harness import machine

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Table:
    """What a step found: rows of text, and ``bad``, what is wrong with it."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)

    def to_markdown(self) -> str:
        """The table under its title, what is wrong first."""
        lines = [f"## {self.title}", "", *(f"- **{text}**" for text in self.bad), *(f"- {text}" for text in self.notes)]
        lines += ["", "| " + " | ".join(self.columns) + " |", "|" + "---|" * len(self.columns)]
        return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in self.rows), ""])


@dataclass
class Contact:
    """Where the steps run; ``tell`` shows a line at once, ``left`` is how many seconds there are."""

    rehearse: bool
    folder: Path
    end: float
    tell: Callable[[str], None] = print

    @property
    def device(self) -> str:
        """Of tensors: a rehearsal has a CPU."""
        return "cpu" if self.rehearse else "cuda"

    def left(self) -> float:
        """Seconds until no step may begin."""
        return self.end - time.monotonic()


Step = Callable[[Contact], Table]


def run(steps: dict[str, Step], contact: Contact) -> int:
    """All steps, with what they found on disk after each; 1 if any failed or found something wrong."""
    about = machine(contact.device)
    done: dict[str, dict[str, object]] = {}
    texts: list[str] = ["# A GPU", "", *(f"- {name}: {value}" for name, value in about.items()), ""]
    bad = False
    for name, step in steps.items():
        begin = time.monotonic()
        if contact.left() <= 0:
            table = Table(name, [], bad=["left out: the time was over"])
        else:
            try:
                table = step(contact)
            except Exception as error:
                table = Table(name, [], bad=[f"failed: {''.join(traceback.format_exception_only(error)).strip()}"])
                (contact.folder / f"{name}.traceback.txt").write_text(traceback.format_exc())
        seconds = time.monotonic() - begin
        table.notes.append(f"this step took {seconds:.1f} s")
        bad |= bool(table.bad)
        done[name] = {"seconds": seconds, **asdict(table)}
        texts.append(table.to_markdown())
        (contact.folder / "gpu.json").write_text(json.dumps({"about": about, "steps": done}, indent=1) + "\n")
        (contact.folder / "gpu.md").write_text("\n".join(texts))
        contact.tell(table.to_markdown())
    return int(bad)


def main(words: list[str] | None = None) -> int:
    """Run the chosen steps."""
    from gpu_casts import bits, casts, ceilings, tilings
    from gpu_linears import linears, products
    from gpu_training import resume, training

    steps: dict[str, Step] = {
        "ceilings": ceilings, "bits": bits, "products": products, "casts": casts, "linears": linears,
        "training": training, "resume": resume, "tilings": tilings,
    }  # fmt: skip
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of gpu.json and gpu.md")
    parser.add_argument("--rehearse", action="store_true", help="small, on a CPU")
    parser.add_argument("--steps", default=",".join(steps), help=f"some of {', '.join(steps)}")
    parser.add_argument("--minutes", type=float, default=9.0, help="no step begins after so many")
    args = parser.parse_args(words)
    chosen = args.steps.split(",")
    if unknown := [name for name in chosen if name not in steps]:
        parser.error(f"--steps {', '.join(unknown)} unknown; known: {', '.join(steps)}")
    if not args.rehearse and not torch.cuda.is_available():
        parser.error("no GPU is here; --rehearse runs every step on the CPU")
    args.output.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(ROOT))  # tests.gpu.core
    contact = Contact(args.rehearse, args.output.resolve(), time.monotonic() + 60 * args.minutes)
    return run({name: steps[name] for name in chosen}, contact)


if __name__ == "__main__":
    sys.modules["gpu"] = sys.modules["__main__"]  # the steps import Table from here
    sys.exit(main())
