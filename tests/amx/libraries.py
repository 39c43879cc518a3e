"""Builds of llama.cpp's kernels, from the source package of the installed llama-cpp-python.

A build is a folder of shared libraries. `LLAMA_CPP_LIB_PATH` has llama-cpp-python load them in place of its
own. Only ggml is compiled: libllama and libmtmd are the installed ones.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import llama_cpp

from loadtests.compare.llama_server import CMAKE_FLAGS, compiler_flags, downloaded, has_amx, run

INSTALLED = Path(llama_cpp.__file__).parent / "lib"
_FLAGS = (
    *CMAKE_FLAGS,
    "-DBUILD_SHARED_LIBS=ON",  # of two values, cmake takes the last
    "-DCMAKE_BUILD_WITH_INSTALL_RPATH=ON",
    "-DCMAKE_INSTALL_RPATH=$ORIGIN",
    "-DLLAMA_BUILD_TOOLS=OFF",
    "-DLLAMA_BUILD_SERVER=OFF",
)


def folder() -> Path:
    """Where the builds of the installed version are kept."""
    return Path.home() / ".cache/corral" / f"builds-{version('llama-cpp-python')}"


def built(name: str, flags: Sequence[str], jobs: int) -> Path:
    """The folder of the build of this name, made with so many compilers at once if it is not there. Their
    output goes to stderr. Raises CalledProcessError if the download or the compilation fails."""
    target = folder() / name
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory(prefix="corral-build-") as directory:
        made = Path(directory) / "build"
        source = downloaded(Path(directory)) / "vendor/llama.cpp"
        run("cmake", "-S", source, "-B", made, *_FLAGS, *compiler_flags(has_amx()), *flags)
        run("cmake", "--build", made, "--target", "ggml", "--parallel", str(jobs))
        done = Path(directory) / "done"
        shutil.copytree(INSTALLED, done)
        for library in made.glob("bin/libggml*.so*"):
            shutil.copy(library, done / library.name)  # a link's target: llama-cpp-python has none
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}")
        shutil.move(done, unfinished)
        unfinished.rename(
            target
        )  # at once: a build that was interrupted leaves nothing that is used
    return target
