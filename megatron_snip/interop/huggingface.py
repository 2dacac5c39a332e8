"""Weights and configurations of Hugging Face's counterparts of our models, which a `ModelSpec` names.

Our rotary channels are in Hugging Face's half-split order, so conversion only renames.
Source: transformers, models/llama and models/qwen3.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import msgspec
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from megatron_snip.config import ModelConfig
from megatron_snip.errors import UserError
from megatron_snip.files.io import open_file, read_file, shown
from megatron_snip.files.json import checked, in_file, read_json
from megatron_snip.model.rotary import rotate
from megatron_snip.model.spec import MODELS, ModelSpec, spec_of
from megatron_snip.snip.measure.block_probe import Attend

#: Ours -> theirs, for fields of every config.json.
_SAME = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads", "vocab_size": "vocab_size",
}  # fmt: skip
#: Ours -> theirs, for Llama 3's rotary scaling.
_LLAMA3 = {
    "rope_scaling_factor": "factor", "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_max_position_embeddings": "original_max_position_embeddings",
}  # fmt: skip
#: Limits in bytes for a config.json, and for all safetensors headers of a folder; the largest models have 0.2 MB.
_MOST_CONFIG, _MOST_HEADERS = 1 << 20, 1 << 24
#: Dtypes of stored weights.
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
#: Kinds of model whose attention in transformers equals `attention_of`; nothing is assumed about others.
_SAME_ATTENTION = ("llama", "qwen3")
#: A tied model has only the first.  If both are there, they are compared this many bytes at a time.
_EMBEDDING, _OUTPUT, _COMPARED = "model.embed_tokens.weight", "lm_head.weight", 1 << 26
#: A size; a positive number.
_Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e300)]
_T = TypeVar("_T")


class _Kind(msgspec.Struct):
    """The field of a config.json that identifies the kind of model."""

    architectures: list[str] | None = None


class _Rope(msgspec.Struct):
    """The rotary embedding in a config.json.  Fields of rope_type llama3 are optional."""

    rope_theta: _Positive | None = None
    rope_type: str | None = None
    type: str | None = None
    factor: _Positive | None = None
    low_freq_factor: _Positive | None = None
    high_freq_factor: _Positive | None = None
    original_max_position_embeddings: _Size | None = None


class _Fields(msgspec.Struct):
    """The fields of a config.json that we read."""

    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=9999)]
    hidden_size: _Size
    intermediate_size: _Size
    num_attention_heads: _Size
    vocab_size: _Size
    num_key_value_heads: _Size | None = None
    head_dim: _Size | None = None
    max_position_embeddings: _Size = 2048
    rms_norm_eps: _Positive = 1e-6
    rope_theta: _Positive | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    tie_word_embeddings: bool = False
    quantization_config: Any = None


def hf_config(m: ModelConfig, *, tied: bool) -> dict[str, Any]:
    """Keyword arguments for the transformers configuration of the same model."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": m.rotary_base}
    if m.use_rope_scaling:
        rope |= {"rope_type": "llama3", **{theirs: getattr(m, ours) for ours, theirs in _LLAMA3.items()}}
    return {
        "vocab_size": m.padded_vocab_size,
        "hidden_size": m.hidden_size,
        "intermediate_size": m.ffn_hidden_size,
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.num_attention_heads,
        "num_key_value_heads": m.query_groups,
        "head_dim": m.head_dim,
        "max_position_embeddings": m.max_position_embeddings or m.seq_length,
        "rms_norm_eps": m.norm_epsilon,
        "rope_parameters": rope,
        "tie_word_embeddings": tied,
        **spec_of(m).fixed,
    }


def is_hf_folder(folder: Path) -> bool:
    """Whether a folder holds a Hugging Face model: config.json with safetensors.

    Raises UserError for a model in another form, which is not a folder of checkpoints either.
    """
    config = folder / "config.json"
    if not config.is_file():
        return False
    if any(folder.glob("*.safetensors")):
        return True
    if b'"architectures"' in read_file(config, "configuration", "move it aside"):  # run folders have a config.json too
        raise UserError(
            f"{folder} holds the config.json of a model, but no .safetensors files; download them, or write the model "
            "with save_pretrained of transformers"
        )
    return False


