"""tools/merge_datasets.py: folders and prefixes, and the errors."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_snip.cli.merge_datasets import main
from megatron_snip.data.indexed import IndexedDataset, IndexedDatasetBuilder


@pytest.fixture
def folder(tmp_path):
    for name, tokens in (("b", [3, 4]), ("a", [1, 2])):
        with IndexedDatasetBuilder(tmp_path / "in" / name, np.uint16) as builder:
            builder.add_document(tokens)
            builder.add_document([])
    return tmp_path / "in"


def merged(tmp_path, *inputs):
    status = main(["--input", *map(str, inputs), "--output-prefix", str(tmp_path / "all")])
    return status, status == 0 and IndexedDataset(tmp_path / "all")


def test_a_folder_is_merged_by_name(tmp_path, folder, capsys):
    status, dataset = merged(tmp_path, folder)
    assert status == 0 and [dataset.get(i).tolist() for i in range(2)] == [[1, 2], [3, 4]]
    assert dataset.document_indices.tolist() == [0, 1, 1, 2, 2]
    assert "4 documents, 4 tokens, uint16" in capsys.readouterr().out


def test_the_largest_id_is_recorded_even_of_inputs_without_a_record(tmp_path, folder):
    (folder / "a.ids.json").unlink()
    _, dataset = merged(tmp_path, folder)
    dataset.check_recorded_ids(5)
    with pytest.raises(ValueError, match=r"all holds token id 4, outside the vocabulary of 4; "):
        dataset.check_recorded_ids(4)


def test_prefixes_keep_their_order(tmp_path, folder):
    _, dataset = merged(tmp_path, folder / "b", folder / "a", folder / "b")
    assert [dataset.get(i).tolist() for i in range(3)] == [[3, 4], [1, 2], [3, 4]]


def test_errors_name_the_input_and_leave_nothing(tmp_path, folder, capsys):
    (tmp_path / "empty").mkdir()
    assert merged(tmp_path, tmp_path / "empty")[0] == 2
    assert "empty holds no .bin/.idx pair" in capsys.readouterr().err
    assert merged(tmp_path, folder / "c")[0] == 2
    assert "c.idx" in capsys.readouterr().err
    (folder / "b.bin").unlink()
    assert merged(tmp_path, folder)[0] == 2
    assert "b.bin" in capsys.readouterr().err
    with IndexedDatasetBuilder(folder / "b", np.int32) as builder:
        builder.add_document([1])
    assert merged(tmp_path, folder)[0] == 2
    assert "holds int32" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "in"]
