"""Hostile clients, the short form: honest users notice nothing, and nothing dies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.hostile.__main__ import chosen
from loadtests.hostile.verdict import HELD
from tests.e2e.conftest import ROOT

TIMEOUT_S = 300


@pytest.mark.long
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_no_client_hurts_another(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "loadtests.hostile", "--short", "--json", str(report)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert report.is_file(), done.stderr
    attacks = json.loads(report.read_text())["attacks"]
    assert [one["name"] for one in attacks] == [one.name for one in chosen((), (), short=True)]
    hurt = {one["name"]: one["reasons"] for one in attacks if one["verdict"] != HELD}
    assert hurt == {}, done.stdout
    assert done.returncode == 0
