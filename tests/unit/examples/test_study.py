"""The study of examples/study on a toy: its checkpoints, and the settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.study import setting
from examples.study.planted import linears_of, make_parts
from examples.study.setting import Setting, read_setting
from examples.study.study import Study
from examples.study.truth import batches, loss_of, shifted
from tests.dist.helpers.harness import run_ranks

SETTINGS = sorted((Path(setting.__file__).parent / "settings").glob("*.toml"))
SHAPE = {
    "hidden_size": 128, "ffn_hidden_size": 128, "num_attention_heads": 1, "micro_batch_size": 2, "global_batch_size": 2,
}  # fmt: skip


def checkpoints(folder: Path) -> dict:
    """The losses at a toy's checkpoints, as they are made and as they are read again, and when each was written."""
    toy = Setting("toy", {"num_layers": 1, **SHAPE, "lr_warmup_iters": 1}, planted=((0, 0),),
                  checkpoints={"early": 2, "late": 4}, spare=2)  # fmt: skip
    found, times = [], []
    for _ in range(2):
        study = Study(toy, folder / "toy")
        losses = {}
        for name in ("early", "late", "early"):
            _, parts = study.at(name)
            losses.setdefault(name, []).append(loss_of(parts, batches(parts, 10, 1, 2)))
        study.close()
        found.append(losses)
        times.append([study.checkpoint_path(name).stat().st_mtime_ns for name in ("early", "late")])
    return {"losses": found, "times": times}


def test_checkpoints_are_made_once_and_read_again(tmp_path):
    (found,) = run_ranks(checkpoints, 1, tmp_path)
    first, again = found["losses"]
    assert first == again and first["early"][0] == first["early"][1] != first["late"][0]
    assert found["times"][0] == found["times"][1]


def shifted_losses(folder: Path) -> dict[str, tuple[float, float, float]]:
    """By linear, the loss without a shift, with one, and after it."""
    _, parts = make_parts(folder, num_layers=1, **SHAPE)
    over, found = batches(parts, 0, 1, 2), {}
    for name, linear in linears_of(parts).items():
        before = loss_of(parts, over)
        with shifted(linear, "fp4", 1.0):
            inside = loss_of(parts, over)
        found[name] = before, inside, loss_of(parts, over)
    parts.train_loader.close()
    return found


def test_every_linear_can_be_shifted(tmp_path):
    (found,) = run_ranks(shifted_losses, 1, tmp_path)
    assert len(found) == 7
    for name, (before, inside, after) in found.items():
        assert before == after and inside != before, name


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.stem)
def test_settings_are_sound(path):
    setting = read_setting(path)
    m = setting.model
    head = m.get("kv_channels", m["hidden_size"] // m["num_attention_heads"])
    groups = m.get("num_query_groups", m["num_attention_heads"])
    sides = (m["hidden_size"], m["ffn_hidden_size"], m["num_attention_heads"] * head, groups * head)
    assert all(side % 128 == 0 for side in sides)
    assert all(0 <= block < m["num_layers"] and place in (0, 1, 2) for block, place in setting.planted)


@pytest.mark.parametrize(
    ("content", "said"), [(None, "cannot read the setting"), ("name =", "not TOML"), ("plants = []", "unknown plants")]
)
def test_a_setting_that_is_none_is_refused(tmp_path, content, said):
    path = tmp_path / "a.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=f"{path}: .*{said}"):
        read_setting(path)
