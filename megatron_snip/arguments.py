"""A run's options from the command line and a TOML file.  Both use one flat list of names.

The command line overrides the file.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import megatron_snip.config
from megatron_snip.config import Config, check_names, option_groups
from megatron_snip.errors import UserError
from megatron_snip.files.io import HALF_PAIR, parse_toml, read_file, shown
from megatron_snip.megatron_options import without_megatrons

LOGGER = logging.getLogger("megatron_snip")

#: Options for a first run, after --config.
FIRST = (
    "run_dir", "data_path", "tokenizer_model", "global_batch_size", "train_iters", "bf16", "precision", "snip_target",
    "load",
)  # fmt: skip

#: Options of the group of plans that a run without plans follows, too; --snip-options names a dry run's device.
WITHOUT_PLANS = (
    "snip_options", "snip_final_precision", "snip_final_iters", "gemm_times", "snip_guard", "snip_guard_patience",
    "snip_bf16_eval_interval",
)  # fmt: skip

#: Two ways to say how much a plan saves.
ALTERNATIVES = ("snip_target", "snip_max_loss")


def read_toml(path: Path) -> dict[str, Any]:
    """Options of a TOML file.  Tables only group them; table names have no meaning."""
    if not path.exists():
        raise UserError(f"--config {path}: no such file; give the path of a TOML file of options")
    data = read_file(path, "file of options", "give the path of a TOML file of options", most=1 << 20)
    try:
        content = parse_toml(data)
    except ValueError as error:
        raise UserError(f"--config {path}: not valid TOML: {error}; correct the file") from None
    options: dict[str, Any] = {}
    for key, value in content.items():
        for name, item in value.items() if isinstance(value, dict) else [(key, value)]:
            name = name.replace("-", "_")
            if name in options:
                raise UserError(f"--config {path}: option {name} is given twice; keep one")
            options[name] = item
    check_names(options, str(path))
    _check_kinds(options, path)
    return options


def _check_kinds(options: dict[str, Any], path: Path) -> None:
    """Raise UserError for a switch that is not a boolean, and for an unexpected boolean, list or table."""
    groups = option_groups()
    for name, value in options.items():
        default = getattr(getattr(Config(), groups[name]), name)
        if isinstance(default, bool) != isinstance(value, bool):
            wanted = "true or false" if isinstance(default, bool) else "a value, not true or false"
            raise UserError(f"--config {path}: option {name} is {shown(value)}; give {wanted}")
        if isinstance(value, dict) or (isinstance(value, list) and not isinstance(default, tuple)):
            raise UserError(f"--config {path}: option {name} is {shown(value)}; give one value")
        for item in value if isinstance(value, list) else ():
            if isinstance(item, (bool, dict, list)):
                raise UserError(f"--config {path}: option {name} has the item {shown(item)}; give text or numbers")


def _as_arguments(options: dict[str, Any]) -> list[str]:
    """Options as command-line words, so that one parser checks both sources."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            items = [str(item) for item in value]
            if odd := [item for item in items if item.startswith("-")]:
                raise UserError(f"--{flag} has the item {odd[0]!r}, which reads as an option; write ./{odd[0]}")
            words += [f"--{flag}", *items]
        else:
            words.append(f"--{flag}={value}")
    return words


def _take_config_file(words: list[str]) -> tuple[list[str], Path | None]:
    """Command-line words without `--config FILE`, and the file."""
    at = [i for i, word in enumerate(words) if word == "--config" or word.startswith("--config=")]
    if not at:
        return words, None
    if len(at) > 1:
        raise UserError("--config is given twice; keep one, and give other options by their names")
    _, joined, path = words[at[0]].partition("=")
    rest = words[at[0] + 1 :]
    if not joined and rest:
        path, rest = rest[0], rest[1:]
    if not path or path.startswith("--"):
        raise UserError("--config names no file; give the path of a TOML file of options")
    return words[: at[0]] + rest, Path(path)


def parse(argv: Sequence[str], defaults: dict[str, Any] | None = None) -> Config:
    """Config from command-line words.  Raises UserError for anything invalid; `--help` prints and exits.

    If the command line repeats an option, the last one counts, so that scripts can append words.
    defaults: options as in a TOML file; the command line and the file override them.
    """
    words, path = _take_config_file(without_megatrons(argv))
    of_file = read_toml(path) if path is not None else {}
    given = [w.partition("=")[0][2:].replace("-", "_") for w in words if w.startswith("--") and len(w) > 2]
    names = [name[3:] if name.startswith("no_") and name not in option_groups() else name for name in given]
    check_names([n for n in names if n != "help"], "")
    file_options = _under_alternatives(names, of_file, str(path), defaults or {})
    config = _read_words((*words, *_as_arguments({k: v for k, v in file_options.items() if k not in names})))
    _check_texts(config)
    if "--group-query-attention" in argv and config.model.num_query_groups is None:
        raise UserError(
            "--group-query-attention without --num-query-groups means one key/value head in Megatron-LM but one "
            "per query head here; give --num-query-groups"
        )
    return config


