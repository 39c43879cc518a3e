"""`make` says in one line what a machine lacks, before anything is downloaded or compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = ("awk", "df", "ls", "uname", "cc", "c++", "cmake")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder of programs that is the whole PATH: those that are needed, and Python as `python3`."""
    for name in PROGRAMS:
        program = shutil.which(name)
        assert program, name
        (tmp_path / name).symlink_to(program)
    program_text = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
    write(tmp_path / "python3", program_text)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def preflight(machine: Path, *arguments: str) -> tuple[int, str]:
    """The exit status, and what it prints."""
    done = subprocess.run(
        ["/bin/sh", ROOT / "cluster/preflight.sh", *(arguments or ("python3", "."))],
        env={"PATH": str(machine)} | {k: v for k, v in os.environ.items() if k == "LANG"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        cwd=machine,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_machine_with_everything_passes_in_silence(machine: Path) -> None:
    assert preflight(machine) == (0, "")


@pytest.mark.parametrize(
    ("program", "text", "said"),
    [
        ("uname", "#!/bin/sh\necho Darwin\n", "needs Linux, and this is Darwin"),
        ("uname", '#!/bin/sh\n[ "$1" = -m ] && echo ppc64le || echo Linux\n', "kind ppc64le"),
        ("python3", None, "there is no python3. Name another one: make serve PYTHON="),
        ("python3", '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\nexit 1\n', "Python 3.9"),
        (
            "python3",
            f'#!/bin/sh\ncase "$2" in *ensurepip*) exit 1;; esac\nexec "{sys.executable}" "$@"\n',
            "apt-get install --yes python3-venv",
        ),
        ("c++", None, "there is no c++."),
        ("cmake", None, "there is no cmake. On Debian and Ubuntu"),
        (
            "df",
            "#!/bin/sh\necho head\necho /dev/x 9 9 1048576 9 /\n",
            "3 GB of disk are needed in ., and 1 GB are free",
        ),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    machine: Path, program: str, text: str | None, said: str
) -> None:
    if text is None:
        (machine / program).unlink()
    else:
        write(machine / program, text)
    status, output = preflight(machine)
    assert status == 1
    assert output.startswith("Corral cannot be installed: ")
    assert said in output
    assert output.count("\n") == 1


def test_with_a_wheel_of_llama_cpp_no_compiler_is_needed(machine: Path) -> None:
    (machine / "c++").unlink()
    status, output = preflight(machine, "python3", ".", str(machine))
    assert (status, "has no wheel of llama-cpp-python" in output) == (1, True)
    (machine / "llama_cpp_python-0.3.36-py3-none-linux_x86_64.whl").touch()
    assert preflight(machine, "python3", ".", str(machine)) == (0, "")


def test_the_versions_of_python_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.15"
    text = (ROOT / "cluster/preflight.sh").read_text()
    assert "(3, 11) <= sys.version_info < (3, 15)" in text
    for page in ("README.md", "docs/install.md", "docs/quickstart.md"):
        assert "Python 3.11 to 3.14" in (ROOT / page).read_text()
