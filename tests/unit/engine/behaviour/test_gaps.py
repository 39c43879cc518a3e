"""Idle slots between busy ones: computed along for nothing, and left as they were."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.base.values.answers import FinishReason
from serve_app.engine.core.scheduler.batch import SequenceRows, plan_batch
from serve_app.engine.costs.cost_model import Profile
from tests.doubles.backend import FakeBackend
from tests.unit.engine.core.scheduler.test_scheduler import streaming
from tests.unit.engine.harness import continuation, endless, options, request, running, start

FEW_BATCHES = Profile(dict.fromkeys((1, 2, 4, 8), 1.0), {8: 1e-6, 64: 1e-6})
"""A batch takes as long for many rows as for one. What batches really take here is learned slowly."""
LETTERS = "abcdef"


def test_a_gap_gets_a_row_at_the_end_of_its_slot() -> None:
    turns = [SequenceRows(streaming(slot, n_past=3), 1) for slot in (0, 3)]
    plan = plan_batch(turns, slot_ends={0: 3, 1: 7, 2: 0, 3: 3})
    assert [(row[1:]) for row in plan.rows] == [
        (3, 0, True),
        (7, 1, False),
        (0, 2, False),
        (3, 3, True),
    ]
    assert plan.fillers == ((1, 7), (2, 0))
    assert [chunk.sample_row for chunk in plan.chunks] == [0, 3]
    assert plan_batch(turns).fillers == ()


def gap_rows(backend: FakeBackend) -> int:
    """Rows that were computed to be dropped: their places in the cache were taken again."""
    places = [row[1:3] for batch in backend.batches for row in batch]
    return len(places) - len(set(places))


@pytest.mark.parametrize("fills_gaps", [True, False])
def test_sequences_that_are_left_apart_share_batches(fills_gaps: bool) -> None:
    backend = FakeBackend(endless, n_slots=6)
    backend.profile, backend.fills_gaps = FEW_BATCHES, fills_gaps
    with running(backend, options(6, speculate=False)) as engine:
        backend.hold()
        lengths = [24, 2, 2, 24, 2, 24]
        inboxes = start(
            engine,
            *(
                request(letter, letter * 3, max_tokens=n)
                for letter, n in zip(LETTERS, lengths, strict=True)
            ),
        )
        backend.resume()
        for inbox, letter, n in zip(inboxes, LETTERS, lengths, strict=True):
            assert inbox.wait().reason == FinishReason.LENGTH
            assert inbox.token_ids == continuation(letter.encode() * 3, n)
        assert [slot.n_past for slot in engine.stats().slots] == list(map(len, backend.slots))
    assert (gap_rows(backend) > 0) is fills_gaps
    assert engine.stats().tokens.generated_tokens == sum(lengths)


@settings(max_examples=60)
@given(
    prompts=st.lists(
        st.tuples(st.text("ab", min_size=1, max_size=20), st.integers(1, 20)),
        min_size=1,
        max_size=12,
    ),
    n_ctx_slot=st.integers(21, 48),
    cache_ram_bytes=st.sampled_from([0, 100_000]),
)
def test_answers_are_the_same(
    prompts: list[tuple[str, int]], n_ctx_slot: int, cache_ram_bytes: int
) -> None:
    backend = FakeBackend(endless, n_slots=6)
    backend.profile = FEW_BATCHES
    sizes = options(6, n_ctx_slot=n_ctx_slot, max_waiting=12, cache_ram_bytes=cache_ram_bytes)
    with running(backend, sizes) as engine:
        inboxes = start(
            engine, *(request(str(i), text, max_tokens=n) for i, (text, n) in enumerate(prompts))
        )
        for inbox, (text, max_tokens) in zip(inboxes, prompts, strict=True):
            inbox.wait()
            n_tokens = min(max_tokens, n_ctx_slot - len(text))
            assert inbox.token_ids == continuation(text.encode(), n_tokens)
        assert [slot.n_past for slot in engine.stats().slots] == list(map(len, backend.slots))
