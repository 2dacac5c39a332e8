"""What a stranger may do to a file: its values, its text, or what lies in its place.  Drawn by a generator alone."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import tomllib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any


class Raw(str):
    """Text that stands in a file as it is."""


class Pairs:
    """An object as (key, value), which may have a key twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        self.pairs = pairs

    def items(self) -> list[tuple[str, Any]]:
        return self.pairs


#: A folder that nothing may be written to, and nothing published from, as a path that a case's folders are beside.
OUTSIDE = "outside"
_DEEP = 50_000
_NUMBERS = (
    0, -1, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**40, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 0.5, 1.5, 4.0,
    -1e-9, 1e-320, 1e300, Raw("-0"), Raw("1e400"), Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("9" * 5000),
    Raw("1" + "0" * 400 + ".5"), Raw("0x10"), Raw("1_000"), Raw("01"),
)  # fmt: skip
_TEXTS = (
    "", " ", ".", "..", "/", "../x", "../../../x", f"../{OUTSIDE}/kept", f"../../{OUTSIDE}/kept",
    f"../../../{OUTSIDE}/kept.json", "/dev/zero", "/proc/self/environ", "plans/../../iter_0000001.json",
    "plans/iter_0000001.json", "iter_0000004", "iter_0000004/../iter_0000002", "a\0b", "two\nlines", "two\rlines",
    "two\u2028lines", "two\x85lines", "\x1b[31mred", "\u202egnirts", "ck🚀", "\ufeff", "x" * 5000, "x" * 300_000,
    "0" * 16, "0123456789abcdef", "fp4", "fp8", "bf16", "plan", "snip", "e99m99", "nan", "null", "4", "<script>",
    Raw(r'"\ud800"'), Raw(r'"\ud83d\ude80"'), Raw(r'"\u0000"'), Raw('"\\x"'), Raw('"' + "\n" + '"'),
)  # fmt: skip
_OTHERS: tuple[Any, ...] = (
    None, True, False, [], {}, [[]], [None], [{}], {"": {}}, [[0.0]], [0] * 5000, [[1.0] * 40] * 40,
    {str(i): i for i in range(2000)}, Raw("[" * _DEEP + "]" * _DEEP), Raw('{"a":' * _DEEP + "1" + "}" * _DEEP),
    Raw("[" * 900 + "]" * 900), Raw("undefined"), Raw("//"), Raw(""),
)  # fmt: skip


def _hostile(draw: random.Random, outside: Path) -> Any:
    kind = draw.choice((_NUMBERS, _TEXTS, _TEXTS, _OTHERS, (f"{outside}/kept", f"{outside}/kept.json", f"{outside}")))
    return copy.deepcopy(draw.choice(kind))


