"""Which rows a step is made of."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.base.formats import Row
from serve_app.base.sampling import SamplingParams
from serve_app.base.values.answers import Sampled, TokenLogprobs
from serve_app.base.values.requests import GenerationRequest
from serve_app.engine.cache.packing import token_array
from serve_app.engine.core.scheduler.batch import Batch
from serve_app.engine.core.scheduler.scheduler import Scheduler
from serve_app.engine.core.sequence import Sequence
from serve_app.engine.core.step_budget import StepBudget
from serve_app.engine.costs.cost_model import CostModel, Profile
from serve_app.engine.guests.drafts.drafting import MAX_DRAFTED_ROWS, Drafting
from tests.doubles.backend import FakeVocabulary
from tests.unit.engine.harness import steps

N_CTX_SLOT = 1000
NOW = 100.0
"""On the clock of `submitted`: nobody has waited longer than that."""


class NoSampler:
    """Sampling is not the scheduler's."""

    def sample(self, row: int) -> Sampled:
        raise NotImplementedError

    def score(self, row: int, token: int) -> TokenLogprobs:
        raise NotImplementedError

    def close(self) -> None:
        """Holds nothing."""


def running(
    slot_id: int,
    n_prompt: int,
    *,
    n_cached: int = 0,
    waited_s: float | None = None,
    client: str = "",
) -> Sequence:
    """A sequence in a slot; its tokens are 1000 times the slot's number, and their position. Unless said,
    it has waited the longer the lower its slot."""
    prompt = tuple(1000 * slot_id + i for i in range(n_prompt))
    sequence = Sequence(
        GenerationRequest(str(slot_id), prompt, SamplingParams(), client=client), lambda delta: None
    )
    sequence.admit(slot_id, n_cached, NoSampler())
    sequence.trace.submitted = NOW - (10.0 - slot_id / 100 if waited_s is None else waited_s)
    sequence.trace.admitted = sequence.trace.submitted
    return sequence


def streaming(slot_id: int, n_past: int = 1) -> Sequence:
    """A sequence that has begun to answer: its next token is to be computed."""
    sequence = running(slot_id, n_past)
    sequence.advance(n_past)
    sequence.accept([Sampled(ord("x"))], FakeVocabulary(), N_CTX_SLOT)
    return sequence


def scheduler(n_batch: int, *sequences: Sequence) -> Scheduler:
    made = Scheduler(n_batch)
    for sequence in sequences:
        made.running.append(sequence)
    return made


def carry_out(plan: list[Batch]) -> None:
    """What a step does to the sequences: their rows are cached, complete ones get a token."""
    for chunk in (chunk for one in plan for chunk in one.chunks):
        chunk.sequence.advance(chunk.n_rows)
        if chunk.sample_row is not None:
            chunk.sequence.accept([Sampled(ord("x"))], FakeVocabulary(), N_CTX_SLOT)


def served(plan: list[Batch]) -> list[tuple[int, int]]:
    """(slot, rows) of each chunk, batch by batch."""
    return [(chunk.sequence.slot_id, chunk.n_rows) for one in plan for chunk in one.chunks]


@pytest.mark.parametrize(
    ("n_batch", "sequences", "steps"),
    [
        pytest.param(8, [], [[]], id="nothing runs"),
        pytest.param(8, [(0, 5)], [[(0, 5)], [(0, 1)], [(0, 1)]], id="a prompt, then its tokens"),
        pytest.param(4, [(0, 9)], [[(0, 4)], [(0, 4)], [(0, 1)], [(0, 1)]], id="prompt in chunks"),
        pytest.param(8, [(0, 3), (1, 4)], [[(0, 3), (1, 4)]], id="prompts together"),
        pytest.param(8, [(2, 3), (0, 4)], [[(0, 4), (2, 3)]], id="ordered by slot, not by age"),
        pytest.param(
            4,
            [(0, 1), (1, 8)],
            [[(0, 1), (1, 4)], [(0, 1), (1, 4)], [(0, 1), (1, 1)]],
            id="a decoder has a row in every step, beside the prompts' budget",
        ),
        pytest.param(
            4,
            [(0, 8), (1, 8), (2, 8)],
            [[(0, 4)], [(0, 4)], [(0, 1), (1, 4)], [(0, 1), (1, 4)], [(0, 1), (1, 1), (2, 4)]],
            id="prompts that do not fit go one by one",
        ),
        pytest.param(
            4,
            [(0, 20), (1, 3)],
            [[(0, 1), (1, 3)], [(1, 1), (0, 4)]],
            id="a short prompt overtakes",
        ),
    ],
)
def test_steps(
    n_batch: int, sequences: list[tuple[int, int]], steps: list[list[tuple[int, int]]]
) -> None:
    made = scheduler(n_batch, *(running(slot_id, n) for slot_id, n in sequences))
    for expected in steps:
        plan = made.schedule(NOW)
        assert served(plan) == expected
        carry_out(plan)


