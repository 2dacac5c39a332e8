"""Files are whole or absent, read with limits, and what goes wrong with them is one line."""

from __future__ import annotations

import argparse
import errno
import os
import signal

import pytest

from megatron_snip.errors import UserError
from megatron_snip.files import io
from megatron_snip.files.io import (
    atomic_output,
    check_folder,
    check_output,
    one_line,
    parse_json,
    path_word,
    read_file,
    shown,
    temporary_beside,
)


def test_file_appears_only_at_the_end(tmp_path):
    target = tmp_path / "made" / "a.txt"
    with atomic_output(target) as path:
        path.write_text("new")
        assert not target.exists()
    assert target.read_text() == "new"
    assert list(target.parent.iterdir()) == [target]


def test_an_error_leaves_the_old_file_and_no_other(tmp_path):
    target = tmp_path / "a.txt"
    target.write_text("old")
    with pytest.raises(RuntimeError, match="half"), atomic_output(target) as path:
        path.write_text("ne")
        raise RuntimeError("half")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_names_are_fresh(tmp_path):
    assert temporary_beside(tmp_path / "a") != temporary_beside(tmp_path / "a")


def test_a_full_disk_is_told_with_the_target(tmp_path):
    target = tmp_path / "a.txt"
    with pytest.raises(OSError) as info, atomic_output(target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert one_line(info.value) == (
        f"{target}: No space left on device; free some space, or give a path on another disk"
    )


@pytest.fixture
def in_time():
    """A read that waits for ever is stopped."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def test_only_regular_files_of_a_sensible_size_are_read(tmp_path, in_time):
    (tmp_path / "file").write_text("text")
    os.mkfifo(tmp_path / "pipe")
    assert read_file(tmp_path / "file", "plan", "way out", most=4) == b"text"
    said = {
        "none": "cannot read the plan (No such file or directory)",
        "file/x": "cannot read the plan (Not a directory)",
        "pipe": "cannot read the plan (it is a pipe, not a file)",
        "": "cannot read the plan (Is a directory)",
        "a" * 300: "cannot read the plan (File name too long)",
        "a\0b": "cannot read the plan (embedded null byte)",
    }
    for name, reason in said.items():
        with pytest.raises(ValueError) as info:
            read_file(f"{tmp_path}/{name}", "plan", "way out")
        assert str(info.value) == f"{tmp_path}/{name}: {reason}; way out"
    with pytest.raises(ValueError, match=r"/dev/zero: cannot read the plan \(it is a device, not a file\); way out"):
        read_file("/dev/zero", "plan", "way out")
    with pytest.raises(ValueError, match=r"file: this plan has more than 0 MiB; way out"):
        read_file(tmp_path / "file", "plan", "way out", most=3)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 10**5, "it is nested too deeply"),
        ('{"a":' * 10**5, "it is nested too deeply"),
        ('{"a": {"b": 1, "c": 2, "b": 1}}', "key 'b' appears twice"),
        ('{"a": "x\\ud800y"}', "half of a surrogate pair"),
        ('{"\\udfff": 1}', "half of a surrogate pair"),
        (b'{"a": "\xff"}', "can't decode byte 0xff"),
        ("9" * 5000, "Exceeds the limit"),
        ("{", "Expecting"),
    ],
)
def test_bad_json_is_a_value_error(text, said):
    with pytest.raises(ValueError, match=said):
        parse_json(text)


def test_good_json_is_read():
    assert parse_json(b'\xef\xbb\xbf{"a": ["\\ud83d\\ude00", 1.5, null]}') == {"a": ["\U0001f600", 1.5, None]}


def test_errors_are_one_line_with_a_way_out():
    denied = PermissionError(errno.EACCES, "Permission denied", "a\nb")
    assert one_line(denied) == "a b: Permission denied; give a path that you may read and write"
    assert one_line(OSError(errno.EIO, "Input/output error", "a")).endswith("; check the path and its disk")
    assert one_line(UserError("--lr is odd; even it")) == "--lr is odd; even it"
    assert len(one_line(UserError("x" * 10**6))) < io.MOST_SHOWN + 10
    assert len(shown("x" * 10**6)) < 100 and len(shown([[[[[[[[[1]]]]]]]]] * 1000)) < 1000


def test_a_path_on_a_command_line_names_something():
    assert path_word("a") == "a"
    for text in ("", "a\0b"):
        with pytest.raises(argparse.ArgumentTypeError, match="give one"):
            path_word(text)


def test_an_output_is_tried_before_the_work(tmp_path):
    (tmp_path / "file").write_text("")
    check_output("--output", tmp_path / "made/out.json")
    assert not (tmp_path / "made").exists()
    with pytest.raises(ValueError, match=rf"--output {tmp_path} is a folder; give a file"):
        check_output("--output", tmp_path)
    for name in ("file/out", "n" * 300):
        with pytest.raises(ValueError, match=r"--output .* cannot be written \(.*\); give another path"):
            check_output("--output", tmp_path / name)


def test_a_folder_behind_a_link_to_nowhere_is_told(tmp_path):
    """As of a disk that is not mounted; making the folder would fail with "File exists"."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    for folder in (link, link / "run"):
        with pytest.raises(ValueError, match=f"^--save {folder}: {link} is a broken link to {tmp_path}/gone; mend it"):
            check_folder("--save", folder)


@pytest.mark.parametrize("text", ["ck\N{ROCKET}", 'a "b" \\ c', "\t\n\x00\x01\x1f\x7f", "\u00e9\u4e2d\u2028", "'''"])
def test_a_text_in_toml_is_what_it_was(text):
    assert io.parse_toml(f"x = {io.toml_value(text)}\n".encode()) == {"x": text}


@pytest.mark.parametrize("value", [True, False, 3, 1e-5, 500000.0])
def test_a_value_in_toml_is_what_it_was(value):
    found = io.parse_toml(f"x = {io.toml_value(value)}\n".encode())["x"]
    assert found == value and type(found) is type(value)


def test_a_name_that_is_not_utf_8_has_no_toml():
    with pytest.raises(UserError, match="not a character; give a name in UTF-8"):
        io.toml_value(os.fsdecode(b"run\xff"))
