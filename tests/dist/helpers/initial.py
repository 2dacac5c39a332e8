"""What the tests of initial weights run on every rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.dist.helpers.runs import make


def whole_weights(options: dict[str, Any]) -> dict[str, Tensor]:
    """The parameters of this rank's stages, put together from all shards; each on one device with memory."""
    _, parts = make(options)
    parts.train_loader.close()
    weights = {name: p.detach() for name, p in parts.optimizer.parameters.items()}
    assert {p.device for p in weights.values()} == {torch.device("cpu")}
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in weights.items()}
