"""Fixtures of the unit tests."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def lone_mesh():
    """The mesh of a single process."""
    from megatron_snip import runtime
    from megatron_snip.mesh import build_mesh

    runtime.start("gloo", 1.0)
    yield build_mesh("cpu", pp=1, dp=1, tp=1)
    runtime.stop()
