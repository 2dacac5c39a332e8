"""A tokenizer's files from one folder into another.

Folder or path may be a stranger's, and the copy may be published: no link is followed out of the folder, and what an
export copies has been read as a tokenizer.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from megatron_snip.data.tokenizer import MOST_BYTES, Tokenizer, build_tokenizer
from megatron_snip.errors import UserError
from megatron_snip.files import parse_json, read_file

#: Files of a Hugging Face folder that travel with the weights.
TOKENIZER = (
    "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja", "vocab.json", "merges.txt",
)  # fmt: skip
GENERATION = "generation_config.json"


def read_files(folder: Path) -> dict[str, bytes]:
    """The files of a Hugging Face folder beside its weights, by name.

    UserError for a link out of the folder, but for those of Hugging Face's cache, for what is no regular file, and for
    JSON that is none.
    """
    found = {}
    for name in (*TOKENIZER, GENERATION):
        path = folder / name
        if not os.path.lexists(path):
            continue
        _check_link(path)
        found[name] = read_file(path, "tokenizer", "give another folder, or move it away", most=MOST_BYTES)
        if path.suffix == ".json":
            try:
                values = parse_json(found[name])
            except ValueError as error:
                raise UserError(f"{path} is not JSON ({error}); move it away") from None
            if not isinstance(values, dict):
                raise UserError(f"{path} is not a JSON object; move it away")
    return found


def _check_link(path: Path) -> None:
    """UserError for a link out of its folder; snapshots/REVISION of Hugging Face's cache links to blobs beside it."""
    try:
        target, folder = path.resolve(strict=True), path.parent.resolve()
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop, before Python 3.13
        raise UserError(f"{path} is a link that leads nowhere ({error}); remove it") from None
    cached = folder.parent.name == "snapshots" and target.parent == folder.parent.parent / "blobs"
    if not (target.is_relative_to(folder) or cached):
        raise UserError(
            f"{path} is a link out of its folder, to {target}; put a copy of the file there if it is the model's"
        )


def write_files(found: dict[str, bytes], folder: Path) -> None:
    """What `read_files` found, as plain files."""
    for name, data in found.items():
        (folder / name).write_bytes(data)


def copy_tokenizer(kind: str, source: Path, target: Path) -> Tokenizer:
    """Copy a tokenizer's file or folder into ``target``, once the copy has been read as a tokenizer; returns that.

    UserError, with nothing copied, if it cannot be read as one.
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
