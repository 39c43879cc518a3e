"""The requests of the goodput's load, which of them are good, and the table."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from loadtests.common.bursts import Burst
from loadtests.compare.goodput import (
    Settings,
    arrivals_s,
    best,
    bodies,
    goodput,
    is_good,
    parse_args,
    plot,
    report,
)
from loadtests.compare.sides import CORRAL, LLAMA_SERVER
from serve_app.cli.measure.outcomes import StreamedAnswer

GOOD = StreamedAnswer(tuple(1.5 + 0.1 * i for i in range(64)), 8.0, 64, True, 128, 0, None)
REFUSED = StreamedAnswer((), 0.0, 0, False, None, None, "429: busy")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    model = tmp_path / "model.gguf"
    model.write_bytes(b"x")
    return Settings(model, (1.0, 2.0), "short", (CORRAL, LLAMA_SERVER), 2, 10, 16, 2, model)


def test_good_is_whole_and_fast(settings: Settings) -> None:
    late = replace(GOOD, pieces_s=tuple(time + 0.6 for time in GOOD.pieces_s))
    halting = replace(GOOD, pieces_s=tuple(1.0 + 0.21 * i for i in range(64)))
    short = replace(GOOD, tokens=63)
    cut_off = replace(GOOD, error="the stream ended without [DONE]")
    answers = [GOOD, late, halting, short, cut_off, REFUSED]
    assert [is_good(answer, settings) for answer in answers] == [True, *[False] * 5]
    assert is_good(replace(late, tokens=256), replace(settings, length="long"))


def test_arrivals_have_their_rate_and_are_the_same_again() -> None:
    times = arrivals_s(4.0, 1000, 1)
    assert len(times) == pytest.approx(4000, rel=0.05)
    assert times == sorted(times) == arrivals_s(4.0, 1000, 1) != arrivals_s(4.0, 1000, 2)
    gaps = [b - a for a, b in pairwise(times)]
    assert sum(gap > 0.25 for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.03)


def test_prompts_begin_anywhere_in_the_text(settings: Settings) -> None:
    asked = bodies(range(500), 3, settings, "1 2")
    assert [len(body["prompt"]) for body in asked] == [128] * 3
    assert len({body["prompt"][0] for body in asked}) == 3
    assert all(b == (a + 1) % 500 for body in asked for a, b in pairwise(body["prompt"]))
    assert {body["max_tokens"] for body in asked} == {64}
    assert asked == bodies(range(500), 3, settings, "1 2")


def test_the_table_and_the_plot(settings: Settings) -> None:
    def burst(n_good: int) -> Burst:
        return Burst((*[GOOD] * n_good, REFUSED), 10.0, 0.1)

    rounds = [
        {CORRAL: {1.0: burst(10), 2.0: burst(ours)}, LLAMA_SERVER: {1.0: burst(10), 2.0: burst(5)}}
        for ours in (15, 20)
    ]
    assert goodput(burst(15), settings) == 1.5
    assert best(rounds[0][CORRAL], settings) == 1.5
    lines = report(settings, rounds).splitlines()
    ours, theirs = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines[-2:])
    assert ours == [
        *("corral", "1.00 (1.00-1.00)", "1.75 (1.50-2.00)"),
        *("1.75 (1.50-2.00)", "1.75 (1.50-2.00)"),
    ]
    assert theirs[-2:] == ["1.00 (1.00-1.00)", "1.00 (1.00-1.00)"]
    assert ElementTree.fromstring(plot(settings, rounds)).tag.endswith("svg")


def test_the_command_line(tmp_path: Path) -> None:
    path = str(tmp_path / "model.gguf")
    settings, *files = parse_args(["--model", path, "--rates", "0.5,3", "--server", __file__])
    assert (settings.rates, settings.rounds, files) == ((0.5, 3.0), 5, [None, None])
    assert (settings.sizes.n_ctx_slot, settings.most_ttft_s) == (448, 2.0)
    for wrong in (["--rates", "0"], ["--sides", "nobody"], ["--length", "tiny"]):
        with pytest.raises(SystemExit):
            parse_args(["--model", path, *wrong])