def test_a_first_token_does_not_wait_for_prompts_of_a_client_with_more_slots() -> None:
    greedy = [running(slot_id, 40, waited_s=5.0, client="greedy") for slot_id in range(3)]
    other = running(3, 4, waited_s=1.0, client="modest")
    made = scheduler(16, *greedy, other)
    steps = []
    for _ in range(3):
        plan = made.schedule(NOW)
        steps.append(served(plan))
        carry_out(plan)
    assert steps == [[(3, 4)], [(3, 1), (0, 16)], [(3, 1), (0, 16)]]


def test_clients_with_as_many_slots_share_a_step() -> None:
    made = scheduler(16, running(0, 40, client="a"), running(1, 4, client="b"))
    assert served(made.schedule(NOW)) == [(0, 12), (1, 4)]


def test_beside_others_a_clients_prompts_go_one_after_the_other() -> None:
    """Short ones go together; without others, all do."""
    long = [running(slot_id, 200, client="many") for slot_id in range(2)]
    short = [running(slot_id, 60, client="many") for slot_id in (2, 3, 4)]
    other = running(5, 200, waited_s=1.0, client="one")
    assert served(scheduler(900, *long, other).schedule(NOW)) == [(0, 200), (5, 200)]
    assert served(scheduler(900, *short, other).schedule(NOW)) == [
        *((slot_id, 60) for slot_id in (2, 3, 4)),
        (5, 200),
    ]
    assert served(scheduler(900, *long).schedule(NOW)) == [(0, 200), (1, 200)]


def test_slots_of_one_client_share_what_it_may_hurry() -> None:
    """Each has waited for half as long again by what it needs, but there are two of them."""
    two = [running(slot_id, 20, waited_s=6.0, client="two") for slot_id in range(2)]
    made = scheduler(10, *two, running(2, 20, waited_s=4.0, client="one"))
    assert served(made.schedule(NOW)) == [(2, 10)]


def test_only_the_last_row_of_a_complete_prompt_wants_logits() -> None:
    made = scheduler(4, running(0, 2), running(1, 3))
    (plan,) = made.schedule(NOW)
    rows: list[Row] = [(0, 0, 0, False), (1, 1, 0, True), (1000, 0, 1, False), (1001, 1, 1, False)]
    assert plan.rows == rows
    assert [chunk.sample_row for chunk in plan.chunks] == [1, None]


def test_cached_tokens_are_not_fed() -> None:
    (plan,) = scheduler(8, running(0, 4, n_cached=3)).schedule(NOW)
    assert plan.rows == [(3, 3, 0, True)]


def test_planning_alone_changes_no_sequence() -> None:
    made = scheduler(8, running(0, 3))
    assert made.schedule(NOW) == made.schedule(NOW)


def test_removed_sequence_is_not_served() -> None:
    gone, stays = running(0, 3), running(1, 3)
    made = scheduler(8, gone, stays)
    made.running.remove(gone)
    assert made.running == [stays]
    assert served(made.schedule(NOW)) == [(1, 3)]


