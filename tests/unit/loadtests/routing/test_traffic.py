"""What Serve's controller carries follows from the sizes of its messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests.routing import traffic
from loadtests.routing.traffic import Sizes, after, before
from serve_app.routing.blocks import MAX_BLOCKS


@pytest.fixture(scope="module")
def few() -> Sizes:
    return Sizes.of(20)


@pytest.fixture(scope="module")
def many() -> Sizes:
    return Sizes.of(200)


def test_membership_alone_is_linear_in_replicas(few: Sizes, many: Sizes) -> None:
    ratio = sum(after(many, 4).values()) / sum(after(few, 4).values())
    assert 5 < ratio <= 10


def test_reports_through_the_controller_were_not(few: Sizes, many: Sizes) -> None:
    assert sum(before(many, 4).values()) > 50 * sum(before(few, 4).values())
    assert sum(before(few, 4).values()) > 1000 * sum(after(few, 4).values())


def test_every_replica_is_in_what_subscribers_get(few: Sizes, many: Sizes) -> None:
    blocks = 4 * MAX_BLOCKS
    assert many.all_said - many.members > 200 * blocks
    assert 8 * few.members < many.members < 10 * few.members


def test_a_change_is_a_part_of_a_report(few: Sizes) -> None:
    new = 4 * 2 * (traffic._NEW_BLOCKS + traffic._NEW_REQUESTS)
    assert new <= few.change < few.first / 4
    assert few.first > 4 * MAX_BLOCKS


def test_the_table_has_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traffic.main(["--replicas", "5,10", "--json", str(tmp_path / "out.json")])
    out = capsys.readouterr().out
    assert out.count("\n| ") == 8
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["10"]["after"]["reports"] == 0


@pytest.mark.parametrize(("n_bytes", "text"), [(7, "7 B"), (4321, "4.32 kB"), (5e13, "5e+04 GB")])
def test_sizes_are_for_people(n_bytes: float, text: str) -> None:
    assert traffic.size(n_bytes) == text
