"""tools/preprocess_data.py killed at any moment: the next go gives the bytes of a run that was left alone."""

from __future__ import annotations

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_snip.cli import preprocess_data
from megatron_snip.cli.preprocess_data import main
from megatron_snip.data import documents as documents_of
from megatron_snip.data.resumable import ResumableBuilders
from tests.unit.cli.test_preprocess_data import NULL, ROOT, documents, write

DOCS = [*documents(40, seed=1), [], *documents(40, seed=2)]


class Killed(BaseException):
    """Stands for a kill: nothing below the place where it is raised may tidy up."""


def outputs(folder: Path, name: str) -> dict[str, bytes]:
    return {path.name[len(name) :]: path.read_bytes() for path in folder.glob(f"{name}_*")}


@pytest.fixture
def quick(monkeypatch):
    """Many pieces, and a mark after each second one of them."""
    monkeypatch.setattr(documents_of, "PIECE_BYTES", 400)
    monkeypatch.setattr(documents_of, "_ROWS", 7)
    clock = iter(range(10**9))
    monkeypatch.setattr(preprocess_data.time, "perf_counter", lambda: next(clock) * 15.0)


@pytest.fixture
def sources(tmp_path):
    """The same documents in all kinds of files, so one run goes over all of them."""
    plain = Path(write(tmp_path / "a.jsonl", DOCS))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    rows = [json.loads(line) for line in plain.read_text().splitlines()]
    pq.write_table(pa.table({key: [row[key] for row in rows] for key in rows[0]}), tmp_path / "c.parquet")
    return [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl.gz", "c.parquet")]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_run_killed_again_and_again_gives_the_same_bytes(tmp_path, capsys, monkeypatch, quick, sources, workers):
    words = ["--input", *sources, "--json-keys", "text", "note", "--append-eod", "--workers", workers, *NULL]
    assert main([*words, "--output-prefix", str(tmp_path / "whole")]) == 0
    kills, advance = iter([3, 9, 5, 11, 2, 9]), preprocess_data._Progress.advance
    left = [next(kills)]

    def until_killed(self, *done):
        advance(self, *done)
        left[0] -= 1
        if left[0] == 0:
            raise Killed

    monkeypatch.setattr(preprocess_data._Progress, "advance", until_killed)
    goes = 0
    for allowed in (*kills, 10**9):
        with pytest.raises(Killed):
            main([*words, "--output-prefix", str(tmp_path / "killed")])
        assert not outputs(tmp_path, "killed") and (tmp_path / "killed.partial/progress.json").exists()
        left[0], goes = allowed, goes + 1
    assert main([*words, "--output-prefix", str(tmp_path / "killed")]) == 0
    assert goes == 6 and "continuing from" in capsys.readouterr().out
    assert outputs(tmp_path, "killed") == outputs(tmp_path, "whole")
    assert len(outputs(tmp_path, "whole")) == 6 and not (tmp_path / "killed.partial").exists()


def stopped(tmp_path, monkeypatch, words) -> Path:
    """A run that Ctrl-C stops after some marks."""

    def interrupted(self, *done):
        advance(self, *done)
        if self.at["pieces"] == 9:
            raise KeyboardInterrupt

    advance = preprocess_data._Progress.advance
    with monkeypatch.context() as patch:
        patch.setattr(preprocess_data._Progress, "advance", interrupted)
        assert main(words) == 130
    return tmp_path / "o.partial"


def test_what_does_not_fit_the_unfinished_work_is_refused(tmp_path, capsys, monkeypatch, quick, sources):
    words = ["--input", sources[0], "--output-prefix", str(tmp_path / "o"), *NULL]
    folder = stopped(tmp_path, monkeypatch, words)
    assert (
        f"error: interrupted; {folder} keeps what is done, and the same command continues it" in capsys.readouterr().err
    )
    assert main([*words, "--append-eod"]) == 2
    assert f"{folder} holds unfinished work with another set of options; continue with" in capsys.readouterr().err
    assert main([*words[:2], sources[1], *words[2:]]) == 2
    assert "another input" in capsys.readouterr().err
    (folder / "progress.json").write_text("{")
    assert main(words) == 2
    assert f"{folder}/progress.json is not a record of progress" in capsys.readouterr().err and folder.exists()


def test_damaged_files_of_the_unfinished_work_begin_it_anew(tmp_path, caplog, monkeypatch, quick, sources):
    words = ["--input", sources[0], "--output-prefix", str(tmp_path / "o"), *NULL]
    assert main([*words[:3], str(tmp_path / "whole"), *NULL]) == 0
    for name, damage in (("0.bin", b""), ("0.lengths", b"\1"), ("0.bin", None)):
        path = stopped(tmp_path, monkeypatch, words) / name
        path.unlink()
        if damage is not None:
            path.write_bytes(damage)
        caplog.clear()
        assert main(words) == 0
        assert "the work starts over" in caplog.text
        assert outputs(tmp_path, "o") == outputs(tmp_path, "whole")


def test_a_longer_work_without_a_mark_leaves_nothing(tmp_path, quick, sources):
    words = ["--input", sources[0], "--output-prefix", str(tmp_path / "o"), *NULL]
    (tmp_path / "o.partial").mkdir()
    for name in ("0.bin", "0.lengths"):
        (tmp_path / "o.partial" / name).write_bytes(b"\1" * 100000)
    assert main(words) == 0 and main([*words[:3], str(tmp_path / "whole"), *NULL]) == 0
    assert outputs(tmp_path, "o") == outputs(tmp_path, "whole")


def test_a_dataset_that_has_its_name_stays_whole(tmp_path):
    """Of work that needed no mark, killed between its two datasets, whatever the next go does."""
    folder, prefixes = tmp_path / "d.partial", [str(tmp_path / name) for name in ("one", "two")]
    killed = ResumableBuilders(folder, prefixes, "uint16", {})
    for builder in killed.builders:
        builder.add_encoded(bytes([1, 0, 2, 0]), [2])
    killed.builders[0].finalize()
    os.close(killed._lock)  # as a kill does
    tokens = (tmp_path / "one.bin").read_bytes()
    with ResumableBuilders(folder, prefixes, "uint16", {}) as again:
        assert again.found is None
        again.builders[0].add_encoded(bytes([3, 0]), [1])
        again.builders[0]._stream.flush()
        assert (tmp_path / "one.bin").read_bytes() == tokens == bytes([1, 0, 2, 0])


def test_one_process_alone_writes(tmp_path, capsys, monkeypatch, quick, sources):
    words = ["--input", sources[0], "--output-prefix", str(tmp_path / "o"), *NULL]
    seen = []

    def another(self, *done):
        advance(self, *done)
        monkeypatch.setattr(preprocess_data._Progress, "advance", advance)
        seen.append(main(words))

    advance = preprocess_data._Progress.advance
    monkeypatch.setattr(preprocess_data._Progress, "advance", another)
    assert main(words) == 0
    assert seen == [2] and "o.partial is being written by another process" in capsys.readouterr().err


def test_a_full_disk_keeps_what_is_done(tmp_path, capsys, monkeypatch, quick, sources):
    words = ["--input", sources[0], "--output-prefix", str(tmp_path / "o"), *NULL]
    replace = os.replace

    def full(source, target):
        if str(target).endswith(".idx"):
            raise OSError(28, "No space left on device")
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        assert main(words) == 2
    assert "the same command continues it" in capsys.readouterr().err
    assert main(words) == 0 and main([*words[:3], str(tmp_path / "whole"), *NULL]) == 0
    assert outputs(tmp_path, "o") == outputs(tmp_path, "whole")


def has_ended(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.slow
def test_processes_killed_for_good(tmp_path):
    """The command itself with two workers, its whole group killed at many moments; no process is left behind."""
    source = write(tmp_path / "a.jsonl", documents(3000) * 40)
    code = (
        "import sys; from megatron_snip.cli import preprocess_data as p; p.MARK_SECONDS = 0.05; "
        "sys.exit(p.main(sys.argv[1:]))"
    )
    words = [sys.executable, "-c", code, "--input", source, *NULL, "--workers", "2", "--output-prefix"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*words, str(tmp_path / "whole")], env=environment, check=True, capture_output=True)
    marks, done = set(), [0]
    for _ in range(40):
        process = subprocess.Popen([*words, str(tmp_path / "o")], env=environment, stdout=subprocess.PIPE, text=True)
        progress, before = tmp_path / "o.partial/progress.json", len(marks)
        while process.poll() is None and len(marks) < before + 2:
            if progress.exists():
                marks.add(progress.stat().st_mtime_ns)
            time.sleep(0.01)
        ended = process.poll() is not None
        children = [] if ended else Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGKILL)
        output = process.communicate()[0]
        done += [int(found.replace(",", "")) for found in re.findall(r": ([\d,]+) documents are done", output)]
        if ended:
            break
        for child in children:
            for _ in range(1000):
                if has_ended(child):
                    break
                time.sleep(0.01)
            else:
                pytest.fail(f"process {child} outlives its parent")
    assert process.returncode == 0, process.returncode
    assert len(done) > 3 and done == sorted(done), done  # no go loses what another has done
    assert outputs(tmp_path, "o") == outputs(tmp_path, "whole")
