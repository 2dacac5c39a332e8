"""A memory plan: what each block keeps for its backward, and its JSON file.

    {"version": 1, "blocks": ["full", "selective", "keep", "keep"], "memory_gib": 80.0,
     "made_for": {"num_layers": 4, "hidden_size": 4096, ..., "data_parallel_size": 8},
     "ranks": [{"stage": 0, "peak": 70123456789, "seconds": 0.41, "host": 0}, ...],
     "rates": "nominal", "precision": "fp8", "status": "optimal", "gap": 0.0, "hash": "0123456789abcdef"}

    keep       keeps all activations
    selective  recomputes the attention and the MLP, as --recompute-modules core_attn mlp does
    full       keeps only its input, and runs again in backward
    offload    keeps all activations on the host

gathered, on_host: left out of files where they are empty.  gathered: the blocks, by index, whose parameters are not
resharded after forward, so that backward need not gather them again; for optim_grads_params.  on_host: the units whose
AdamW state lies on the host, as --optimizer-cpu-offload has it: layers.0, embed_tokens, norm, lm_head.
ranks: of each pipeline rank, the predicted bytes at the peak and on the host (older files have no host), and the
modelled seconds of an iteration without the pipeline's bubble.
precision: which one the predictions are for, see `precision_of`; "" if nothing is predicted.
made_for: the options that decide what activations take.  A run with others refuses the plan, because its memory would
be another.
The hash is the first 16 hex digits of the SHA-256 of the canonical JSON of blocks, made_for, gathered and on_host.
Ranks must agree on these.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from megatron_snip.config import Config
from megatron_snip.errors import UserError
from megatron_snip.files.io import shown
from megatron_snip.files.json import (
    Count,
    Finite,
    JsonFileError,
    PlanHash,
    Text,
    checked,
    read_json,
    write_atomic,
)
from megatron_snip.snip.plan.plan_file import Plan
from megatron_snip.train.schedule import final_switch

VERSION = 1
#: Name of a run's plan in its folder.
FILE = "memory_plan.json"
_WAY_OUT = "use a plan that a run wrote, or make a new one (--memory-plan auto)"
_OF_MODEL = ("model_name", "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "seq_length")
_OF_LAYOUT = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "num_layers_per_virtual_pipeline_stage", "num_virtual_stages_per_pipeline_rank",
    "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "sequence_parallel", "data_parallel_sharding_strategy", "num_distributed_optimizer_instances",
)  # fmt: skip


class RankCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prediction for pipeline rank ``stage``: bytes at the peak and on the host, modelled seconds of an iteration."""

    stage: Count
    peak: Count
    seconds: Finite
    host: Count = 0


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A memory plan's file; see the module's docstring."""

    version: Count
    blocks: Annotated[list[Literal["keep", "selective", "full", "offload"]], Meta(min_length=1)]
    memory_gib: Finite | None
    made_for: dict[Text, Any]
    ranks: list[RankCost]
    rates: Text
    status: Text
    gap: Finite
    hash: PlanHash
    gathered: list[Count] = []
    on_host: list[Text] = []
    precision: Text = ""


@dataclass(frozen=True)
class MemoryPlan:
    """The choice of each block, by global index.  See the module's docstring for the fields."""

    blocks: tuple[str, ...]
    made_for: Mapping[str, Any]
    memory_gib: float | None = None
    ranks: tuple[RankCost, ...] = ()
    rates: str = "nominal"
    status: str = "none"
    gap: float = 0.0
    gathered: tuple[int, ...] = ()
    on_host: tuple[str, ...] = ()
    precision: str = ""

    @classmethod
    def by_hand(
        cls,
        blocks: Sequence[str],
        config: Config,
        world_size: int,
        gathered: Sequence[int] = (),
        on_host: Sequence[str] = (),
    ) -> MemoryPlan:
        """A plan of these choices for a run with these options."""
        return cls(tuple(blocks), made_for(config, world_size), gathered=tuple(gathered), on_host=tuple(on_host))

    @property
    def hash(self) -> str:
        """16 hex digits over what decides a run's memory."""
        content = {"blocks": list(self.blocks), "made_for": dict(self.made_for), **self._optional()}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def told(self) -> str:
        """The choices in words: of 32 blocks, 20 keep, 12 full."""
        counts = Counter(self.blocks)
        more = f", {len(self.gathered)} not resharded after forward" * bool(self.gathered)
        more += f"; states of {len(self.on_host)} units on the host" * bool(self.on_host)
        return (
            f"of {len(self.blocks)} blocks, {', '.join(f'{n} {choice}' for choice, n in sorted(counts.items()))}{more}"
        )

    def _optional(self) -> dict[str, Any]:
        both = {"gathered": list(self.gathered), "on_host": list(self.on_host)}
        return {name: value for name, value in both.items() if value}

    def to_dict(self) -> dict[str, Any]:
        """The JSON object in the module's docstring."""
        return {
            "version": VERSION,
            "blocks": list(self.blocks),
            "memory_gib": self.memory_gib,
            "made_for": dict(self.made_for),
            "ranks": msgspec.to_builtins(self.ranks),
            "rates": self.rates,
            "precision": self.precision,
            "status": self.status,
            "gap": self.gap,
            "hash": self.hash,
            **self._optional(),
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any], source: str = "memory plan") -> MemoryPlan:
        """The plan from ``to_dict``.  Raises UserError with ``source``, the field and the way out."""
        try:
            if "linears" in values:
                raise JsonFileError("this is a plan of precisions, not a memory plan")
            found = checked(values, _File, version=VERSION)
            plan = cls(
                tuple(found.blocks), found.made_for, found.memory_gib, tuple(found.ranks), found.rates, found.status,
                found.gap, tuple(found.gathered), tuple(found.on_host), found.precision,
            )  # fmt: skip
            if plan.hash != found.hash:
                raise JsonFileError(
                    f"field hash is {found.hash!r}, but its choices and made_for give {plan.hash!r}: "
                    "the file was changed by hand or is damaged"
                )
        except JsonFileError as error:
            raise UserError(f"{source}: {error}; {_WAY_OUT}") from None
        return plan

    def save(self, path: str | Path) -> None:
        """Write the JSON file, atomically; creates missing folders."""
        write_atomic(path, json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> MemoryPlan:
        """Read a file from ``save``.  Raises UserError with the file, the field and the way out."""
        return cls.from_dict(read_json(path, "memory plan", _WAY_OUT), str(path))

    def check(self, config: Config, world_size: int, source: str) -> None:
        """Raise UserError with ``source`` and the option unless the plan is for this model and layout."""
        wanted = made_for(config, world_size)
        for name in dict.fromkeys([*wanted, *self.made_for]):
            here, there = wanted.get(name), self.made_for.get(name)
            if here != there:
                option = "data parallel" if name == "data_parallel_size" else f"--{name.replace('_', '-')}"
                raise UserError(
                    f"{source}: this memory plan is for {option} {shown(there)}, and the run has {here}; "
                    "give a plan of this model and layout, or --memory-plan auto"
                )
        if len(self.blocks) != config.model.num_layers:
            raise UserError(
                f"{source}: field blocks has {len(self.blocks)} choices for {config.model.num_layers} blocks; "
                f"{_WAY_OUT}"
            )
        if config.training.compile and "selective" in self.blocks:
            raise UserError(
                f"{source}: block {self.blocks.index('selective')} is selective, which does not go with --compile; "
                "drop --compile, or give another plan"
            )
        self._check_units(config, source)

    def _check_units(self, config: Config, source: str) -> None:
        """The same for gathered and on_host."""
        strategy, t = config.parallel.data_parallel_sharding_strategy, config.training
        if self.gathered and strategy != "optim_grads_params":
            raise UserError(
                f"{source}: field gathered is for --data-parallel-sharding-strategy optim_grads_params, and the run "
                f"has {strategy}, which gathers weights once an iteration; drop the field, or give another plan"
            )
        units = host_units(config)
        for name, given, known in (
            ("gathered", self.gathered, range(len(self.blocks))), ("on_host", self.on_host, units),
        ):  # fmt: skip
            if unknown := [one for one in given if one not in known]:
                raise UserError(f"{source}: field {name} has {shown(unknown[0])}, which the model lacks; {_WAY_OUT}")
        if self.on_host and (t.optimizer_cpu_offload or t.optimizer_impl != "torch"):
            option = "--optimizer-cpu-offload" if t.optimizer_cpu_offload else f"--optimizer-impl {t.optimizer_impl}"
            raise UserError(
                f"{source}: the plan says which states lie on the host, which does not go with {option}; drop one"
            )


def made_for(config: Config, world_size: int) -> dict[str, Any]:
    """The options that decide what activations take, and the number of data-parallel ranks."""
    m = config.model
    return {
        **{name: getattr(m, name) for name in _OF_MODEL},
        "num_query_groups": m.query_groups,
        "kv_channels": m.head_dim,
        **{name: getattr(config.parallel, name) for name in _OF_LAYOUT},
        "micro_batch_size": config.training.micro_batch_size,
        "data_parallel_size": config.data_parallel_size(world_size),
    }


def precision_of(config: Config) -> str:
    """What decides the formats of a run's linears: its precision, the hash of its plan or what plans choose from, and a
    late switch.
    """
    p, snip, final = config.precision, config.snip, final_switch(config.with_iterations())
    found = p.precision
    if found == "plan":
        found = f"plan {Plan.load(str(p.precision_plan)).hash}"
    elif found == "snip":
        found = f"snip, {snip.snip_warmup_precision} and then {snip.snip_options}"
    return f"{found}, at last {final}" if final else found


def host_units(config: Config) -> tuple[str, ...]:
    """The units whose AdamW state may lie on the host, in order of use.

    A tied embedding with a copy on another stage is none: both copies must get the same bits.
    """
    m, p = config.model, config.parallel
    head = ("lm_head",) if m.untie_embeddings_and_output_weights else ()
    ends = bool(head) or p.pipeline_model_parallel_size == 1
    return (*(("embed_tokens",) * ends), *(f"layers.{i}" for i in range(m.num_layers)), "norm", *head)


def read_memory_plan(config: Config, world_size: int) -> MemoryPlan | None:
    """The plan of --memory-plan FILE; None without a file.  Raises UserError if it is not for this run."""
    path = config.training.memory_plan
    if path in ("none", "auto"):
        return None
    plan = MemoryPlan.load(path)
    plan.check(config, world_size, path)
    return plan