@given(
    n_batch=st.integers(1, 8),
    prompts=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 15)), min_size=1, max_size=6),
)
def test_every_plan_is_fair_and_fits(n_batch: int, prompts: list[tuple[int, int]]) -> None:
    """`prompts` are (steps that pass before it arrives, length)."""
    made = Scheduler(n_batch)
    arrivals = sorted((step, slot, n) for slot, (step, n) in enumerate(prompts))
    slots: dict[int, list[int]] = {slot: [] for slot in range(len(prompts))}
    for step in range(7 + sum(n for _, n in prompts)):
        for arrived, slot, n in arrivals:
            if arrived == step:
                made.running.append(running(slot, n))
        before = {sequence.slot_id: sequence for sequence in made.running}
        pending = {slot: sequence.n_pending for slot, sequence in before.items()}
        plan = made.schedule(NOW)
        taken = dict(served(plan))
        decoding = sum(n == 1 for n in pending.values())
        rows = [row for one in plan for row in one.rows]
        prompt_rows = len(rows) - decoding
        assert prompt_rows <= n_batch
        for one in plan:
            assert [row[2] for row in one.rows] == sorted(row[2] for row in one.rows)
            assert len({chunk.n_rows == 1 for chunk in one.chunks}) == 1 or one is plan[-1]
        assert all(taken.get(slot) == 1 for slot, n in pending.items() if n == 1)
        most = sum(n for n in pending.values() if n > 1)
        assert prompt_rows == min(n_batch, most), "room was left unused"
        for token, position, slot, wants_logits in rows:
            assert position == len(slots[slot])
            assert token == before[slot].tokens[position]
            slots[slot].append(token)
            assert wants_logits == (len(slots[slot]) == len(before[slot].tokens))
        carry_out(plan)
    assert all(s.n_generated > 0 for s in made.running), "a prompt starved"
    assert all(slots[s.slot_id] == list(s.tokens[:-1]) for s in made.running)


# A batch over n sequences' next tokens takes 20 ms + 10 ms each; of a prompt, 1 ms a row, and from 33 rows
# on as much as 64.
SLOW = Profile(
    decode_s={1: 0.03, 2: 0.04, 4: 0.06, 8: 0.1},
    prefill_s={16: 0.016, 32: 0.032, 33: 0.064, 64: 0.064, 128: 0.128, 256: 0.256},
)


def still(max_stall_s: float, elapsed_s: float = 0.0) -> StepBudget:
    """A budget of which so much has gone by."""
    clock = iter([0.0])
    return StepBudget(1000 * max_stall_s, lambda: next(clock, elapsed_s))


def stalling(max_stall_s: float, *sequences: Sequence, **changed: Any) -> Scheduler:
    made = Scheduler(256, CostModel(SLOW), still(max_stall_s), **changed)
    for sequence in sequences:
        made.running.append(sequence)
    return made


@pytest.mark.parametrize(
    ("max_stall_s", "n_streams", "prompts", "expected"),
    [
        pytest.param(0.11, 1, [500], [64], id="as much as fits"),
        pytest.param(math.inf, 1, [500], [256], id="no bound"),
        pytest.param(1.0, 1, [500], [256], id="a wide bound"),
        pytest.param(0.1, 1, [20, 90], [20, 32], id="two prompts"),
        pytest.param(0.085, 1, [500], [32], id="not 40, which cost 64"),
        pytest.param(0.04, 1, [500], [28], id="as long as decoding takes"),
        pytest.param(0.01, 1, [500], [16], id="but never longer than the bound"),
        pytest.param(0.04, 2, [500], [32], id="decoding two takes longer, and so may prompts"),
        pytest.param(0.04, 1, [2000], [28], id="the margin cannot take all"),
    ],
)
def test_prompts_get_what_the_stall_budget_leaves(
    max_stall_s: float, n_streams: int, prompts: list[int], expected: list[int]
) -> None:
    streams = [streaming(slot) for slot in range(n_streams)]
    made = stalling(
        max_stall_s, *streams, *(running(n_streams + i, n) for i, n in enumerate(prompts))
    )
    rows = [1] * n_streams + expected
    assert served(made.schedule(NOW)) == list(enumerate(rows))


