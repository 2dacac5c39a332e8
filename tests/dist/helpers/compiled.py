"""Runs with compiled blocks; importable, so that forked ranks find it."""

from __future__ import annotations

from typing import Any

from torch.nn.attention.bias import causal_lower_right

from megatron_snip.model.llama import Block
from megatron_snip.parallel import context_parallel
from tests.dist.helpers.runs import losses


def compiled_losses(options: dict[str, Any], backend: str, iterations: int) -> dict[str, Any]:
    """`losses` with blocks that this backend compiles, and how many graphs and breaks there were.

    Queries are masked as on GPUs, which compilers trace in their own way.
    """
    from torch._dynamo.utils import counters

    plain = Block.compile_run

    def compile_run(self: Block) -> None:
        plain(self, backend)

    Block.compile_run = compile_run  # type: ignore[method-assign]
    context_parallel.lower_right = lambda queries, keys, device: causal_lower_right(queries, keys)  # type: ignore[assignment]
    found = losses({**options, "compile": True}, iterations=iterations)
    return {**found, "graphs": counters["stats"]["unique_graphs"], "breaks": dict(counters["graph_break"])}
