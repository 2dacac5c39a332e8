"""Any model of nn.Linear under SNIP, in one process without a process group."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from megatron_snip.attach import attach
from megatron_snip.integrations.transformers import SnipCallback
from megatron_snip.quant import LinearPrecision, RoundingKey, fake_quantize, name_stream, quantized_linear
from megatron_snip.snip.measure.probe import ProbeFailed
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.snip.predict.divergence import loss_divergence
from tests.dist.helpers.attached import tiny_llama, tokens_of


class Mixed(nn.Module):
    """Linears with and without bias, of tensors with two and three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 64)
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=bias) for bias in (True, False))
        self.lm_head = nn.Linear(64, 50)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.blocks[0](x).relu()
        x = x + self.blocks[1](x.flatten(0, 1)).view_as(x)
        return self.lm_head(x)


@pytest.fixture
def mixed():
    torch.manual_seed(3)
    return Mixed()


IDS = torch.randint(50, (2, 128), generator=torch.Generator().manual_seed(2))


def loss_of(model):
    return F.cross_entropy(model(IDS).flatten(0, 1), IDS.flatten())


def test_nothing_changes_before_a_plan_and_after_detach(mixed):
    before = mixed(IDS)
    snip = attach(mixed)
    assert list(snip.linears) == ["blocks.0", "blocks.1"] and [shape.block for shape in snip.shapes] == [0, 1]
    assert torch.equal(mixed(IDS), before)
    snip.apply(Plan.uniform(snip.linears, "fp4"))
    planned = mixed(IDS)
    assert not torch.equal(planned, before)
    with snip.unquantised():
        assert torch.equal(mixed(IDS), before)
    assert torch.equal(mixed(IDS), planned)
    snip.detach()
    assert torch.equal(mixed(IDS), before) and "forward" not in vars(mixed.blocks[0])


def test_a_linear_is_the_packages_own(mixed):
    snip = attach(mixed, seed=7)
    snip.apply(Plan.uniform(snip.linears, "fp8/fp4/fp4"))
    x, g = torch.randn(2, 128, 64), torch.randn(2, 128, 64)
    x.requires_grad_()
    layer = mixed.blocks[0]
    y = layer(x)
    y.backward(g)
    key = RoundingKey(snip.seed, 1, name_stream("blocks.0"))
    rows, w = x.detach().flatten(0, 1).requires_grad_(), layer.weight.detach().requires_grad_()
    expected = quantized_linear(rows, w, LinearPrecision.parse("fp8/fp4/fp4"), key=key)
    expected.backward(g.flatten(0, 1))
    assert torch.equal(y.detach(), (expected + layer.bias).view_as(y).detach())
    assert torch.equal(x.grad.flatten(0, 1), rows.grad) and torch.equal(layer.weight.grad, w.grad)
    assert torch.equal(layer.bias.grad, g.sum((0, 1)))


def test_rounding_draws_anew(mixed):
    """In every update, and for every microbatch in it."""
    snip = attach(mixed)
    snip.apply(Plan.uniform(snip.linears, "fp4"))

    def gradient():
        mixed.zero_grad()
        loss_of(mixed).backward()
        return mixed.blocks[0].weight.grad.clone()

    first, second = gradient(), gradient()
    snip.step()
    third = gradient()
    assert not torch.equal(first, second) and not torch.equal(first, third)
    again = attach(mixed)
    again.apply(snip.plan)
    assert torch.equal(gradient(), first)


def test_weights_that_change_are_cast_anew(mixed):
    snip = attach(mixed)
    snip.apply(Plan.uniform(snip.linears, "fp8"))
    with torch.no_grad():
        before = mixed(IDS)
        mixed.blocks[0].weight.mul_(2.0)
        assert not torch.equal(mixed(IDS), before)


def test_a_probe_leaves_no_trace(mixed):
    model = nn.Sequential(mixed, nn.Dropout(0.1))
    snip = attach(model, ["*blocks*"])
    loss_of(model).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    values = {name: grad.clone() for name, grad in grads.items()}
    state = torch.random.get_rng_state()
    stats = snip.probe(lambda: loss_of(model), lambda: loss_of(model))
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, p in model.named_parameters():
        assert p.grad is grads[name] and torch.equal(p.grad, values[name])
    assert stats.tokens == 256 and not stats.not_finite and snip.statistics is stats
    plan = snip.solve(0.5, granularity="linear")
    assert plan.achieved == 0.5 and torch.equal(torch.random.get_rng_state(), state)


