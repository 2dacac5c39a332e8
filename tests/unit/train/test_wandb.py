"""A short run with --wandb-project: an offline wandb run under the run folder, with no network."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_snip.snip.plan import Plan
from megatron_snip.train.metrics import read_metrics

pytest.importorskip("wandb")
PROGRAM = Path(__file__).resolve().parents[3] / "pretrain_llama.py"
WORDS = """--num-layers 1 --hidden-size 128 --ffn-hidden-size 128 --num-attention-heads 2 --seq-length 128
--vocab-size 128 --global-batch-size 1 --train-iters 3 --mock-data --precision snip --snip-start 1
--snip-interval 4 --snip-target 0.5 --snip-weight 1 --wandb-project demo --wandb-exp-name first --run-dir run"""


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


def history(path: Path) -> list[dict]:
    """The rows that wandb's own file holds."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    rows = []
    for data in records(path.read_bytes()):
        record = messages.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


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


def test_a_run_is_logged_offline(tmp_path):
    dead = "http://127.0.0.1:9"  # whoever tries the network fails
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("WANDB_", "RANK"))}
    environment |= {"HTTPS_PROXY": dead, "HTTP_PROXY": dead, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(
            [sys.executable, PROGRAM, *WORDS.split()],
            cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        status = process.wait(100)
    assert status == 0, (tmp_path / "log").read_text()
    end = time.monotonic() + 20
    while living(process.pid) and time.monotonic() < end:
        time.sleep(0.05)
    assert living(process.pid) == []

    run_id = json.loads((tmp_path / "run/config.json").read_text())["run_id"]
    (file,) = (tmp_path / "run/wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb")
    rows, written = history(file), read_metrics(tmp_path / "run/metrics.jsonl")
    assert [row["iteration"] for row in rows] == [1, 2, 3]
    for row, expected in zip(rows, written, strict=True):
        assert {key: row[key] for key in expected} == expected
    assert rows[1]["snip/achieved"] > 0.5 and rows[0]["snip/probe_seconds"] > 0
    assert rows[1]["snip/plan/_type"] == "table-file"
    (path,) = (tmp_path / "run/wandb").rglob("plan_*.table.json")
    table = json.loads(path.read_text())
    assert table["columns"] == ["linear", "fprop", "dgrad", "wgrad", "loss divergence", "weight divergence"]
    assert [row[0] for row in table["data"]] == list(Plan.load(tmp_path / "run/plans/iter_0000002.json").linears)
    assert all(loss > 0 and weight > 0 for *_, loss, weight in table["data"])
    total = sum(row[4] for row in table["data"])
    assert abs(total - written[1]["snip/predicted_loss_divergence"]) < 1e-9 * total
    assert rows[1]["snip/plan_heatmap/_type"] == "image-file"
    (image,) = (tmp_path / "run/wandb").rglob("plan_heatmap_*.png")
    assert image.read_bytes().startswith(b"\x89PNG") and "snip/plan_heatmap/_type" not in rows[2]
