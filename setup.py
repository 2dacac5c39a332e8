"""Builds the optional CPU kernel; pyproject.toml holds everything else.

The kernel is a plain shared library without Python headers.  Without a compiler, or if every set of
flags fails, the installation goes on and casts take the plain torch path with the same results.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

KERNEL = "megatron_snip.quant.kernels._cpu"
# The kernel must round like plain torch: no -ffast-math, no fused multiply-add.
EXACT = ["-std=c++17", "-ffp-contract=off", "-fwrapv", "-pthread"]
# GCC 12 warns of its own intrinsics' headers, and of the calling convention of functions that are never called.
QUIET = ["-Wno-uninitialized", "-Wno-maybe-uninitialized", "-Wno-psabi"]
FLAGS = [
    ["-O3", "-fno-math-errno", "-fno-trapping-math", *QUIET, *EXACT],
    ["-O2", "-DMEGATRON_SNIP_GENERIC", *EXACT],  # for compilers without the attributes for several instruction sets
]
FOLDER = "megatron_snip/quant/kernels"
PARTS = ("adamw", "four_over_six", "kernels", "rounding", "sizes", "vectors")
HEADERS = ["cpu.h", *(f"cpu_{part}.h" for part in PARTS)]


class BuildKernel(build_ext):
    """Try each set of flags until one compiles."""

    def get_ext_filename(self, fullname: str) -> str:
        """No ABI tag in the name: the library does not depend on the Python version."""
        return str(fullname.replace(".", "/")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        """Compile ``ext``, or take what is compiled in the sources' folder and newer than all of them.

        The last failure is reported by setuptools, which goes on as it is optional.
        """
        built, target = Path(FOLDER, "_cpu.so"), Path(self.get_ext_fullpath(ext.name))
        newest = max(map(os.path.getmtime, [*ext.sources, *ext.depends, __file__]))
        if built.exists() and built.stat().st_mtime > newest:
            if target.resolve() != built.resolve():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(built, target)
            return None
        for flags in FLAGS:
            ext.extra_compile_args = flags
            try:
                return super().build_extension(ext)
            except Exception as error:  # compilers fail in many ways; every one means the next flags
                failure = error
        raise failure


class AnyPython(bdist_wheel):
    """A wheel for every Python on this platform: the kernel has none of its headers."""

    def get_tag(self) -> tuple[str, str, str]:
        """Python, ABI and platform."""
        return "py3", "none", super().get_tag()[2]


setup(
    ext_modules=[
        Extension(
            KERNEL,
            sources=[f"{FOLDER}/cpu.cpp"],
            depends=[f"{FOLDER}/{name}" for name in HEADERS],
            extra_link_args=["-pthread", "-ldl"],
            language="c++",
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernel, "bdist_wheel": AnyPython},
)
