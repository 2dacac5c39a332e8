"""What the compiled Triton casts need of a GPU: registers, spills, shared memory and occupancy.  No GPU is used.

    python benchmarks/kernel_resources.py                   # sm_90a, then sm_100a, as launched
    python benchmarks/kernel_resources.py --sweep --json kernels.json   # and in 16 or 32 rows by 4 or 8 warps

Each kernel goes through triton's own launch up to the machine code for the device, which triton's cuobjdump and
nvdisasm then read.  Rows are the casts that a linear launches under ``scaled_mm``, and values as ``emulated`` takes
them.  "Warps an SM" is what registers and shared memory leave room for, of 64.  Spills are instructions that store
registers to local memory or load them from there.  Instructions and bytes an element are those that a thread issues and
loads on its way through the code when all numbers are finite: a loop counts as often as it is passed.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from megatron_snip.formats import get_format
from megatron_snip.quant import RoundingKey
from megatron_snip.quant.casts.cast import Form, Output
from megatron_snip.quant.kernels import triton_cast, triton_kernels, triton_launches
from megatron_snip.quant.kernels.triton_launches import FP8, FP8_AND_FP4, Tiling

HOPPER, BLACKWELL = 90, 100
_BINARIES = Path(triton.__file__).parent / "backends/nvidia/bin"
_SIZES = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}  # of what an instruction loads, in bytes
# Of an SM of either: 32-bit registers, those a warp is given at a time, bytes of shared memory and those a block takes.
_REGISTERS, _UNIT, _SHARED, _RESERVED, _MAX_WARPS = 65536, 256, 233472, 1024, 64


def _no_device(capability: int) -> SimpleNamespace:
    """What triton asks of a device before it launches, without one."""
    target = GPUTarget("cuda", capability, 32)
    return SimpleNamespace(
        get_current_device=lambda: capability,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: target,
        get_active_torch_device=lambda: torch.device("cpu"),
    )


class _Compiled:
    """Stands in for a kernel: ``kernel[grid](...)`` compiles and keeps the result."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.results = kernel, []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.results.append(self.kernel.warmup(*args, grid=grid, **kwargs))


def compile_ahead(name: str, capability: int, call: Callable[[], object], module: ModuleType = triton_kernels) -> Any:
    """The one kernel of that name that ``call`` would have launched on a device of the capability."""
    kernel, converts = _Compiled(getattr(module, name)), FP8_AND_FP4 if capability >= BLACKWELL else FP8
    with (
        mock.patch.object(module, name, kernel),
        mock.patch.object(triton_cast, "_converts", lambda device: converts),
    ):
        driver.set_active(_no_device(capability))
        try:
            call()
        finally:
            driver.set_active(None)  # triton looks for a device anew when it needs one
    (result,) = kernel.results
    return result


class Resources(NamedTuple):
    """Of one kernel: registers a thread, instructions that spill, bytes of shared memory, and warps an SM."""

    registers: int
    spills: int
    shared: int
    warps_an_sm: int


