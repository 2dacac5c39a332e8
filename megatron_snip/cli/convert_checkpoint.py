r"""Convert a Hugging Face Llama or Qwen3 to a checkpoint of pretrain_llama.py, and back.

    megatron-snip convert import --hf meta-llama/ --save checkpoints/llama
    megatron-snip convert export --load runs/my/checkpoints --hf exported/ [--ckpt-step 1000]

`import` writes a checkpoint with only the weights, `model.toml` with the model's options for --config, and the
tokenizer.  Start a new run from it with `--load DIR --finetune`, at any layout.  (--load also takes a Hugging Face
folder directly.) `export` writes safetensors, config.json, the tokenizer, the current plan and a model card, for
AutoModelForCausalLM.from_pretrained.  Import holds one tensor in memory at a time, export one file.
"""

from __future__ import annotations

import math
import secrets
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from tqdm import tqdm

from megatron_snip import __version__, runtime
from megatron_snip.checkpoint.manifest import Manifest, check, naming
from megatron_snip.checkpoint.saver import Saver
from megatron_snip.checkpoint.storage import load_tensors
from megatron_snip.cli import parsers
from megatron_snip.config import CheckpointConfig, Config
from megatron_snip.errors import UserError
from megatron_snip.files.io import check_output, toml_value
from megatron_snip.files.json import write_atomic, write_json
from megatron_snip.interop.huggingface import (
    check_weights,
    hf_config,
    is_hf_folder,
    load_hf,
    model_options,
)
from megatron_snip.interop.sentencepiece_json import tokenizer_files
from megatron_snip.interop.tokenizer_files import PLAN, TOKENIZER, copy_tokenizer, read_files, write_files
from megatron_snip.mesh import Mesh, build_mesh
from megatron_snip.model.build import Build
from megatron_snip.model.llama import LlamaStage
from megatron_snip.model.spec import ModelSpec, spec_of
from megatron_snip.parallel.tensor import Region
from megatron_snip.quant.adamw.expansion import LOW
from megatron_snip.train.run.run_folder import find_checkpoint, saved_options
from megatron_snip.train.run.state_file import new_state, read_state

INDEX = "model.safetensors.index.json"
#: Prefix of a weight's name in our checkpoints.
OURS = "model."
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Largest file of an export in bytes, which export holds in memory.
MOST_OF_A_FILE = 1 << 30


@dataclass(frozen=True)
class Entry:
    """A tensor of an export: our name and theirs, shape, bytes on disk, and index of its file."""

    ours: str
    theirs: str
    shape: tuple[int, ...]
    size: int
    file: int


