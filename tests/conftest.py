"""Fixtures and options that all tests share."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Projects that are compared with ours and not installed, and where figures go."""
    parser.addoption("--microxcaling", metavar="DIR", help="checkout of microsoft/microxcaling")
    parser.addoption("--figures", metavar="FILE", help="where tests/validation writes what it measured, as JSON")
    parser.addoption("--transformer-engine", metavar="DIR", help="checkout of NVIDIA/TransformerEngine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests begin first, so that no worker ends long after the others.

    Tests marked `gpu` are skipped where no CUDA device is.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _signals_as_before() -> Iterator[None]:
    """What a test does to signals ends with it: processes that later tests start would inherit an ignored SIGTERM."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
