"""``python -m megatron_snip.formats``: the table has every format, and needs no torch."""

from __future__ import annotations

import subprocess
import sys

from megatron_snip.formats import format_names
from megatron_snip.formats.__main__ import table


def test_one_row_a_format_with_its_numbers():
    rows = table([*format_names(), "e3m2"]).splitlines()[1:]
    assert [row.split()[0] for row in rows] == [*format_names(), "e3m2"]
    assert rows[1].split() == [
        "fp8",
        "E4M3",
        "8.25",
        "448",
        "0.015625",
        "0.00195312",
        "1x128",
        "128x128",
        "fp32",
        "-",
        "-",
        "-",
    ]
    assert rows[2].split() == [
        "fp4",
        "E2M1",
        "4.25",
        "6",
        "1",
        "0.5",
        "1x128",
        "128x128",
        "fp32",
        "grad_output",
        "-",
        "-",
    ]
    assert rows[format_names().index("bf16_dequantized")].split()[-2:] == ["input,", "weight"]
    transformed = ["E2M1", "4.5", "6", "1", "0.5", "1x16", "16x16", "e4m3", "grad_output", "16", "wgrad", "-"]
    assert rows[format_names().index("nvfp4")].split() == ["nvfp4", *transformed]


def test_command_line():
    code = "import sys, runpy; runpy.run_module('megatron_snip.formats', run_name='__main__'); "
    code += "assert 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[0].startswith("format")
    failed = subprocess.run([sys.executable, "-m", "megatron_snip.formats", "fp5"], capture_output=True, text=True)
    assert failed.returncode == 1 and "known: bf16" in failed.stderr and "Traceback" not in failed.stderr