@pytest.mark.parametrize(
    ("max_stall_s", "n_streams", "mixed", "expected"),
    [
        pytest.param(0.25, 0, False, 1.0, id="nobody streams"),
        pytest.param(0.25, 1, False, (0.03 + 0.192) / 0.192, id="chunks of 192 rows"),
        pytest.param(0.1, 4, False, (0.06 + 0.032) / 0.032, id="chunks of 32 rows"),
        pytest.param(
            0.1, 8, False, (0.1 + 0.088) / 0.088, id="chunks of 88 rows, as long as the bound"
        ),
        pytest.param(math.inf, 8, False, (0.1 + 0.256) / 0.256, id="no bound"),
        pytest.param(0.25, 8, True, 0.224 / 0.216, id="chunks of 216 rows in a pass of 224"),
    ],
)
def test_streams_slow_prompts_by_what_a_step_leaves(
    max_stall_s: float, n_streams: int, mixed: bool, expected: float
) -> None:
    made = stalling(max_stall_s, *(streaming(i) for i in range(n_streams)), mixed=mixed)
    assert made.crowding == pytest.approx(expected)


def test_what_guests_took_is_taken_from_prompts() -> None:
    def n_rows(elapsed_s: float) -> int:
        made = Scheduler(256, CostModel(SLOW), still(0.3, elapsed_s))
        made.running.append(streaming(0))
        made.running.append(running(1, 200))
        return dict(served(made.schedule(NOW)))[1]

    assert n_rows(0.0) > n_rows(0.1) > n_rows(9.0) > 0


def test_the_step_that_the_documents_work_through() -> None:
    """The numbers of docs/develop/scheduler.md, by hand: 0.92 * 250 - 28.5 = 201.5 ms fit 96 rows."""
    measured = Profile(
        decode_s={1: 0.014, 2: 0.025, 4: 0.032, 16: 0.078},
        prefill_s={16: 0.05, 32: 0.075, 64: 0.14, 128: 0.26, 256: 0.51},
    )
    prompt = running(3, 2048, n_cached=512, waited_s=0.1)
    made = Scheduler(512, CostModel(measured), still(0.25))
    for sequence in (*(streaming(slot, 200) for slot in range(3)), prompt):
        made.running.append(sequence)
    n_steps = 0
    while prompt.n_pending > 1:
        plan = made.schedule(NOW)
        assert [len(one.rows) for one in plan] == [3, 96]
        carry_out(plan)
        n_steps += 1
    assert n_steps == 16


def test_a_prompt_gets_on_even_if_nothing_fits() -> None:
    costs = CostModel(Profile(decode_s={1: 0.001}, prefill_s={16: 9.0, 32: 9.0}))
    made = Scheduler(256, costs, still(0.1))
    made.running.append(streaming(0))
    made.running.append(running(1, 100))
    assert served(made.schedule(NOW)) == [(0, 1), (1, 16)]


def test_deep_prompts_get_smaller_chunks() -> None:
    deep = {n: s + n * 1e-3 for n, s in SLOW.prefill_s.items()}
    made = Scheduler(256, CostModel(replace(SLOW, depth=1000, deep_prefill_s=deep)), still(0.1))
    made.running.append(streaming(0))
    made.running.append(running(1, 2000, n_cached=1500))
    assert served(made.schedule(NOW)) == [(0, 1), (1, 24)]


# -- before the first stream ----------------------------------------------------------------------


def test_a_burst_gets_its_first_tokens_together() -> None:
    made = stalling(1.0, *(running(slot, 100, waited_s=0.0) for slot in range(4)))
    plans = []
    while not any(one.n_generated for one in made.running):
        plans.append(made.schedule(NOW))
        carry_out(plans[-1])
    # The first three but for their last tokens, as the last one is still to be computed; then all of that.
    assert [served(plan) for plan in plans] == [[(0, 99), (1, 99), (2, 56)], [(2, 44), (3, 100)]]
    carry_out(made.schedule(NOW))
    assert [one.n_generated for one in made.running] == [1, 1, 2, 2]


def test_a_short_prompt_is_not_held_back_for_long_ones() -> None:
    made = stalling(0.1, running(0, 20, waited_s=0.0), running(1, 900, waited_s=0.0))
    assert served(made.schedule(NOW))[0] == (0, 20)


