"""Ends of documents: positions, masks and losses against megatron-core's and by hand."""

from __future__ import annotations

import warnings

import pytest
import torch

from megatron_snip.mesh import Axis
from megatron_snip.model.document_ends import Documents, attention_mask, positions

EOD = 7
LONE = Axis(1, 0, None)  # type: ignore[arg-type]


def tokens() -> torch.Tensor:
    """[6, 24]: ends at the edges, in a row, nowhere and everywhere."""
    rows = torch.randint(0, 6, (6, 24), generator=torch.Generator().manual_seed(0))
    rows[0, [0, 5, 6, 7, 20]] = EOD
    rows[1, [23]] = EOD
    rows[2, [22, 23]] = EOD
    rows[3, [1, 11]] = EOD
    rows[4] = EOD
    return rows


def documents(**chosen: bool) -> Documents:
    options = dict.fromkeys(("reset_positions", "reset_attention", "mask_loss", "per_token"), False)
    return Documents(EOD, **{**options, **chosen}, cp=LONE)


@pytest.fixture(scope="module")
def megatrons():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("megatron.core")
        return pytest.importorskip("megatron.core.datasets.gpt_dataset")._get_ltor_masks_and_position_ids


def test_positions_masks_and_losses_are_megatrons(megatrons):
    mask, place = attention_mask(tokens(), EOD), positions(tokens(), EOD)
    assert mask.shape == (6, 1, 24, 24) and mask.dtype == torch.bool
    for row, one in enumerate(tokens()):
        hidden, counted, theirs = megatrons(one, EOD, True, True, True, True)
        assert torch.equal(place[row], theirs)
        assert torch.equal(mask[row], ~hidden), "theirs is true where nothing is seen"
        alone = documents(mask_loss=True)
        alone.begin(one[None, None], torch.tensor([[3]]), LONE)
        seen = [float(alone.loss(torch.eye(24)[t], 3, 24)) > 0 for t in range(24)]
        assert seen == counted.bool().tolist()


def test_positions_by_hand():
    assert positions(torch.tensor([[1, EOD, 2, 3, EOD, EOD, 4]]), EOD).tolist() == [[0, 1, 0, 1, 2, 0, 0]]


@pytest.mark.parametrize("per_token", [False, True])
def test_losses_are_averaged_as_megatron_does(per_token):
    """Two microbatches, with 3 of 4 and 1 of 4 tokens that count, and a third that has none."""
    batch = torch.tensor([[[1, 2, EOD, 3]], [[EOD, EOD, 1, EOD]], [[EOD] * 4]])
    index, losses = torch.tensor([[5], [6], [7]]), torch.tensor([1.0, 2.0, 50.0, 3.0])
    one = documents(mask_loss=True, per_token=per_token)
    divisor = one.begin(batch, index, LONE)
    shares = [float(one.loss(losses, sample, divisor)) for sample in (5, 6, 7)]
    expected = [6 / 4, 50 / 4, 0.0] if per_token else [6 / 3 / 3, 50 / 3, 0.0]
    assert shares == pytest.approx(expected)


def test_without_a_mask_all_tokens_count():
    one = documents(reset_positions=True)
    divisor = one.begin(tokens()[None], torch.arange(6)[None], LONE)
    assert divisor == 6 * 24 and float(one.loss(torch.ones(6 * 24), 0, divisor)) == 1.0


def test_what_is_not_reset_stays():
    cos, sin = torch.rand(2, 24, 4)
    for chosen in ({"reset_positions": True}, {"reset_attention": True}, {"mask_loss": True}):
        one = documents(**chosen)
        one.begin(tokens()[None], torch.arange(6)[None], LONE)
        turned, _, mask = one.tables(0, cos, sin)
        assert (mask is not None) == ("reset_attention" in chosen)
        assert (turned is cos) == ("reset_positions" not in chosen)
    one = documents(reset_positions=True)
    one.begin(tokens()[None], torch.arange(6)[None], LONE)
    turned, other, _ = one.tables(0, cos, sin)
    assert turned.shape == (6, 1, 24, 4)
    assert torch.equal(turned[0, 0, 8], cos[0]) and torch.equal(other[0, 0, 10], sin[2])
