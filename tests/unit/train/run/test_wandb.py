"""A short run with --wandb-project and its resume: offline wandb runs under the run folder, with no network."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_snip.cli.wandb_dashboard import BAND, HEATMAP, PANELS, TABLE
from megatron_snip.config import Config
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.plan_metrics import modelled_metrics
from megatron_snip.train.run.metrics import MetricsWriter, read_metrics
from tests.dist.helpers.harness import CONTEXT
from tests.unit.snip.test_coordinator import make
from tests.unit.train.run.program import program

pytest.importorskip("wandb")
__all__ = ["make"]  # a fixture
WORDS = """--num-layers 1 --hidden-size 128 --ffn-hidden-size 128 --num-attention-heads 2 --seq-length 128
--vocab-size 128 --global-batch-size 1 --train-iters 5 --mock-data --precision snip --snip-start 1
--snip-interval 10 --snip-target 0.5 --snip-weight 1 --snip-bf16-eval-interval 1
--snip-probe-tokens 256 --snip-trial-tokens 256 --eval-interval 1 --eval-iters 1
--log-throughput --log-memory --wandb-project demo --wandb-exp-name first --run-dir run"""


def records(data: bytes) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format (blocks of 32 KiB, fragments) after 7 bytes of header."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last of several
            yield parts
            parts = b""


def living(group: int) -> list[str]:
    """Processes of a group that still run; a zombie has ended, whoever is to reap it.  Without /proc: none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = path.read_text().rpartition(")")
            state, _, its_group = rest.split()[:3]
            if int(its_group) == group and state != "Z":
                found.append(name)
    return found


def records_of(path: Path, kind: str) -> list:
    """wandb's own messages of one kind in one of its files."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    found = []
    for data in records(path.read_bytes()):
        record = messages.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == kind:
            found.append(getattr(record, kind))
    return found


def history(path: Path) -> list[dict]:
    """The rows that wandb's own file holds."""
    items = [row.item for row in records_of(path, "history")]
    return [{i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in row} for row in items]


