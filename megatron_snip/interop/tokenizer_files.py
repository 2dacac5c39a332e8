"""Copies a tokenizer's files from one folder to another.

The source may be untrusted and the copy published.  So no link out of the folder is followed, and an export copies only
files that load as a tokenizer.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from megatron_snip.data.tokenizer import MOST_BYTES, Tokenizer, build_tokenizer
from megatron_snip.errors import UserError
from megatron_snip.files.io import read_file
from megatron_snip.files.json import json_object

#: Files of a Hugging Face folder that are copied with the weights.
TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "vocab.json", "merges.txt",
)  # fmt: skip
GENERATION = "generation_config.json"
#: The plan in the folder of an exported model.
PLAN = "precision_plan.json"


def read_files(folder: Path) -> dict[str, bytes]:
    """The files beside the weights of a Hugging Face folder, by name.

    Raises UserError for a link out of the folder (except Hugging Face's cache), anything but a regular file, and
    invalid JSON.
    """
    found = {}
    for name in (*TOKENIZER, GENERATION):
        path = folder / name
        if not os.path.lexists(path):
            continue
        _check_link(path)
        found[name] = read_file(path, "tokenizer", "give another folder, or move it away", most=MOST_BYTES)
        if path.suffix == ".json":
            json_object(found[name], path, "file", "move it away")
    return found


def _check_link(path: Path) -> None:
    """Raise UserError for a link out of its folder.  In Hugging Face's cache, snapshots/REVISION links to blobs."""
    try:
        target, folder = path.resolve(strict=True), path.parent.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop, before Python 3.13
        raise UserError(f"{path} is a broken link ({error}); remove it") from None
    cached = folder.parent.name == "snapshots" and target.parent == folder.parent.parent / "blobs"
    if not (target.is_relative_to(folder) or cached):
        raise UserError(
            f"{path} is a link out of its folder, to {target}; put a copy of the file there if it is the model's"
        )


def write_files(found: dict[str, bytes], folder: Path) -> None:
    """Write the files from `read_files`."""
    for name, data in found.items():
        (folder / name).write_bytes(data)


def copy_tokenizer(kind: str, source: Path, target: Path) -> Tokenizer:
    """Copy a tokenizer's file or folder into ``target`` and return the tokenizer read from the copy.

    Raises UserError, and copies nothing, if it cannot be read as a tokenizer.
    """
    if source.is_dir():
        found = read_files(source)
    elif kind == "HuggingFaceTokenizer":
        beside = read_files(source.parent)
        found = {name: beside[name] for name in ("tokenizer_config.json", "special_tokens_map.json") if name in beside}
        found["tokenizer.json"] = _bytes(source)
    else:
        found = {"tokenizer.model": _bytes(source)}
    with tempfile.TemporaryDirectory() as aside:
        write_files(found, Path(aside))
        try:
            tokenizer = build_tokenizer(kind, aside if kind == "HuggingFaceTokenizer" else f"{aside}/tokenizer.model")
        except UserError as error:
            raise UserError(str(error).replace(aside, str(source))) from error
    write_files(found, target)
    return tokenizer


def _bytes(path: Path) -> bytes:
    return read_file(path, "tokenizer", "give another", most=MOST_BYTES)
