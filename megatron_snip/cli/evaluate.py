r"""Score a model on benchmarks of EleutherAI's lm-evaluation-harness, unquantised or under a plan.

    megatron-snip evaluate runs/my/checkpoints --tasks zero-shot
    megatron-snip evaluate runs/my/checkpoints --plan own --tasks arc_easy,piqa --batch-size 32
    torchrun --rdzv-backend one_node --nproc_per_node 8 -m megatron_snip.cli evaluate llama/ \
        --tensor-model-parallel-size 8 --bf16 --tasks mmlu --num-fewshot 5
    megatron-snip evaluate runs/my/checkpoints --include-path my_tasks/ --tasks my_task

MODEL is a folder of checkpoints, one checkpoint in it, or a Hugging Face folder.  --tasks takes lm-eval's names, task
files, and the preset ``zero-shot``.  By default nothing is quantised.  --plan FILE quantises the linears' forward as in
training; --plan own does so with the checkpoint's plan, or the run's --precision.  Scores go to
evaluations/iter_0001000.json in the run folder, report.html, and wandb and TensorBoard if the run logs there; with
--output FILE they go only to that file.  Tasks in which the model generates text are refused.  You can add options of
the trainer.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib.util
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from megatron_snip import runtime
from megatron_snip.checkpoint.manifest import naming
from megatron_snip.cli import parsers
from megatron_snip.cli.tables import aligned
from megatron_snip.config import TILE, Config
from megatron_snip.data.tokenizer import Tokenizer, build_tokenizer
from megatron_snip.errors import UserError
from megatron_snip.files.io import check_output
from megatron_snip.interop.huggingface import check_model, is_hf_folder
from megatron_snip.interop.tokenizer_files import PLAN
from megatron_snip.model.llama import LlamaStage
from megatron_snip.model.spec import spec_of
from megatron_snip.quant import LinearPrecision, check_linear
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train.build_model import build_model
from megatron_snip.train.health.memory import WEIGHTS, warn_about_memory
from megatron_snip.train.report.evaluations import Evaluation, Scores, evaluation_file, score_rows
from megatron_snip.train.report.sections import write_report
from megatron_snip.train.run.run_folder import (
    Start,
    read_tensors,
    refuse_other_model,
    run_id_of,
    saved_options,
    with_saved_options,
)
from megatron_snip.train.run.trackers import check_trackers, start_trackers
from megatron_snip.train.schedule import final_switch
from megatron_snip.train.setup import agree_on, check, mesh_of

LOGGER = logging.getLogger("megatron_snip")
#: Kinds of requests that we can score.
SCORED = ("loglikelihood", "loglikelihood_rolling", "multiple_choice")


def load_tasks(words: str, include_path: str | None) -> tuple[Any, list[str]]:
    """lm-eval's task manager, and the names of the tasks.  Raises UserError for tasks that cannot be scored."""
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("evaluate needs lm-evaluation-harness; pip install lm-eval")
    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"--include-path {include_path} is not a folder; give one with YAML files of tasks")
    names = [task for word in words.split(",") for task in parsers.PRESETS.get(word.strip(), (word.strip(),))]
    manager = _manager(names, include_path)
    for name in names:
        if name not in manager.all_tasks and not Path(name).is_file():
            near = difflib.get_close_matches(name, [*parsers.PRESETS, *manager.all_tasks], n=1, cutoff=0.0)[0]
            raise UserError(f"--tasks: unknown task {name!r}; did you mean {near}? --include-path DIR adds your own")
    try:
        found = manager.load(names)["tasks"]
    except Exception as error:  # datasets, its files and the network fail in many ways
        first = str(error).strip().partition("\n")[0]
        raise UserError(f"--tasks {words}: cannot be loaded ({first}); check the task's file and its data") from error
    for name, task in found.items():
        if (kind := task.get_config("output_type")) not in SCORED:
            raise UserError(
                f"--tasks: {name} is of kind {kind}, but this tool only scores text; leave it out, or export the "
                "model with `megatron-snip convert` and run lm_eval itself"
            )
    return manager, names


