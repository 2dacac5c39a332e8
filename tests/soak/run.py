"""Break a run again and again, and check that nothing is lost.

    python -m tests.soak.run --faults 200 --seed 1 --output runs/soak

The run is a small Llama over tp x pp with SNIP, under torchrun as users start it.  It trains to its last iteration with
a few faults on the way, and starts again after each fault that ends it.  Then metrics, plans and statistics must equal
those of an undisturbed run, bit for bit.  Such rounds follow until there were enough faults.

OUTPUT/report.json and report.md list for every fault where it hit, what the run said, from which checkpoint it
continued and how many iterations it repeated.  "Lost" are iterations before the newest checkpoint that was whole when
the fault hit; "silent" is damage that nothing reported.  The exit status is 1 if there was either, or a difference.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron_snip.train.run.metrics import metrics_file, read_metrics
from tests.soak.faults import FAULTS, PLACES, Fault, Launch, Round, newest_whole

#: The run that is broken, as options; probes before iterations 4, 12, 20, ...
OPTIONS: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4, "seq_length": 128,
    "vocab_size": 512, "untie_embeddings_and_output_weights": True, "micro_batch_size": 1, "global_batch_size": 2,
    "train_iters": 48, "lr": 2e-3, "mock_data": True, "bf16": True, "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2, "precision": "snip", "snip_start": 4, "snip_interval": 8, "snip_apply_lag": 3,
    "snip_probe_tokens": 1, "save_interval": 3, "async_save": True, "log_interval": 1000,
    "distributed_timeout_minutes": 0.4, "snip_solve_timeout": 20.0,
}  # fmt: skip
#: Metrics that a clock wrote.
TIMES = re.compile(r"(-time|_seconds|-seconds)$")


@dataclass
class Outcome:
    """What became of one fault."""

    number: int
    round: int
    kind: str
    place: str
    fell_at: int = 0  # iterations in the metrics when it fell
    whole: int = 0  # the newest checkpoint that was whole then, but for what the fault damaged
    resumed: int | None = None  # the checkpoint that the run went on from, None if it never stopped
    lost: int = 0
    silent: bool = False
    said: str = ""
    seconds: float = 0.0  # until the run was past the iteration at which it fell


@dataclass
class Report:
    """All faults, and what differed at the end of a round."""

    seed: int
    options: Mapping[str, Any]
    outcomes: list[Outcome] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Nothing lost, nothing silent, no difference."""
        return not self.differences and not any(o.lost or o.silent for o in self.outcomes)

    def to_markdown(self) -> str:
        """A row for each kind of fault."""
        lines = ["| fault | times | lost iterations | silent | made again, median (most) | seconds, median |",
                 "|---|---|---|---|---|---|"]  # fmt: skip
        for kind in FAULTS:
            mine = [o for o in self.outcomes if o.kind == kind]
            if not mine:
                continue
            again = [max(0, o.fell_at - o.resumed) for o in mine if o.resumed is not None]
            made = f"{statistics.median(again):.0f} ({max(again)})" if again else "-"
            seconds = statistics.median(o.seconds for o in mine)
            lines.append(
                f"| {kind} | {len(mine)} | {sum(o.lost for o in mine)} | {sum(o.silent for o in mine)} | {made} "
                f"| {seconds:.1f} |"
            )
        rounds = len({o.round for o in self.outcomes})
        count = f"{len(self.outcomes)} faults in {rounds} runs, seed {self.seed}"
        lines += ["", f"{count}; differences from the undisturbed run: {len(self.differences)}."]
        return "\n".join([*lines, *(f"- {text}" for text in self.differences)])

    def save(self, folder: Path) -> None:
        """report.json and report.md."""
        (folder / "report.json").write_text(json.dumps(asdict(self), indent=1))
        (folder / "report.md").write_text(self.to_markdown() + "\n")


def timeless(run_dir: Path) -> dict[str, Any]:
    """What a run leaves, without what a clock wrote: metrics by iteration, plans and statistics by file."""
    rows = read_metrics(metrics_file(run_dir))
    found: dict[str, Any] = {
        f"iteration {row['iteration']}": {key: value for key, value in row.items() if not TIMES.search(key)}
        for row in rows
    }
    for kind in ("plans", "stats"):
        for path in sorted((run_dir / kind).glob("*.json")):
            content = json.loads(path.read_text())
            content.get("solver", {}).pop("seconds", None)
            found[f"{kind}/{path.name}"] = content
    return found


def differences(ours: Mapping[str, Any], reference: Mapping[str, Any]) -> list[str]:
    """Names under which two runs left something else."""
    return [name for name in {**reference, **ours} if ours.get(name) != reference.get(name)]


def draw_faults(random_: random.Random, kinds: Sequence[str], last: int) -> list[Fault]:
    """A fault of each of these kinds, in the order in which they fall: each at a place that its kind knows."""
    found = []
    for kind, iteration in zip(kinds, random_.sample(range(2, last - 1), len(kinds)), strict=True):
        place = random_.choice(FAULTS[kind].places)
        at = PLACES[place](iteration, OPTIONS)
        found.append(Fault(kind, place, at, random_.random(), random_.randrange(1 << 30)))
    return sorted(found, key=lambda fault: fault.iteration)


