"""What the tests of `megatron_snip.attach` run on every rank; importable, so that forked ranks find it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from megatron_snip.attach import Snip, attach, token_losses
from megatron_snip.errors import UserError
from megatron_snip.interop.huggingface import hf_config
from megatron_snip.model.spec import spec_of
from megatron_snip.snip.measure.statistics import Statistics
from tests.dist.helpers.harness import preload
from tests.dist.helpers.runs import make

preload(__name__)  # transformers takes two seconds to import
SMALL = {"num_layers": 2, "hidden_size": 128, "num_query_groups": 2, "precision": "snip", "snip_apply_lag": 0}


def tiny_llama(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """A Llama of two blocks over 300 words."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=300, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, **options,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def tokens_of(samples: int) -> torch.Tensor:
    """Sequences of 128 tokens [samples, 128]."""
    return torch.randint(300, (samples, 128), generator=torch.Generator().manual_seed(5))


def beside_the_trainer(options: dict[str, Any]) -> dict[str, Any]:
    """Statistics and plan of the trainer, and of a library's loop over transformers' model with its weights."""
    config, parts = make({**SMALL, **options, "snip_start": 1})
    batch = parts.train_loader.make(0)
    parts.train_loader.close()
    for stage in parts.stages.values():
        for block in stage.blocks().values():
            block.self_attn.in_float32 = False  # as transformers' model attends on any CPU
    m, spec = config.model, spec_of(config.model)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(m.model_name, **hf_config(m, tied=False)))
    theirs.load_state_dict({spec.hf_name(name): p.detach() for name, p in parts.optimizer.parameters.items()})
    if config.training.bf16:
        theirs = theirs.bfloat16()
    coordinator = parts.coordinator
    assert coordinator is not None
    seen = []
    run = coordinator.probe.run
    coordinator.probe.run = lambda *args, **more: seen.append(run(*args, **more)) or seen[-1]
    coordinator.before_step(1, parts.stepper.pass_runner(batch, 1), parts.optimizer.zero_grad)
    snip = attach(theirs, options="fp8,fp4")

    def loss() -> torch.Tensor:
        logits = theirs(input_ids=batch.tokens.flatten(0, 1)).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten())

    stats = snip.probe(loss)
    return {"trainer": (seen[0], coordinator.plan), "library": (stats, snip.solve(config.snip.snip_target))}


def _plan_of(model: nn.Module, attached: Snip, samples: torch.Tensor) -> dict[str, Any]:
    stats = attached.probe(lambda: model(input_ids=samples, labels=samples).loss)
    plan = attached.solve(0.5)
    attached.apply(plan)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(3):
        loss = model(input_ids=samples, labels=samples).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        attached.step()
        losses.append(float(loss.detach()))
    return {"stats": stats, "plan": plan, "losses": losses}


def over_processes(wrapped: str) -> dict[str, Any]:
    """Statistics and plan by data parallel processes, each with its share of four sequences."""
    model, samples = tiny_llama(), tokens_of(4)
    if dist.is_initialized():
        samples = samples.chunk(dist.get_world_size())[dist.get_rank()]
    if wrapped == "fsdp2":
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
        return _plan_of(model, attach(model, options="fp8,fp4"), samples)
    if wrapped == "ddp":
        both = nn.parallel.DistributedDataParallel(model)
        return _plan_of(both, attach(both, options="fp8,fp4"), samples)
    return _plan_of(model, attach(model, options="fp8,fp4"), samples)


def tried_over_processes(wrapped: str) -> dict[str, Any]:
    """What a trial measures, each process with its share of four sequences, and gradients after it.

    wrapped: "" for one process; then also what a trial says that fails on the last process.
    """
    model, samples = tiny_llama(), tokens_of(8)
    seen, other = samples.split(4)
    if dist.is_initialized():
        seen, other = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in (seen, other))
    if wrapped == "fsdp2":
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
    elif wrapped == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    snip = attach(model, options="fp8,fp4")
    snip.probe(lambda: model(input_ids=seen, labels=seen).loss)

    def losses() -> torch.Tensor:
        return token_losses(model(input_ids=other).logits, other)

    def failing() -> torch.Tensor:
        found = losses()  # whose forward waits for the others: DDP sends buffers
        if dist.get_rank() == dist.get_world_size() - 1:
            raise RuntimeError("no memory")
        return found

    plan = snip.solve(0.5, held_out=losses)
    model(input_ids=seen, labels=seen).loss.backward()
    grads = [p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad for p in model.parameters()]
    kept = snip.solve(0.5, held_out=failing) if wrapped == "ddp" else None
    return {"plan": plan, "norm": float(sum(g.square().sum() for g in grads)), "kept": kept}


def of_unequal_batches() -> Statistics:
    """Statistics of a mean over processes with one sequence and with three; of one process, over two such batches."""
    model, parts = tiny_llama(), tokens_of(4).split([1, 3])
    mine = [parts[dist.get_rank()]] if dist.is_initialized() and dist.get_world_size() > 1 else parts
    snip = attach(nn.parallel.DistributedDataParallel(model) if len(mine) == 1 else model, options="fp8,fp4")
    return snip.probe(*(lambda part=part: model(input_ids=part, labels=part).loss for part in mine))


def failing_solve() -> str:
    """What a solve that goes wrong on rank 0 says."""
    snip = attach(tiny_llama())
    if dist.get_rank() == 0:
        snip._solved = lambda config: [][0]
    try:
        snip.solve(0.5)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def after_a_validation(late: bool) -> dict[str, Any]:
    """Under FSDP2: gradients of a step with a probe before it, and without one, each after a forward alone.

    late: attach before the model is sharded, and tell what that says.
    """
    found: list[dict[str, torch.Tensor]] = []
    for probed in (False, True):
        model, samples = tiny_llama(), tokens_of(2)
        early = attach(model, options="fp8,fp4") if late else None
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
        if early is not None:
            try:
                early.probe(lambda model=model: model(input_ids=samples, labels=samples).loss)
            except UserError as error:
                return {"error": str(error)}
        snip = attach(model, options="fp8,fp4")
        with torch.no_grad():
            model(input_ids=samples)
        if probed:
            snip.probe(lambda model=model: model(input_ids=samples, labels=samples).loss)
        model(input_ids=samples, labels=samples).loss.backward()
        found.append({name: p.grad.full_tensor() for name, p in model.named_parameters()})
    return {"plain": found[0], "probed": found[1]}