def model_options(folder: Path) -> dict[str, Any]:
    """Our model options, by their flat names, from the config.json of a Hugging Face folder.

    The vocabulary is not padded.  Raises UserError for any model that this package does not train.
    """
    path = folder / "config.json"
    known = {spec.architecture: spec for spec in MODELS.values()}
    way_out = f"give the folder of a {' or '.join(known)}"
    found = read_json(path, "model's configuration", way_out, _MOST_CONFIG)
    given = _checked(path, found, _Kind).architectures
    spec = next((known[name] for name in given or () if name in known), None)
    if spec is None:
        raise UserError(f"{path}: architectures is {shown(given)}, but only {', '.join(known)} can be read; {way_out}")
    found = {**spec.defaults, **found}
    for key, wanted in spec.fixed.items():
        if found.get(key, wanted) != wanted:
            value = shown(found[key])
            raise UserError(f"{path}: {key} is {value}, but this package supports only {wanted!r}; {way_out}")
    fields = _checked(path, found, _Fields)
    if quantised := fields.quantization_config:
        kind = shown(quantised.get("quant_method") if isinstance(quantised, dict) else quantised).strip("'")
        raise UserError(f"{path}: the weights are quantised ({kind}); give the model's folder in BF16, FP16 or float32")
    if fields.tie_word_embeddings:
        _refuse_other_output(folder)
    options: dict[str, Any] = {"model_name": spec.name}
    options |= {ours: getattr(fields, theirs) for ours, theirs in _SAME.items()}
    options["num_query_groups"] = fields.num_key_value_heads or fields.num_attention_heads
    options["kv_channels"] = fields.head_dim or fields.hidden_size // fields.num_attention_heads
    options["max_position_embeddings"] = fields.max_position_embeddings
    options["norm_epsilon"] = fields.rms_norm_eps
    options["untie_embeddings_and_output_weights"] = not fields.tie_word_embeddings
    options["make_vocab_size_divisible_by"] = math.gcd(options["vocab_size"], 128)
    return options | _rope_options(path, fields)


def _checked(path: Path, found: dict[str, Any], schema: type[_T]) -> _T:
    with in_file(path, "correct the file"):
        return checked(found, schema)


def _rope_options(path: Path, fields: _Fields) -> dict[str, Any]:
    """Options of the rotary embedding.  Newer files have them in one table, older ones in two places."""
    rope = fields.rope_parameters or fields.rope_scaling or _Rope()
    base = float(rope.rope_theta or fields.rope_theta or 10000.0)
    kind = rope.rope_type or rope.type or "default"
    if kind == "default":
        return {"rotary_base": base}
    if kind != "llama3":
        raise UserError(
            f"{path}: rope_type is {shown(kind)}, but only default and llama3 are supported; give another model"
        )
    scaling = {ours: getattr(rope, theirs) for ours, theirs in _LLAMA3.items()}
    if missing := [theirs for ours, theirs in _LLAMA3.items() if scaling[ours] is None]:
        raise UserError(f"{path}: {missing[0]} of rope_type llama3 is missing; correct the file")
    return {"rotary_base": base, "use_rope_scaling": True, **scaling}


def check_model(folder: Path, m: ModelConfig) -> None:
    """Raise UserError unless a Hugging Face folder fits this model, except in max_position_embeddings."""
    theirs = ModelConfig(**model_options(folder))
    same = (
        "model_name", *(name for name in _SAME if name != "vocab_size"), "query_groups", "head_dim",
        "padded_vocab_size", "norm_epsilon", "untie_embeddings_and_output_weights", "rotary_base", "use_rope_scaling",
        *(_LLAMA3 if m.use_rope_scaling else ()),
    )  # fmt: skip
    options = {"query_groups": "num_query_groups", "head_dim": "kv_channels", "padded_vocab_size": "vocab_size"}
    for name in same:
        old, new = getattr(theirs, name), getattr(m, name)
        if old != new:
            option = options.get(name, name).replace("_", "-")
            own = f"give --vocab-size {old} --make-vocab-size-divisible-by {theirs.make_vocab_size_divisible_by}"
            way_out = own if name == "padded_vocab_size" else "give its own"
            raise UserError(f"--{option} comes to {new}, but the model in {folder} has {old}; {way_out}")


