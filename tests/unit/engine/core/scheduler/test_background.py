"""Which rows a step has of what is in the background."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_app.engine.autotune.cost_model import CostModel, Profile
from serve_app.engine.core.scheduler.backlog import Backlog
from serve_app.engine.core.scheduler.fair_queue import Accounts, FairQueue, SlotShares
from serve_app.engine.core.scheduler.scheduler import Scheduler
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.core.step_budget import StepBudget
from serve_app.types import Sampled, account
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
    made = Scheduler(256, costs, StepBudget(0.25, lambda: 0.0), n_rewind=256 if cancellable else 0)
    for one in sequences:
        made.add(one)
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
    made.remove(somebody)
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


def waiting(name: str, *, background: bool, priority: int = 0) -> Sequence:
    one = running(0, 4, client=name[0])
    one.request = replace(one.request, id=name, background=background, priority=priority)
    one.trace.admitted, one.is_behind = None, background
    return one


def test_who_is_waited_for_is_next() -> None:
    queue = FairQueue(lambda n_prompt, n: n_prompt + n, Accounts())
    queue.extend(
        [
            waiting("a1", background=True, priority=-9),
            waiting("a2", background=False, priority=9),
            waiting("b1", background=True),
            waiting("b2", background=False),
        ]
    )
    assert [one.request.id for one in queue] == ["b2", "a2", "a1", "b1"]


@pytest.mark.parametrize(
    ("asked", "background", "ahead"),
    [
        pytest.param("a b c d", "e1 e2", "", id="all keep to their shares"),
        pytest.param("m m m m m m", "m1 m2", "", id="nobody loses to itself"),
        pytest.param("m m m m m", "e1 e2 e3 e4 e5", "e1 e2 e3 e4", id="half of eight slots"),
        pytest.param("m m m m m", "e1 f1 e2 f2 f3", "e1 f1 e2 f2", id="a third, for each"),
        pytest.param("m m m a b c e", "e1 f1 f2", "f1", id="its other request has its share"),
        pytest.param("m m " + " ".join("abcdghijk"), "e1 e2", "e1", id="a slot at least"),
        pytest.param("M M M M M", "m1 e1 m2", "e1", id="its own batch has risen"),
        pytest.param("M M M M", "e1", "", id="and keeps to its share"),
    ],
)
def test_what_goes_beyond_a_share_takes_nothing_from_a_batch(
    asked: str, background: str, ahead: str
) -> None:
    """Names begin with their client's; a capital one is a batch of it that has risen."""
    people = [waiting(name, background=False) for name in asked.split()]
    for one in people:
        name = one.request.client
        risen = account(name.lower(), background=True)
        one.request = replace(one.request, client=risen if name.isupper() else name)
    lines = [waiting(name, background=True) for name in background.split()]
    shares = SlotShares(8)
    shares.rank_background([*people, *lines], 0.0)
    assert [one.request.id for one in lines if not one.is_behind] == ahead.split()
    shares.rank_background(lines, 0.0)
    assert all(one.is_behind for one in lines)


def test_who_will_be_back_at_once_has_a_share_too() -> None:
    people = [waiting("m", background=False) for _ in range(5)]
    lines = [waiting(f"e{n}", background=True) for n in range(5)]
    shares = SlotShares(8)
    shares.left("a", 1.0)
    shares.rank_background([*people, *lines], 1.1)
    assert [one.is_behind for one in lines] == [False, False, True, True, True]
    assert shares.has_share_left("e", people, 1.1)
    assert not shares.has_share_left("e", people[:2], 1.1)
    assert not shares.has_share_left("m", people, 1.1)


def test_what_a_client_has_in_the_background_is_not_held_against_it() -> None:
    accounts = Accounts()
    queue = FairQueue(lambda n_prompt, n: n_prompt + n, accounts)
    patient, own, other = (
        waiting("a1", background=True),
        waiting("a2", background=False),
        waiting("b", background=False),
    )
    queue.extend([patient, own, other])
    queue.admit(patient)
    queue.charge(patient, 1000.0)
    queue.charge(other, 1.0)
    assert [one.request.client for one in queue] == ["a", "b"]
    for one in (patient, own, other):
        queue.end(one)
    assert accounts.active == 0


def test_nobody_is_told_to_wait_for_it() -> None:
    backlog = Backlog(CostModel(Profile(decode_s=DEAR, prefill_s=PROMPTS)), 4)
    patient = [waiting(f"a{i}", background=True) for i in range(9)]
    forecast = backlog.forecast(patient)
    assert forecast.work_s == forecast.prefill_s == 0.0
    assert forecast.background_s > 1.0
    assert forecast.wait_s("a", {}, []) == 0.0
    own = waiting("a", background=False)
    assert backlog.forecast([*patient, own]).work_s == backlog.forecast([own]).work_s > 0
