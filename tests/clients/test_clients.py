"""Clients as their users run them: each is a script, run where `make test-clients` installed it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.clients.environment import NODE, RECIPES, interpreter
from tests.e2e.conftest import Corral

_TIMEOUT_S = 200


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_a_client_works(corral: Corral, recipe: Path, tmp_path: Path) -> None:
    run_client(recipe, tmp_path, corral.url)


def run_client(recipe: Path, folder: Path, *arguments: str) -> None:
    """Run a script with these arguments in a folder of its own; it fails if the client does not work."""
    runs = interpreter(recipe)
    if recipe.suffix == ".mjs" and shutil.which("npm") is None:
        pytest.skip("there is no npm")
    assert shutil.which(runs) is not None, f"{runs} is not there: make test-clients installs it"
    # Outside its environment, so that it finds nothing of Corral's; node looks beside the script.
    script = recipe
    if recipe.suffix == ".mjs":
        script = NODE / recipe.name
        shutil.copy(recipe, script)
    own = {"HOME": str(folder), "PATH": f"{Path(runs).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [runs, script, *arguments],
        cwd=folder,
        env=own,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