def check_weights(folder: Path, weights: Mapping[str, Tensor], spec: ModelSpec) -> list[str]:
    """Raise UserError unless a Hugging Face folder has every weight, by our name, once, in this shape, in a float
    dtype.

    Returns the names of other tensors, except those that this kind of model does not need.
    """
    saved = _tensors(folder)
    for name, tensor in weights.items():
        theirs = spec.hf_name(name)
        size = getattr(saved.get(theirs), "size", None)
        if size is None:
            raise UserError(f"{folder}: its .safetensors have no {theirs}; {_way_to(theirs, saved)}")
        if tuple(size) != tuple(tensor.shape):
            raise UserError(
                f"{folder}: {theirs} has shape {list(size)}, but the model's is {list(tensor.shape)}; match the model "
                "options to its config.json"
            )
        if (dtype := saved[theirs].properties.dtype) not in _DTYPES:
            raise UserError(
                f"{folder}: {theirs} is stored in {str(dtype).removeprefix('torch.')}; give the model's folder in "
                "BF16, FP16 or float32"
            )
    known = {*map(spec.hf_name, weights), _OUTPUT}  # a tied model may have a copy of it
    return sorted(name for name in saved if name not in known and not name.endswith("rotary_emb.inv_freq"))


def _way_to(missing: str, saved: Mapping[str, Any]) -> str:
    """What to do about a missing tensor."""
    if (bare := missing.removeprefix("model.")) != missing and bare in saved:
        return f"they have {bare}, as of a model without its output layer; save the whole model with transformers"
    more = ", or set tie_word_embeddings to true in its config.json if the output layer is the embedding"
    return "download the missing files" + (more if missing == _OUTPUT else "")


def load_hf(folder: Path, weights: Mapping[str, Tensor], spec: ModelSpec) -> None:
    """Read weights, by our names, sharded or whole, in place.  Every rank must call it, and reads only its own shard.

    Raises UserError, before it reads anything, for a missing tensor or another shape or dtype; on every rank for a
    tensor that is not finite.
    """
    check_weights(folder, weights, spec)
    theirs = {spec.hf_name(name): tensor for name, tensor in weights.items()}
    try:
        dcp_load(theirs, storage_reader=_reader(folder))
    except CheckpointException as error:  # a BaseException, the same on every rank
        rank, (first, _) = min(error.failures.items())
        if isinstance(first, UserError):
            raise first from error
        raise UserError(f"{folder}: rank {rank} could not read it ({first}); check its files") from error


def _tensors(folder: Path) -> dict[str, Any]:
    """torch's metadata of every tensor.  Raises UserError for a duplicate tensor or a shard of one."""
    try:
        _file_of_each(folder)
        found = dict(_reader(folder).read_metadata().state_dict_metadata)
    except UserError:
        raise
    except Exception as error:  # safetensors has its own error class for damaged files
        raise UserError(f"{folder}: its .safetensors cannot be read ({error}); copy them again") from error
    for name, tensor in found.items():
        if len(tensor.chunks) != 1 or any(tensor.chunks[0].offsets):
            raise UserError(
                f"{folder}: {name} is a shard of a tensor, as saved by one rank of a larger run; write whole tensors "
                "with save_pretrained of transformers"
            )
    return found


def _file_of_each(folder: Path) -> dict[str, Path]:
    """The file of each tensor.  Raises UserError for a duplicate, since torch would pick either."""
    from safetensors import safe_open

    file_of: dict[str, Path] = {}
    paths = sorted(folder.glob("*.safetensors"))
    _check_headers(folder, paths)
    for path in paths:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                if name in file_of:
                    raise UserError(
                        f"{folder}: {name} is in {file_of[name].name} and in {path.name}; "
                        "keep only the model's own files"
                    )
                file_of[name] = path
    return file_of


