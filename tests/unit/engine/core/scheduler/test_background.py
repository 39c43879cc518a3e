"""Which rows a step has of what is in the background."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.base.values.answers import Sampled
from serve_app.engine.core.scheduler.scheduler import Scheduler
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.core.step_budget import StepBudget
from serve_app.engine.costs.cost_model import CostModel, Profile
from tests.doubles.backend import FakeVocabulary
from tests.unit.engine.core.scheduler.test_scheduler import N_CTX_SLOT, NOW, running, served

DEAR = {1: 0.1, 2: 0.2, 4: 0.3, 8: 0.6}
"""Seconds of so many decoding rows where cores are few."""
FREE = {1: 0.1, 2: 0.1, 4: 0.101, 8: 0.15}
"""And where all wait for memory."""
PROMPTS = {16: 0.1, 64: 0.4, 256: 1.6}


def behind(one: Sequence) -> Sequence:
    one.request = replace(one.request, background=True)
    one.is_behind = True
    return one


def decoding(slot_id: int) -> Sequence:
    one = running(slot_id, 2)
    one.advance(2)
    one.accept([Sampled(ord("x"))], FakeVocabulary(), N_CTX_SLOT)
    return one


def scheduler(
    decode_s: dict[int, float], *sequences: Sequence, cancellable: bool = True
) -> Scheduler:
    costs = CostModel(Profile(decode_s=decode_s, prefill_s=PROMPTS))
    made = Scheduler(256, costs, StepBudget(250, lambda: 0.0), n_rewind=256 if cancellable else 0)
    for one in sequences:
        made.running.append(one)
    made.schedule(NOW)  # nobody is new any more
    return made


@pytest.mark.parametrize(
    ("decode_s", "n_free"),
    [pytest.param(DEAR, 0, id="few cores"), pytest.param(FREE, 3, id="bound by memory")],
)
def test_beside_streams_only_what_is_free(decode_s: dict[int, float], n_free: int) -> None:
    patient = [behind(decoding(slot_id)) for slot_id in range(1, 8)]
    made = scheduler(decode_s, decoding(0), *patient, behind(running(8, 300)))
    assert served(made.schedule(NOW)) == [(slot_id, 1) for slot_id in range(1 + n_free)]
    assert not made.served_all


def test_beside_prompts_nothing() -> None:
    made = scheduler(FREE, running(0, 100), behind(decoding(1)), behind(running(2, 300)))
    assert served(made.schedule(NOW)) == [(0, 100)]


@pytest.mark.parametrize(
    ("after_s", "n_rows"),
    [
        pytest.param(0.1, 40, id="a quarter of a second"),
        pytest.param(5.0, 80, id="a tenth of the time"),
        pytest.param(100.0, 256, id="two seconds"),
    ],
)
def test_alone_they_may_lose_more_the_longer_nobody_came(after_s: float, n_rows: int) -> None:
    somebody = decoding(2)
    made = scheduler(DEAR, behind(decoding(0)), behind(running(1, 300)), somebody)
    made.running.remove(somebody)
    assert served(made.schedule(NOW + after_s)) == [(1, n_rows)]


def test_alone_they_compute_prompts_before_they_decode() -> None:
    late = behind(running(1, 100))
    made = scheduler(DEAR, behind(decoding(0)), late)
    assert served(made.schedule(NOW + 100)) == [(1, 100)]
    late.advance(99)
    assert served(made.schedule(NOW + 100)) == [(0, 1), (1, 1)]


def test_where_prompts_and_tokens_share_a_batch_neither_waits() -> None:
    made = scheduler(DEAR, behind(decoding(0)), behind(running(1, 100)))
    made.mix(True)
    assert served(made.schedule(NOW + 100)) == [(0, 1), (1, 100)]


def test_where_a_pass_cannot_be_left_they_keep_to_the_bound() -> None:
    pair = behind(decoding(0)), behind(running(1, 300))
    bounded = scheduler(DEAR, *pair, cancellable=False).schedule(NOW)
    ((_, _), (slot_id, n_rows)) = served(bounded)
    assert slot_id == 1
    assert n_rows < 64