def _manager(names: Sequence[str], include_path: str | None) -> Any:
    """lm-eval's index of tasks, reduced to your own tasks if these suffice; the full index takes ten seconds."""
    from lm_eval.tasks import TaskManager

    own = TaskManager(include_path=include_path, include_defaults=False)
    kinds = {name: own.task_index[name].kind.name for name in names if name in own.all_tasks}
    if all(kinds.get(name) == "TASK" or (name not in kinds and Path(name).is_file()) for name in names):
        return own  # a group might include lm-eval's own tasks
    return TaskManager(include_path=include_path)


def plan_of(word: str | None, config: Config, start: Start) -> tuple[Config, Plan | None]:
    """The plan of the linears' forward, from --plan; None means the --precision of the returned config."""
    if word is None:
        return config, None
    if config.precision.precision != "bf16":
        raise UserError(f"you gave both --plan {word} and --precision {config.precision.precision}; drop one")
    if word != "own":
        return config, Plan.load(word)
    if start.state is None:
        path = Path(str(start.load)) / PLAN
        if not path.is_file():
            raise UserError(f"--plan own: {start.load} has no {PLAN}; give --plan FILE, or drop it")
        return config, Plan.load(path)
    if start.state["snip"] and (saved := start.state["snip"]["plan"]) is not None:
        return config, Plan.from_dict(saved, f"plan of {start.load}")
    own = Config().replace(**saved_options(start.state, ("training", "precision", "snip"))).with_iterations()
    kind, final = own.precision.precision, final_switch(own)
    if kind == "plan":
        plan = Plan.load(str(own.precision.precision_plan))
        now = plan.linears if final is None else final.linears(plan.linears, start.iteration)
        return config, dataclasses.replace(plan, linears=now)
    kind = own.snip.snip_warmup_precision if kind == "snip" else kind
    if final is not None and start.iteration >= final.start:
        kind = str(final.of(LinearPrecision.parse(kind)))
    return config.replace(precision=kind), None


def check_plan(plan: Plan, config: Config, device: Any) -> None:
    """Raise UserError if a plan is for another model or cannot run here."""
    plan.check_names(spec_of(config.model).linear_names(config.model.num_layers), "--plan")
    for precision in set(plan.linears.values()):
        check_linear(config.precision.linear_impl, precision, device)


