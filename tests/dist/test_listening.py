"""What a run listens on can be seen; test_faults.py looks at one that is started as the documents say."""

from __future__ import annotations

import os
import shlex
import socket
import sys

import pytest

from tests.dist.helpers.listening import listening
from tests.dist.test_faults import ONE_NODE
from tests.test_readme import README

pytestmark = [pytest.mark.dist, pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")]


def test_the_documents_start_runs_on_one_node_as_test_faults_does():
    """By torchrun's own words in their commands, for two processes."""
    launches = set()
    for words in map(shlex.split, README):
        if words[0] == "torchrun":
            end = next(i for i, word in enumerate(words) if word == "-m" or word.endswith(".py"))
            launches.add(tuple("2" if word.isdecimal() else word for word in words[1:end]))
    assert launches == {tuple(ONE_NODE)}, "all pages say the same"


def test_a_listening_socket_is_seen():
    with socket.create_server(("0.0.0.0", 0)) as server:
        assert f"0.0.0.0 {server.getsockname()[1]}" in listening([os.getpid()])
