"""The benchmark of picking tokens, on a real tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loadtests.engine.sampling import __main__ as sampling


def test_a_row_for_each_kind_and_number(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(tiny_gguf), "--sequences", "1,3", "--rounds", "2"]
    monkeypatch.setattr("sys.argv", ["sampling", *arguments])
    sampling.main()
    rows = re.findall(
        r"^\| (.*) \| (\d) \| [\d.]+ \| [\d.]+ \| [\d.]+ \(.*\) \|$", capsys.readouterr().out, re.M
    )
    assert rows == [(name, n) for name in sampling.KINDS for n in ("1", "3")]