def test_a_probe_measures_what_its_definition_says(mixed):
    """T/2 sum_t (sum_n G dY)^2 with G of the mean loss, at the linear's own output."""
    seen = {}

    def keep(module, given, y):
        seen["x"] = given[0].detach().flatten(0, -2)
        y.register_hook(lambda grad: seen.update(g=grad.flatten(0, -2)))

    layer = mixed.blocks[1]
    with layer.register_forward_hook(keep):
        loss_of(mixed).backward()
    stats = attach(mixed).probe(lambda: loss_of(mixed))
    x, w = seen["x"], layer.weight.detach()
    qx, qw = (fake_quantize(t, "fp4", role=role, dim=1) for t, role in ((x, "input"), (w, "weight")))
    error = ((qx @ qw.T - x @ w.T) * seen["g"]).sum(1)
    expected = len(x) / 2 * float(error.double().square().sum())
    found = loss_divergence(stats, [LinearPrecision.uniform("fp4")])[1, 0]
    assert found == pytest.approx(expected, rel=1e-4) and found > 0
    assert stats.loss == pytest.approx(float(loss_of(mixed).detach()), rel=1e-6)


@pytest.mark.parametrize("lengths", [(128, 32), (32, 128)])
def test_batches_of_unequal_size_count_alike(lengths, mixed):
    """What is added to the mean of their losses is the mean of what is added to each."""
    option = [LinearPrecision.uniform("fp4")]

    def probed(*batches):
        def loss(ids):
            return F.cross_entropy(mixed(ids).flatten(0, 1), ids.flatten())

        stats = attach(mixed).probe(*(lambda ids=ids: loss(ids) for ids in batches))
        return loss_divergence(stats, option)[:, 0], stats.loss

    batches = [IDS[:, :length] for length in lengths]
    (one, first), (other, second) = probed(batches[0]), probed(batches[1])
    found, loss = probed(*batches)
    assert found == pytest.approx((one + other) / 2, rel=1e-12) and loss == pytest.approx((first + second) / 2)


def test_a_probe_between_microbatches_leaves_their_random_bits(mixed):
    def gradient(probed):
        snip = attach(mixed)
        snip.apply(Plan.uniform(snip.linears, "fp4"))
        mixed.zero_grad()
        loss_of(mixed).backward()
        if probed:
            snip.probe(lambda: loss_of(mixed))
        loss_of(mixed).backward()
        return mixed.blocks[0].weight.grad.clone()

    assert torch.equal(gradient(False), gradient(True))


def test_a_probe_leaves_what_is_beside_the_model(mixed):
    head = nn.Linear(50, 2)
    attach(mixed).probe(lambda: head(mixed(IDS)).square().mean())
    assert head.weight.grad is None and head.bias.grad is None


def test_batches_of_several_lengths_in_one_loss():
    """Each is judged by its own attention, whichever came last."""
    model = tiny_llama()
    snip = attach(model)
    long, short = tokens_of(2), tokens_of(2)[:, :64]

    def probed(*batches):
        return snip.probe(lambda: sum(model(input_ids=batch, labels=batch).loss for batch in batches))

    one, other = probed(long, short), probed(short, long)
    for column in ("token/fp4", "token/fp8"):
        assert other.column(column) == pytest.approx(one.column(column), rel=1e-4)


def test_recomputation_gives_the_same_statistics():
    model, samples = tiny_llama(), tokens_of(2)
    snip = attach(model, options="fp8,fp4")
    plain = snip.probe(lambda: model(input_ids=samples, labels=samples).loss)
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again = snip.probe(lambda: model(input_ids=samples, labels=samples).loss)
    assert {shape.kind for shape in snip.shapes} == {"q", "k", "v", "o", "gate", "up", "down"}
    assert (plain.values == again.values).all() and plain.tokens == again.tokens == 256
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.enable_input_require_grads()
    again = snip.probe(lambda: model(input_ids=samples, labels=samples).loss)
    assert (plain.values == again.values).all() and again.tokens == 256


