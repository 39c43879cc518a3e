"""What the process has before llama.cpp is loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping

import pytest

_LOAD = "import os, serve_app.kernels.llama.library; print(os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.parametrize(
    ("settings", "spin_count"),
    [({}, 30_000), ({"GOMP_SPINCOUNT": "7"}, 7), ({"OMP_WAIT_POLICY": "active"}, 30_000_000_000)],
    ids=["the default", "an operator's own", "an operator's policy"],
)
def test_threads_that_wait_spin_for_a_moment(settings: Mapping[str, str], spin_count: int) -> None:
    """libgomp prints what it has read. Other programs do not inherit it."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))
    }
    shown = subprocess.run(
        [sys.executable, "-c", _LOAD],
        env=inherited | {"OMP_DISPLAY_ENV": "VERBOSE"} | dict(settings),
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.findall(r"GOMP_SPINCOUNT = '(\d+)'", shown.stderr)[-1] == str(spin_count)
    assert shown.stdout == f"{settings.get('GOMP_SPINCOUNT')}\n"
