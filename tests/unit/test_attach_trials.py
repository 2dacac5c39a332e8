"""Plans in somebody's own loop are tried on batches that the probe did not see."""

from __future__ import annotations

import logging
import math

import pytest
import torch
import torch.nn.functional as F

from megatron_snip.attach import attach, token_losses
from megatron_snip.quant import LinearPrecision
from megatron_snip.snip.predict.divergence import Predictions
from tests.dist.helpers.attached import tiny_llama, tokens_of

SEEN, OTHER = tokens_of(4).split(2)


@pytest.fixture
def probed():
    model = tiny_llama()
    snip = attach(model, options="fp8,fp4")
    snip.probe(lambda: model(input_ids=SEEN, labels=SEEN).loss)
    return model, snip


def held_out(model):
    return token_losses(model(input_ids=OTHER).logits, OTHER)


def costs_more_than_predicted(monkeypatch):
    monkeypatch.setattr(Predictions, "total_loss_divergence", lambda self, linears: -1.0)


def test_auto_means_the_same_in_attach_and_in_solve(monkeypatch):
    """As on Blackwell, whose tensor cores take other formats than the default."""
    monkeypatch.setattr("megatron_snip.snip.plan.options.check_linear", lambda *_: None)
    model = tiny_llama()
    snip = attach(model)
    snip.probe(lambda: model(input_ids=SEEN, labels=SEEN).loss)
    plan = snip.solve(0.5, options="auto", granularity="linear")
    assert set(map(str, plan.linears.values())) == {"mxfp8", "nvfp4"}


def test_token_losses_are_those_of_transformers():
    """Of labels that count; their mean is the model's own loss."""
    model, labels = tiny_llama(), OTHER.clone()
    labels[:, 40:60] = -100
    found = token_losses(model(input_ids=OTHER).logits, labels)
    assert found.shape == (2 * (127 - 20),)
    torch.testing.assert_close(found.mean(), model(input_ids=OTHER, labels=labels).loss)


def test_a_plan_that_costs_what_was_predicted_is_returned(probed, monkeypatch):
    model, snip = probed
    monkeypatch.setattr(Predictions, "total_loss_divergence", lambda self, linears: 1.0)
    plan = snip.solve(0.5, held_out=lambda: held_out(model))
    assert plan.linears == snip.solve(0.5).linears and plan.trial.name == "solver"
    assert plan.trial.tokens == 2 * 127 and len(plan.trial.tried) == 1 and plan.trial.tried[0].predicted == 1.0


def test_a_trial_measures_the_plans_and_leaves_no_trace(probed, monkeypatch):
    """The increase is that of the model under the plan; weights, precisions and random numbers stay."""
    model, snip = probed
    costs_more_than_predicted(monkeypatch)
    model.model.layers[0].register_forward_hook(lambda *_: torch.rand(1) and None)  # as dropout would
    state = torch.random.get_rng_state()
    plan = snip.solve(0.8, held_out=[lambda: held_out(model)], trials=4)
    assert torch.equal(torch.random.get_rng_state(), state) and snip.plan is None
    assert [one.name for one in plan.trial.tried] == ["solver", "lowest", "layer_id"]
    with torch.no_grad():
        plain = held_out(model)
        snip.apply(plan)
        change = held_out(model) - plain
    assert plan.trial.increase == pytest.approx(change.mean().item(), abs=1e-6)
    assert plan.trial.error == pytest.approx(change.std(correction=0).item() / math.sqrt(len(change)), rel=1e-3)


def test_the_best_by_measurement_is_returned(probed, monkeypatch):
    """Low precision everywhere, where the model says that it costs less."""
    model, snip = probed
    costs_more_than_predicted(monkeypatch)

    def losses():
        fp4 = [linear.precision == LinearPrecision.uniform("fp4") for linear in snip.linears.values()]
        return held_out(model) - 5.0 * all(fp4)

    plan = snip.solve(0.5, held_out=losses)
    assert plan.trial.name == "lowest" and set(map(str, plan.linears.values())) == {"fp4"}


