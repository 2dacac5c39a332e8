"""What travels of a tokenizer: what was read as one, and no file from elsewhere."""

from __future__ import annotations

import json
import os

import pytest

from megatron_snip.errors import UserError
from megatron_snip.interop.tokenizer_files import copy_tokenizer, read_files, write_files

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture
def source(tmp_path):
    """A folder with a tokenizer, and a secret beside it."""
    folder = tmp_path / "source"
    folder.mkdir()
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1})).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    (tmp_path / "secret").write_text("PRIVATE KEY")
    return folder


@pytest.fixture
def target(tmp_path):
    (tmp_path / "target").mkdir()
    return tmp_path / "target"


@pytest.mark.parametrize("form", ["folder", "file"])
def test_a_tokenizer_is_copied_with_its_settings(form, source, target):
    path = source if form == "folder" else source / "tokenizer.json"
    assert copy_tokenizer("HuggingFaceTokenizer", path, target).eod == 1
    assert sorted(os.listdir(target)) == ["tokenizer.json", "tokenizer_config.json"]
    assert (target / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("kind", ["HuggingFaceTokenizer", "SentencePieceTokenizer", "Llama2Tokenizer"])
def test_what_is_no_tokenizer_is_not_copied(kind, source, target, tmp_path):
    with pytest.raises(UserError, match=rf"{tmp_path}/secret"):
        copy_tokenizer(kind, tmp_path / "secret", target)
    assert not os.listdir(target)


def test_a_folder_of_other_things_is_not_copied(source, target):
    (source / "tokenizer.json").write_text(json.dumps({"token": "of a cloud"}))
    with pytest.raises(UserError, match=rf"--tokenizer-model {source}/tokenizer.json is not a tokenizer.json"):
        copy_tokenizer("HuggingFaceTokenizer", source, target)
    assert not os.listdir(target)


@pytest.mark.parametrize("name", ["tokenizer.model", "chat_template.jinja", "generation_config.json"])
def test_a_link_out_of_the_folder_is_refused(name, source, tmp_path):
    (source / name).symlink_to("../secret")
    with pytest.raises(UserError, match=rf"{source}/{name} is a link out of its folder, to {tmp_path}/secret; put a c"):
        read_files(source)


def test_links_within_the_folder_and_of_the_cache_are_followed(source, target, tmp_path):
    (source / "special_tokens_map.json").symlink_to("tokenizer_config.json")
    assert read_files(source).keys() == {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"}
    snapshot, blobs = tmp_path / "models--x/snapshots/1a", tmp_path / "models--x/blobs"
    snapshot.mkdir(parents=True)
    (source / "tokenizer.json").rename(blobs.mkdir() or blobs / "77")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/77")
    found = read_files(snapshot)
    write_files(found, target)
    assert found.keys() == {"tokenizer.json"} and not (target / "tokenizer.json").is_symlink()
    (blobs / "78").symlink_to(tmp_path / "secret")
    (snapshot / "tokenizer.model").symlink_to("../../blobs/78")
    with pytest.raises(UserError, match="tokenizer.model is a link out of its folder"):
        read_files(snapshot)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "is a pipe, not a file"),
        (lambda path: path.symlink_to(path), "is a broken link"),
        (lambda path: path.write_text("{"), "is not JSON"),
        (lambda path: path.write_text("[" * 10**5), "is not JSON .it is nested too deeply"),
        (lambda path: path.write_text("[1]"), "holds a JSON list, not an object"),
    ],
)
def test_what_is_no_settings_file_is_named(make, message, source):
    make(source / "generation_config.json")
    with pytest.raises(UserError, match=rf"{source}/generation_config.json.*{message}"):
        read_files(source)
