"""What the tests of Hugging Face conversion run on every rank; importable, so that forked ranks find it."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_snip import runtime
from megatron_snip.errors import UserError
from megatron_snip.train.run import run_folder
from megatron_snip.train.step import Stepper
from tests.dist.helpers.runs import make, train_run
from megatron_snip.cli import analyse as analyse_tool
from megatron_snip.cli import collect_stats, convert_checkpoint, generate_plan


def convert(*words: str) -> str:
    """The tool; what it refused, or nothing."""
    runtime.stop = lambda: None  # the harness stops
    try:
        convert_checkpoint.main(words)
    except ValueError as error:
        return str(error)
    return ""


def refused(options: dict[str, Any]) -> str:
    """What a run refuses, on every process."""
    try:
        train_run(options)
    except UserError as error:
        return str(error)
    return ""


def told(*words: str) -> str:
    """What the tool prints."""
    runtime.stop = lambda: None
    with contextlib.redirect_stdout(io.StringIO()) as said:
        convert_checkpoint.main(words)
    return said.getvalue()


def warned(*words: str) -> tuple[str, str]:
    """What the tool refused, and what it prints to stderr."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        return convert(*words), said.getvalue()


def tokenizer_files(folder: Path) -> dict[str, Path]:
    """A tokenizer of each kind by --tokenizer-type, of which none ends documents with the token 2."""
    import sentencepiece
    import tokenizers

    corpus = ["def add(a, b):", "    return a + b", "# the sum of two numbers", "while True: pass"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_prefix=str(folder / "tok"), model_type="bpe", byte_fallback=True,
        vocab_size=300, minloglevel=2, normalization_rule_name="identity", remove_extra_whitespaces=False, eos_id=3,
        pad_id=2,
    )  # fmt: skip
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    special = ["<|begin|>", "<|other|>", "<|pad|>", "<|endoftext|>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(corpus, trainer)
    (folder / "json").mkdir()
    made.save(str(folder / "json/tokenizer.json"))
    (folder / "json/tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}'
    )
    return {"SentencePieceTokenizer": folder / "tok.model", "HuggingFaceTokenizer": folder / "json"}


def collect(*words: str) -> None:
    """tools/collect_stats.py."""
    runtime.stop = lambda: None
    collect_stats.main(words)


def analyse(*words: str) -> tuple[str, str]:
    """tools/analyse.py: what it prints, what it refuses."""
    runtime.stop = lambda: None
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            analyse_tool.main(words)
        except ValueError as error:
            return "", str(error)
    return said.getvalue(), ""


def analyse_unprobed(*words: str) -> tuple[str, str]:
    """The same where it does not come to the probe."""
    analyse_tool.measure = lambda *args: pytest.fail("it has probed")
    return analyse(*words)


def logits_of(options: dict[str, Any], load: Path, iteration: int, tokens: torch.Tensor) -> torch.Tensor:
    """A checkpoint's logits [B, S, V] of tokens [B, S]."""
    _, parts = make(options)
    parts.train_loader.close()
    start = run_folder.Start(iteration, None, load, iteration, "")
    run_folder.read_tensors(start, {n: t for n, t in parts.tensors().items() if n.startswith("model.")})
    (stage,) = parts.stages.values()
    with torch.no_grad():
        return stage.logits(stage.hidden(tokens, range(len(tokens))))


def first_batch(options: dict[str, Any]) -> dict[str, Any]:
    """Train one iteration: its loss before the update, and the tokens and labels [B, S] of its batch."""
    found: dict[str, Any] = {}
    plain = Stepper.step

    def step(self: Stepper, batch: Any, *args: Any, **more: Any) -> Any:
        result = plain(self, batch, *args, **more)
        found.update(loss=result.loss, tokens=batch.tokens.flatten(0, 1), labels=batch.labels.flatten(0, 1))
        return result

    Stepper.step = step  # type: ignore[method-assign]
    train_run({**options, "train_iters": 1})
    return found


def plan(*words: str) -> tuple[str, str]:
    """`megatron-snip plan`: what it prints, and what it refuses."""
    runtime.stop = lambda: None
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            generate_plan.main(words)
        except ValueError as error:
            return "", str(error)
    return said.getvalue(), ""