def test_nobody_is_held_back_for_longer_than_its_share() -> None:
    fresh = [running(slot, 150, waited_s=0.0) for slot in range(2)]
    assert served(stalling(1.0, *fresh).schedule(NOW)) == [(0, 149), (1, 106)]
    tired = [running(slot, 150, waited_s=0.4) for slot in range(2)]
    assert served(stalling(1.0, *tired).schedule(NOW)) == [(0, 150), (1, 106)]


def test_who_waited_for_a_prefix_is_held_back_for_the_others() -> None:
    """Four that start from one: 100 rows in all, 10 s after they came, as soon as it is there."""
    prompts = [running(slot, 525, n_cached=500) for slot in range(4)]
    for one in prompts:
        one.trace.admitted = NOW
    made = Scheduler(60, CostModel(SLOW), still(1.0))
    for one in prompts:
        made.running.append(one)
    assert served(made.schedule(NOW)) == [(0, 24), (1, 24), (2, 10)]


def test_a_chunk_ends_with_the_prefix_that_others_wait_for() -> None:
    made = stalling(1.0, running(0, 150))
    made.running[0].n_awaited = 120
    for n_rows in (120, 30):
        plan = made.schedule(NOW)
        assert served(plan) == [(0, n_rows)]
        carry_out(plan)


def test_nobody_is_held_back_without_a_bound_or_beside_a_stream() -> None:
    prompts = [running(slot, 150, waited_s=0.0) for slot in range(2)]
    assert served(stalling(math.inf, *prompts).schedule(NOW)) == [(0, 150), (1, 106)]
    beside = served(stalling(1.0, streaming(2), *prompts).schedule(NOW))
    assert beside == [(2, 1), (0, 150), (1, 106)]


def test_streams_begin_when_three_quarters_of_a_burst_have_their_prompts() -> None:
    made = stalling(1.0, *(running(slot, 128, waited_s=0.0) for slot in range(8)))
    plans = []
    for _ in range(4):
        plans.append(made.schedule(NOW))
        carry_out(plans[-1])
    assert [served(plan) for plan in plans] == [
        [(0, 127), (1, 127)],
        [(2, 127), (3, 127)],
        [(4, 128), (5, 128)],
        [(slot, 1) for slot in range(6)],  # first tokens wait for no prompt
    ]
    assert [one.n_generated for one in made.running] == [1, 1, 1, 1, 2, 2, 0, 0]


# -- the margin, splits, drafts and mixed batches --------------------------------------------------


def test_the_margin_follows_what_steps_take() -> None:
    stream, prompt = streaming(0), running(1, 900)
    made = stalling(0.1, stream, prompt)
    assert served(made.schedule(NOW)) == [(0, 1), (1, 32)]
    for _ in range(300):
        made.observe(made.schedule(NOW), 0.05)
    assert served(made.schedule(NOW)) == [(0, 1), (1, 64)]
    for _ in range(30):
        made.observe(made.schedule(NOW), 0.2)
    assert served(made.schedule(NOW)) == [(0, 1), (1, 28)]


def test_a_decode_batch_is_split_where_that_is_faster() -> None:
    costs = CostModel(Profile({1: 0.02, 2: 0.07, 4: 0.03, 8: 0.05}, {8: 0.1}))
    made = Scheduler(256, costs)
    for slot in range(2):
        made.running.append(streaming(slot))
    assert [served([one]) for one in made.schedule(NOW)] == [[(0, 1), (1, 1)]]  # tried now and then
    costs.observe_decode(2, 2, 0, 0.07)
    assert [served([one]) for one in made.schedule(NOW)] == [[(0, 1)], [(1, 1)]]


def repeating(slot_id: int) -> Sequence:
    """A stream whose text repeats itself."""
    sequence = streaming(slot_id)
    sequence.tokens[:] = token_array([1, 2, 3, 4, 5, 6, 7, 8] * 4)
    sequence.n_past = len(sequence.tokens) - 1
    return sequence


