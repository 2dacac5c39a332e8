"""The examples: files parse and validate for their world size, scripts are sound and launch what they say."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from megatron_snip.arguments import parse
from megatron_snip.config import TILE, Config, ModelConfig
from megatron_snip.train.validate import validate

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
OTHERS = {"study", "authors_workflow"}  # which are no runs under SNIP
FILES = sorted(path for path in EXAMPLES.rglob("*.toml") if not OTHERS & {*path.parts})
LAUNCHERS = sorted(EXAMPLES.glob("llama_*/train_*.sh"))
FOLDERS = ("benchmarks", "docs", "examples", "tests", "tools")
SHELL = [p for folder in FOLDERS for p in (ROOT / folder).rglob("*") if p.suffix in {".sh", ".sbatch"}]
SCRIPTS = [ROOT / ".ci/run", *sorted(SHELL)]
# The smallest number of processes each file is written for, and the published number of parameters.
WORLD_SIZES = {"quickstart": 4, "llama_1b": 8, "llama_3b": 8, "llama_7b": 8, "llama_70b": 64}
PARAMETERS = {
    "llama_1b": 1_235_814_400,
    "llama_3b": 3_212_749_824,
    "llama_7b": 6_738_415_616,
    "llama_70b": 70_553_706_496,
}


def load(path: Path) -> Config:
    """Options of an example; the Llama files leave the data to the launch script."""
    words = ["--config", str(path)]
    return parse(words if "data-path" in path.read_text() else [*words, "--mock-data"])


def parameters(m: ModelConfig) -> int:
    """Parameters of a Llama, counted by hand from its shape."""
    attention = 2 * m.hidden_size * m.head_dim * (m.num_attention_heads + m.query_groups)
    block = attention + 3 * m.hidden_size * m.ffn_hidden_size + 2 * m.hidden_size
    ends = 2 if m.untie_embeddings_and_output_weights else 1
    return m.num_layers * block + ends * m.padded_vocab_size * m.hidden_size + m.hidden_size


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_is_valid_for_its_world_size(path: Path) -> None:
    validate(load(path), WORLD_SIZES[path.stem])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_shard_of_a_linear_ends_at_a_block(path: Path) -> None:
    config = load(path)
    m, tp = config.model, config.parallel.tensor_model_parallel_size
    for width in (
        m.hidden_size,
        m.ffn_hidden_size,
        m.num_attention_heads * m.head_dim,
        m.query_groups * m.head_dim,
    ):
        assert width % (tp * TILE) == 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_plans_at_75_percent(path: Path) -> None:
    config = load(path)
    assert config.precision.precision == "snip"
    assert config.snip.snip_target == 0.75
    assert config.snip.snip_start + config.snip.snip_interval < config.training.train_iters  # at least two plans


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_the_published_number(name: str) -> None:
    path = EXAMPLES / name / f"{name}.toml"
    assert parameters(load(path).model) == PARAMETERS[name]
    assert f"{PARAMETERS[name]:,} parameters" in path.read_text()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_script_passes_shellcheck(path: Path) -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert shellcheck, "shellcheck is missing; install the dev extra"
    done = subprocess.run([shellcheck, "-x", str(path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def program(folder: Path, name: str, text: str) -> None:
    """A stand-in for a program: a bash script in a folder that will stand first on PATH."""
    path = folder / name
    path.write_text("#!/usr/bin/env bash\n" + text)
    path.chmod(0o755)


def environment(stubs: Path, **more: str) -> dict[str, str]:
    """This environment with the stand-ins first, this Python next, and none of the launch variables."""
    names = re.compile("GPUS_PER_NODE|NUM_NODES|NODE_RANK|MASTER_|SLURM_|QUICKSTART_|RANK|WORLD_SIZE")
    kept = {k: v for k, v in os.environ.items() if not names.match(k)}
    path = f"{stubs}:{Path(sys.executable).parent}:{kept['PATH']}"
    return {**kept, "PATH": path, "SKIP_SET_UP": "1", **more}


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    """A folder with a torchrun that prints its arguments, one a line."""
    folder = tmp_path / "stubs"
    folder.mkdir()
    program(folder, "torchrun", "printf '%s\\n' \"$@\"\n")
    return folder


def check_command_line(text: str) -> tuple[Config, int, list[str]]:
    """The run that torchrun's printed arguments describe: its config, world size and torchrun's own words."""
    from torch.distributed.run import get_args_parser

    words = text.splitlines()
    program = next(i for i, word in enumerate(words) if word.endswith("pretrain_llama.py") or word == "train")
    launch = get_args_parser().parse_args(words[: program + 1])
    world_size = int(launch.nproc_per_node) * int(launch.nnodes.split(":")[-1])
    config = parse(words[program + 1 :])
    validate(config, world_size)
    return config, world_size, words[:program]


@pytest.mark.parametrize("script", LAUNCHERS, ids=lambda path: path.stem)
def test_launch_script_with_its_defaults(script: Path, stubs: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(script)],
        env=environment(stubs),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    config, world_size, _ = check_command_line(done.stdout)
    name = script.parent.name
    assert world_size == WORLD_SIZES[name]
    assert config.data.mock_data
    assert config.logging.run_dir == f"runs/{name}"
    assert config.checkpoint.save == config.checkpoint.load == f"checkpoints/{name}"


@pytest.mark.parametrize("script", LAUNCHERS, ids=lambda path: path.stem)
def test_launch_script_takes_arguments_and_environment(script: Path, stubs: Path, tmp_path: Path) -> None:
    nodes = WORLD_SIZES[script.parent.name] // 4
    env = environment(
        stubs, GPUS_PER_NODE="4", NUM_NODES=str(nodes), NODE_RANK="1", MASTER_ADDR="n0", MASTER_PORT="7001"
    )
    words = ["ckpt dir", "logs", "tok.model", "0.3 a_text_document 0.7 b_text_document", "--lr", "1e-3"]
    done = subprocess.run(
        ["bash", str(script), *words], env=env, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    config, world_size, launch = check_command_line(done.stdout)
    assert world_size == 4 * nodes
    for name, value in (("--node_rank", "1"), ("--master_addr", "n0"), ("--master_port", "7001")):
        assert launch[launch.index(name) + 1] == value
    assert config.checkpoint.save == config.checkpoint.load == "ckpt dir"
    assert config.data.data_path == ("0.3", "a_text_document", "0.7", "b_text_document")
    assert (config.data.tokenizer_type, config.data.tokenizer_model) == (
        "SentencePieceTokenizer",
        "tok.model",
    )
    assert config.training.lr == 1e-3


@pytest.mark.parametrize(
    ("words", "variables", "told"),
    [
        (["--lr", "1e-3"], {}, "--lr is among the first four arguments, CHECKPOINT_PATH LOGS_PATH TOKENIZER_ARG"),
        (["a", "b", "--lr=1e-3"], {}, "for example checkpoints/my runs/my MOCK MOCK --lr=1e-3"),
        ([], {"NODE_RANK": "1", "NUM_NODES": "2"}, "NODE_RANK is 1, NUM_NODES 2 and MASTER_ADDR not set; give"),
        (
            [],
            {"NODE_RANK": "2", "NUM_NODES": "2", "MASTER_ADDR": "n0"},
            "NODE_RANK is 2, NUM_NODES 2 and MASTER_ADDR n0;",
        ),
    ],
)
def test_launch_script_refuses_what_would_be_misread_or_wait(
    words: list[str], variables: dict[str, str], told: str, stubs: Path, tmp_path: Path
) -> None:
    env = environment(stubs, **variables)
    script = EXAMPLES / "llama_1b/train_llama_1b.sh"
    done = subprocess.run(["bash", str(script), *words], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stdout == "" and told in done.stderr


def quickstart(stubs: Path, folder: Path, *words: str) -> Config:
    """What the quickstart would launch, with its text, tokenizer and tokens made already."""
    for name in ("text", "tokenizer", "tokens"):
        (folder / "data" / name).mkdir(parents=True, exist_ok=True)
    env = environment(stubs, QUICKSTART_DATA=str(folder / "data"), QUICKSTART_RUN=str(folder / "run"))
    done = subprocess.run(
        ["bash", str(EXAMPLES / "quickstart.sh"), *words],
        env=env, cwd=folder, capture_output=True, text=True, check=True,
    )  # fmt: skip
    config, world_size, _ = check_command_line(done.stdout)
    assert world_size == 4
    return config


def test_quickstart_resumes_or_moves_the_old_run_aside(
    stubs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)  # quickstart.toml is named relative to the repository
    marker = tmp_path / "run" / "metrics.jsonl"
    config = quickstart(stubs, tmp_path, "--train-iters", "7")
    assert config.training.train_iters == 7
    assert config.checkpoint.load == str(tmp_path / "run" / "checkpoints") == str(config.save_dir)
    marker.parent.mkdir()
    marker.write_text("old")
    quickstart(stubs, tmp_path)
    assert marker.read_text() == "old"
    quickstart(stubs, tmp_path, "--fresh")
    assert not marker.exists()
    assert [p.read_text() for p in tmp_path.glob("run.*/metrics.jsonl")] == ["old"]


def sbatch(
    stubs: Path, folder: Path, seconds: int = 86400, preempted: str = "None", **more: str
) -> subprocess.Popen[str]:
    """Start pretrain.sbatch as SLURM would on two nodes for so many seconds, with stand-ins for its programs."""
    end = datetime.now() + timedelta(seconds=seconds)
    program(
        stubs,
        "scontrol",
        'case "$1 $2" in "show hostnames") printf "n0\\nn1\\n" ;;\n'
        f'"show job") printf "JobId=31\\n   JobState=RUNNING EndTime={end:%FT%T} Deadline=N/A\\n"\n'
        f'printf "   PreemptEligibleTime=2026-01-01T00:00:00 PreemptTime={preempted}\\n" ;;\n'
        '*) echo "scontrol $*" ;; esac\n',
    )
    program(stubs, "sleep", f'[ "$1" != 1 ] || set 0.1; exec {shutil.which("sleep")} "$1"\n')  # between its questions
    program(stubs, "scancel", f'echo "scancel $*"; kill -TERM $(cat "{folder}"/pid.*)\n')
    program(
        stubs,
        "srun",
        'while [ "$1" != bash ]; do shift; done\n'
        f'for i in 0 1; do SLURM_NODEID=$i "$@" >"{folder}/out.$i" & echo $! >"{folder}/pid.$i"; done\n'
        f'wait "$(cat "{folder}/pid.0")" && wait "$(cat "{folder}/pid.1")"\n',
    )
    env = environment(
        stubs,
        SLURM_JOB_ID="31",
        SLURM_NNODES="2",
        SLURM_JOB_NODELIST="n[0-1]",
        SLURM_GPUS_ON_NODE="4",
        VENV="no",
        **more,
    )
    script = str(EXAMPLES / "slurm" / "pretrain.sbatch")
    return subprocess.Popen(
        ["bash", script, str(EXAMPLES / "llama_1b/train_llama_1b.sh"), "ckpt"],
        env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("value", ["PATH[$(touch ran)]", "1e6", "-1", "08", "9" * 20, " 1"])
def test_quickstart_evaluates_no_bytes_but_digits(value: str, stubs: Path, tmp_path: Path) -> None:
    value = value.replace("ran", str(tmp_path / "ran"))
    variables = {"QUICKSTART_BYTES": value, "QUICKSTART_DATA": str(tmp_path / "d")}
    done = subprocess.run(
        ["bash", str(EXAMPLES / "quickstart.sh")], env=environment(stubs, **variables), capture_output=True, text=True
    )
    assert done.returncode == 1 and not (tmp_path / "ran").exists() and not (tmp_path / "d").exists()
    assert f"error: QUICKSTART_BYTES is {value}; give a number of bytes" in done.stderr


@pytest.mark.parametrize("name", ["SAVE_LEAD_SECONDS", "SLURM_JOB_ID"])
def test_sbatch_evaluates_nothing_but_digits(name: str, stubs: Path, tmp_path: Path) -> None:
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a", "SLURM_NNODES": "1"}
    variables = {**job, name: f"x[$(touch {tmp_path}/ran)]"}
    script = str(EXAMPLES / "slurm/pretrain.sbatch")
    done = subprocess.run(["bash", script, "x"], env=environment(stubs, **variables), capture_output=True, text=True)
    assert done.returncode == 2 and not (tmp_path / "ran").exists()
    assert done.stderr.startswith(f"{name} is x[$(touch {tmp_path}/ran)]")


def test_sbatch_starts_one_task_a_node(stubs: Path, tmp_path: Path) -> None:
    job = sbatch(stubs, tmp_path)
    output, _ = job.communicate(timeout=60)
    assert (job.returncode, output) == (0, "")
    for rank in (0, 1):
        config, world_size, launch = check_command_line((tmp_path / f"out.{rank}").read_text())
        assert (world_size, config.checkpoint.load) == (8, "ckpt")
        for name, value in (("--node_rank", str(rank)), ("--master_addr", "n0"), ("--master_port", "10031")):
            assert launch[launch.index(name) + 1] == value


def wait_for_start(outputs: list[Path]) -> None:
    """Until the stand-ins for torchrun have said that they run."""
    deadline = time.monotonic() + 30
    while not all(p.exists() and "started" in p.read_text() for p in outputs):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("array", "number"), [({}, "31"), ({"SLURM_ARRAY_JOB_ID": "31", "SLURM_ARRAY_TASK_ID": "2"}, "31_2")]
)
def test_sbatch_saves_and_requeues_on_usr1(array: dict[str, str], number: str, stubs: Path, tmp_path: Path) -> None:
    program(stubs, "torchrun", "sleep 60 & trap 'kill $!; echo saved; exit 1' TERM\necho started; wait\n")
    job = sbatch(stubs, tmp_path, **array)
    outputs = [tmp_path / "out.0", tmp_path / "out.1"]
    wait_for_start(outputs)
    job.send_signal(signal.SIGUSR1)
    output, _ = job.communicate(timeout=60)
    assert output.splitlines() == [f"scancel --signal=TERM {number}", f"scontrol requeue {number}"]
    assert job.returncode != 0
    assert all("saved" in p.read_text() for p in outputs)


def test_sbatch_lives_on_after_term_and_does_not_requeue(stubs: Path, tmp_path: Path) -> None:
    program(stubs, "torchrun", "sleep 60 & trap 'kill $!; sleep 1; echo saved; exit 1' TERM\necho started; wait\n")
    job = sbatch(stubs, tmp_path)
    outputs = [tmp_path / "out.0", tmp_path / "out.1"]
    wait_for_start(outputs)
    job.send_signal(signal.SIGTERM)  # as scancel does, to all processes
    for i in (0, 1):
        os.kill(int((tmp_path / f"pid.{i}").read_text()), signal.SIGTERM)
    output, _ = job.communicate(timeout=60)
    assert output == ""
    assert job.returncode != 0
    assert all("saved" in p.read_text() for p in outputs)


@pytest.mark.parametrize(("preempted", "says"), [("None", ""), ("2026-01-01T00:00:09", "scontrol requeue 31\n")])
def test_sbatch_requeues_what_left_because_it_was_preempted(
    preempted: str, says: str, stubs: Path, tmp_path: Path
) -> None:
    """SLURM's own way: TERM to the processes alone, a grace time, and the job failed if it ends within it."""
    program(stubs, "torchrun", "exit 1\n")
    job = sbatch(stubs, tmp_path, preempted=preempted)
    output, _ = job.communicate(timeout=60)
    assert (output, job.returncode) == (says, 1)


