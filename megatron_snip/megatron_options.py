"""Megatron-LM options that this trainer lacks: which have no effect here, and what replaces the others.

You can paste the options of a Megatron-LM launch script.  Options that have no effect here are dropped and logged.  All
others are refused at once, each with its way out.  megatron_options.toml names them.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from megatron_snip.config import option_groups
from megatron_snip.errors import UserError

LOGGER = logging.getLogger("megatron_snip")
_ANY = ""  # any value


class Tables(NamedTuple):
    """switches take no value, lists one or more.  values: name -> (values that are the same here, the way out for
    others).  refused: name -> the way out; prefixes: beginning of a name -> the same, for names in none of the tables.
    """

    switches: frozenset[str]
    lists: frozenset[str]
    values: Mapping[str, tuple[Sequence[str], str]]
    refused: Mapping[str, str]
    prefixes: Mapping[str, str]


@cache
def tables() -> Tables:
    """The content of megatron_options.toml."""
    found = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
    values: dict[str, tuple[Sequence[str], str]] = dict.fromkeys(found["any_value"].split(), ([_ANY], ""))
    for entry in found["values"]:
        values |= dict.fromkeys(entry["names"].split(), (entry["same"], entry["instead"]))
    refused, prefixes = (
        {name: instead for instead, names in found[table].items() for name in names.split()}
        for table in ("refused", "prefixes")
    )
    return Tables(frozenset(found["switches"].split()), frozenset(found["lists"].split()), values, refused, prefixes)


def instead_of(name: str) -> str:
    """What to give instead of an unsupported Megatron-LM option; "" for other names."""
    if name.replace("-", "_") in option_groups():
        return ""
    _, _, _, refused, prefixes = tables()
    return refused.get(name) or next((text for start, text in prefixes.items() if name.startswith(start)), "")


def _is_value(word: str) -> bool:
    """Whether a word is an option's value, such as a negative number."""
    return not word.startswith("-") or word[1:2].isdigit() or word[1:2] == "."


def _same(value: str, allowed: Sequence[str]) -> bool:
    if _ANY in allowed or value in allowed:
        return True
    try:
        return any(float(value) == float(each) for each in allowed)
    except ValueError:
        return False


def without_megatrons(words: Sequence[str]) -> list[str]:
    """Command-line words without Megatron-LM options that have no effect here.

    Raises UserError that lists all unsupported options, each with its way out.
    """
    kept: list[str] = []
    dropped: list[str] = []
    refused: dict[str, list[str]] = {}  # the way out -> options, as many have the same one
    ours, (switches, lists, known_values, _, _), left = option_groups(), tables(), list(words)
    while left:
        word = left.pop(0)
        name, joined, value = word.removeprefix("--").partition("=")
        known = name in switches or name in lists or name in known_values
        instead = "" if known else instead_of(name)
        if not word.startswith("--") or name.replace("-", "_") in ours or not (known or instead):
            kept.append(word)
            continue
        values = [value] if joined else []
        while not joined and name not in switches and left and _is_value(left[0]):
            values.append(left.pop(0))
        shown = " ".join([f"--{name}", *values])
        allowed, instead = known_values.get(name, ((), instead))
        if name in switches or (name in lists and values) or (len(values) == 1 and _same(values[0], allowed)):
            dropped.append(shown)
        else:
            way_out = instead or ("give it a value" if name in lists else "give it one value")
            refused.setdefault(way_out, []).append(shown)
    if refused:
        told = "; ".join(f"{', '.join(options)}: {way_out}" for way_out, options in refused.items())
        raise UserError(f"Megatron-LM options that are not supported here: {told}")
    if dropped:
        LOGGER.info(f"Megatron-LM options that are ignored here: {', '.join(dropped)}")
    return kept
