"""The benchmark of fresh engines that get others' prefixes, on a real tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loadtests.engine import warm_start


def test_a_row_for_each_way_to_be_asked(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(tiny_gguf), "--shared", "128", "--own", "8", "--rounds", "1"]
    monkeypatch.setattr("sys.argv", ["warm_start", *arguments])
    warm_start.main()
    out, err = capsys.readouterr()
    rows = re.findall(r"^\| (a .*) \| \d+ \| (\S+) \(.*\) \|$", out, re.M)
    assert [way for way, _ in rows] == [warm_start.WARM, warm_start.FRESH, warm_start.COLD]
    assert rows[0][1] == "1.00"
    assert re.search(f"{warm_start.FRESH}, round 1: .* taken in", err)
