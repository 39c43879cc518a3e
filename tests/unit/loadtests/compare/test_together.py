"""The table of two models on one machine."""

from __future__ import annotations

import argparse

import pytest

from loadtests.compare import together
from loadtests.compare.together import Figures


def test_both_are_compared_with_each_alone() -> None:
    rounds = [
        {
            ("turns", "both"): Figures(n * 45.0, n * 40.0, 0.1, 0.2),
            ("alone", "chat-4"): Figures(n * 90.0, 0.0, 0.05, 0.03),
            ("alone", "other"): Figures(0.0, n * 100.0),
        }
        for n in (1, 2, 3)
    ]
    rows = together.report(rounds, ("turns", "alone")).splitlines()[2:]
    assert rows == [
        "| turns | both | tokens_per_s | 90.00 (45.00-135.00) | 0.50 (0.50-0.50) "
        "| 100.00 (100.00-100.00) | 2.00 (2.00-2.00) | 200.00 (200.00-200.00) |",
        "| turns | both | other_per_s | 80.00 (40.00-120.00) | 0.40 (0.40-0.40) | - | - | - |",
        "| turns | both | shares | - | 0.90 (0.90-0.90) | - | - | - |",
        "| alone | chat-4 | tokens_per_s | 180.00 (90.00-270.00) | 1.00 (1.00-1.00) "
        "| 50.00 (50.00-50.00) | 1.00 (1.00-1.00) | 30.00 (30.00-30.00) |",
        "| alone | other | other_per_s | 200.00 (100.00-300.00) | 1.00 (1.00-1.00) | - | - | - |",
    ]


def test_sides_and_cells_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    files = ["--chat", "a.gguf", "--embed", "b.gguf"]
    args = together.parse_args([*files, "--sides", "turns,alone", "--cells", "both"])
    assert (args.sides, args.cells) == (("turns", "alone"), ("both",))
    with pytest.raises(SystemExit):
        together.parse_args([*files, "--cells", "none"])
    assert "none" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        together.parse_args([*files, "--second", "c.gguf"])
    assert isinstance(args, argparse.Namespace)