def test_linears_that_no_gradient_comes_to_are_named(mixed):
    with pytest.raises(ProbeFailed, match=r"no gradient reached blocks\.1; leave it out"):
        attach(mixed, ["*blocks*"]).probe(lambda: mixed.blocks[0](mixed.embed(IDS)).mean())
    mixed.embed.requires_grad_(False)
    mixed.blocks[0].requires_grad_(False)
    snip = attach(mixed)
    with pytest.raises(ProbeFailed, match=r"no gradient reached blocks\.0; leave it out"):
        snip.probe(lambda: loss_of(mixed))
    assert attach(mixed, ["blocks.1"]).probe(lambda: loss_of(mixed)).names == ["blocks.1"]
    with pytest.raises(ProbeFailed, match=r"no gradient reached blocks\.0, blocks\.1; leave them out"):
        attach(mixed).probe(lambda: mixed.lm_head(mixed.embed(IDS)).mean())


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_its_linears_as_they_were(how, mixed):
    before = mixed(IDS)
    snip = attach(mixed)
    snip.apply(Plan.uniform(snip.linears, "fp4"))
    planned, copied = mixed(IDS), how(mixed)
    assert b"megatron_snip" not in pickle.dumps(nn.Sequential(*mixed.blocks)), "others can read it"
    assert torch.equal(copied(IDS), before) and not torch.equal(planned, before)
    with torch.no_grad():
        copied.blocks[0].weight.zero_()
    assert torch.equal(mixed(IDS), planned) and not torch.equal(copied(IDS), before)


@pytest.mark.parametrize("options", [{"attention_bias": True}, {"attention_dropout": 0.1}])
def test_attention_that_is_more_than_q_k_and_v_is_not_looked_through(options):
    model = tiny_llama(**options)
    snip, samples = attach(model), tokens_of(1)
    assert {shape.kind for shape in snip.shapes} == {""}
    assert not snip.probe(lambda: model(input_ids=samples, labels=samples).loss).not_finite


def test_gradients_that_share_memory_are_given_back(mixed):
    """As DDP's do, which are views of its buckets."""
    loss_of(mixed).backward()
    bucket = torch.cat([p.grad.flatten() for p in mixed.parameters()])
    views = bucket.split([p.numel() for p in mixed.parameters()])
    for p, view in zip(mixed.parameters(), views, strict=True):
        p.grad = view.view_as(p)
    before, snip = bucket.clone(), attach(mixed)

    def loss():
        bucket.fill_(7.0)  # the reducer's work
        return loss_of(mixed)

    snip.probe(loss)
    assert torch.equal(bucket, before)


def test_a_part_of_a_block_is_judged_at_its_own_output():
    model, samples = tiny_llama(), tokens_of(1)
    snip = attach(model, ["*.q_proj", "*.down_proj"])
    assert {shape.kind for shape in snip.shapes} == {""}
    assert not snip.probe(lambda: model(input_ids=samples, labels=samples).loss).not_finite
    assert snip.solve(0.5, objective="layer_id").achieved >= 0.5


def test_plans_travel_by_file(mixed, tmp_path):
    snip = attach(mixed)
    snip.probe(lambda: loss_of(mixed))
    snip.solve(0.5, granularity="linear").save(tmp_path / "plan.json")
    for path in (str(tmp_path / "plan.json"), tmp_path / "plan.json"):
        snip.apply(path)
    assert snip.plan.achieved == 0.5
    assert snip.solve(0.5, granularity="gemm", fix="blocks.0=fp8").linears["blocks.0"] == LinearPrecision.uniform("fp8")


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (lambda m: attach(m, ["*.q_proj"]), "'*.q_proj' matches no nn.Linear; names are such as blocks.0, blocks.1"),
        (lambda m: attach(m, "*.q_proj"), "'*.q_proj' matches no nn.Linear"),
        (lambda m: attach(m, lambda name, linear: False), "no nn.Linear was selected; the model has blocks.0, "),
        (lambda m: attach(m, options="fp8,fp5"), "fp5"),
        (lambda m: attach(m, impl="cuda"), "'cuda' is unknown; known: auto"),
        (lambda m: attach(m).probe(), "probe: no loss; give what runs the model"),
        (lambda m: attach(m).probe(loss_of(m)), "probe: a Tensor is not a function; give lambda: model(**batch).loss"),
        (lambda m: attach(m).probe(lambda: m(IDS)), "the loss has shape [2, 128, 50]; return one number"),
        (lambda m: attach(m).probe(lambda: loss_of(m).item()), "the loss is a float without a gradient; return"),
        (lambda m: attach(m).probe(lambda: loss_of(m).detach()), "the loss is a Tensor without a gradient; return"),
        (lambda m: attach(m).solve(0.75), "this objective needs statistics; probe first"),
        (lambda m: attach(m).solve(0.75, targets=1), "unknown option 'targets'"),
        (lambda m: attach(m).solve(0.75, weight=1.0), "'weight' is only for the trainer; options are churn, fix"),
        (lambda m: attach(m).solve(0.75, objective="abs_err"), "'abs_err' needs what only the trainer measures"),
        (lambda m: attach(m).solve(-0.1), "solve: target is -0.1; give a share, 0 to 1"),
        (lambda m: attach(m).solve(1.5), "solve: target is 1.5; give a share, 0 to 1"),
        (lambda m: attach(m).solve("0.5"), "solve: target is '0.5'; give a share, 0 to 1"),
        (lambda m: attach(m).solve(0.75, objective="random", options="fp8"), "0.75 is more than the options fp8 can"),
        (lambda m: attach(m, options="bf16"), "attach: options bf16 quantise nothing; name a format"),
        (lambda m: attach(m).solve(0.5, objective="layer_type"), "blocks.0 is not a linear of a Llama"),
        (lambda m: attach(m).solve(0.5, granularity="fused"), "fused: it is not known which of blocks.0, blocks.1"),
        (lambda m: attach(m).apply(Plan.uniform(["blocks.0"], "fp4")), "blocks.1"),
    ],
)
def test_mistakes(mistake, said, mixed):
    with pytest.raises(ValueError) as info:
        mistake(mixed)
    assert said in str(info.value)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_a_linear_that_computes_something_else_is_not_taken(mixed):
    """As torchao's Float8Linear, or one that accelerate has hooked: what it does would be lost without a word."""
    mixed.blocks[1] = Doubled(64, 64)
    with pytest.raises(ValueError, match=r"blocks.1 \(Doubled\) has a forward of its own; leave it out of linears"):
        attach(mixed)
    plain = mixed.blocks[0].forward
    mixed.blocks[0].forward = lambda x: 2 * plain(x)
    with pytest.raises(ValueError, match=r"blocks.0 \(Linear\) has a forward of its own"):
        attach(mixed, ["blocks.0"])
    del mixed.blocks[0].forward
    assert list(attach(copy.deepcopy(mixed), ["blocks.0"]).linears) == ["blocks.0"]