def warn_of_unused(words: Sequence[str], config: Config) -> None:
    """Name options of plans on the command line of a run that makes none.  A file of options may serve other runs."""
    kind, groups = config.precision.precision, option_groups()
    given = dict.fromkeys(word.partition("=")[0] for word in words if word.startswith("--"))
    names = {option: option[2:].replace("-", "_") for option in given}
    unused = [one for one, name in names.items() if groups.get(name) == "snip" and name not in WITHOUT_PLANS]
    if unused and kind != "snip":
        LOGGER.warning(f"{', '.join(unused)}: no effect under --precision {kind}; give --precision snip to make plans")


def _under_alternatives(
    names: Sequence[str], of_file: dict[str, Any], path: str, defaults: dict[str, Any]
) -> dict[str, Any]:
    """Options of file and defaults; without alternatives of what is given above them.

    UserError for two alternatives on the command line, or in the file.
    """
    one, other = (f"--{name.replace('_', '-')}" for name in ALTERNATIVES)
    found = dict(defaults)
    for where, given in ((f"--config {path}: ", of_file), ("", dict.fromkeys(names))):
        both = [name for name in ALTERNATIVES if name in given]
        if len(both) > 1:
            raise UserError(f"{where}{one} and {other} are alternatives, and both are given; drop one")
        if both:
            found = {name: value for name, value in found.items() if name not in ALTERNATIVES}
        found |= given if where else {}
    return found


def _check_texts(config: Config) -> None:
    """Raise UserError for an empty path, which would mean the current folder, and for text that no path can hold."""
    for name, group in option_groups().items():
        value = getattr(getattr(config, group), name)
        for text in value if isinstance(value, tuple) else (value,):
            option = f"--{name.replace('_', '-')}"
            if text == "" and name != "snip_fix":
                raise UserError(f"{option} is empty; give it a value, or leave it out")
            if isinstance(text, str) and "\0" in text:
                raise UserError(f"{option} {text!r} has a NUL character; leave that out")
            if isinstance(text, str) and HALF_PAIR.search(text):  # JSON files cannot store it
                raise UserError(f"{option} {text!r} is not UTF-8; rename it, or set LC_ALL=C.UTF-8 where it is")


def program_name() -> str:
    """The command or script that you called, for its help."""
    return Path(sys.argv[0]).name


def asks_for_help(words: Sequence[str]) -> bool:
    """Whether the command line asks for help."""
    return "--help" in words or "-h" in words


def first_options() -> str:
    """The most important options, one per line: name, default, and the comment of the field."""
    groups, source, lines = option_groups(), inspect.getsource(megatron_snip.config), []
    for name in FIRST:
        default = getattr(getattr(Config(), groups[name]), name)
        given = "" if default in (None, False, ()) or default == 0 else f" ({default})"
        found = re.search(rf"^    {name}: .*?  # (.*)$", source, re.MULTILINE)
        assert found is not None, name
        lines.append(f"  {'--' + name.replace('_', '-') + given:<28}{found[1]}")
    lines.insert(0, f"  {'--config FILE.toml':<28}Options from a file; the command line overrides it.")
    return "\n".join(["The most important options, with defaults. All options follow below, in groups.", *lines, ""])


@lru_cache(maxsize=64)  # commands read the same words again with the options of a checkpoint, a tenth of a second each
def _read_words(words: tuple[str, ...]) -> Config:
    """Read the words with tyro, and turn its framed error message into one line."""
    import tyro

    if asks_for_help(words):
        print(first_options())
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(
                Config,
                args=words,
                prog=program_name(),
                description="Pretrain a Llama or Qwen3 in mixed FP4 and FP8. --config FILE.toml reads options from a "
                "file; the command line overrides it.",
                config=(tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes),
            )
    except SystemExit as leaving:
        if not leaving.code:
            raise
    # tyro's frame is made of lines or dashes: title, rule, problem, and help that does not fit one line
    text = re.sub(r"[\s│╭╮╰╯]*(?:─{3,}|-{3,})[\s│╭╮╰╯]*", ": ", complaint.getvalue())
    text = " ".join(text.replace("│", " ").split()).partition(": ")[2]
    for tail in ("Argument helptext", "For full helptext", "Perhaps you meant"):
        text = text.partition(tail)[0]
    number = re.match(
        r"Error parsing (--\S+): (?:invalid literal for (int)|could not convert string to float).*?('.*')", text
    )
    if number:
        kind = "a whole number" if number[2] else "a number"
        text = f"{number[1]} is {number[3]}; give {kind}"
    raise UserError(f"{text.strip(' :.')}; --help lists all options and their values")
