"""llama.cpp's libraries with AMX kernels, compiled on any x86-64 machine.

GCC's `-march=native` has no AMX where the processor has none. So the kernels are compiled for the first
processor with AMX, less what the processor at hand lacks besides. The instructions of AMX itself are left
to `emulator.c`.
"""

from __future__ import annotations

import os
import subprocess
from functools import cache
from pathlib import Path

from loadtests.compare.llama_server import TILES
from tests.amx import libraries

WITH_HEADER = "amx"
"""As the Makefile compiles on a machine with AMX."""
WITHOUT_HEADER = "amx-without-header"
"""What llama.cpp alone would make of it."""

_PROCESSOR = "sapphirerapids"
_OPTIONAL = {
    "avx_vnni": "avxvnni",
    "avx512_bf16": "avx512bf16",
    "avx512_fp16": "avx512fp16",
    "avx512ifma": "avx512ifma",
    "avx512vbmi": "avx512vbmi",
    "avx512_vbmi2": "avx512vbmi2",
    "avx512_bitalg": "avx512bitalg",
    "avx512_vpopcntdq": "avx512vpopcntdq",
    "gfni": "gfni",
    "vaes": "vaes",
    "vpclmulqdq": "vpclmulqdq",
}
"""Linux's and GCC's names of what `_PROCESSOR` has and other processors with AVX-512 may lack."""
_REQUIRED = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512_vnni")


@cache
def _features() -> frozenset[str]:
    """The processor's, by Linux's names."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return frozenset(next((one for one in lines if one.startswith("flags")), "").split())


def has_amx() -> bool:
    """Whether this processor has AMX."""
    return "amx_int8" in _features()


def lacking() -> list[str]:
    """What llama.cpp's AMX kernels need besides AMX, and this processor has not."""
    return [one for one in _REQUIRED if one not in _features()]


def built(name: str) -> Path:
    """The folder with the libraries, `WITH_HEADER` or `WITHOUT_HEADER`. Making it takes minutes, the first
    time. Raises CalledProcessError if the download or the compilation fails."""
    less = (f"-mno-{gcc}" for linux, gcc in _OPTIONAL.items() if linux not in _features())
    processor = " ".join((f"-march={_PROCESSOR}", *less))
    header = f" -include {TILES}" if name == WITH_HEADER else ""
    flags = (
        "-DGGML_NATIVE=OFF",
        f"-DCMAKE_C_FLAGS={processor}",
        f"-DCMAKE_CXX_FLAGS={processor}{header}",
    )
    return libraries.built(name, flags, len(os.sched_getaffinity(0)))


def drops_stores() -> bool:
    """Whether the compiler has the error that tiles.h corrects: GCC before 13.3."""
    told = subprocess.run(["g++", "-dumpfullversion"], check=True, capture_output=True, text=True)
    return tuple(int(part) for part in told.stdout.strip().split(".")) < (13, 3)
