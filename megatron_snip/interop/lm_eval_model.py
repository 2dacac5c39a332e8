"""Our Llama as a model of EleutherAI's lm-evaluation-harness.  It scores text but does not generate any.

A request is a context and a continuation.  Its answer is the continuation's log-likelihood in nats, and whether greedy
decoding would produce it.  Source: lm-eval 0.4, lm_eval/api/model.py and lm_eval/utils.py.
Convention: input beyond max_length loses its beginning.  Requests with the same tokens share a forward.
Shapes: B requests, S tokens padded on the right, H hidden, P scored positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from megatron_snip.config import TILE
from megatron_snip.data.tokenizer import Tokenizer
from megatron_snip.errors import UserError
from megatron_snip.mesh import Axis
from megatron_snip.model.llama import LlamaStage
from megatron_snip.parallel.loss import vocab_parallel_cross_entropy

#: Positions whose logits are in memory at once.
_POSITIONS = 1024


class SnipLM(TemplateLM):
    """The whole model in one pipeline stage, with or without tensor parallelism, at its linears' precision.

    bos: the id before every text, or None.  max_length: tokens per forward, at most those of the rotary tables.
    Every tensor-parallel rank scores every request.
    """

    def __init__(
        self, stage: LlamaStage, tokenizer: Tokenizer, *, max_length: int, batch_size: int, bos: int | None
    ) -> None:
        super().__init__()
        self.stage, self.text, self.bos = stage, tokenizer, bos
        self.max_length, self.batch_size = max_length, batch_size
        self._cos, self._sin = stage.cos, stage.sin

    @property
    def eot_token_id(self) -> int:
        """The id that ends a document."""
        return self.text.eod

    @property
    def prefix_token_id(self) -> int:
        """The id before a text without context."""
        return self.eot_token_id if self.bos is None else self.bos

    @property
    def tokenizer_name(self) -> str:
        """The key by which lm-eval separates its caches of requests."""
        return type(self.text).__name__

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The ids of a text, after ``bos`` unless add_special_tokens is False."""
        ids = self.text.encode(string)
        if self.bos is None or add_special_tokens is False or ids[:1] == [self.bos]:
            return ids
        return [self.bos, *ids]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Raises UserError: there is no KV cache here."""
        raise UserError("evaluate only scores text; export the model and use lm_eval's own command")

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of each whole text.  Each token sees up to max_length tokens before it."""
        windows, owners = [], []
        for owner, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                windows.append((("", ""), *make_disjoint_window(window)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += value
        return totals

    def _loglikelihood_tokens(  # an empty continuation has probability 1
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        by_input: dict[tuple[int, ...], list[tuple[int, list[int]]]] = {}
        for place, (_names, context, continuation) in enumerate(requests):
            tokens = (*context, *continuation)[-(self.max_length + 1) :]
            if continuation:
                by_input.setdefault(tokens[:-1], []).append((place, list(tokens[1:][-len(continuation) :])))
        ordered = sorted(by_input, key=len, reverse=True)  # running out of memory happens first
        quiet = disable_tqdm or (dist.is_initialized() and dist.get_rank() > 0)
        with tqdm(total=len(requests), desc="requests", disable=quiet) as bar:
            for start in range(0, len(ordered), self.batch_size):
                inputs = ordered[start : start + self.batch_size]
                wanted = [(row, len(tokens), *each) for row, tokens in enumerate(inputs) for each in by_input[tokens]]
                for place, answer in self._score(inputs, wanted):
                    found[place] = answer
                bar.update(len(wanted))
        return found

    @torch.no_grad()
    def _score(
        self, inputs: Sequence[tuple[int, ...]], wanted: Sequence[tuple[int, int, int, list[int]]]
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Answers with their index.  wanted: (row, its length, index, the last tokens to score)."""
        stage, device = self.stage, self.stage.build.device
        length = -(-max(map(len, inputs)) // TILE) * TILE
        tokens = torch.zeros(len(inputs), length, dtype=torch.long)  # the model is causal, so padding has no effect
        for row, ids in enumerate(inputs):
            tokens[row, : len(ids)] = torch.tensor(ids)
        stage.cos, stage.sin = self._cos[:length], self._sin[:length]
        hidden = stage.hidden(tokens.to(device), [0]).flatten(0, 1)  # [B S, H]
        at = [row * length + position for row, n, _, said in wanted for position in range(n - len(said), n)]
        labels = torch.tensor([token for *_, said in wanted for token in said], device=device)
        losses, greedy = self._judge(hidden[torch.tensor(at, device=device)], labels)
        begin = 0
        for *_, place, said in wanted:
            span = slice(begin, begin + len(said))
            begin += len(said)
            yield place, (-float(losses[span].double().sum()), bool(greedy[span].all()))

    def _judge(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [P, H], labels [P] -> losses in nats [P], and whether each label is the likeliest token [P]."""
        axis, losses, greedy = self.stage.build.region.axis, [], []
        for x, label in zip(hidden.split(_POSITIONS), labels.split(_POSITIONS), strict=True):
            logits = self.stage.logits(x[None])[0]
            losses.append(vocab_parallel_cross_entropy(logits, label, axis))
            greedy.append(likeliest(logits, axis) == label)
        return torch.cat(losses).cpu(), torch.cat(greedy).cpu()


def likeliest(logits: Tensor, axis: Axis) -> Tensor:
    """Token of the largest logit, the first in a tie: logits [P, V/tp] -> [P], the same on every tp rank."""
    value, token = logits.float().max(dim=-1)
    if axis.size == 1:
        return token
    pair = torch.stack([value.double(), (token + axis.rank * logits.shape[-1]).double()])
    everyone = [torch.empty_like(pair) for _ in range(axis.size)]
    dist.all_gather(everyone, pair, group=axis.group)
    values, tokens = torch.stack(everyone, dim=1)  # [tp, P] each
    return tokens.gather(0, values.argmax(dim=0, keepdim=True))[0].long()
