"""The callback of transformers' Trainer: bad values; tests/unit/test_attach.py and the example train with it."""

from __future__ import annotations

import importlib
import sys

import pytest

from megatron_snip.integrations import transformers


@pytest.mark.parametrize(
    ("options", "message"),
    [({"every": 0}, "every is 0; give 1 or more steps"), ({"start": -1}, "start is -1; give 0 or more steps")],
)
def test_bad_steps_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        transformers.SnipCallback(**options)


def test_without_transformers_it_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, transformers.__name__)
    with pytest.raises(ValueError, match="needs transformers; pip install transformers"):
        importlib.import_module(transformers.__name__)
