"""Identity of a run's data in checkpoints, and agreement between ranks when a file goes bad.

A rank that finds a bad file must not leave the others blocked in a collective.  At the start, before validation and
before a probe's later batches, ranks ask each other.  In training, the loader has the next batch before the current
update, and a rank with a bad one asks all to stop, with a flag in each iteration's all-reduce.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from typing import Any

from megatron_snip.config import Config
from megatron_snip.data.indexed import IndexedDatasetError
from megatron_snip.data.loader import Batch, Loader
from megatron_snip.data.sampling import Dataset
from megatron_snip.errors import UserError
from megatron_snip.files.io import one_line
from megatron_snip.mesh import Mesh

LOGGER = logging.getLogger("megatron_snip")
#: Keys of a dataset's identity, as error messages name them.
_DIFFERENCES = {
    "size": "the size of its .bin",
    "lengths": "the lengths of its sequences",
    "content": "the content of its .bin",
    "weight": "its weight in the blend",
}
_PARTS = {"train": "training", "valid": "validation"}
Identity = dict[str, list[dict[str, Any]]]


def identity(**datasets: Dataset | None) -> Identity:
    """Part of the data (``train``, ``valid``) -> its datasets: prefix, weight, fingerprint and sequences of each.

    Reads the index and about 1 MiB of each.
    """
    return {
        part: [
            {
                "prefix": one.files.prefix,
                "weight": one.weight,
                **one.files.fingerprint,
                "rounds": one.rounds,
                "sequences": list(one.sequences),
            }
            for one in dataset.sources
        ]
        for part, dataset in datasets.items()
        if dataset is not None
    }


def difference(now: Identity, then: Identity) -> str:
    """The first difference of the data from a checkpoint's; "" if they are the same, regardless of file names.

    Ignores parts that either of them lacks.
    """
    for part in now.keys() & then.keys():
        before, here = then[part], now[part]
        if len(before) != len(here):
            return f"{_PARTS[part]} data has {len(here)} datasets and had {len(before)}"
        for old, new in zip(before, here):
            odd = [what for key, what in _DIFFERENCES.items() if old[key] != new[key]]
            taken, took = new["sequences"], old["sequences"]
            if not odd and taken != took:
                odd = ["its sequences [{}, {}) are read instead of [{}, {})".format(*taken, *took)]
            if odd:
                moved = "" if old["prefix"] == new["prefix"] else f" (it was {old['prefix']})"
                return f"dataset {new['prefix']}{moved} has changed: {', '.join(odd)}"
    return ""


def reordered(now: Identity, then: Identity) -> str:
    """The first data whose order differs from the checkpoint's because the number of samples changed; "" for none."""
    for part in now.keys() & then.keys():
        for old, new in zip(then[part], now[part]):
            if old["rounds"] != new["rounds"]:
                epochs, before = ("+".join(map(str, each["rounds"])) for each in (new, old))
                return f"{_PARTS[part]} data {new['prefix']} is shuffled as {epochs} epochs instead of {before}"
    return ""


def agreed(make: Callable[[], Batch], mesh: Mesh) -> Batch:
    """The batch from ``make()``.  Raises IndexedDatasetError on every rank if a file is bad on any.  Collective."""
    batch, problem = None, ""
    try:
        batch = make()
    except (IndexedDatasetError, OSError) as error:
        problem = one_line(error)
    if first := mesh.first_problem(problem)[1]:
        raise IndexedDatasetError(first)
    assert batch is not None
    return batch


def settle_data(
    config: Config, state: dict[str, Any] | None, train: Loader, valid: Loader | None, mesh: Mesh, *, reads: bool
) -> Identity:
    """The data's identity for checkpoints, on rank 0.  Every rank must call it, before anything is written.

    ``state`` is that of the checkpoint to continue from.  ``reads``: whether this rank identifies the files (one per
    node does).  Raises UserError on all ranks if a dataset differs from the checkpoint's without --accept-changed-data,
    if nodes have different files, for recorded ids outside the vocabulary, and if the first batch cannot be read.
    """
    found: Identity = {}
    problem = ""
    try:
        if reads:
            found = identity(train=train.dataset, valid=valid.dataset if valid else None)
            _check_ids(config, train, valid)
        problem = _first_batches(config, state, train, valid)
    except (IndexedDatasetError, OSError) as error:
        problem = one_line(error)
    digest = hashlib.blake2b(json.dumps(found, sort_keys=True).encode(), digest_size=16).hexdigest() if found else ""
    if mesh.rank == 0 and not problem:
        problem = _refused(config, state, found)
    reports = mesh.gathered((problem, digest))
    for rank, (its_problem, its_digest) in enumerate(reports):
        if its_problem:
            raise UserError(its_problem)
        if its_digest and its_digest != reports[0][1]:
            raise UserError(
                f"the data of rank {rank}'s node differs from rank 0's under the same prefixes; copy the files again"
            )
    return found


def _first_batches(config: Config, state: dict[str, Any] | None, train: Loader, valid: Loader | None) -> str:
    done, consumed = (state["iteration"], state["consumed_samples"]) if state else (0, 0)
    problem = train.problem(consumed) if done < config.training.train_iters else ""
    return problem or (valid.problem(state["consumed_valid_samples"] if state else 0) if valid else "")


def _check_ids(config: Config, *loaders: Loader | None) -> None:
    for loader in filter(None, loaders):
        for source in loader.dataset.sources:
            source.files.check_recorded_ids(int(config.model.vocab_size or 0))


def _refused(config: Config, state: dict[str, Any] | None, found: Identity) -> str:
    """Why the run must not continue with this data; "" if it may."""
    changed = difference(found, state["data"]) if state else ""
    if changed and config.checkpoint.accept_changed_data:
        LOGGER.warning(f"this run continues with other data: {changed}")
        return ""
    if not changed and state and (moved := reordered(found, state["data"])):
        LOGGER.warning(
            f"samples come in a different order from here on, and some repeat early: {moved}. The order depends on the "
            "whole run's number of samples, as in Megatron-LM. To keep it, give the final --train-iters at the first "
            "start, and end earlier with --exit-interval"
        )
    way_out = f"give the data that the checkpoint in {config.checkpoint.load} was trained on, or --accept-changed-data"
    return f"{changed}; {way_out}" if changed else ""
