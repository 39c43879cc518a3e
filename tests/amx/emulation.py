"""Runs commands on AMX: the processor's own, or where it has none, the emulator's."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from tests.amx import builds

SOURCES = Path(__file__).parent / "emulator"
INSTRUCTIONS = (
    *(
        "ldtilecfg",
        "sttilecfg",
        "tilerelease",
        "tilezero",
        "tileloadd",
        "tileloaddt1",
        "tilestored",
    ),
    *("tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud", "tdpbf16ps"),
)
"""In the order of the counters, `enum instruction` of tiles.h."""


@dataclass(frozen=True)
class Emulation:
    """A place to run commands in."""

    variables: dict[str, str]
    """The environment that a command and the processes that it starts need."""
    _counters: Path

    def counts(self) -> dict[str, int]:
        """How often each instruction was emulated since the beginning, in all processes, also in those that
        died. None are if the processor has AMX itself."""
        if not self._counters.exists():
            return {}
        numbers = np.fromfile(self._counters, np.uint64)
        return {name: int(n) for name, n in zip(INSTRUCTIONS, numbers, strict=True) if n}


@contextmanager
def emulation(build: str | None = None) -> Iterator[Emulation]:
    """With llama.cpp's libraries of this name (builds.py), or with the installed ones.

    Raises CalledProcessError if something cannot be compiled.
    """
    libraries = {"LLAMA_CPP_LIB_PATH": str(builds.built(build))} if build else {}
    with tempfile.TemporaryDirectory(prefix="corral-amx-") as directory:
        counters = Path(directory) / "counts"
        variables = {**os.environ, **libraries, "AMX_COUNTS": str(counters)}
        if not builds.has_amx():
            preloaded = Path(directory) / "amx.so"
            preloaded.write_bytes(_compiled())
            variables["LD_PRELOAD"] = str(preloaded)
        yield Emulation(variables, counters)


@cache
def _compiled() -> bytes:
    """The emulator, a shared library."""
    options = ("-O3", "-march=native", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    with tempfile.TemporaryDirectory(prefix="corral-amx-") as directory:
        library = Path(directory) / "amx.so"
        subprocess.run(["gcc", *options, *SOURCES.glob("*.c"), "-o", library], check=True)
        return library.read_bytes()