def options_of(own: argparse.Namespace, rest: Sequence[str]) -> tuple[Config, Start, int]:
    """The config, where the weights are, and the context length in tokens.

    Raises UserError for options that do not go together.
    """
    words = ["--load", own.model, *rest]
    try:
        config, start = with_saved_options(words, ("model", "data"))
    except UserError as error:  # the user gave a folder, not --load
        raise UserError(str(error).removeprefix("--load ")) from None
    if start.state is not None:
        config, start = with_saved_options([*words, *_compute(start.state, rest)], ("model", "data"))
    elif config.data.tokenizer_model is None:
        config = config.replace(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=own.model)
    if config.data.tokenizer_type == "NullTokenizer":
        raise UserError(f"{own.model} has no tokenizer; give --tokenizer-type and --tokenizer-model")
    world, p = runtime.environment_world_size(), config.parallel
    if p.pipeline_model_parallel_size > 1 or world != p.tensor_model_parallel_size:
        raise UserError(
            f"{world} ranks, --tensor-model-parallel-size {p.tensor_model_parallel_size}, "
            f"--pipeline-model-parallel-size {p.pipeline_model_parallel_size}; only tensor parallelism is supported: "
            "start as many ranks as --tensor-model-parallel-size says"
        )
    m = config.model
    longest = m.max_position_embeddings or m.seq_length
    length = min(own.max_length or longest, longest)
    config = config.replace(
        seq_length=-(-length // TILE) * TILE, max_position_embeddings=None, micro_batch_size=1, global_batch_size=1,
        train_iters=1, lr_warmup_iters=0, data_path=(), train_data_path=(), valid_data_path=(), mock_data=True,
        eval_interval=None, wandb_project=None, tensorboard_dir=None, sequence_parallel=False,
        reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,  # a request is one document
    )  # fmt: skip
    return config, start, length


def _compute(state: Mapping[str, Any], rest: Sequence[str]) -> list[str]:
    """--bf16 if the run used it and the options do not override it."""
    said = {word.partition("=")[0] for word in rest} & {"--bf16", "--no-bf16"}
    return ["--bf16"] if state["config"]["training"]["bf16"] and not said else []


def run_folder_of(start: Start) -> Path | None:
    """The run folder of the checkpoint: its original place, or the parent of its checkpoints; None if gone."""
    if start.state is None or start.load is None:
        return None
    for folder in (start.load.parent, Path(start.state["config"]["logging"]["run_dir"])):
        try:
            if run_id_of(folder) == start.run_id:
                return folder
        except UserError:  # another program's config.json
            continue
    return None


def make_model(config: Config, start: Start, plan: Plan | None, here: runtime.Runtime) -> LlamaStage:
    """The model with its weights, each linear at its precision.  Every rank must call it."""
    if start.state is None:
        assert start.load is not None
        check_model(start.load, config.model)
    else:
        refuse_other_model(config, start.state, finetune=True)
    start = agree_on(config, start)
    warn_about_memory(config, here, WEIGHTS)
    (stage,) = build_model(config, mesh_of(config, here), here.device).values()
    assert start.load is not None
    with naming(start.load, start.load_iteration):
        read_tensors(start, {f"model.{name}": p.detach() for name, p in stage.named_parameters()})
    for name, linear in stage.linears().items():
        linear.precision = plan.linears[name] if plan else LinearPrecision.parse(config.precision.precision)
    return stage.eval()


def asked(own: argparse.Namespace) -> str:
    """Suffix for task names, so that a quick test or other few-shot examples are not mistaken for the task itself."""
    said = {"num-fewshot": own.num_fewshot, "limit": own.limit}
    return "".join(f", {name} {value}" for name, value in said.items() if value is not None)


def scores_of(results: Mapping[str, Mapping[str, Any]], more: str = "") -> dict[str, Scores]:
    """lm-eval's results as task -> metric -> (value, standard error).  A filter becomes part of the metric's name.

    more: suffix for the names of tasks.
    """
    found: dict[str, Scores] = {}
    for task, values in results.items():
        scores: dict[str, tuple[float, float | None]] = {}
        for key, value in values.items():
            metric, _, kept = key.partition(",")
            if not kept or metric.endswith("_stderr") or isinstance(value, (str, bool)):
                continue
            error = values.get(f"{metric}_stderr,{kept}")
            name = metric if kept == "none" else f"{metric}, {kept}"
            scores[name] = (float(value), float(error) if isinstance(error, (int, float)) else None)  # or "N/A"
        if scores:
            found[f"{task}{more}"] = scores
    return found


def run(own: argparse.Namespace, model: Any, manager: Any, names: list[str]) -> dict[str, Scores]:
    """Run lm-eval on all tasks.  Returns the scores on rank 0 and nothing elsewhere.  Every rank must call it."""
    import lm_eval

    begin = time.perf_counter()
    results = lm_eval.simple_evaluate(
        model=model, tasks=names, num_fewshot=own.num_fewshot, limit=own.limit, task_manager=manager,
        log_samples=False, bootstrap_iters=own.bootstrap,
    )  # fmt: skip
    if results is None:
        return {}
    LOGGER.info(f"scored {len(names)} tasks in {time.perf_counter() - begin:.1f} s")
    return scores_of(results["results"], asked(own))


def model_of(start: Start) -> str:
    """Identifies the model: its run's id, or the path of the Hugging Face folder."""
    return str(start.load.resolve()) if start.state is None and start.load else start.run_id


def known(path: Path, iteration: int, model: str) -> Evaluation:
    """The scores already in the file.  Raises UserError if it is another checkpoint's."""
    found = Evaluation.load(path) if path.is_file() else Evaluation(iteration)
    if found.iteration != iteration:
        raise UserError(f"{path} is from iteration {found.iteration}, not {iteration}; give another --output")
    if found.model not in ("", model):
        raise UserError(f"{path} has the scores of {found.model}, not {model}; give another --output")
    return msgspec.structs.replace(found, model=model)


def track(run_dir: Path, start: Start, row: Mapping[str, Any]) -> None:
    """Add the scores to the report, wandb and TensorBoard.  Errors only warn, as the file of scores is written."""
    assert start.state is not None
    try:
        write_report(run_dir)
        config = tracked(start.state)
        for tracker in start_trackers(config.replace(run_dir=str(run_dir)), start.run_id, None):
            tracker.log(row, None, None)
            tracker.finish()
    except Exception as error:
        LOGGER.warning(f"the scores are not in the report, wandb or TensorBoard: {error}")


def tracked(state: Mapping[str, Any]) -> Config:
    """The run's own options, which say where it logs.

    A checkpoint may come from a stranger, so folders that it names count only if a run has logged there before.
    """
    config = Config().replace(**saved_options(dict(state), [f.name for f in dataclasses.fields(Config)]))
    log = config.logging
    if log.tensorboard_dir and not any(Path(log.tensorboard_dir).glob("events.out.tfevents.*")):
        config = config.replace(tensorboard_dir=None)
    if log.wandb_save_dir and not (Path(log.wandb_save_dir) / "wandb").is_dir():
        config = config.replace(wandb_project=None)
    return config


def check_own(own: argparse.Namespace) -> None:
    """Raise UserError for a number out of range."""
    for name, least in (("num_fewshot", 0), ("limit", 1), ("batch_size", 1), ("max_length", 2), ("bootstrap", 0)):
        value = getattr(own, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} is {value}; give {least} or more")


def bos_of(own: argparse.Namespace, tokenizer: Tokenizer, *, hf: bool) -> int | None:
    """The token before each text, if any.  Raises UserError if --add-bos is given but the tokenizer has none."""
    wanted = own.add_bos if own.add_bos is not None else hf
    if own.add_bos and tokenizer.bos is None:
        raise UserError("you gave --add-bos, but the tokenizer puts nothing before a text; drop it")
    return tokenizer.bos if wanted else None


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line.  Raises UserError for bad input."""
    own, rest = parsers.evaluate().parse_known_args(arguments)
    check_own(own)
    config, start, length = options_of(own, rest)
    run_dir = None if own.output else run_folder_of(start)
    path = Path(own.output or (evaluation_file(run_dir, start.iteration) if run_dir else "evaluation.json"))
    check_output("--output", path)
    if run_dir is not None and start.state is not None:
        check_trackers(tracked(start.state))
    known(path, start.iteration, model_of(start))  # now, so that a file of another model costs no scoring
    config, plan = plan_of(own.plan, config, start)
    config, given = check(config, runtime.environment_world_size())  # the plan of --precision plan
    plan, config = plan or given, config.with_defaults()
    manager, names = load_tasks(own.tasks, own.include_path)
    p, d = config.parallel, config.data
    here = runtime.start(p.distributed_backend, p.distributed_timeout_minutes, device=p.device)
    if plan is not None:
        check_plan(plan, config, here.device)
    tokenizer = build_tokenizer(d.tokenizer_type, d.tokenizer_model, config.model.vocab_size)
    LOGGER.info(f"tokenizer: {d.tokenizer_model}")  # the checkpoint may have chosen it
    bos = bos_of(own, tokenizer, hf=is_hf_folder(Path(own.model)))
    stage = make_model(config, start, plan, here)
    from megatron_snip.interop.lm_eval_model import SnipLM  # lm-eval is known to be here

    model = SnipLM(stage, tokenizer, max_length=length, batch_size=own.batch_size, bos=bos)
    scores = run(own, model, manager, names)
    if here.rank == 0:
        precision = f"plan {plan.hash}" if plan else config.precision.precision
        # printed first, in case something fails below
        heads, rows = score_rows([Evaluation(start.iteration, {precision: scores})])
        print(f"{aligned([heads, *rows])}\n\n{path}", flush=True)
        evaluation = known(path, start.iteration, model_of(start)).with_scores(precision, scores)  # as it is by now
        evaluation.save(path)
        if run_dir is not None:
            track(run_dir, start, evaluation.row(precision))
    runtime.stop()
