"""Reading numbers that are the sum of two tensors, NAME and NAME.low, from checkpoints that may hold either form.

in the checkpoint     wanted              read
a sum                 a sum               both parts, as they are
a sum                 a float32 tensor    the sum, exact unless the low part is below 2^-16 of the high one
a sum                 a BF16 tensor       the high part
a float32 tensor      a sum               the number rounded to BF16, and what that lost (expansion.py's `split`)
a BF16 tensor         a sum               the tensor, and 0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from megatron_snip.parallel.data import local_of, sharded_as
from megatron_snip.quant.adamw.expansion import LOW, split


def readable(
    tensors: Mapping[str, Tensor], saved: Mapping[str, torch.dtype]
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """(tensors to read by name in place of ``tensors`` [...], what to call once they are read).

    saved: the dtype of each tensor that there is.  Sums take float32 memory until the end if their form changes.
    """
    read, changes = dict[str, Tensor](), list[Callable[[], object]]()
    for name, tensor in tensors.items():
        low, low_name = tensors.get(name + LOW), name + LOW
        if name.endswith(LOW):
            if name in saved:
                read[name] = tensor
        elif low is None and low_name in saved and tensor.dtype == torch.float32:
            read[name], read[low_name] = tensor, _float32(tensor)
            changes.append(partial(_add, tensor, read[low_name]))
        elif low is not None and low_name not in saved and saved.get(name) == torch.float32:
            read[name] = _float32(tensor)
            changes.append(partial(_split, read[name], tensor, low))
        else:
            read[name] = tensor
            if low is not None and low_name not in saved:
                changes.append(local_of(low).zero_)

    def finish() -> None:
        for change in changes:
            change()

    return read, finish


def _float32(tensor: Tensor) -> Tensor:
    return sharded_as(tensor, torch.empty_like(local_of(tensor), dtype=torch.float32))


@torch.no_grad()
def _add(whole: Tensor, low: Tensor) -> None:
    local_of(whole).add_(local_of(low))


@torch.no_grad()
def _split(whole: Tensor, high: Tensor, low: Tensor) -> None:
    for part, value in zip((high, low), split(local_of(whole)), strict=True):
        local_of(part).copy_(value)
