"""Options of plans on the command line of a run that makes none: a warning names them."""

from __future__ import annotations

import pytest

from megatron_snip.arguments import parse, warn_of_unused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--snip-target 0.5 --precision fp8 --snip-fix=a=fp8",
            "--snip-target, --snip-fix: no effect under --precision fp8;",
        ),
        ("--snip-granularity gemm", "--snip-granularity: no effect under --precision bf16; give --precision snip"),
        ("--snip-target 0.5 --precision snip", ""),
        ("--snip-final-precision bf16 --snip-final-iters 3 --gemm-times published:b300 --snip-guard", ""),
    ],
)
def test_options_of_plans_without_plans_are_told(words, said, caplog):
    warn_of_unused(words.split(), parse(words.split()))
    assert [record.getMessage().startswith(said) for record in caplog.records] == ([True] if said else [])


def test_options_of_plans_in_a_file_may_go_unused(tmp_path, caplog):
    (tmp_path / "run.toml").write_text("snip-target = 0.5\n")
    words = ["--config", str(tmp_path / "run.toml"), "--precision", "fp8"]
    warn_of_unused(words, parse(words))
    assert not caplog.records
