"""Corral's own tests of the engine and of models, with llama.cpp's AMX kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.amx.emulation import Emulation

ROOT = Path(__file__).parents[2]
FOLDERS = ("engine", "models")
FILES = [
    str(file.relative_to(ROOT))
    for folder in FOLDERS
    for file in sorted((ROOT / "tests/integration" / folder).glob("test_*.py"))
]
LIMIT_S = 1800
"""Of one test over there: emulated tiles are slow, and some tests read many prompts."""


@pytest.mark.timeout(4 * LIMIT_S)
@pytest.mark.parametrize("file", FILES)
def test_a_file_of_tests_passes(amx: Emulation, file: str) -> None:
    options = ("-q", "-m", "not long", f"--timeout={LIMIT_S}", "-p", "no:cacheprovider")
    command = (sys.executable, "-m", "pytest", *options, file)
    done = subprocess.run(command, env=amx.variables, cwd=ROOT)
    assert done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
