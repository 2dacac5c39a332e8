"""Effect of document boundaries within a sample on positions, attention and loss.

Source: Megatron-LM core 0.16.1, _get_ltor_masks_and_position_ids of gpt_dataset.py, and loss_func of pretrain_gpt.py.
Convention: an end-of-document token (EOD) belongs to the document that it ends.
Shapes: B sequences, S tokens per sequence, s of them on this rank, D channels per head.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_snip.mesh import Axis
from megatron_snip.parallel.context_parallel import own_tokens


def positions(tokens: Tensor, eod: int) -> Tensor:
    """Position of each token in its document, from 0: tokens [B, S] -> int64 [B, S]."""
    place = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    after_end = torch.where(tokens == eod, place + 1, 0)
    begin = torch.cat([torch.zeros_like(place[:, :1]), after_end[:, :-1]], dim=1).cummax(dim=1).values
    return place - begin


def attention_mask(tokens: Tensor, eod: int) -> Tensor:
    """Causal mask within documents: True where a query (dim 2) sees a key (dim 3), bool [B, 1, S, S]."""
    ends = (tokens == eod).long()
    document = ends.cumsum(dim=1) - ends  # [B, S], the number of documents that end before each token
    same = document[:, :, None] == document[:, None, :]
    return same.tril_().unsqueeze(1)


class Documents:
    """The options, and the tokens of the current pass; shared by all stages of a rank.

    Every stage needs the tokens, but only the first receives them.  So the pipeline stores them here before a pass, and
    a stage looks up a microbatch by its first sample.
    """

    def __init__(
        self, eod: int, *, reset_positions: bool, reset_attention: bool, mask_loss: bool, per_token: bool, cp: Axis
    ) -> None:
        self.eod, self.reset_positions, self.reset_attention = eod, reset_positions, reset_attention
        self.mask_loss, self.per_token, self.cp = mask_loss, per_token, cp
        self._tokens: dict[int, Tensor] = {}

    def begin(self, tokens: Tensor, sample_index: Tensor, dp: Axis) -> int | Tensor:
        """Store the microbatches of a pass.  Returns the divisor of the loss, before any mean over a microbatch.

        tokens [M, B, S] on the device, sample_index [M, B] on the CPU.  Every dp rank must call it.
        """
        self._tokens = {int(index[0]): part for index, part in zip(sample_index, tokens, strict=True)}
        if not (self.mask_loss and self.per_token):
            return tokens.numel() * dp.size
        counted = (tokens != self.eod).sum()
        if dp.size > 1:
            dist.all_reduce(counted, group=dp.group)
        return counted.clamp(min=1)  # a tensor, so that nothing waits for it

    def tables(self, sample: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """cos and sin [(B, 1,) S, D] and the mask [B, 1, S, S] of the microbatch with this first sample."""
        tokens = self._tokens[sample]
        if self.reset_positions:
            place = positions(tokens, self.eod)
            cos, sin = cos[place].unsqueeze(1), sin[place].unsqueeze(1)
        return cos, sin, attention_mask(tokens, self.eod) if self.reset_attention else None

    def counted(self, losses: Tensor, sample: int) -> Tensor:
        """Losses of the tokens that count: losses [B s] of a microbatch -> [at most B s]."""
        return losses[self._counts(sample)] if self.mask_loss else losses

    def _counts(self, sample: int) -> Tensor:
        """Which local tokens of a microbatch count: bool [B s]."""
        return own_tokens(self._tokens[sample] != self.eod, self.cp).flatten()

    def loss(self, losses: Tensor, sample: int, divisor: int | Tensor) -> Tensor:
        """This rank's share [] of a microbatch's loss: losses [B s], ``divisor`` from `begin`.

        As in Megatron-LM: the mean over counted tokens, with equal weight for each microbatch; or, with
        --calculate-per-token-loss, equal weight for each token of the global batch.
        """
        if not self.mask_loss:
            return losses.sum() / divisor
        total = losses.masked_fill(~self._counts(sample), 0.0).sum()
        if self.per_token:
            return total / divisor
        counts = self._tokens[sample] != self.eod
        return total / counts.sum().clamp(min=1) * (counts.numel() / divisor)
