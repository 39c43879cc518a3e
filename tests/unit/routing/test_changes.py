"""Reports that go as changes are the same reports."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.routing.blocks import MAX_BLOCKS
from serve_app.routing.changes import applied, change
from serve_app.routing.score import Report

HASHES = st.frozensets(st.integers(0, 2**32 - 1), max_size=9)
FIGURES = st.floats(0, 1e6)
REPORTS = st.builds(
    Report,
    st.integers(1, 64),
    st.integers(0, 999),
    *[FIGURES] * 5,
    blocks=HASHES,
    requests=HASHES,
    turns=HASHES,
)


@given(st.lists(REPORTS, min_size=1))
def test_changes_add_up_to_what_was_said(said: list[Report]) -> None:
    before = heard = None
    for report in said:
        body = change(before, report)
        if body is not None:
            heard = applied(heard, body)
        assert heard == report
        before = report


@given(REPORTS)
def test_the_first_one_is_whole_whatever_the_reader_takes_for_given(report: Report) -> None:
    body = change(None, report)
    assert body is not None
    assert applied(Report(n_slots=99, work_s=9e9, token_s=9e9), body).n_slots == report.n_slots
    assert applied(None, body) == report


@given(REPORTS)
def test_what_is_the_same_is_not_said(report: Report) -> None:
    assert change(report, report) is None


def test_little_is_said_where_little_has_changed() -> None:
    rng = random.Random(7)
    held = [rng.getrandbits(32) for _ in range(MAX_BLOCKS)]
    before = Report(blocks=frozenset(held[1:]), requests=frozenset(range(256)))
    after = Report(n_live=1, blocks=frozenset(held[:-1]), requests=frozenset(range(1, 257)))
    whole, body = change(None, before), change(before, after)
    assert whole is not None
    assert body is not None
    assert 4 * (MAX_BLOCKS + 255) < len(whole) < 4 * (MAX_BLOCKS + 256) + 256
    assert len(body) < 128


def test_what_another_version_says_besides_is_left_out() -> None:
    said = {"figures": {"n_live": 3, "mood": 7}, "added": {"songs": b"abcd"}, "jokes": []}
    assert applied(None, msgspec.msgpack.encode(said)) == Report(n_live=3)


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode({"figures": "many"})])
def test_what_is_no_change_is_refused(body: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        applied(None, body)
