"""Fixtures and options that all tests share."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator

import pytest

if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):  # as tools/set_up.sh, for who starts pytest without tests/run.sh:
    sys.dont_write_bytecode = False  # every process that a test starts would compile torch and transformers anew

#: Of the unit tests' files, those that take longest.
LONG = ("test_head_to_head.py", "test_joint_plan.py", "test_triton_cast.py")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Whether slow tests run, projects that are compared with ours and not installed, and where figures go."""
    parser.addoption("--all", action="store_true", help="run the tests that are marked slow, too")
    parser.addoption("--microxcaling", metavar="DIR", help="checkout of microsoft/microxcaling")
    parser.addoption("--neighbours", metavar="DIR", help="programs that read plans, from tests/neighbours.sh")
    parser.addoption("--figures", metavar="FILE", help="where tests/validation writes what it measured, as JSON")
    parser.addoption("--transformer-engine", metavar="DIR", help="checkout of NVIDIA/TransformerEngine")


def pytest_sessionstart() -> None:
    """No garbage is looked for while tests are collected: that makes millions of objects, which all stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `slow` are left out without --all, those marked `gpu` are skipped where no CUDA device is.

    Unit tests come last, but for files that take half a minute, so that no worker ends long after the others.
    """
    if not config.getoption("--all"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("slow")])
        items[:] = [item for item in items if not item.get_closest_marker("slow")]
    items.sort(key=lambda item: "unit" in item.path.parts and item.path.name not in LONG)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _logger_as_before() -> Iterator[None]:
    """The program's own handlers and level end with the test that started it: others look at what is logged."""
    logger = logging.getLogger("megatron_snip")
    logger.handlers[:], logger.propagate = [], True
    logger.setLevel(logging.NOTSET)
    yield


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """What a test does to signals ends with it: processes that later tests start would inherit an ignored SIGTERM."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