def test_the_last_attach_counts(mixed):
    """What was returned before, or is detached, would apply plans to nothing."""
    first = attach(mixed)
    second = attach(mixed)
    first.detach()
    assert vars(mixed.blocks[0])["forward"] is second.linears["blocks.0"]
    for late in (lambda: first.apply(Plan.uniform(first.linears, "fp4")), lambda: first.probe(lambda: loss_of(mixed))):
        with pytest.raises(ValueError, match="blocks.0 is no longer attached; call attach again"):
            late()


def test_a_linear_taken_again_detaches_all_of_the_first(mixed):
    """Else the others would stay in its plan, which nobody could change any more."""
    before = mixed(IDS)
    first = attach(mixed)
    first.apply(Plan.uniform(first.linears, "fp4"))
    attach(mixed, ["blocks.0"])
    assert torch.equal(mixed(IDS), before) and "forward" not in vars(mixed.blocks[1])


def test_a_model_that_has_moved_is_told():
    model = nn.Sequential(nn.Linear(64, 64, device="meta"))
    snip = attach(model)
    model.to_empty(device="cpu")
    with pytest.raises(ValueError, match="has moved from meta to cpu since attach; call attach again"):
        snip.probe(lambda: model(torch.zeros(2, 64)).mean())


def test_processes_that_started_after_attach_are_told(mixed, monkeypatch):
    """Each would measure alone, and have a plan of its own."""
    snip = attach(mixed)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    with pytest.raises(
        ValueError, match="number of processes was 1 when attach was called and is 2 now; call attach after"
    ):
        snip.probe(lambda: loss_of(mixed))


def test_half_precision_is_refused(mixed):
    snip = attach(mixed)
    snip.apply(Plan.uniform(snip.linears, "fp4"))
    with pytest.raises(
        ValueError, match="blocks.0: x is torch.float16; quantised linears compute in bfloat16 or float32; conv"
    ):
        mixed.half()(IDS)


def test_a_resumed_trainer_plans_at_once(mixed):
    """Its first run had a plan, and the next step to plan at may be far."""
    callback = SnipCallback(start=10, every=100)
    args, state = SimpleNamespace(device=torch.device("cpu"), bf16=False), SimpleNamespace(global_step=60)
    logits = mixed.forward
    mixed.forward = lambda ids: SimpleNamespace(loss=F.cross_entropy(logits(ids).flatten(0, 1), ids.flatten()))
    given = {"model": mixed, "train_dataloader": [{"ids": IDS}]}
    callback.on_train_begin(args, state, None, **given)
    callback.on_step_begin(args, state, None, **given)
    plan = callback.snip.plan
    assert plan is not None and plan.iteration == callback.snip.iteration == 61
    callback.on_step_end(args, state, None)
    callback.on_step_begin(args, SimpleNamespace(global_step=61), None, **given)
    assert callback.snip.plan is plan