def start(folder: Path, *words: str, **variables: str) -> None:
    """A run of the program; all that it started is gone at the end."""
    dead = "http://127.0.0.1:9"  # whoever tries the network fails
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "RANK"))}
    environment |= {"HTTPS_PROXY": dead, "HTTP_PROXY": dead, "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    environment |= variables
    process = CONTEXT.Process(target=program, args=([*WORDS.split(), *words], str(folder), environment))
    process.start()
    try:
        process.join(150)
    finally:
        process.kill()
    assert process.exitcode == 0, (folder / "log").read_text()
    end = time.monotonic() + 20
    while living(process.pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert living(process.pid) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a run of three iterations and its resume to the fifth."""
    folder = tmp_path_factory.mktemp("wandb")
    start(folder, "--exit-interval", "3")
    start(folder, "--load", "run/checkpoints")
    return folder


@pytest.fixture(scope="module")
def files(folder) -> list[Path]:
    """wandb's files, one of each start, both of the run's id."""
    run_id = json.loads((folder / "run/config.json").read_text())["run_id"]
    return sorted((folder / "run/wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))


def test_a_resume_goes_on_with_the_run_and_its_iterations(folder, files):
    written = read_metrics(folder / "run/metrics.jsonl")
    rows = [history(file) for file in files]
    assert [[row["iteration"] for row in each] for each in rows] == [[0, 1, 2, 3], [4, 5]]
    for row, expected in zip([*rows[0], *rows[1]], written, strict=True):
        assert {key: row[key] for key in expected} == expected
    for file in files:  # the same run, whose axis is the iteration
        (run,) = records_of(file, "run")
        assert (run.project, run.display_name, run.run_id) == ("demo", "first", files[0].stem.removeprefix("run-"))
        axis = {m.glob_name or m.name: m.step_metric for m in records_of(file, "metric")}
        assert axis["*"] == "iteration" and "iteration" in axis


def test_every_metric_of_the_dashboard_is_logged(files, make):
    """What this run is too small for comes from a coordinator of two stages."""
    logged = {key.removesuffix("/_type") for file in files for row in history(file) for key in row}
    staged = make(snip_target=0.5)
    plan = Plan.uniform([shape.name for shape in staged.shapes], "fp4")
    staged.shapes = [dataclasses.replace(shape, stage=i % 2) for i, shape in enumerate(staged.shapes)]
    logged |= modelled_metrics(plan, staged.shapes, "fp4", staged.times).keys()
    named = [name for panels in PANELS.values() for _, names in panels for name in names]
    named += [HEATMAP, TABLE, *re.findall(r"\$\{(.*?)\}", " ".join(BAND))]
    assert len(named) > 30
    for name in named:
        found = [key for key in logged if re.fullmatch(name.strip("/"), key)] if name[0] == "/" else {name} & logged
        assert found, name


def test_a_plan_is_shown(folder, files):
    rows, written = history(files[0])[1:], read_metrics(folder / "run/metrics.jsonl")[1:]
    assert rows[1]["snip/achieved"] > 0.5 and rows[0]["snip/probe_seconds"] > 0
    assert rows[1]["snip/plan/_type"] == "table-file"
    path = next((folder / "run/wandb").rglob("plan_*.table.json"))
    table = json.loads(path.read_text())
    assert table["columns"] == ["linear", "fprop", "dgrad", "wgrad", "loss divergence", "weight divergence"]
    assert [row[0] for row in table["data"]] == list(Plan.load(folder / "run/plans/iter_0000002.json").linears)
    assert all(loss > 0 and weight > 0 for *_, loss, weight in table["data"])
    total = sum(row[4] for row in table["data"])
    assert abs(total - written[1]["snip/predicted_loss_divergence"]) < 1e-9 * total
    assert rows[1]["snip/plan_heatmap/_type"] == "image-file"
    image = next((folder / "run/wandb").rglob("plan_heatmap_*.png"))
    assert image.read_bytes().startswith(b"\x89PNG") and "snip/plan_heatmap/_type" not in rows[2]


def test_an_alert_is_in_the_file(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    config = Config().replace(run_dir=str(tmp_path / "run"), wandb_project="demo")
    one = MetricsWriter(config, "abc", 0)
    one.write({"iteration": 1, "snip/solve_error": "it took too long"})
    one.close()
    (file,) = (tmp_path / "run/wandb").glob("offline-run-*-abc/run-abc.wandb")
    end = time.monotonic() + 20
    while (
        not (found := records_of(file, "alert")) and time.monotonic() < end
    ):  # finish() may be back before it is there
        time.sleep(0.05)
    (alert,) = found
    assert (alert.title, alert.text) == ("no new plan", "iteration 1: keeping the current plan: it took too long")


@pytest.mark.parametrize("answers", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["closed", "silent"])
def test_where_wandb_does_not_answer_the_run_goes_on_offline(answers, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not answers:
            server.close()
        variables = {"WANDB_BASE_URL": f"http://127.0.0.1:{port}", "WANDB_API_KEY": 40 * "a", "NO_PROXY": "127.0.0.1"}
        variables["WANDB_INIT_TIMEOUT"] = "1"
        start(tmp_path, "--wandb-mode", "online", "--train-iters", "3", "--precision", "bf16", **variables)
    written = read_metrics(tmp_path / "run/metrics.jsonl")
    (file,) = (tmp_path / "run/wandb").glob("offline-run-*/run-*.wandb")
    assert [row["iteration"] for row in history(file)] == [row["iteration"] for row in written] == [0, 1, 2, 3]
    (line,) = [line for line in (tmp_path / "log").read_text().splitlines() if "wandb cannot be reached" in line]
    assert line.endswith(f"wandb sync {file.parent}"), "said once, with the command"
