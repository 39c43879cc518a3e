"""The sums, the table and the plot of the frontier between streams' gaps and a long prompt's time."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from loadtests.compare.frontier import Found, Settings, Side, between, parse_args, plot, report
from loadtests.compare.sides import CORRAL, LLAMA_SERVER

OURS, THEIRS, BEST = Side(CORRAL, 250), Side(LLAMA_SERVER, 64), Side(LLAMA_SERVER, 512)
ROUNDS = [
    {
        OURS: Found(3.0, (0.02,), (0.2, 0.24)),
        THEIRS: Found(5.0, (0.02,), (0.2, 0.5)),
        BEST: Found(2.0, (0.02,), (1.5,)),
    },
    {
        OURS: Found(6.0, (0.03,), (0.2, 0.26)),
        THEIRS: Found(8.0, (0.02,), (0.2, 0.6)),
        BEST: Found(5.0, (0.02,), (1.7,)),
    },
]


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"x")
    return Settings(model, (250,), (64, 512), 2, 1200, 4, 2, 2, CORRAL, model)


def test_gaps_before_and_beside() -> None:
    times = [0.0, 1.0, 2.5, 4.0, 4.5]
    assert between(times, came=1.5, done=4.2) == ([1.0], [1.5, 1.5])


def test_a_stream_that_stands_has_the_gap_up_to_then() -> None:
    assert between([0.0, 1.0], came=1.5, done=4.0) == ([1.0], [3.0])


def test_sides_are_called_by_their_setting() -> None:
    assert [str(side) for side in (OURS, BEST)] == ["corral 250 ms", "llama-server -b 512"]


def test_the_baseline_is_the_largest_batch(settings: Settings) -> None:
    assert settings.sides == (OURS, THEIRS, BEST)
    assert settings.baseline == BEST


def test_ratios_are_of_the_same_round(settings: Settings) -> None:
    rows = report(settings, ROUNDS).splitlines()[-3:]
    assert rows[0].startswith("| corral 250 ms | 25 |")
    assert rows[0].endswith("| 250 (240-259) | 260 | 4.50 (3.00-6.00) | 1.35 (1.20-1.50) |")
    assert rows[2].endswith("| 1.00 (1.00-1.00) |")


def test_the_plot_is_svg(settings: Settings) -> None:
    drawn = ElementTree.fromstring(plot(settings, ROUNDS))
    texts = "".join(drawn.itertext())
    assert all(word in texts for word in (CORRAL, LLAMA_SERVER, "250", "512"))


def test_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model.gguf"
    base = ["--model", str(model), "--server", str(model)]
    model.write_bytes(b"x")
    settings, _, _ = parse_args([*base, "--bounds", "50,100", "--corral", "ray"])
    assert (settings.bounds, settings.corral) == ((50, 100), "ray")
    with pytest.raises(SystemExit):
        parse_args([*base, "--streams", "4", "--slots", "4"])
    assert "slot beside" in capsys.readouterr().err
