"""One process of a node works first, and the others wait for as long as it takes."""

from __future__ import annotations

import pytest

from tests.dist.helpers.harness import run_ranks
from tests.dist.helpers.turns import take_turns


@pytest.mark.slow  # it waits
@pytest.mark.dist
def test_the_first_works_first_and_no_wait_times_out(tmp_path):
    for turn in range(2):
        (tmp_path / str(turn)).mkdir()
    done = run_ranks(take_turns, 3, tmp_path, 1, 8.0, 6.0)
    assert done[1] == [[], []] and all(1 in before for rank in (0, 2) for before in done[rank])
