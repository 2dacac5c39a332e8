"""Linears keep their names and kinds in whatever wraps the model or its blocks."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from megatron_snip.attach import attach
from megatron_snip.errors import UserError
from megatron_snip.quant import KINDS
from megatron_snip.snip.plan.plan_file import Plan
from tests.dist.helpers.attached import tiny_llama, tokens_of

NAMES = list(attach(tiny_llama()).linears)


def blocks_by(wrap):
    def wrapped(model):
        for i, block in enumerate(model.model.layers):
            model.model.layers[i] = wrap(block)
        return model

    return wrapped


@pytest.mark.parametrize("wrap", [torch.compile, blocks_by(torch.compile), blocks_by(checkpoint_wrapper)])
def test_a_wrapper_is_in_no_name(wrap):
    """Else plans of one would not do for the other, and random bits, which go by the name, would be others."""
    snip = attach(wrap(tiny_llama()))
    assert list(snip.linears) == NAMES and NAMES[0] == "layers.0.self_attn.q_proj"
    assert {shape.kind for shape in snip.shapes} == set(KINDS)


def test_ddp_within_and_around_the_compiler(lone_mesh):
    ddp = torch.nn.parallel.DistributedDataParallel
    for model in (torch.compile(ddp(tiny_llama())), ddp(torch.compile(tiny_llama()))):
        assert list(attach(model).linears) == NAMES


def test_other_linears_beside_the_blocks_do_not_change_how_these_are_judged():
    model, samples = tiny_llama(), tokens_of(1)
    probed = attach(model).probe(lambda: model(input_ids=samples, labels=samples).loss)
    snip = attach(model, lambda name, linear: True)
    assert [shape.kind for shape in snip.shapes] == [*KINDS * 2, ""] and snip.shapes[-1].name == "lm_head"
    both = snip.probe(lambda: model(input_ids=samples, labels=samples).loss)
    assert (both.values[:-1] == probed.values).all() and (both.values[-1] > 0).any()


def test_an_adapter_around_the_model_is_no_attention_that_we_know():
    """As peft's: it has the model's config, and as its ``model`` the whole one."""

    class Adapted(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model, self.config = model, model.config

    assert {shape.kind for shape in attach(Adapted(tiny_llama())).shapes} == {""}


def test_a_weight_cut_by_tensor_parallelism_is_refused(lone_mesh):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    parallelize_module(model, torch.distributed.init_device_mesh("cpu", (1,)), {"0": ColwiseParallel()})
    snip = attach(model)
    snip.apply(Plan.uniform(snip.linears, "fp8"))
    with pytest.raises(UserError, match="0: the weight is a DTensor in forward, .* leave it out of linears"):
        model(torch.randn(4, 64))
