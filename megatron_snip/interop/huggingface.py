"""Weights and configuration of Hugging Face's classes of our models, which a `ModelSpec` names.

Our rotary channels stand in Hugging Face's half-split order, so conversion renames and nothing else.
Source: transformers, models/llama and models/qwen3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from megatron_snip.config import ModelConfig
from megatron_snip.errors import UserError
from megatron_snip.files import parse_json, read_file
from megatron_snip.model.rotary import rotate
from megatron_snip.model.spec import MODELS, ModelSpec, spec_of
from megatron_snip.snip.measure.block_probe import Attend

#: Ours -> theirs, for what every config.json has.
_SAME = {
    "num_layers": "num_hidden_layers", "hidden_size": "hidden_size", "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads", "vocab_size": "vocab_size",
}  # fmt: skip
#: Ours -> theirs, for Llama 3's scaling of the rotary embedding.
_LLAMA3 = {
    "rope_scaling_factor": "factor", "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_original_max_position_embeddings": "original_max_position_embeddings",
}  # fmt: skip
#: Numbers above 0 that a config.json may leave out, and those of them that it may set to null.
_MAY_MISS = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps")
_MAY_BE_NULL = ("num_key_value_heads", "head_dim")
#: Kinds of model whose attention in transformers is as `attention_of` computes it; of others nothing is assumed.
_SAME_ATTENTION = ("llama", "qwen3")
#: A tied model has the first alone; bytes of each that are compared at a time where both are there.
_EMBEDDING, _OUTPUT, _COMPARED = "model.embed_tokens.weight", "lm_head.weight", 1 << 26


def hf_config(m: ModelConfig, *, tied: bool) -> dict[str, Any]:
    """Keyword arguments of transformers' configuration for the same model."""
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

    UserError for a model in another form, which is no folder of checkpoints either.
    """
    config = folder / "config.json"
    if not config.is_file():
        return False
    if any(folder.glob("*.safetensors")):
        return True
    if b'"architectures"' in config.read_bytes():  # a run folder has a config.json, too
        raise UserError(
            f"{folder} holds the config.json of a model, but no .safetensors files; download them, or write the model "
            "with save_pretrained of transformers"
        )
    return False


def model_options(folder: Path) -> dict[str, Any]:
    """Our model options, by their flat names, of a Hugging Face folder's config.json.

    The vocabulary is not padded.  UserError for anything else than a model that this package trains.
    """
    path = folder / "config.json"
    known = {spec.architecture: spec for spec in MODELS.values()}
    way_out = f"give the folder of a {' or '.join(known)}"
    try:
        found = parse_json(read_file(path, "model's configuration", way_out, most=1 << 20))
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); {way_out}") from None
    given = (found.get("architectures") or []) if isinstance(found, dict) else None
    spec = next((known[name] for name in given or () if name in known), None)
    if spec is None:
        raise UserError(f"{path}: architectures is {given}, and only {', '.join(known)} can be read; {way_out}")
    found = {**spec.defaults, **found}
    for key, wanted in spec.fixed.items():
        if found.get(key, wanted) != wanted:
            raise UserError(f"{path}: {key} is {found[key]!r}, and this package supports only {wanted!r}; {way_out}")
    if missing := [theirs for theirs in _SAME.values() if type(found.get(theirs)) is not int or found[theirs] < 1]:
        raise UserError(f"{path}: {missing[0]} is {found.get(missing[0])!r}, not a number above 0; {way_out}")
    if quantised := found.get("quantization_config"):
        kind = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise UserError(f"{path}: the weights are quantised ({kind}); give the model's folder in BF16, FP16 or float32")
    _check_entries(path, found)
    if found.get("tie_word_embeddings"):
        _refuse_other_output(folder)
    options: dict[str, Any] = {"model_name": spec.name, **{ours: found[theirs] for ours, theirs in _SAME.items()}}
    options["num_query_groups"] = found.get("num_key_value_heads") or options["num_attention_heads"]
    options["kv_channels"] = found.get("head_dim") or options["hidden_size"] // options["num_attention_heads"]
    options["max_position_embeddings"] = found.get("max_position_embeddings", 2048)
    options["norm_epsilon"] = found.get("rms_norm_eps", 1e-6)
    options["untie_embeddings_and_output_weights"] = not found.get("tie_word_embeddings", False)
    options["make_vocab_size_divisible_by"] = math.gcd(options["vocab_size"], 128)
    return options | _rope_options(path, found)


def _check_entries(path: Path, found: Mapping[str, Any]) -> None:
    """UserError for an entry that may be left out, but not be this."""
    for key in _MAY_MISS:
        if key in found and not (found[key] is None and key in _MAY_BE_NULL):
            _check_number(path, key, found[key], (int, float) if key == "rms_norm_eps" else (int,))
    if type(tied := found.get("tie_word_embeddings", False)) is not bool:
        raise UserError(f"{path}: tie_word_embeddings is {tied!r}, not true or false; correct the file")


def _check_number(path: Path, key: str, value: object, kinds: tuple[type, ...] = (int, float)) -> None:
    if type(value) not in kinds or not cast(float, value) > 0:
        raise UserError(f"{path}: {key} is {value!r}, not a number above 0; correct the file")


def _rope_options(path: Path, found: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the rotary embedding, which newer files have in one table and older ones in two places."""
    name = "rope_parameters" if found.get("rope_parameters") else "rope_scaling"
    rope: dict[str, Any] = found.get(name) or {}
    if not isinstance(rope, dict):
        raise UserError(f"{path}: {name} is {rope!r}, not a table; correct the file")
    base = rope.get("rope_theta") or found.get("rope_theta") or 10000.0
    _check_number(path, "rope_theta", base)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return {"rotary_base": float(base)}
    if kind != "llama3":
        raise UserError(f"{path}: rope_type is {kind!r}, but only default and llama3 are supported; give another model")
    if missing := [theirs for theirs in _LLAMA3.values() if theirs not in rope]:
        raise UserError(f"{path}: {missing[0]} of rope_type llama3 is missing; correct the file")
    scaling = {ours: rope[theirs] for ours, theirs in _LLAMA3.items()}
    for theirs in _LLAMA3.values():
        _check_number(path, theirs, rope[theirs])
    return {"rotary_base": float(base), "use_rope_scaling": True, **scaling}