#: How a run ends that could not save for too long: what befalls its processes then is not told any more.
ENDED = r"^error.* failed on rank \d+ \(.*\), \d+ in a row; free space"


def told(said: str, expected: str, *, ends: bool) -> str:
    """The line that the run owes, "" if there is none.

    ends: the fault ends the run, which may have been ending by one before, and then says that.
    """
    patterns = [expected, *([ENDED] if ends else [])] if expected else []
    return next((line for pattern in patterns for line in said.splitlines() if re.search(pattern, line)), "")


def one_fault(round_: Round, fault: Fault, outcome: Outcome) -> None:
    """Wait for the place, let the fault fall, and see the run past it."""
    round_.run_until(fault)
    begin = time.monotonic()
    outcome.fell_at, said_before = round_.iteration(), round_.log_size()
    outcome.whole = newest_whole(round_.saves, leave_out=FAULTS[fault.kind].damages)
    expected = FAULTS[fault.kind].fall(round_, fault)
    round_.go_on_past(outcome.fell_at)
    said = round_.log_since(said_before)
    loaded = re.findall(r"loaded and verified iteration (\d+)", said)
    if loaded:
        outcome.resumed = int(loaded[-1])
        outcome.lost = max(0, outcome.whole - min(map(int, loaded)))
    elif "starting from new weights" in said:
        outcome.resumed, outcome.lost = 0, outcome.whole
    # a run that was leaving already, and began again, has nothing to say of what befell its processes
    kind = FAULTS[fault.kind]
    line = told(said, expected, ends=kind.ends)
    owed = kind.damages or kind.ends or outcome.resumed is None
    outcome.said, outcome.silent = line.strip()[:300], bool(expected and owed and not line)
    outcome.seconds = time.monotonic() - begin


def soak(launch: Launch, output: Path, *, faults: int, seed: int, each: int, kinds: list[str],
         tell: Callable[[str], None] = lambda text: None) -> Report:  # fmt: skip
    """Rounds of at most ``each`` faults until there were enough; the report is written after each round."""
    random_, report = random.Random(seed), Report(seed, OPTIONS)
    output.mkdir(parents=True, exist_ok=True)
    whole = Round(launch, output / "undisturbed", OPTIONS)
    whole.go_on_past(int(OPTIONS["train_iters"]))
    whole.end()
    reference, number = timeless(whole.run_dir), 0
    last = int(OPTIONS["train_iters"])
    deck = [kind for _ in range(-(-faults // len(kinds))) for kind in random_.sample(kinds, len(kinds))][:faults]
    while deck:
        number += 1
        now, deck = deck[:each], deck[each:]
        round_ = Round(launch, output / f"round_{number:03d}", OPTIONS)
        try:
            drawn = draw_faults(random_, now, last)
            for i, fault in enumerate(drawn):
                if round_.iteration() >= last - 1:  # the run was faster: these fall in another
                    deck += [later.kind for later in drawn[i:]]
                    break
                outcome = Outcome(len(report.outcomes) + 1, number, fault.kind, fault.place)
                report.outcomes.append(outcome)
                one_fault(round_, fault, outcome)
                tell(f"{fault.kind} {fault.place} at {outcome.fell_at}")
            round_.go_on_past(last)
        except TimeoutError as error:
            report.differences.append(f"round {number}: {error}")
        finally:
            round_.end()
        different = differences(timeless(round_.run_dir), reference)
        report.differences += [f"round {number}: {name}" for name in different]
        report.save(output)
        if not different:
            shutil.rmtree(round_.run_dir)
    return report


def main(words: list[str] | None = None) -> int:
    """Break, compare, tell; 1 if anything was lost, silent or different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200, help="faults in all (default: 200)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the faults (default: 1)")
    parser.add_argument("--each", type=int, default=5, help="most faults in a run of 48 iterations (default: 5)")
    parser.add_argument("--kinds", default=",".join(FAULTS), help=f"some of {', '.join(FAULTS)}")
    parser.add_argument("--output", type=Path, required=True, help="a new folder")
    args = parser.parse_args(words)
    kinds = args.kinds.split(",")
    if unknown := sorted(set(kinds) - set(FAULTS)):
        parser.error(f"--kinds {', '.join(unknown)} unknown; known: {', '.join(FAULTS)}")
    if args.output.exists() and any(args.output.iterdir()):
        parser.error(f"--output {args.output} is not empty; give a new folder")
    from tests.soak.faults import torchrun

    with tqdm(total=args.faults, unit="fault") as bar:

        def tell(text: str) -> None:
            bar.set_postfix_str(text)
            bar.update()

        report = soak(torchrun, args.output, faults=args.faults, seed=args.seed, each=args.each, kinds=kinds, tell=tell)
    print(report.to_markdown())
    return 0 if report.good else 1


if __name__ == "__main__":
    sys.exit(main())
