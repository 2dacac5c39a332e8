"""Blocks of scales that ranks cut: what they send is what a cast of the whole weight makes."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.parallel.code_gather import Cuts
from megatron_snip.quant import LinearPrecision
from megatron_snip.quant.casts.codes import to_send
from megatron_snip.quant.kernels.dispatch import cast
from megatron_snip.quant.linears.operands import weight_codes

K = 64
AMAX = torch.tensor(3.5)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("rows", "ranks"),
    [
        (5504 // 4, 4),  # 344 rows, in blocks of 128 and 32
        (480, 4),  # the weight's last block is shorter
        (192, 4), (64, 4), (24, 8),  # several ranks in a block
        (129, 3), (4, 4),
        (384, 2),  # one cut in the middle of a block of 128
    ],
)  # fmt: skip
@pytest.mark.parametrize("plan", ["fp8", "nvfp4", "mxfp4", "fp8_pow2/fp4/bf16"])
@pytest.mark.parametrize("nan", [False, True])
def test_blocks_that_ranks_cut_have_the_scales_of_the_whole(rows, ranks, plan, nan):
    w = torch.randn(rows, K, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 0, rows)[:, None]
    w[rows // 2, 7], w[rows // 3, 5] = -AMAX, torch.inf
    if nan:
        w[rows - 2, 30] = torch.nan
    for form in weight_codes(LinearPrecision.parse(plan)):
        side = form.block[0]
        if rows // ranks % side == 0:
            continue
        cuts = [Cuts(rows, ranks, rank, side, CPU) for rank in range(ranks)]
        parts = w.chunk(ranks)
        found = [one.largest_of(own, torch.bfloat16) for one, own in zip(cuts, parts, strict=True)]
        for one in cuts:
            one.largest = torch.stack(found).amax(dim=0)
        sent = [one.send(own, form, AMAX) for one, own in zip(cuts, parts, strict=True)]
        assert len({scales.shape for _, scales in sent}) == 1
        data, scales = to_send(cast(w, [form], amax=AMAX, dtype=torch.bfloat16)[0])
        made = cuts[0].scales(torch.cat([scales for _, scales in sent]))
        assert torch.equal(torch.cat([data for data, _ in sent]), data)
        assert torch.equal(made.nan_to_num(-1.0), scales.nan_to_num(-1.0)) and made.is_contiguous()
        assert bool(made.isnan().any()) == (nan and form.element.bits == 4)