class _Lazy(DefaultSavePlanner):
    """Reads each tensor when it is written, so that one is in memory at a time."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._read(index.fqn)


def plan_entries(shapes: Mapping[str, Sequence[int]], spec: ModelSpec, itemsize: int, most: int) -> list[Entry]:
    """Distribute tensors over files of at most ``most`` bytes, in order.  A larger tensor gets its own file."""
    entries, file, used = [], 0, 0
    for name, shape in shapes.items():
        size = math.prod(shape) * itemsize
        if used and used + size > most:
            file, used = file + 1, 0
        entries.append(Entry(name, spec.hf_name(name.removeprefix(OURS)), tuple(shape), size, file))
        used += size
    return entries


def told(rows: Sequence[tuple[str, Sequence[int], str]], total: int) -> str:
    """A table of names, shapes and files, with the total size."""
    lines = [f"{name:<48} {'x'.join(map(str, shape)):>14}  {file}" for name, shape, file in rows]
    return "\n".join([*lines, f"{len(rows)} tensors, {total / 1e9:.2f} GB"])


def weights_of(config: Config, mesh: Mesh) -> dict[str, Tensor]:
    """Every weight of the whole model by our name, without memory.

    Builds one block and repeats its names, because a stranger's config.json may ask for any number of blocks.
    """
    m = config.model
    build = Build(m, mesh, Region(mesh.tp, False), 0, torch.float32, torch.device("cpu"))
    tied = not m.untie_embeddings_and_output_weights
    found = dict(LlamaStage(build, range(1), first=True, last=True, tied=tied).named_parameters())
    of_block = [name for name in found if name.startswith("layers.0.")]
    out: dict[str, Tensor] = {}
    for name, weight in found.items():
        if name == of_block[0]:
            for i in range(m.num_layers):
                out |= {f"layers.{i}.{one.removeprefix('layers.0.')}": found[one] for one in of_block}
        elif name not in of_block:
            out[name] = weight
    return out


def import_hf(hf: Path, save: Path, *, dry_run: bool) -> None:
    """Write a checkpoint of iteration 0 with the weights of a Hugging Face folder, in float32."""
    if not is_hf_folder(hf):
        raise UserError(
            f"--hf {hf} has no model (config.json and .safetensors files); give the folder of a Hugging Face model"
        )
    options = model_options(hf)
    beside = read_files(hf)
    if beside.keys() & set(TOKENIZER):  # written below
        options |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(save.resolve())}
    config = Config().replace(**options)
    spec = spec_of(config.model)
    runtime.start("gloo", 10.0, device="cpu")
    mesh = build_mesh("cpu", pp=1, dp=1, tp=1)
    weights = weights_of(config, mesh)
    behind = check_weights(hf, weights, spec)
    shapes = {f"{OURS}{name}": tuple(weight.shape) for name, weight in weights.items()}
    rows = [(spec.hf_name(name.removeprefix(OURS)), shape, name) for name, shape in shapes.items()]
    total = 4 * sum(map(math.prod, shapes.values()))
    if dry_run:
        print(told(rows, total))
        runtime.stop()
        return
    if save.exists() and any(save.iterdir()):
        raise UserError(f"--save {save} is not empty; give a new folder")
    saver = Saver(save, CheckpointConfig(), mesh, secrets.token_hex(8), 0)
    with tqdm(total=2 * total, unit="B", unit_scale=True, desc="import") as bar:  # every tensor is read twice

        def read(name: str) -> Tensor:
            tensor = torch.empty(shapes[name])
            load_hf(hf, {name.removeprefix(OURS): tensor}, spec)
            bar.update(tensor.nbytes)
            return tensor

        state = new_state(saver.run_id, config)
        places = {name: torch.zeros(()).expand(shape) for name, shape in shapes.items()}  # no memory
        try:
            saver.save(0, places, state, finite=True, last=True, planner=_Lazy(read))
        except CheckpointException as error:
            saver.close()
            shutil.rmtree(save)  # it was empty
            first, _ = error.failures[0]
            raise first if isinstance(first, UserError) else error from error
    saver.close()
    runtime.stop()
    write_files(beside, save)
    if behind:
        print(
            f"{hf}: {len(behind)} tensors do not belong to the model that its config.json describes, and were "
            f"left out, such as {behind[0]}", file=sys.stderr,
        )  # fmt: skip
    write_atomic(save / "model.toml", "".join(f"{key} = {toml_value(value)}\n" for key, value in options.items()))
    print(
        f"{save}: {len(rows)} tensors; next: pretrain_llama.py --config {save}/model.toml --load {save} --finetune ..."
    )


def export_hf(load: str, step: int | None, hf: Path, *, dtype: str | None, dry_run: bool) -> None:
    """Write the weights of a checkpoint as a Hugging Face folder."""
    folder, iteration = find_checkpoint(load, step)
    if iteration is None:
        raise UserError(f"--load {load}: no checkpoint is there; give a folder of checkpoints, or an iter_ folder")
    state = read_state(folder, iteration)
    config = Config().replace(**saved_options(state, ("model", "training", "data", "precision", "parallel")))
    with naming(folder, iteration):
        manifest = check(folder, iteration)
    weights = [name for name in manifest.tensors if name.startswith(OURS) and not name.endswith(LOW)]
    shapes = {name: manifest.tensors[name].shape for name in weights}
    dtype = dtype or ("bfloat16" if config.training.bf16 else "float32")
    entries = plan_entries(shapes, spec_of(config.model), DTYPES[dtype].itemsize, MOST_OF_A_FILE)
    count, total = entries[-1].file + 1, sum(entry.size for entry in entries)
    names = (
        ["model.safetensors"] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    )
    if dry_run:
        print(told([(entry.theirs, entry.shape, names[entry.file]) for entry in entries], total))
        return
    if not hf.name:
        raise UserError(f"--hf {hf} does not end in a name; give a new folder")
    if hf.exists() and any(hf.iterdir()):
        raise UserError(f"--hf {hf} is not empty; give a new folder")
    aside = hf.with_name(f"{hf.name}.partial")
    check_output("--hf", aside / INDEX)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    with tqdm(total=total, unit="B", unit_scale=True, desc="export") as bar:
        for i, name in enumerate(names):
            write_file(aside / name, [entry for entry in entries if entry.file == i], folder, manifest, dtype, bar)
    if count > 1:
        places = {entry.theirs: names[entry.file] for entry in entries}
        write_json(aside / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
    write_beside(aside, config, state, dtype)
    if hf.exists():
        hf.rmdir()
    aside.rename(hf)
    print(f"{hf}: {len(entries)} tensors of iteration {iteration} in {dtype}, {total / 1e9:.2f} GB")


def write_file(path: Path, entries: Sequence[Entry], folder: Path, manifest: Manifest, dtype: str, bar: Any) -> None:
    """Write one file of an export."""
    try:
        from safetensors.torch import save_file
    except ImportError:
        raise UserError("export needs safetensors; pip install safetensors") from None
    tensors = {}
    for entry in entries:
        tensor = torch.empty(entry.shape)
        with naming(folder, manifest.iteration):
            load_tensors(folder, manifest.iteration, {entry.ours: tensor}, manifest)
        tensors[entry.theirs] = tensor.to(DTYPES[dtype])
        bar.update(entry.size)
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes files that only their owner can read


def write_beside(hf: Path, config: Config, state: Mapping[str, Any], dtype: str) -> None:
    """Write config.json, tokenizer, plan and model card."""
    tied = not config.model.untie_embeddings_and_output_weights
    settings = hf_config(config.model, tied=tied)
    rope = settings["rope_parameters"]
    older = {"rope_theta": rope["rope_theta"]}  # for transformers before 5, and for other programs
    if rope["rope_type"] != "default":
        older["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    spec = spec_of(config.model)
    about = {"architectures": [spec.architecture], "model_type": spec.name, "torch_dtype": dtype}
    write_json(hf / "config.json", {**about, **settings, **older, **write_tokenizer(config, hf)})
    plan = state["snip"]["plan"] if state["snip"] else None
    if plan is not None:
        write_json(hf / PLAN, plan)
    write_atomic(hf / "README.md", card(config, state, plan))


def write_tokenizer(config: Config, hf: Path) -> dict[str, int | None]:
    """Write the run's tokenizer in a form that transformers reads as the same tokens.  Returns BOS and EOS.

    They are None if the tokenizer is missing; otherwise transformers would assume 1 and 2.
    """
    d, ends = config.data, dict[str, int | None](bos_token_id=None, eos_token_id=None)
    if d.tokenizer_model is None or d.tokenizer_type == "NullTokenizer":  # reads no file
        return ends
    source = Path(d.tokenizer_model)  # from the checkpoint, which may be a stranger's
    if not source.exists():
        print(f"the tokenizer {source} no longer exists; copy it to {hf.name} by hand", file=sys.stderr)
        return ends
    try:
        tokenizer = copy_tokenizer(d.tokenizer_type, source, hf)
    except UserError as error:
        print(f"wrote no tokenizer, and config.json has no EOS: {error}", file=sys.stderr)
        return ends
    print(f"copied the tokenizer from {source.resolve()}, as the checkpoint says")
    if source.is_file() and d.tokenizer_type != "HuggingFaceTokenizer":
        try:
            for name, value in tokenizer_files(hf / "tokenizer.model").items():
                write_json(hf / name, value)
        except UserError as error:
            print(f"{error}: transformers may read {hf.name} with other tokens than the model's", file=sys.stderr)
    return {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eod}


def card(config: Config, state: Mapping[str, Any], plan: Mapping[str, Any] | None) -> str:
    """A model card: the model, its training, and its precision."""
    m = config.model
    trained = {} if state["weights_alone"] else _training(config, state, plan)
    rows = {
        "blocks, width, SwiGLU": f"{m.num_layers}, {m.hidden_size}, {m.ffn_hidden_size}",
        "heads, key/value heads": f"{m.num_attention_heads}, {m.query_groups}",
        "vocabulary": f"{m.padded_vocab_size}",
        **trained,
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    head = "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n"
    how = "trained with" if trained else "converted by"
    return f"{head}# {spec_of(m).architecture} {how} megatron_snip {__version__}\n\n| | |\n|---|---|\n{table}\n"


def _training(config: Config, state: Mapping[str, Any], plan: Mapping[str, Any] | None) -> dict[str, str]:
    m, t, p = config.model, config.training, config.parallel
    precision = config.precision.precision
    if plan is not None:
        precision += f", {plan['achieved']:.0%} of the linears' FLOPs in FP4 at the end ({PLAN})"
    return {
        "tokens trained on": f"{state['consumed_samples'] * m.seq_length:,}",
        "iteration": f"{state['iteration']:,} of {t.train_iters:,}",
        "batch, sequence length": f"{t.global_batch_size}, {m.seq_length}",
        "learning rate": f"{t.lr:g} to {t.min_lr:g}, {t.lr_decay_style}",
        "compute": "BF16" if t.bf16 else "float32",
        "precision of the linears": precision,
        "layout": f"tp {p.tensor_model_parallel_size}, pp {p.pipeline_model_parallel_size}",
        "run": f"{state['run_id']}",
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Command line.  Raises UserError for bad input."""
    own = parsers.convert().parse_args(argv)
    if own.which == "import":
        import_hf(Path(own.hf), Path(own.save), dry_run=own.dry_run)
    else:
        export_hf(own.load, own.ckpt_step, Path(own.hf), dtype=own.dtype, dry_run=own.dry_run)
