"""The scripts of `findings/` have the form that CONTRIBUTING describes. They are not run."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "findings").iterdir())
TABLE = (ROOT / "docs/develop/surprises.md").read_text()
PIN = re.compile(r"@?[\w./\[\]-]+(==|=|@)(?P<version>\d[\w.+~:-]*)")
"""A package and its version, as PyPI, Debian and npm have it."""
MOST_SECONDS = 120

each_script = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


@each_script
def test_it_can_be_run_and_stops_at_a_failure(script: Path) -> None:
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    first = next(line for line in lines if not line.startswith("#"))
    assert first == "set -euo pipefail"


@each_script
def test_its_header_has_versions_behaviour_and_what_was_seen(script: Path) -> None:
    header, _, rest = script.read_text().partition("\nset -euo pipefail\n")
    found = re.fullmatch(
        r"#!.*\n# \S.*\.\n#\n# Version: .+\n(# Behaviour: (?:.+\n)+)# Seen:\n((?:#   .+\n?)+)",
        header,
    )
    assert found
    assert len(found[1].splitlines()) > 1
    compares = """sed -n '/^# Seen:/,/^set/s/^#   //p' "$own" | diff - seen"""
    assert rest.rstrip().splitlines()[-1] == compares


@each_script
def test_its_packages_are_pinned_and_installed_in_a_folder_of_its_own(script: Path) -> None:
    text = script.read_text()
    lists = re.findall(r'^(?:\w+_)?packages="(.+)"$', text, re.M)
    assert lists
    header = text.partition("\nset ")[0]
    for package in (one for words in lists for one in words.split()):
        pin = PIN.fullmatch(package)
        assert pin, package
        assert pin["version"] in header or package.startswith("lib")
    assert "NEWEST" in text
    assert "folder=$(mktemp -d)\n" in text
    assert re.search(r"^trap '.*rm -rf \"\$folder\"' EXIT$", text, re.M)
    assert "|| exit 2" in text or "exit 2; }" in text
    assert "sudo" not in text


@each_script
def test_it_talks_to_the_loopback_address_only(script: Path) -> None:
    text = script.read_text()
    hosts = set(re.findall(r"https?://([\w.]+)", text))
    assert hosts <= {"127.0.0.1", "loopback"}  # the latter is nginx' name for some servers here
    assert not re.search(r"(?<![\d.])0\.0\.0\.0", text)
    assert set(re.findall(r'\(\("([^"]*)", 0\)', text)) <= {"127.0.0.1"}
    assert not re.search(r"\b(corral|serve_app)\b", text, re.I)


@each_script
def test_it_ends_in_time(script: Path) -> None:
    text = script.read_text()
    limits = [
        int(seconds)
        for seconds in re.findall(r"\btimeout (\d+) (?=env/|node |python3 |usr/)", text)
    ]
    assert limits
    assert sum(limits) <= MOST_SECONDS
    assert not re.search(r"^\s*(?:env/bin/\S+|usr/\S+|node|python3 -) ", text, re.M)


@each_script
def test_the_table_names_it(script: Path) -> None:
    assert f"`{script.stem}`" in TABLE


def test_every_row_says_what_came_and_what_is_done() -> None:
    rows = [line.strip("|").split(" | ") for line in TABLE.splitlines() if line.startswith("| ")]
    assert {len(row) for row in rows} == {4}
    assert all(cell.strip() for row in rows for cell in row)
    named = set(re.findall(r"`([a-z]+(?:-[a-z]+)+)` \| [A-Z\[]", TABLE))
    assert named <= {script.stem for script in SCRIPTS}