DRAFTS_PAY = Profile({1: 0.1, 2: 0.2, 4: 0.4}, {8: 0.1}, {2: 0.1, 4: 0.11, 8: 0.3})


def drafting(profile: Profile, *, speculate: bool = True, left_s: float = math.inf) -> Scheduler:
    costs, budget = CostModel(profile), still(left_s)
    made = Scheduler(256, costs, budget)
    if speculate:
        made.drafts = Drafting(costs, steps(budget), lookup=True)
    return made


def test_drafts_take_no_longer_than_the_budget_or_twice_as_long_as_decoding() -> None:
    slow = Profile({1: 0.1, 2: 0.2, 4: 0.4}, {8: 0.1}, {2: 0.15, 4: 0.22, 8: 0.3, 16: 0.4})

    def n_drafted(bound_s: float) -> int:
        made, sequence = drafting(slow, left_s=bound_s), repeating(0)
        assert isinstance(made.drafts, Drafting)
        for _ in range(30):
            made.drafts.record(sequence, 5, 5)
        made.running.append(sequence)
        (plan,) = made.schedule(NOW)
        return len(plan.chunks[0].draft)

    assert [n_drafted(bound_s) for bound_s in (1.0, 0.25, 0.01)] == [15, 3, 1]


def test_drafts_are_verified_where_that_pays() -> None:
    made = drafting(DRAFTS_PAY)
    made.running.append(repeating(0))
    (plan,) = made.schedule(NOW)
    (chunk,) = plan.chunks
    assert chunk.draft == (1, 2, 3)  # 4 rows take hardly longer than 1, 6 would
    assert [row[:2] for row in plan.rows] == [(8, 31), (1, 32), (2, 33), (3, 34)]
    assert all(row[3] for row in plan.rows)


@pytest.mark.parametrize("speculate", [True, False])
def test_no_drafts_where_they_do_not_pay(speculate: bool) -> None:
    costs = Profile({1: 0.1}, {8: 0.1}, {2: 0.2, 8: 0.8}) if speculate else DRAFTS_PAY
    made = drafting(costs, speculate=speculate)
    made.running.append(repeating(0))
    assert [len(one.rows) for one in made.schedule(NOW)] == [1]


@pytest.mark.parametrize("two_rows_s", [0.101, 0.11, 0.15])
def test_drafts_that_are_always_wrong_cost_little(two_rows_s: float) -> None:
    profile = Profile(
        {1: 0.1}, {8: 0.1}, {2: two_rows_s, 4: 0.02 + two_rows_s, 8: 0.08 + two_rows_s}
    )
    made, sequence, costs = drafting(profile), repeating(0), CostModel(profile)
    made.running.append(sequence)
    assert isinstance(made.drafts, Drafting)
    spent_s, n_tried, n_steps = 0.0, 0, 400
    for _ in range(n_steps):
        (plan,) = made.schedule(NOW)
        n_drafted = len(plan.chunks[0].draft)
        spent_s += costs.verify_s(1, n_drafted, 0)
        if n_drafted:
            n_tried += 1
            made.drafts.record(sequence, n_drafted, 0)
    assert 0 < n_tried < 40
    assert spent_s < 1.01 * n_steps * 0.1


def test_drafts_of_many_are_of_one_length_and_bounded() -> None:
    free = Profile(dict.fromkeys(range(1, 65), 0.1), {8: 0.1})
    made = drafting(free)
    for slot in range(5):
        made.running.append(repeating(slot))
    (plan,) = made.schedule(NOW)
    assert {len(chunk.draft) for chunk in plan.chunks} == {3}
    assert sum(len(chunk.draft) for chunk in plan.chunks) <= MAX_DRAFTED_ROWS


def test_with_a_unified_cache_all_share_a_batch() -> None:
    made = stalling(0.1, streaming(0), streaming(2), running(1, 500), mixed=True)
    (plan,) = made.schedule(NOW, n_cells=40)
    assert served([plan]) == [(0, 1), (1, 86), (2, 1)]
    assert (plan.depth, plan.n_cells) == (2 / 88, 40)
    assert (plan.decodes, plan.prefills) == (True, True)
