"""Text and a tokenizer for models that are trained from scratch.

    python -m examples.study.scratch

Prose is that of /usr/share/doc, code that of the Python packages in this environment, which requirements/dev.txt pins:
72 MB to train on, each document once, of which 2% are prose.  The tokenizer is a byte-level BPE of 4,096 tokens,
trained by the library tokenizers on the first 8 MB.  --output, a folder outside the repository, has what
`real_model.py` gives a schedule, except a model.  A folder that is there already is kept.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

from examples.study.real_model import DEFAULT as REAL
from examples.study.real_text import write_texts
from megatron_snip import runtime
from megatron_snip.files.io import path_word

DEFAULT = REAL.with_name("scratch")
VOCABULARY, END = 4096, "<|endoftext|>"
#: Of the text, of one package's sources, and of what the tokenizer is trained on.
CHARACTERS, OF_PACKAGE, OF_TOKENIZER = 72_000_000, 12_000_000, 8_000_000


def made(folder: Path = DEFAULT) -> Path:
    """The folder, made if it is not there.  UserError where this machine has too little text."""
    if not (folder / "tokenizer_config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_texts(folder, code=Path(sysconfig.get_path("purelib")), most=CHARACTERS, code_of_package=OF_PACKAGE)
        train_tokenizer(folder)
    return folder


def train_tokenizer(folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json of the folder's probe.txt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    with (folder / "probe.txt").open(encoding="utf-8") as file:
        text = file.read(OF_TOKENIZER)
    tokenizer.train_from_iterator(text.split("\n\n"), trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))  # last: it says that all is there


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=path_word, default=DEFAULT, help=f"the folder (default: {DEFAULT})")
    folder = made(Path(parser.parse_args().output))
    for path in sorted(folder.iterdir()):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    with runtime.report_errors():
        main()