def _check_headers(folder: Path, paths: Sequence[Path]) -> None:
    """Raise UserError for a file that would block safetensors, and for headers that take long to read."""
    total = 0
    for path in paths:
        with open_file(path, "weights", "copy them again") as file:
            start = file.read(8)
        total += struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if total > _MOST_HEADERS:
            raise UserError(
                f"{folder}: the headers of its .safetensors say that they have more than {_MOST_HEADERS >> 20} MiB, "
                f"{path.name}'s too; copy them again"
            )


def _refuse_other_output(folder: Path) -> None:
    """Raise UserError if a tied model's files have an output layer that differs from its embedding.

    transformers 5 would not tie them.
    """
    if not {_EMBEDDING, _OUTPUT} <= _tensors(folder).keys():
        return
    from safetensors import safe_open

    file_of = _file_of_each(folder)
    with safe_open(file_of[_EMBEDDING], "pt") as one, safe_open(file_of[_OUTPUT], "pt") as other:
        embedding, output = one.get_slice(_EMBEDDING), other.get_slice(_OUTPUT)
        shape = embedding.get_shape()
        same = shape == output.get_shape() and len(shape) == 2
        rows = max(1, _COMPARED // (4 * shape[-1])) if same else 1
        same = same and all(
            torch.equal(embedding[row : row + rows].float(), output[row : row + rows].float())
            for row in range(0, shape[0], rows)
        )
    if not same:
        raise UserError(
            f"{folder}: tie_word_embeddings is true in config.json, but {_OUTPUT} differs from {_EMBEDDING}; set "
            "tie_word_embeddings to false there"
        )


def _reader(folder: Path) -> Any:
    try:
        import safetensors  # noqa: F401  # torch's reader needs it; its own error is less clear
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    except ImportError as error:
        raise UserError(f"{folder}: reading it needs {error.name}; pip install {error.name}") from None

    class Reader(HuggingFaceStorageReader):
        """torch's reader, which also refuses tensors that are not finite.  An error of one rank is raised on all."""

        def _process_read_request(self, f: Any, req: Any, planner: Any) -> None:
            super()._process_read_request(f, req, planner)
            read = planner.resolve_tensor(req).detach()
            # aminmax makes no copy, however large the tensor; both ends show NaN
            if read.numel() and not all(end.isfinite() for end in read.aminmax()):
                raise UserError(f"{folder}: {req.storage_index.fqn} is not finite; give another model")

    return Reader(str(folder))


def attention_of(model: nn.Module, length: Callable[[int], int]) -> dict[int, Attend] | None:
    """Each block's attention as a function of q, k and v, for transformers classes that we know; else None.

    None also if the attention has biases, dropout or a sliding window.

    length: tokens per sequence of the microbatch that starts at a row.  Causal, no padding, positions from 0.
    """
    config = getattr(model, "config", None)
    decoder = getattr(model, "model", None)
    if getattr(config, "model_type", None) not in _SAME_ATTENTION or not hasattr(decoder, "rotary_emb"):  # peft
        return None
    assert config is not None and decoder is not None
    if config.attention_bias or config.attention_dropout or getattr(config, "use_sliding_window", False):
        return None
    rotary = cast(Any, decoder).rotary_emb
    grouped = config.num_key_value_heads != config.num_attention_heads

    def attend(attention: Any, q: Tensor, k: Tensor, v: Tensor, row0: int) -> Tensor:
        shape = (-1, length(row0))
        q, k, v = (x.unflatten(0, shape).unflatten(-1, (-1, config.head_dim)).transpose(1, 2) for x in (q, k, v))
        if hasattr(attention, "q_norm"):
            q, k = attention.q_norm(q), attention.k_norm(k)
        cos, sin = rotary(q, torch.arange(shape[1], device=q.device)[None])
        y = F.scaled_dot_product_attention(
            rotate(q, cos[0], sin[0]), rotate(k, cos[0], sin[0]), v, is_causal=True, enable_gqa=grouped
        )
        return y.transpose(1, 2).flatten(2).flatten(0, 1)

    return {i: partial(attend, block.self_attn) for i, block in enumerate(cast(Any, decoder).layers)}