def _read(compiled: Any, tool: str, option: str) -> str:
    """What a tool says of a compiled kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        done = subprocess.run([_BINARIES / tool, option, file.name], capture_output=True, text=True, check=True)
    return done.stdout


def resources(compiled: Any) -> Resources:
    """What a compiled kernel needs."""
    usage = _read(compiled, "cuobjdump", "-res-usage")
    match = re.search(r"REG:(\d+)", usage)
    assert match is not None, usage
    registers, warps, shared = int(match[1]), compiled.metadata.num_warps, compiled.metadata.shared
    a_warp = -(-registers * 32 // _UNIT) * _UNIT
    blocks = min(_REGISTERS // a_warp // warps, _SHARED // (shared + _RESERVED), _MAX_WARPS // warps)
    spills = sum(one.name.split(".")[0] in ("LDL", "STL") for one in _instructions(compiled))
    return Resources(registers, spills, shared, blocks * warps)


class _Instruction(NamedTuple):
    """guarded: whether a predicate decides if it does anything.  target: the place of that to which it branches."""

    name: str
    guarded: bool
    target: int | None


_LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(@\S+\s+)?([A-Z0-9_.]+)([^;]*)")


def _instructions(compiled: Any) -> list[_Instruction]:
    """The machine code of a kernel, in order."""
    labels: dict[str, int] = {}
    lines: list[tuple[str, bool, str]] = []
    for line in _read(compiled, "nvdisasm", "-c").splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif match := _LINE.match(line):
            lines.append((match[2], match[1] is not None, match[3]))
    made = []
    for name, guarded, operands in lines:
        label = re.search(r"\.L_x_\d+", operands) if name.startswith("BRA") else None
        made.append(_Instruction(name, guarded, None if label is None else labels[label[0]]))
    return made


def _shorter(code: Sequence[_Instruction], place: int) -> bool:
    """Whether a branch ahead goes the shorter way, or the only one: what it skips may end with a branch over it."""
    target = code[place].target
    assert target is not None
    end = code[target - 1]
    skips = end.target is not None and not end.guarded and end.target > target
    return not code[place].guarded or not skips or target - place > end.target - target


def issued(compiled: Any, passes: int) -> tuple[int, int]:
    """Instructions that a thread issues, and bytes that it loads from global memory.

    Loops are passed so often.  Of two ways ahead the shorter is taken: the other is for NaN and infinities, or the slow
    way of a division.
    """
    code, place, count, loaded = _instructions(compiled), 0, 0, 0
    back: dict[int, int] = {}  # passes that end with a branch back
    while True:
        one = code[place]
        count += 1
        if one.name.startswith("LDG"):
            loaded += next((size for suffix, size in _SIZES.items() if suffix in one.name), 4)
        if one.name.startswith("EXIT"):
            following = next((i for i in range(place, len(code)) if code[i].target is not None), None)
            if not one.guarded or following is None or back.get(following, 0) + 1 >= passes:
                return count, loaded
        if one.target is not None and one.target > place:
            place = one.target if _shorter(code, place) else place + 1
        elif one.target is not None and back.get(place, 0) + 1 < passes:
            back[place] = back.get(place, 0) + 1
            place = one.target
        else:
            back.pop(place, None)
            place += 1


class Launch(NamedTuple):
    """One cast of x [R, C]: its forms, what it is rounded to if it is float32, and whether it is SwiGLU's product that
    is cast.
    """

    forms: list[Form]
    dtype: torch.dtype | None = None
    product: bool = False

    @property
    def tiling(self) -> Tiling:
        """What it has when it is launched."""
        return triton_launches.tiling([*map(triton_launches.Kind.of, self.forms)], self.product)

    def __call__(self) -> object:
        """Cast an x of even tiles."""
        x = torch.empty(256, 512, dtype=torch.bfloat16 if self.dtype is None else torch.float32)
        return self.of(x, torch.empty_like(x), torch.ones(()))

    def of(self, x: torch.Tensor, up: torch.Tensor, amax: torch.Tensor) -> object:
        """Cast x [R, C], or the product of x and ``up``."""
        read = up if self.product else None
        return triton_cast.run(x, self.forms, amax, self.dtype, count=False, up=read)


def _both(name: str, role: str, output: Output, key: RoundingKey | None = None, *, product: bool = False) -> Launch:
    fmt = get_format(name)
    forms = [Form(fmt, role, dim, key if role in fmt.stochastic_roles else None, output) for dim in (1, 0)]
    return Launch(forms, torch.bfloat16 if role == "weight" else None, product)


_KEY = RoundingKey(1, 2, 3)
LAUNCHES = {
    "fp8 input, two operands": _both("fp8", "input", "operand"),
    "fp8 weight from float32, two operands": _both("fp8", "weight", "operand"),
    "fp4 grad_output, stochastic, two operands": _both("fp4", "grad_output", "operand", _KEY),
    "fp4 input, two operands": _both("fp4", "input", "operand"),
    "fp8 input of SwiGLU, two operands": _both("fp8", "input", "operand", product=True),
    "fp4 input of SwiGLU, two operands": _both("fp4", "input", "operand", product=True),
    "mxfp8 input of SwiGLU, two of codes": _both("mxfp8", "input", "codes", product=True),
    "mxfp8 input of SwiGLU, two swizzled": _both("mxfp8", "input", "swizzled", product=True),
    "nvfp4_plain input of SwiGLU, two swizzled": _both("nvfp4_plain", "input", "swizzled", product=True),
    "mxfp8 input, two of codes": _both("mxfp8", "input", "codes"),
    "mxfp8 input, two swizzled": _both("mxfp8", "input", "swizzled"),
    "mxfp4 grad_output, stochastic, two of values": _both("mxfp4", "grad_output", "values", _KEY),
    "nvfp4_plain input, two of values": _both("nvfp4_plain", "input", "values"),
    "nvfp4_plain input, two swizzled": _both("nvfp4_plain", "input", "swizzled"),
    "nvfp4_4over6 input, two of values": _both("nvfp4_4over6", "input", "values"),
    "nvfp4_4over6 input, two swizzled": _both("nvfp4_4over6", "input", "swizzled"),
    "nvfp4_4over6 weight, two swizzled": _both("nvfp4_4over6", "weight", "swizzled"),
    "nvfp4_4over6 grad_output, stochastic, two of codes": _both("nvfp4_4over6", "grad_output", "codes", _KEY),
    "nvfp4_4over6 grad_output, stochastic, two swizzled": _both("nvfp4_4over6", "grad_output", "swizzled", _KEY),
    "nvfp4_plain grad_output, stochastic, two of codes": _both("nvfp4_plain", "grad_output", "codes", _KEY),
    "nvfp4_plain grad_output, stochastic, two swizzled": _both("nvfp4_plain", "grad_output", "swizzled", _KEY),
}
SWEEP = [Tiling(chunk, warps) for chunk in (16, 32) for warps in (4, 8)]
#: Of blocks of 16, which programs of more rows have in several chunks.
SWEEP_OF_16 = [*(Tiling(16, warps, rows) for warps in (4, 8) for rows in (16, 64)), Tiling(32, 4)]


def devices(launch: Launch) -> tuple[int, ...]:
    """The capabilities that launch it: Blackwell alone reads swizzled operands."""
    return (BLACKWELL,) if any(form.output == "swizzled" for form in launch.forms) else (HOPPER, BLACKWELL)


def sweep(launch: Launch) -> list[Tiling]:
    """The tilings to try: SWEEP or SWEEP_OF_16, and that which is launched."""
    launched = launch.tiling
    tilings = SWEEP_OF_16 if max(max(form.block) for form in launch.forms) == 16 else SWEEP
    return tilings if launched in tilings else [*tilings, launched]


class Work(NamedTuple):
    """Of a kernel, per element: instructions that a thread issues, and bytes that it loads."""

    issued: float
    loaded: float


def work(compiled: Any, launch: Launch, tiling: Tiling) -> Work:
    """What a compiled launch does in a tiling."""
    kinds = tuple(map(triton_launches.Kind.of, launch.forms))
    with in_tiling(tiling):
        (whole,) = triton_cast.launches(kinds, launch.product, ())
    elements = whole.rows * triton_launches.COLS / (32 * tiling.warps)
    return Work(*(each / elements for each in issued(compiled, whole.rows // tiling.chunk)))


def compile_tiled(capability: int, launch: Launch, tiling: Tiling | None = None) -> Any:
    """The kernel of a launch, in the tiling that it has or in another one."""
    if tiling is None:
        return compile_ahead("cast_kernel", capability, launch)
    with in_tiling(tiling):
        return compile_ahead("cast_kernel", capability, launch)


@contextmanager
def in_tiling(tiling: Tiling) -> Iterator[None]:
    """Casts are launched in this tiling and no other."""
    launches = triton_launches.launches.__wrapped__  # what is worked out now is not kept
    with (
        mock.patch.object(triton_launches, "tiling", lambda *_: tiling),
        mock.patch.object(triton_cast, "launches", launches),
    ):
        yield


def main() -> None:
    from harness import machine, report, save

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="every tiling, not only what is launched")
    parser.add_argument("--json")
    args = parser.parse_args()
    rows, results = [], []
    for capability in (HOPPER, BLACKWELL):
        for name, launch in LAUNCHES.items():
            if capability not in devices(launch):
                continue
            launched = launch.tiling
            for tiling in sweep(launch) if args.sweep else [launched]:
                compiled = compile_tiled(capability, launch, tiling)
                needed, done = resources(compiled), work(compiled, launch, tiling)
                told = f"{tiling}{' *' if tiling == launched else ''}"
                counts = [f"{done.issued:.1f}", f"{done.loaded:.1f}"]
                rows.append([f"sm_{capability}a", name, told, *map(str, needed), *counts])
                made = {**tiling._asdict(), **needed._asdict(), **done._asdict()}
                results.append({"device": f"sm_{capability}a", "launch": name, **made})
    about = machine("cpu")
    columns = (
        "device",
        "launch",
        "rows x warps",
        *(field.replace("_", " ") for field in Resources._fields),
        "issued an element",
        "bytes loaded",
    )
    print(report("Triton casts, compiled ahead of time", columns, rows, about))
    print("* is what is launched")
    save(args.json, about, results)


if __name__ == "__main__":
    main()
