"""Numbers that are a sum of two tensors are read into either form from either form."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.checkpoint.storage import load_tensors
from megatron_snip.quant.adamw.expansion import split

VALUE = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
HIGH, LOW = split(VALUE)
FORMS = {
    "float32": {"model.a": VALUE},
    "sum": {"model.a": HIGH, "model.a.low": LOW},
    "bf16": {"model.a": HIGH},
}
READ = {
    ("float32", "sum"): {"model.a": HIGH, "model.a.low": LOW},
    ("float32", "bf16"): {"model.a": HIGH},
    ("sum", "float32"): {"model.a": HIGH.float() + LOW.float()},
    ("sum", "bf16"): {"model.a": HIGH},
    ("bf16", "float32"): {"model.a": HIGH.float()},
    ("bf16", "sum"): {"model.a": HIGH, "model.a.low": torch.zeros_like(LOW)},
}


@pytest.mark.parametrize("wanted", FORMS)
@pytest.mark.parametrize("saved", FORMS)
def test_each_form_is_read_from_each(saved, wanted, saver, tmp_path):
    saver(tmp_path).save(5, FORMS[saved], {"iteration": 5}, finite=True, last=True)
    into = {name: torch.full_like(tensor, 7.0) for name, tensor in FORMS[wanted].items()}
    load_tensors(tmp_path, 5, into)
    expected = READ.get((saved, wanted), FORMS[wanted])
    assert into.keys() == expected.keys()
    assert all(torch.equal(into[name], tensor) for name, tensor in expected.items())


def test_a_low_part_of_another_shape_is_refused(saver, tmp_path):
    saver(tmp_path).save(5, {"model.a": HIGH, "model.a.low": LOW[:3]}, {"iteration": 5}, finite=True, last=True)
    with pytest.raises(ValueError, match=r"model\.a\.low has shape \[3, 4\], but the model's is \[30, 4\]"):
        load_tensors(tmp_path, 5, {"model.a": torch.zeros(30, 4)})
    with pytest.raises(ValueError, match=r"holds no model\.b; it is a checkpoint of another model"):
        load_tensors(tmp_path, 5, {"model.b": HIGH.clone(), "model.b.low": LOW.clone()})
