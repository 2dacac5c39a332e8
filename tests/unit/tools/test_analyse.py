"""tools/analyse.py, what needs no model; tests/dist/test_analyse.py has the rest."""

from __future__ import annotations

import pytest

from megatron_snip.data.indexed import IndexedDatasetBuilder
from tools.analyse import parse_own, warn_of_repeats


@pytest.mark.parametrize(("batches", "said"), [(4, ""), (5, "has 1,024 tokens and 5 batches of 2 x 128 take 1,280")])
def test_text_that_repeats_is_told(batches, said, tmp_path, caplog):
    with IndexedDatasetBuilder(tmp_path / "data", "u2") as builder:
        builder.add_document([7] * 1024)
    words = f"model --data {tmp_path}/data --batches {batches} --batch-size 2 --seq-length 128"
    warn_of_repeats(str(tmp_path / "data"), parse_own(words.split())[0])
    assert said in caplog.text and bool(caplog.text) == bool(said)
