"""2,000 mutations of what a stranger may hand over: each ends in one line, or changes nothing.

`python -m tests.unit.train.fuzzing FOLDER NUMBER` shows what one of them comes to.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from megatron_snip.cli import convert_checkpoint
from megatron_snip.errors import UserError
from tests.unit.train import fuzzing
from tests.unit.train.fuzzing import Base, judge, make_base, new_case, run_case
from tests.unit.train.health import watched as watched_module
from tests.unit.train.health.watched import Outside, watched

#: Those that run with all other tests, and all.
FEW, ALL, AT_ONCE = 12, 2000, 142


@pytest.fixture(scope="module")
def base(lone_mesh, tmp_path_factory) -> Base:
    return make_base(tmp_path_factory.mktemp("fuzz"))


def run_all(base: Base, folder: Path, numbers: range) -> Counter[str]:
    expected: dict[str, list] = {}
    found = [run_case(base, folder, number, expected) for number in numbers]
    slowest, largest = (max(getattr(case.seen, name) for case in found) for name in ("seconds", "bytes"))
    outcomes = Counter(case.outcome for case in found)
    print(f"{dict(outcomes)}; slowest {slowest:.1f} s, most memory {largest >> 20} MiB")
    bad = [f"{case.outcome}: {case.told}" for case in found if not case.good]
    assert not bad, "\n".join(bad)
    return outcomes


def test_some_mutations(base, tmp_path):
    outcomes = run_all(base, tmp_path, range(FEW))
    assert outcomes["refused"] > FEW // 5 and outcomes["same"] > FEW // 5, "both are tried"


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("first", range(FEW, ALL, AT_ONCE))
def test_all_mutations(first, base, tmp_path):
    run_all(base, tmp_path, range(first, first + AT_ONCE))


def test_a_folder_that_tells_of_10_000_blocks_is_refused_before_they_are_made(base, tmp_path, monkeypatch):
    """It took half a minute and half a GiB to find the second one missing."""
    made, plain = [], convert_checkpoint.LlamaStage

    def stage(build, blocks, **more):
        made.extend(blocks)
        return plain(build, blocks, **more)

    monkeypatch.setattr(convert_checkpoint, "LlamaStage", stage)
    case, outside = new_case(base, tmp_path)
    config = json.loads((case / "hf/config.json").read_text())
    (case / "hf/config.json").write_text(json.dumps({**config, "num_hidden_layers": 9999}))
    found = judge(base, case, outside, fuzzing.imported, [], False)
    assert found.outcome == "refused" and "have no model.layers.1." in found.told and made == [0]


WRITES = {
    "open": lambda path: path.open("w"),
    "append": lambda path: path.open("a"),
    "through a link": lambda path: (Path("link").symlink_to(path), Path("link").write_text("x")),
    "mkdir": Path.mkdir,
    "rename": lambda path: (Path("mine").touch(), os.rename("mine", path)),
    "away": lambda path: os.rename(path.with_name("kept"), "mine"),
    "unlink": lambda path: path.with_name("kept").unlink(),
    "link": lambda path: path.symlink_to("/"),
    "a shell": lambda path: os.system("true"),
}


@pytest.mark.parametrize("way", WRITES)
def test_a_write_outside_is_seen_and_does_not_take_place(way, tmp_path, monkeypatch):
    (tmp_path / "kept").write_text("x")
    (tmp_path / "case").mkdir()
    monkeypatch.chdir(tmp_path / "case")
    with pytest.raises(Outside), watched(tmp_path / "case") as seen:
        WRITES[way](tmp_path / "new")
    assert len(seen.writes) == 1 and sorted(path.name for path in tmp_path.iterdir()) == ["case", "kept"]
    with watched(tmp_path / "case") as seen:
        Path("inside").write_text("x")
        (tmp_path / "kept").read_text()
        Path("away").symlink_to(tmp_path / "kept")
        with pytest.raises(FileExistsError), Path("away").open("x"):
            pass
    assert not seen.writes


def raise_(error):
    raise error


READERS = {
    "same": lambda base, case: 1,
    "losses": lambda base, case: 2,
    "traceback": lambda base, case: {}["x"],
    "refused": lambda base, case: raise_(UserError("in one line")),
    "lines": lambda base, case: raise_(UserError("\x1b[31m")),
    # far above the limit of 50 MiB: what earlier tests left may be freed meanwhile, and is then counted against it
    "memory": lambda base, case: b"x" * (500 << 20),
    "late": lambda base, case: time.sleep(20),
    "published": lambda base, case: ((case / "out").mkdir(), os.link(case.parent / "outside/kept", case / "out/a")),
    "outside": lambda base, case: (case.parent / "new").write_text("x"),
}


@pytest.mark.parametrize("outcome", READERS)
def test_whoever_reads_badly_is_found(outcome, base, tmp_path, monkeypatch):
    if outcome == "late":
        monkeypatch.setattr(watched_module, "MOST_SECONDS", 1.0)
    if outcome == "memory":
        monkeypatch.setattr(fuzzing, "MOST_MEMORY", 50 << 20)
    case, outside = new_case(base, tmp_path)
    assert judge(base, case, outside, READERS[outcome], [1], False).outcome == outcome