@pytest.mark.parametrize(
    ("variables", "grace"),
    [({}, "840"), ({"SAVE_LEAD_SECONDS": "1800"}, "1740"), ({"SAVE_GRACE_SECONDS": "7"}, "7")],
)
def test_grace_follows_the_lead(variables: dict[str, str], grace: str, stubs: Path, tmp_path: Path) -> None:
    program(stubs, "torchrun", 'echo "$TORCH_ELASTIC_SHUTDOWN_TIMEOUT"\n')
    sbatch(stubs, tmp_path, **variables).communicate(timeout=60)
    assert (tmp_path / "out.0").read_text() == f"{grace}\n"


def test_lead_of_the_header_is_the_one_that_the_script_counts_with() -> None:
    text = (EXAMPLES / "slurm" / "pretrain.sbatch").read_text()
    assert re.findall(r"USR1@(\d+)\n", text) == re.findall(r"SAVE_LEAD_SECONDS:-(\d+)", text) == ["900"]


def test_sbatch_refuses_a_time_that_its_lead_fills(stubs: Path, tmp_path: Path) -> None:
    job = sbatch(stubs, tmp_path, seconds=600)
    _, errors = job.communicate(timeout=60)
    assert job.returncode == 2
    assert "within its lead of 900 s; raise --time" in errors
    assert not list(tmp_path.glob("out.*"))
