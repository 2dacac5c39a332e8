"""What the tests of benchmarks run on every rank; importable, so that forked ranks find it."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from examples.study import head_to_head
from examples.study.head_to_head import HeadToHead
from megatron_snip import runtime
from megatron_snip.cli import evaluate as tool

#: A question with three answers, and texts of which the longest needs several windows of 256 tokens.
QUESTIONS = [
    {"question": f"{i} times {i} is", "answers": [str(i * i), str(i + i + 1), "nothing new"], "right": i % 3}
    for i in range(20)
]
TEXTS = [{"text": "".join(f"The {i}th of {n} things. " for i in range(12 * n))} for n in (1, 2, 8)]
TASKS = {
    "sums": (QUESTIONS, "multiple_choice", '"{{question}}"', "right", ["acc", "acc_norm"]),
    "texts": (TEXTS, "loglikelihood_rolling", '""', '"{{text}}"', ["word_perplexity", "bits_per_byte"]),
    "writing": (TEXTS, "generate_until", '"{{text}}"', '"x"', ["exact_match"]),
}


def local_tasks(folder: Path) -> Path:
    """Tasks of one's own: files for lm-eval and their data."""
    folder.mkdir(parents=True)
    for name, (rows, kind, text, target, metrics) in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        choices = 'doc_to_choice: "{{answers}}"\n' if kind == "multiple_choice" else ""
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\ntest_split: test\n"
            f"output_type: {kind}\ndoc_to_text: {text}\ndoc_to_target: {target}\n{choices}"
            f"metric_list:\n{''.join(f'  - metric: {metric}{chr(10)}' for metric in metrics)}"
        )
    return folder


@contextlib.contextmanager
def offline(cache: Path) -> Any:
    """datasets keeps what it reads in a folder of the test, and asks no network; lm-eval asks pip for no versions."""
    os.environ.update(HF_HOME=str(cache), HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    import lm_eval.evaluator

    lm_eval.evaluator.add_env_info = lambda results: None  # it starts `pip list` for every score
    with contextlib.redirect_stderr(io.StringIO()):
        yield


def cloze_of_arms(cache: Path, work: HeadToHead, arms: Sequence[str], exported: Path) -> list[dict[str, Any]]:
    """What `HeadToHead.cloze` finds for each arm of seed 1, with the same weights."""
    runtime.stop = lambda: None  # the harness stops
    head_to_head.run = lambda words, log: tool.main(words[1:])
    os.environ["DISABLE_MULTIPROC"] = "1"  # lm-eval's bootstrap, in a process that may have no children
    found = []
    with offline(cache), contextlib.redirect_stdout(io.StringIO()):
        for name in arms:
            (folder := work.folder / "1" / name).mkdir(parents=True)
            found.append(work.cloze(name, folder, exported))
    return found


def one_after_another(*calls: tuple[Any, ...]) -> list[Any]:
    """What each (function, argument, ...) returns, in one process: transformers and lm-eval take seconds to load."""
    return [function(*arguments) for function, *arguments in calls]


def evaluate(cache: Path, *calls: tuple[str, ...]) -> list[tuple[str, str]]:
    """tools/evaluate.py, once for each list of words: what it prints, what it refuses."""
    found = []
    runtime.stop = lambda: None  # the harness stops
    with offline(cache / str(dist.get_rank())):
        for words in calls:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                try:
                    tool.main(words)
                    found.append((said.getvalue(), ""))
                except ValueError as error:
                    found.append(("", str(error)))
    return found


def by_transformers(cache: Path, hf: Path, tasks: Path, plan: Path | None) -> list[dict[str, Any]]:
    """lm-eval's own scores of transformers' model, as it is and with its linears under a plan."""
    with offline(cache / "theirs"):
        import lm_eval
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        from megatron_snip.attach import attach

        model = HFLM(pretrained=str(hf), device="cpu", dtype="float32", batch_size=4)
        found = []
        for quantised in (False, True) if plan else (False,):
            if quantised:
                attach(model.model).apply(str(plan))
            manager = TaskManager(include_path=str(tasks), include_defaults=False)
            names = ["sums", "texts"]
            results = lm_eval.simple_evaluate(model=model, tasks=names, task_manager=manager, bootstrap_iters=0)
            assert results is not None
            found.append(results["results"])
    return found
