"""Corral's wheel, built from its source package, serves in an environment without the checkout."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

from loadtests.common import processes, servers
from loadtests.common.servers import ROOT
from tests.e2e.cli.test_corral import Started
from tests.e2e.conftest import short_folder

BUILD = """
import sys
from setuptools import build_meta
print(getattr(build_meta, sys.argv[1])(sys.argv[2]))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """The last line that the command prints."""
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return (done.stdout.splitlines() or [""])[-1]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with what builds and installs wheels."""
    folder = tmp_path_factory.mktemp("tools")
    run(sys.executable, "-m", "venv", ".", cwd=folder)
    python = folder / "bin/python"
    wanted = [
        str(python),
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "setuptools>=77",
    ]
    installed = subprocess.run(
        wanted, capture_output=True, text=True, timeout=300, check=False, cwd=folder
    )
    if "Failed to establish a new connection" in installed.stderr:
        pytest.skip("no package index, which has the tool that builds")
    assert installed.returncode == 0, installed.stderr
    return python


@pytest.fixture(scope="module")
def wheel(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as the package `build` does: the source package first, and the wheel from that alone."""
    folder = tmp_path_factory.mktemp("build")
    run("git", "clone", "-q", ROOT, folder / "clone", cwd=folder)
    source = run(python, "-c", BUILD, "build_sdist", folder, cwd=folder / "clone")
    with tarfile.open(folder / source) as archive:
        archive.extractall(folder, filter="data")
    unpacked = folder / source.removesuffix(".tar.gz")
    return folder / run(python, "-c", BUILD, "build_wheel", folder, cwd=unpacked)


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as directory:
        yield directory


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    listed = ["git", "ls-tree", "-r", "--name-only", "HEAD", "serve_app"]
    tracked = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True)
    with ZipFile(wheel) as archive:
        files = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert files == set(tracked.stdout.splitlines())


def test_corral_serve_of_the_wheel_answers(python: Path, wheel: Path, folder: Path) -> None:
    """The environment has the other packages of this one, and not the checkout."""
    run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=folder)
    packages = folder / "env/lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (packages / "others.pth").write_text(
        "\n".join(path for path in sys.path if path.endswith("site-packages"))
    )
    own = folder / "env/bin/python"
    pip = python, "-m", "pip", "--python", own
    run(*pip, "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)
    where = run(own, "-c", "import serve_app; print(serve_app.__file__)", cwd=folder)
    assert where.startswith(str(packages))
    corral = folder / "env/bin/corral"
    started = Started(folder, "--slots", "2", command=(str(corral),))
    try:
        started.wait_for("Ctrl-C stops it.")
        answer = run(
            *(corral, "chat", "What is the capital of Portugal?", "--temperature", "0"),
            *("--url", started.url),
            cwd=folder,
        )
        assert answer == "The capital of Portugal is Lisbon."
    finally:
        processes.stop(started.process, folder, servers.STOP_TIMEOUT_S)
