"""The model under --reset-position-ids, --reset-attention-mask and --eod-mask-loss: on a run's own parts."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_snip.data.loader import Batch
from tests.dist.helpers.runs import make

EOD, LENGTH = 15, 128  # NullTokenizer's last id
OPTIONS = {
    "vocab_size": EOD + 1, "num_layers": 2, "global_batch_size": 2, "hidden_size": 128, "ffn_hidden_size": 128,
    "num_query_groups": 2, "reset_position_ids": True, "reset_attention_mask": True, "lr_warmup_iters": 0,
}  # fmt: skip
CUTS = ((40, 41, 90), (127,))  # places of the ends in the two samples


def batch() -> Batch:
    """Two microbatches of one sample."""
    tokens = torch.randint(0, EOD, (2, 1, LENGTH), generator=torch.Generator().manual_seed(1))
    for sample, cuts in enumerate(CUTS):
        tokens[sample, 0, list(cuts)] = EOD
    return Batch(tokens, tokens.roll(-1, dims=-1), torch.tensor([[4], [5]]))


def outputs(parts, one: Batch) -> list[torch.Tensor]:
    """Logits [S, V] of each sample."""
    (stage,) = parts.stages.values()
    found: list[torch.Tensor] = []
    handle = stage.lm_head.register_forward_hook(lambda head, args, _: found.append((args[0] @ head.weight.T).detach()))
    parts.stepper.evaluate(one, 1)
    handle.remove()
    return found


def test_a_document_in_a_sample_is_a_document_alone(lone_mesh):
    """Its logits are those of a sample that begins with it."""
    _, parts = make(OPTIONS)
    whole = batch()
    packed = outputs(parts, whole)
    for sample, cuts in enumerate(CUTS):
        edges = [0, *(cut + 1 for cut in cuts), LENGTH]
        for begin, end in itertools.pairwise(edges):
            if end - begin > 0:
                tokens = torch.zeros_like(whole.tokens)
                tokens[:, 0, : end - begin] = whole.tokens[sample, 0, begin:end]
                alone = outputs(parts, Batch(tokens, tokens, whole.sample_index))[0]
                torch.testing.assert_close(packed[sample][begin:end], alone[: end - begin], rtol=1e-4, atol=1e-5)
    _, plain = make({**OPTIONS, "reset_position_ids": False, "reset_attention_mask": False})
    running = outputs(plain, whole)[0]
    assert torch.equal(packed[0][0], running[0]) and not torch.allclose(packed[0][41:], running[41:], atol=1e-3)


def gradients(**options) -> tuple[float, dict[str, torch.Tensor]]:
    _, parts = make({**OPTIONS, "eod_mask_loss": True, **options})
    loss = parts.stepper.gradients(batch(), 1)[0].loss
    return loss, {name: p.grad.clone() for name, p in parts.optimizer.parameters.items()}


@pytest.mark.parametrize(
    "how",
    [
        {"recompute_granularity": "full"},
        {"recompute_granularity": "full", "recompute_num_layers": 2},
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")},
    ],
)
def test_recomputation_changes_no_bit(how, lone_mesh):
    loss, plain = gradients()
    again, other = gradients(**how)
    assert loss == again and all(torch.equal(plain[name], other[name]) for name in plain)


def test_the_gradient_is_that_of_the_mean_over_tokens_that_count(lone_mesh):
    """Of each microbatch, or of the batch; against autograd over the logits."""
    found = {}
    for per_token in (False, True):
        _, parts = make({**OPTIONS, "eod_mask_loss": True, "calculate_per_token_loss": per_token})
        (stage,) = parts.stages.values()
        whole = batch()
        logits: list[torch.Tensor] = []
        stage.lm_head.register_forward_hook(lambda head, args, _, to=logits: to.append(args[0] @ head.weight.T))
        loss = parts.stepper.gradients(whole, 1)[0].loss
        counted = [whole.tokens[i, 0] != EOD for i in range(2)]
        losses = [torch.nn.functional.cross_entropy(logits[i], whole.labels[i, 0], reduction="none") for i in range(2)]
        kept = [one[count].detach() for one, count in zip(losses, counted)]
        found[per_token] = loss
        expected = torch.cat(kept).mean() if per_token else torch.stack([one.mean() for one in kept]).mean()
        assert loss == pytest.approx(float(expected), rel=1e-5)
    assert found[True] != found[False]


def test_a_probe_attends_as_the_pass_did(lone_mesh):
    """With each microbatch's own positions and mask, bit for bit."""
    _, parts = make(OPTIONS)
    (stage,) = parts.stages.values()
    attention, seen = stage.blocks()[1].self_attn, []
    attend = attention.attend

    def noted(q, k, v, *tables):
        seen.append((q.detach(), k.detach(), v.detach(), attend(q, k, v, *tables)))
        return seen[-1][-1]

    attention.attend = noted
    parts.stepper.gradients(batch(), 1)
    attention.attend = attend
    for sample, (q, k, v, out) in zip((4, 5), seen, strict=True):
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        assert torch.equal(stage.attend(1, *flat, sample * LENGTH), out.flatten(0, 1))
    assert not torch.allclose(stage.attend(1, *flat, 4 * LENGTH), out.flatten(0, 1))
