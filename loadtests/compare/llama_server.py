"""llama-server, llama-batched-bench and the batched example server, of the installed llama-cpp-python.

    python -m loadtests.compare.llama_server [--jobs N]

Downloads the source package of the installed llama-cpp-python from PyPI, compiles llama.cpp's two programs
with the flags that Corral's own llama.cpp has (Makefile), some minutes, keeps them under ~/.cache/corral
with the example, a Python file, and prints their paths. Does nothing but that if they are there. Needs
cmake and a C++ compiler.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

import llama_cpp

from loadtests.common.comparing import absolute

PROGRAMS = ("llama-server", "llama-batched-bench")
BATCHED_SERVER = "batched_server.py"
"""The package's examples/server/server.py."""
FILES = (*PROGRAMS, BATCHED_SERVER)
TILES = Path(__file__).parents[2] / "cluster/llama_cpp/tiles.h"
CMAKE_FLAGS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=OFF",  # so that a program can be moved
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",  # would be downloaded
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)


def has_amx() -> bool:
    """Whether Corral's own llama.cpp has its AMX kernels."""
    return b"AMX_INT8 = 1" in llama_cpp.llama_print_system_info()


def compiler_flags(amx: bool) -> tuple[str, ...]:
    """Those that Corral's own llama.cpp was compiled with; see the Makefile, which says why."""
    if amx:
        return (f"-DCMAKE_CXX_FLAGS=-include {TILES}",)
    return ("-DCMAKE_C_FLAGS=-U__AMX_INT8__", "-DCMAKE_CXX_FLAGS=-U__AMX_INT8__")


def folder() -> Path:
    """Where the programs of the installed version are, or will be."""
    name = f"llama-server-{version('llama-cpp-python')}{'-amx' if has_amx() else ''}"
    return Path.home() / ".cache/corral" / name


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add --server, the path of llama-server, as commands have it that measure beside it."""
    parser.add_argument("--server", type=absolute, default=folder() / "llama-server")


def expect(parser: argparse.ArgumentParser, server: Path) -> None:
    """End the command with an error if there is no such file."""
    if not server.is_file():
        parser.error(
            "no llama-server: give --server, or run python -m loadtests.compare.llama_server"
        )


def is_built() -> bool:
    """Whether all of them are there."""
    return all((folder() / file).is_file() for file in FILES)


def build(jobs: int) -> Path:
    """The folder with the files, made with so many compilers at once if it is not there. Their
    output goes to stderr. Raises CalledProcessError if the download or the compilation fails."""
    target = folder()
    if is_built():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{target.name}-", dir=target.parent) as directory:
        source = downloaded(Path(directory))
        made = source / "build"
        flags = (*CMAKE_FLAGS, *compiler_flags(has_amx()))
        run("cmake", "-S", source / "vendor/llama.cpp", "-B", made, *flags)
        run("cmake", "--build", made, "--target", *PROGRAMS, "--parallel", str(jobs))
        done = Path(directory) / "done"
        done.mkdir()
        for program in PROGRAMS:
            shutil.move(made / "bin" / program, done)
        shutil.move(source / "examples/server/server.py", done / BATCHED_SERVER)
        shutil.rmtree(target, ignore_errors=True)
        done.rename(target)  # both at once: a build that was interrupted leaves nothing
    return target


def downloaded(directory: Path) -> Path:
    """The source package of the installed version, unpacked in a folder of this one. Raises
    CalledProcessError if it cannot be downloaded."""
    package = f"llama-cpp-python=={version('llama-cpp-python')}"
    pip = (sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps")
    run(*pip, "--no-binary", "llama-cpp-python", "--dest", directory, package)
    (archive,) = directory.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(directory, filter="data")
    return directory / archive.name.removesuffix(".tar.gz")


def run(*command: str | Path) -> None:
    """Run it; its output goes to stderr. Raises CalledProcessError if it fails."""
    subprocess.run(command, check=True, stdout=sys.stderr)


def main() -> None:
    """Build what is not there, print the paths."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.compare.llama_server", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    made = build(parser.parse_args().jobs)
    for file in FILES:
        print(made / file)


if __name__ == "__main__":
    main()