def text_of(value: Any, *, compact: bool = False) -> str:
    """JSON, or nearly."""
    comma, colon = (",", ":") if compact else (", ", ": ")
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, (dict, Pairs)):
        inside = comma.join(f"{text_of(str(k))}{colon}{text_of(v, compact=compact)}" for k, v in value.items())
        return "{" + inside + "}"
    if isinstance(value, list):
        return "[" + comma.join(text_of(item, compact=compact) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def _holder(draw: random.Random, values: Any) -> tuple[list[str], Any, Any]:
    """The way to a place that has something, drawn level by level; its container and its key."""
    way: list[str] = []
    place = values
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = draw.choice(keys)
        way.append(str(key) if isinstance(place, dict) else "[]")
        inside = place[key]
        if not isinstance(inside, (dict, list)) or not inside or draw.random() < 0.25:
            return way, place, key
        place = inside


def _nudged(draw: random.Random, value: Any) -> Any:
    """Nearly the value."""
    if isinstance(value, bool):
        return draw.choice((not value, int(value)))
    if isinstance(value, int):
        return draw.choice((value + 1, value - 1, -value, value << 40, value * 1000, float(value), str(value)))
    if isinstance(value, float):
        return draw.choice((-value, value * 1e30, value + 1, value / 3, str(value)))
    if isinstance(value, str):
        return draw.choice((value + "\n", value + "\0", " " + value, value.upper(), value[:-1], value * 300, [value]))
    if isinstance(value, list) and value:
        return draw.choice((value * 2, value[:-1], value[::-1], value * (20_000 // len(value)), {"0": value}))
    if isinstance(value, dict) and value:
        return draw.choice(([value], list(value), dict(list(value.items())[:-1]), dict(list(value.items())[::-1])))
    return draw.choice((None, 0, "", [], {}))


def change_values(draw: random.Random, values: dict[str, Any], outside: Path) -> tuple[list[str], str]:
    """Change an object in one to three places; the places, as a/b/[]/c, and what was done."""
    told, places = [], []
    for _ in range(draw.choice((1, 1, 1, 1, 2, 3))):
        if not values or "\0pairs" in values:
            break
        way, place, key = _holder(draw, values)
        how = draw.choice(("replace", "replace", "replace", "nudge", "nudge", "drop", "rename", "add", "twice", "swap"))
        new: Any = None
        if how in ("rename", "add", "twice") and not isinstance(place, dict):
            how = "replace"
        if how == "replace":
            new = place[key] = _hostile(draw, outside)
        elif how == "nudge":
            new = place[key] = _nudged(draw, place[key])
        elif how == "drop":
            del place[key]
        elif how == "swap":
            other = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
            place[key], place[other] = place[other], place[key]
            places.append("/".join([*way[:-1], str(other)]))
        else:
            new = draw.choice([text for text in _TEXTS if not isinstance(text, Raw)])
            if how == "rename":
                place[new] = place.pop(key)
            elif how == "add":
                place[new] = _hostile(draw, outside)
            else:
                _double(draw, values, way, key, outside)
        told.append(f"{how} {'/'.join(way)[:200]} {str(new)[:60]!r}")
        places.append("/".join(way))
    return places, "; ".join(told)


def change_names(
    draw: random.Random, values: dict[str, Any], names: Sequence[str], outside: Path
) -> tuple[list[str], str]:
    """Another text in a place that may become a path, ``a/b``, or for one of the names in an object, ``a/b/``."""
    way = draw.choice(names)
    *steps, last = way.split("/")
    place = values
    for step in steps:
        place = place[step]
    new = draw.choice((*(text for text in _TEXTS if not isinstance(text, Raw)), *[f"{outside}/new.json"] * 12))
    if last:
        place[last] = new
    else:
        old = draw.choice(sorted(place))
        place[new] = place.pop(old)
    return [way.rstrip("/")], f"name {way} {new[:60]!r}"


def _double(draw: random.Random, values: dict[str, Any], way: list[str], key: Any, outside: Path) -> None:
    """Give the object at the end of a way its key twice, where the way goes through objects alone."""
    if "[]" in way:
        return
    place, above = values, None
    for step in way[:-1]:
        above, place = place, place[step]
    assert isinstance(place, dict)
    pairs = [*place.items(), (key, draw.choice((place[key], _hostile(draw, outside))))]
    if above is None:
        values.clear()
        values["\0pairs"] = Pairs(pairs)  # `encode` puts them in the object's place
    else:
        above[way[-2]] = Pairs(pairs)


def encode(values: Any, *, compact: bool = False) -> str:
    """The text of an object that `change_values` has changed."""
    return text_of(values.get("\0pairs", values), compact=compact)


def toml_of(values: dict[str, Any]) -> str:
    """The text of a flat TOML file, or nearly."""
    lines = [f"{k} = {text_of(v)}" for k, v in values.get("\0pairs", values).items()]
    return "".join(line.replace("null", '""') + "\n" for line in lines)


def _cut(draw: random.Random, data: bytes) -> bytes:
    return data[: draw.randrange(len(data))]


def _flipped(draw: random.Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(draw.choice((1, 2, 20))):
        at = draw.randrange(len(out) * 8)
        out[at // 8] ^= 1 << at % 8
    return bytes(out)


def _with_bytes(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(len(data) + 1)
    return data[:at] + draw.choice((b"\xff", b"\0", b"\xed\xa0\x80", b"\n", b"\xc0\xaf", b"\xe2\x80\xa8")) + data[at:]


#: Other bytes of a file.
BYTES: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "cut": _cut,
    "flip": _flipped,
    "insert bytes": _with_bytes,
    "empty": lambda draw, data: b"",
    "another encoding": lambda draw, data: data.decode("latin-1").encode(draw.choice(("utf-16", "utf-8-sig", "cp500"))),
    "twice": lambda draw, data: data + data,
    "a tail": lambda draw, data: data + draw.choice((b"\0" * 9, b"}", b"{}", b"\xff", b" " * 100_000)),
    "one value": lambda draw, data: text_of(draw.choice((*_NUMBERS, *_TEXTS, *_OTHERS))).encode(),
}


def _sparse(path: Path, outside: Path) -> None:
    path.touch()
    os.truncate(path, 5 << 30)


#: What may lie in a file's place.
PLACES: dict[str, Callable[[Path, Path], object]] = {
    "a pipe": lambda path, outside: os.mkfifo(path),
    "a folder": lambda path, outside: path.mkdir(),
    "nothing": lambda path, outside: None,
    "a link to a device": lambda path, outside: path.symlink_to("/dev/zero"),
    "a link to itself": lambda path, outside: path.symlink_to(path.name),
    "a link outside": lambda path, outside: path.symlink_to(outside / "kept.json"),
    "a link to what is not there": lambda path, outside: path.symlink_to(outside / "new.json"),
    "5 GiB of zeros": _sparse,
}


def mutate(draw: random.Random, path: Path, names: Sequence[str], outside: Path) -> tuple[list[str], str]:
    """Change a file; places in it, none for all of it, and what was done.  names: what `change_names` takes."""
    data = path.read_bytes()
    kind = draw.choices(("values", "names", "bytes", "place"), (12, 3 if names else 0, 3, 2))[0]
    if path.suffix == ".txt" and kind == "values":
        kind = "bytes"
    if kind in ("values", "names"):
        toml = path.suffix == ".toml"
        values = tomllib.loads(data.decode()) if toml else json.loads(data)
        change = partial(change_names, names=names) if kind == "names" else change_values
        places, told = change(draw, values, outside=outside)
        compact = path.name == "manifest.json"
        text = toml_of(values) if toml else encode(values, compact=compact)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        return places, told
    if kind == "bytes":
        name = draw.choice(sorted(BYTES))
        path.write_bytes(BYTES[name](draw, data).removesuffix(b"\r") or b"")
        return [], name
    name = draw.choice(sorted(PLACES))
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    PLACES[name](path, outside)
    return [], name
