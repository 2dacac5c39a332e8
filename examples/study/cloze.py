"""A cloze task of held-out text for `megatron-snip evaluate`: which word comes next?

    python -m examples.study.cloze ~/.cache/megatron_snip/smollm2 runs/cloze --items 200
    megatron-snip evaluate ~/.cache/megatron_snip/smollm2 --include-path runs/cloze --tasks cloze_prose,cloze_code \
        --max-length 128 --output runs/cloze/scores.json

Like LAMBADA's, an item is a passage of 60 to 80 words and the word after it, of at least four letters.  `acc` counts
words whose every token is the likeliest one, `perplexity` is of whole words.  A text is cut into stretches of equal
length, and the first such passage of each is an item, so items are always the same and share no text.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from examples.study.judge import TEXTS
from megatron_snip import runtime
from megatron_snip.errors import UserError
from megatron_snip.files.json import write_atomic
from megatron_snip.train.report.evaluations import Scores

TASKS = {f"cloze_{text}": file for text, file in TEXTS.items()}
MAX_LENGTH = 128  # tokens that the model sees: most of prose's passages, and the end of code's
_ITEM = re.compile(r"(?<!\S)(\S+(?:\s+\S+){59,79}?)( [A-Za-z]{4,})(?![\w'])")
_YAML = """\
task: {task}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: loglikelihood
doc_to_text: context
doc_to_target: target
metric_list:
  - metric: acc
  - metric: perplexity
"""


def items_of(text: str, count: int) -> list[dict[str, str]]:
    """An item of each of ``count`` stretches: its context and its target, which begins with a space."""
    cuts = [len(text) * i // count for i in range(count + 1)]
    found = (_ITEM.search(text, *stretch) for stretch in pairwise(cuts))
    return [{"context": item[1], "target": item[2]} for item in found if item]


def write_tasks(model: Path, folder: Path, count: int) -> None:
    """Write the tasks' files for lm-eval, from the texts of a model's folder.

    Raises UserError if more than a tenth of the stretches have no item.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for task, file in TASKS.items():
        items, data = items_of((model / file).read_text(encoding="utf-8"), count), folder.absolute() / f"{task}.jsonl"
        if len(items) < 0.9 * count:
            raise UserError(f"{model / file} has {len(items)} items in {count} stretches; ask for fewer")
        write_atomic(data, "".join(json.dumps(item) + "\n" for item in items))
        write_atomic(folder / f"{task}.yaml", _YAML.format(task=task, data=json.dumps(str(data))))


def flat(metrics: Scores) -> dict[str, float | None]:
    """Scores of a task with their standard errors as values of their own, such as acc and acc_stderr."""
    return {key: value for metric, (mean, error) in metrics.items()
            for key, value in ((metric, mean), (f"{metric}_stderr", error))}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with the texts of examples/study/real_model.py")
    parser.add_argument("folder", type=Path, help="for the tasks")
    parser.add_argument("--items", type=int, default=200, help="of each text (default: 200)")
    own = parser.parse_args(arguments)
    write_tasks(own.model, own.folder, own.items)


if __name__ == "__main__":
    with runtime.report_errors():
        main()