def test_the_largest_share_below_a_loss(probed, monkeypatch):
    """Every linear costs .01 nats by measurement, and each plan counts with its prediction if that is more."""
    model, snip = probed
    monkeypatch.setattr(Predictions, "total_loss_divergence", lambda self, linears: 0.0)

    def losses():
        fp4 = [linear.precision == LinearPrecision.uniform("fp4") for linear in snip.linears.values()]
        return held_out(model) * 0 + 0.01 * sum(fp4)

    plan = snip.solve(max_loss=0.055, granularity="linear", held_out=losses, trials=10)
    low = [name for name, precision in plan.linears.items() if str(precision) == "fp4"]
    assert len(low) == 5 and plan.trial.increase == pytest.approx(0.05)
    assert [one.name for one in plan.trial.tried[:3]] == ["target 0%", "target 100%", "target 50%"]
    assert set(map(str, snip.solve(max_loss=1e-3, granularity="linear", held_out=losses).linears.values())) == {"fp8"}
    monkeypatch.setattr(Predictions, "total_loss_divergence", lambda self, linears: 1.0)
    assert set(map(str, snip.solve(max_loss=0.055, granularity="linear", held_out=losses).linears.values())) == {"fp8"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_loss": -1.0}, "solve: max_loss is -1.0; give a number of nats above 0"),
        ({"max_loss": "0.1"}, "solve: max_loss is '0.1'; give a number of nats above 0"),
        ({"max_loss": math.nan}, "solve: max_loss is nan"),
        ({"max_loss": 0.1, "target": 0.5}, "solve: target and max_loss are alternatives, and both are given; drop one"),
        ({"max_loss": 0.1, "held_out": None}, "nothing is tried; give held_out"),
        ({"max_loss": 0.1, "objective": "random"}, "nothing is tried; give held_out"),
        ({"max_loss": 0.1, "trials": 2}, "trials is 2; give 3 or more"),
    ],
)
def test_a_loss_that_cannot_be_asked_for(options, said, probed):
    model, snip = probed
    with pytest.raises(ValueError) as info:
        snip.solve(**{"held_out": lambda: held_out(model), **options})
    assert said in str(info.value)


@pytest.mark.parametrize("held", [None, []])
def test_without_data_or_passes_there_is_no_trial(held, probed):
    model, snip = probed
    assert snip.solve(0.5, held_out=held).trial is None
    assert snip.solve(0.5, held_out=lambda: held_out(model), trials=0).trial is None
    assert snip.solve(0.5, held_out=lambda: held_out(model), objective="random").trial is None


def test_a_trial_that_fails_keeps_the_plan_in_force(probed, caplog):
    model, snip = probed

    def broken():
        raise RuntimeError("no memory\nat all")

    for losses, why in ((broken, "RuntimeError: no memory"), (lambda: held_out(model) * math.nan, "BF16 is nan")):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            plan = snip.solve(0.5, held_out=losses)
        assert set(map(str, plan.linears.values())) == {"bf16"}, "nothing was applied yet"
        (said,) = caplog.messages
        assert why in said and "keeping the current plan" in said
    first = snip.solve(0.75)
    snip.apply(first)
    assert snip.solve(0.5, held_out=broken) is first


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda model: held_out(model), "solve: held_out is a Tensor, not a function; give one that runs the model"),
        (lambda model: lambda: model(input_ids=OTHER, labels=OTHER).loss, "solve: held_out returned one number; plans"),
        (lambda model: lambda: model(input_ids=OTHER), "solve: held_out returned a CausalLMOutputWithPast; return the"),
    ],
)
def test_mistakes(given, said, probed):
    model, snip = probed
    with pytest.raises(ValueError) as info:
        snip.solve(0.5, held_out=given(model))
    assert said in str(info.value)


@pytest.mark.parametrize("trials", [-1, "4", 1.5])
def test_a_number_of_passes_that_is_none(trials, probed):
    with pytest.raises(ValueError, match="solve: trials is .*; give a number of forward passes, 0 or more"):
        probed[1].solve(0.5, trials=trials)


def test_a_loss_of_the_user_s_own(probed):
    """Any tensor of losses will do."""
    model, snip = probed

    def losses():
        return F.cross_entropy(model(input_ids=OTHER).logits[:, :-1].transpose(1, 2), OTHER[:, 1:], reduction="none")

    found = [snip.solve(0.5, held_out=one).trial for one in (losses, lambda: held_out(model))]
    assert found[0].tokens == found[1].tokens == 254
    assert found[0].increase == pytest.approx(found[1].increase, abs=1e-6)
