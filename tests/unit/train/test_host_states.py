"""Which parameters are updated on the host."""

from __future__ import annotations

import pytest
import torch

from megatron_snip.config import Config, TrainingConfig
from megatron_snip.train.dry_run.measure import measure, processes
from megatron_snip.train.health.memory import held
from megatron_snip.train.host_states import last_of, unit_of
from megatron_snip.train.optim import Optimizer
from tests.unit.train.test_optim import Small

SIZES = {"embed_tokens.weight": 50, "layers.0.mlp.up_proj.weight": 20, "layers.11.input_layernorm.weight": 10,
         "norm.weight": 5, "lm_head.weight": 15}  # fmt: skip


def test_the_last_that_are_at_least_the_share():
    names = list(SIZES)
    for fraction, count in ((0.0, 0), (0.15, 1), (0.151, 2), (0.2, 2), (0.5, 4), (0.501, 5), (1.0, 5)):
        assert last_of(SIZES, fraction) == names[len(names) - count :]


def test_units_are_what_runs_at_once():
    assert [unit_of(name) for name in SIZES] == ["embed_tokens", "layers.0", "layers.11", "norm", "lm_head"]


def test_a_weight_that_was_written_elsewhere_is_the_one_that_is_updated():
    model, t = Small(), TrainingConfig(lr=0.1, weight_decay=0.0)
    name = "down_proj.weight"
    optimizer = Optimizer([model], t, host=[name])
    weight, gradient = dict(model.named_parameters())[name], torch.ones(3, 7)
    for steps, start in enumerate((2.0, 5.0)):
        with torch.no_grad():
            weight.fill_(start)
        optimizer.set_steps(steps)  # as after reading a checkpoint
        weight.grad = gradient.clone()
        optimizer.step(0.1, 1.0)
        assert torch.allclose(weight, torch.full((3, 7), start - 0.1))
    assert (len(optimizer.pinned()), len(optimizer.state(host=True)), len(optimizer.state())) == (2, 2, 2 * 2)


def test_a_weight_without_a_gradient_is_left_alone():
    """As without the option, and written elsewhere in the meantime; later it has a gradient again."""
    host, plain = (Small() for _ in range(2))
    plain.load_state_dict(host.state_dict())
    t = TrainingConfig(lr=0.1)
    names = [name for name, _ in host.named_parameters()]
    optimizers = [Optimizer([host], t, host=names), Optimizer([plain], t)]
    for with_gradient in (names, names[1:], [], names):
        for model, optimizer in zip((host, plain), optimizers, strict=True):
            if with_gradient == names[1:]:
                with torch.no_grad():
                    model.up_proj.weight.fill_(3.0)
                optimizer.set_steps(optimizer.steps)
            for name, p in model.named_parameters():
                p.grad = torch.ones_like(p) if name in with_gradient else None
            optimizer.step(0.1, 1.0)
        assert all(torch.equal(a, b) for a, b in zip(host.parameters(), plain.parameters(), strict=True))


def test_a_dry_run_counts_the_host_apart():
    options = {
        "num_layers": 2, "hidden_size": 128, "ffn_hidden_size": 256, "num_attention_heads": 4, "seq_length": 128,
        "vocab_size": 512, "global_batch_size": 1, "train_iters": 1, "bf16": True, "distributed_backend": "gloo",
    }  # fmt: skip
    config = Config().replace(**options)
    with processes(1) as pool:
        variants = (config, config.replace(optimizer_cpu_offload=True))
        plain, host = (pool.submit(measure, one, 1, 0).result() for one in variants)
    peak, parameters = plain.worst.peak, plain.parameters
    assert peak["optimiser"] == 8 * parameters and host.worst.peak["optimiser"] == plain.worst.host == 0
    assert plain.worst.total - host.worst.total == 8 * parameters and host.worst.host == 16 * parameters
    assert (plain.stored, host.stored) == (16 * parameters, 8 * parameters)
    assert [held(one, 1) for one in variants] == [[(plain.stored, 0)], [(host.stored, host.worst.host)]]


def test_what_is_held_is_what_a_dry_run_counts():
    """From options alone: on stages, shards and page-locked memory, and of a tied embedding with a copy."""
    options = {
        "num_layers": 3, "hidden_size": 192, "ffn_hidden_size": 384, "num_attention_heads": 4, "seq_length": 128,
        "vocab_size": 512, "global_batch_size": 4, "train_iters": 1, "bf16": True,
        "optimizer_precision": "collage-plus", "optimizer_cpu_offload": True,
        "untie_embeddings_and_output_weights": False, "pipeline_model_parallel_size": 2,
        "decoder_first_pipeline_num_layers": 1,
    }  # fmt: skip
    config = Config().replace(**options)
    variants = (config, config.replace(optimizer_offload_fraction=0.3))
    with processes(2) as pool:
        jobs = [[pool.submit(measure, one, 4, rank) for rank in (0, 2)] for one in variants]
        counted = [[(one.stored, one.worst.host) for one in (job.result() for job in of)] for of in jobs]
    for one, stages in zip(variants, counted, strict=True):
        for (device, host), (stored, on_host) in zip(held(one, 4, page_locked=True), stages, strict=True):
            assert device == stored and host == pytest.approx(on_host, rel=0.01)  # which rounds norms up to 512 bytes