def check_model(folder: Path, m: ModelConfig) -> None:
    """UserError unless a Hugging Face folder holds the weights of this model; its positions may be others."""
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
            raise UserError(f"--{option} comes to {new}, the model in {folder} has {old}; {way_out}")


def check_weights(folder: Path, weights: Mapping[str, Tensor], spec: ModelSpec) -> list[str]:
    """UserError unless a Hugging Face folder has every weight once, each by our name, in this shape.

    Returns what else is there, but for what a model of this kind can do without.
    """
    saved = _tensors(folder)
    for name, tensor in weights.items():
        theirs = spec.hf_name(name)
        size = getattr(saved.get(theirs), "size", None)
        if size is None:
            raise UserError(f"{folder}: its .safetensors have no {theirs}; {_way_to(theirs, saved)}")
        if tuple(size) != tuple(tensor.shape):
            raise UserError(
                f"{folder}: {theirs} has shape {list(size)}, the model's is {list(tensor.shape)}; match the model "
                "options to its config.json"
            )
    known = {*map(spec.hf_name, weights), _OUTPUT}  # of a tied model a copy
    return sorted(name for name in saved if name not in known and not name.endswith("rotary_emb.inv_freq"))


def _way_to(missing: str, saved: Mapping[str, Any]) -> str:
    """What to do about a tensor that is not there."""
    if (bare := missing.removeprefix("model.")) != missing and bare in saved:
        return f"they have {bare}, as of a model without its output layer; save the whole model with transformers"
    more = ", or set tie_word_embeddings to true in its config.json if the output layer is the embedding"
    return "download the missing files" + (more if missing == _OUTPUT else "")


def load_hf(folder: Path, weights: Mapping[str, Tensor], spec: ModelSpec) -> None:
    """Read weights in place, each by our name, sharded or whole; every process calls it and reads its own part alone.

    UserError, before anything is read, for a missing tensor or one of another shape.
    """
    check_weights(folder, weights, spec)
    theirs = {spec.hf_name(name): tensor for name, tensor in weights.items()}
    try:
        dcp_load(theirs, storage_reader=_reader(folder))
    except CheckpointException as error:  # a BaseException, the same on every process
        rank, (first, _) = min(error.failures.items())
        raise UserError(f"{folder}: rank {rank} could not read it ({first}); check its files") from error


def _tensors(folder: Path) -> dict[str, Any]:
    """torch's description of every tensor; UserError if two files have the same."""
    try:
        found = dict(_reader(folder).read_metadata().state_dict_metadata)
        _file_of_each(folder)
        return found
    except UserError:
        raise
    except Exception as error:  # safetensors has an error of its own for a damaged file
        raise UserError(f"{folder}: its .safetensors cannot be read ({error}); copy them again") from error


def _file_of_each(folder: Path) -> dict[str, Path]:
    """File of each tensor; UserError if two have the same, as torch would take any."""
    from safetensors import safe_open

    file_of: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - no mapping
                if name in file_of:
                    raise UserError(
                        f"{folder}: {name} is in {file_of[name].name} and in {path.name}; "
                        "leave the model's own files there"
                    )
                file_of[name] = path
    return file_of


def _refuse_other_output(folder: Path) -> None:
    """UserError if the files of a tied model have an output layer that is not its embedding.

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
            f"{folder}: tie_word_embeddings is true in config.json, and {_OUTPUT} is not {_EMBEDDING}; set "
            "tie_word_embeddings to false there"
        )


def _reader(folder: Path) -> Any:
    try:
        import safetensors  # noqa: F401  # torch's reader needs it and says so less clearly
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    except ImportError as error:
        raise UserError(f"{folder}: reading it needs {error.name}; pip install 'megatron_snip[hf]'") from None
    return HuggingFaceStorageReader(str(folder))


def attention_of(model: nn.Module, length: Callable[[int], int]) -> dict[int, Attend] | None:
    """What each block's attention makes of q, k and v, for transformers' classes whose attention is known; else None.

    None where it has biases, dropout or a sliding window, too.

    length: tokens of a sequence of the microbatch that begins at a row.  Causal, without padding, positions from 0 on.
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
