"""Trials in a training loop that is not ours: they run on batches that the probe did not see."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_snip.errors import UserError
from megatron_snip.mesh import Mesh
from megatron_snip.snip.trial import TrialFailed

#: Runs the model forward over a batch and returns the losses of its tokens [...].
TokenLosses = Callable[[], Tensor]
_WAY_OUT = 'the losses of its tokens, as from token_losses(logits, labels) or cross_entropy(..., reduction="none")'


def token_losses(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Losses [T] in nats of next tokens: the logits [..., S, V] at a token predict the next one's label [..., S].

    Leaves out tokens whose next label is ``ignore_index``.  Labels are as transformers' models expect them.
    """
    logits, labels = logits[..., :-1, :].flatten(0, -2).float(), labels[..., 1:].flatten().to(logits.device)
    counted = labels != ignore_index
    return F.cross_entropy(logits[counted], labels[counted], reduction="none")


def check_held_out(held_out: TokenLosses | Sequence[TokenLosses] | None) -> list[TokenLosses]:
    """The functions as a list.  Raises UserError for anything else."""
    if held_out is None:
        return []
    losses = list(held_out) if isinstance(held_out, Sequence) else [held_out]
    if given := [type(loss).__name__ for loss in losses if not callable(loss)]:
        raise UserError(
            f"solve: held_out is a {given[0]}, not a function; give one that runs the model and returns {_WAY_OUT}"
        )
    return losses


def losses_of(held_out: Sequence[TokenLosses], mesh: Mesh, device: torch.device) -> Tensor:
    """Losses [T] of this rank's tokens, without gradients.  Every call draws the same random numbers.

    Every rank must call it.  Raises TrialFailed on every rank if one fails, unless other ranks already wait for it
    inside the model's forward, as in any iteration.  Raises UserError if a function returns something else.
    """
    found, failed = [], ""
    try:
        with torch.no_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            for loss in held_out:
                found.append(_checked(loss()))
    except UserError:
        raise
    except Exception as error:  # must not be raised here: the other ranks wait in the collective
        failed = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
    rank, text = mesh.first_problem(failed)
    if text:
        raise TrialFailed(f"rank {rank}: {text}" if mesh.world_size > 1 else text)
    return torch.cat(found)


def _checked(losses: object) -> Tensor:
    if not isinstance(losses, Tensor):
        raise UserError(f"solve: held_out returned a {type(losses).__name__}; return {_WAY_OUT}")
    if losses.ndim == 0:
        raise UserError(f"solve: held_out returned one number; plans are compared token by token, so return {_WAY_OUT}")
    return losses.detach().flatten().float()
