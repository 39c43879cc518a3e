"""The benchmark of adapters, on a real tiny model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from loadtests.engine.adapters import __main__ as adapters
from loadtests.engine.adapters import bench


@pytest.mark.long
def test_every_way_has_its_speed_and_its_texts(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(tiny_gguf), "--adapters", "1", "--streams", "4", "--rounds", "1"]
    arguments += ["--prompt-tokens", "8", "--max-tokens", "8", "--rank", "4", "--threads", "1"]
    monkeypatch.setattr("sys.argv", ["adapters", *arguments])
    adapters.main()
    out = capsys.readouterr().out
    rows = re.findall(r"^\| (\w+|base, parts) \| ([\d.]+) \(.*\) \| ([\d.]+) \(.*\) \|", out, re.M)
    assert [way for way, *_ in rows] == list(bench.WAYS)
    assert all(float(speed) > 0 for _, speed, _ in rows)
    assert rows[-1][2] == "1.00"
    assert re.search(r"^Longest gap .*: [\d.]+ s; allowed: [\d.]+ s\.$", out, re.M)
    found = re.findall(r"^\| (.*) \| (\d+) of (\d+) \|$", out, re.M)
    assert len(found) == 6
    assert {n_all for _, _, n_all in found} == {"4"}
    assert all(0 <= int(n_equal) <= 4 for _, n_equal, _ in found)


def test_equal_texts_are_counted() -> None:
    assert adapters.equal_texts([(1, 2), (3,)], [(1, 2), (4,)]) == "1 of 2"


def test_what_a_stream_may_wait() -> None:
    run = bench.Run(2.0, ((1, 2), (3, 4)), (0.05, 0.1))
    assert run.tokens_per_s == 2
    assert bench.joined([run, run]).tokens_per_s == 2
    assert adapters.longest_allowed_s(run, 4, 0.25) == pytest.approx(0.55)
