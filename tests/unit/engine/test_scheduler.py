"""Which rows a step is made of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.backend import Row
from serve_app.engine.cost_model import CostModel, Measurements
from serve_app.engine.fake import FakeVocabulary
from serve_app.engine.scheduler import Pass, Scheduler
from serve_app.engine.sequence import Sequence
from serve_app.types import GenerationRequest, SamplingParams

N_CTX_SLOT = 1000


class NoSampler:
    """Sampling is not the scheduler's."""

    def sample(self, row: int) -> int:
        raise NotImplementedError

    def close(self) -> None:
        """Holds nothing."""


def running(slot_id: int, n_prompt: int, *, n_cached: int = 0) -> Sequence:
    """A sequence in a slot; its tokens are 1000 times the slot's number, and their position."""
    prompt = tuple(1000 * slot_id + i for i in range(n_prompt))
    sequence = Sequence(
        GenerationRequest(str(slot_id), prompt, SamplingParams()), lambda delta: None
    )
    sequence.admit(slot_id, n_cached, NoSampler())
    return sequence


def scheduler(n_batch: int, *sequences: Sequence) -> Scheduler:
    made = Scheduler(n_batch)
    for sequence in sequences:
        made.add(sequence)
    return made


def carry_out(plan: list[Pass]) -> None:
    """What a step does to the sequences: their rows are cached, complete ones get a token."""
    for chunk in (chunk for one in plan for chunk in one.chunks):
        chunk.sequence.advance(chunk.n_rows)
        if chunk.sample_row is not None:
            chunk.sequence.accept(ord("x"), FakeVocabulary(), N_CTX_SLOT)


def served(plan: list[Pass]) -> list[tuple[int, int]]:
    """(slot, rows) of each chunk, pass by pass."""
    return [(chunk.sequence.slot_id, chunk.n_rows) for one in plan for chunk in one.chunks]


@pytest.mark.parametrize(
    ("n_batch", "sequences", "steps"),
    [
        pytest.param(8, [], [[]], id="nothing runs"),
        pytest.param(8, [(0, 5)], [[(0, 5)], [(0, 1)], [(0, 1)]], id="a prompt, then its tokens"),
        pytest.param(4, [(0, 9)], [[(0, 4)], [(0, 4)], [(0, 1)], [(0, 1)]], id="prompt in chunks"),
        pytest.param(8, [(0, 3), (1, 4)], [[(0, 3), (1, 4)]], id="prompts together"),
        pytest.param(8, [(2, 3), (0, 4)], [[(0, 4), (2, 3)]], id="ordered by lane, not by age"),
        pytest.param(
            4,
            [(0, 1), (1, 8)],
            [[(0, 1), (1, 4)], [(0, 1), (1, 4)], [(0, 1), (1, 1)]],
            id="a decoder has a row in every step, beside the prompts' budget",
        ),
        pytest.param(
            4,
            [(0, 8), (1, 8), (2, 8)],
            [[(0, 4)], [(1, 4)], [(2, 4)], [(0, 4)], [(0, 1), (1, 4)], [(0, 1), (1, 1), (2, 4)]],
            id="prompts that do not fit take turns",
        ),
        pytest.param(
            4, [(0, 20), (1, 3)], [[(0, 4)], [(0, 1), (1, 3)]], id="short prompt behind a long one"
        ),
    ],
)
def test_steps(
    n_batch: int, sequences: list[tuple[int, int]], steps: list[list[tuple[int, int]]]
) -> None:
    made = scheduler(n_batch, *(running(slot_id, n) for slot_id, n in sequences))
    for expected in steps:
        plan = made.schedule()
        assert served(plan) == expected
        carry_out(plan)


def test_only_the_last_row_of_a_complete_prompt_wants_logits() -> None:
    made = scheduler(4, running(0, 2), running(1, 3))
    (plan,) = made.schedule()
    rows: list[Row] = [(0, 0, 0, False), (1, 1, 0, True), (1000, 0, 1, False), (1001, 1, 1, False)]
    assert plan.rows == rows
    assert [chunk.sample_row for chunk in plan.chunks] == [1, None]


def test_cached_tokens_are_not_fed() -> None:
    (plan,) = scheduler(8, running(0, 4, n_cached=3)).schedule()
    assert plan.rows == [(3, 3, 0, True)]


def test_planning_alone_changes_no_sequence() -> None:
    made = scheduler(8, running(0, 3))
    assert made.schedule() == made.schedule()


def test_removed_sequence_is_not_served() -> None:
    gone, stays = running(0, 3), running(1, 3)
    made = scheduler(8, gone, stays)
    made.remove(gone)
    assert made.running == (stays,)
    assert served(made.schedule()) == [(1, 3)]


@given(
    n_batch=st.integers(1, 8),
    prompts=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 15)), min_size=1, max_size=6),
)
def test_every_plan_is_fair_and_fits(n_batch: int, prompts: list[tuple[int, int]]) -> None:
    """`prompts` are (steps that pass before it arrives, length)."""
    made = Scheduler(n_batch)
    arrivals = sorted((step, slot, n) for slot, (step, n) in enumerate(prompts))
    lanes: dict[int, list[int]] = {slot: [] for slot in range(len(prompts))}
    for step in range(7 + sum(n for _, n in prompts)):
        for arrived, slot, n in arrivals:
            if arrived == step:
                made.add(running(slot, n))
        before = {sequence.slot_id: sequence for sequence in made.running}
        pending = {slot: sequence.n_pending for slot, sequence in before.items()}
        plan = made.schedule()
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
            assert position == len(lanes[slot])
            assert token == before[slot].tokens[position]
            lanes[slot].append(token)
            assert wants_logits == (len(lanes[slot]) == len(before[slot].tokens))
        carry_out(plan)
    assert all(s.n_generated > 0 for s in made.running), "a prompt starved"
    assert all(lanes[s.slot_id] == s.tokens[:-1] for s in made.running)


# A pass over n sequences' next tokens takes 20 ms + 10 ms each; of a prompt, 1 ms a row, and 63 rows
# cost as much as 64.
SLOW = Measurements(
    decode_s={1: 0.03, 2: 0.04, 4: 0.06},
    prefill_s={16: 0.016, 32: 0.032, 48: 0.064, 64: 0.064, 128: 0.128, 256: 0.256},
)


def stalling(max_stall_s: float | None, *sequences: Sequence) -> Scheduler:
    made = Scheduler(256, CostModel(SLOW), max_stall_s)
    for sequence in sequences:
        made.add(sequence)
    return made


@pytest.mark.parametrize(
    ("max_stall_s", "sequences", "expected"),
    [
        pytest.param(0.1, [(0, 500)], [(0, 256)], id="nobody decodes, so nobody waits"),
        pytest.param(0.11, [(0, 1), (1, 500)], [(0, 1), (1, 64)], id="as much as fits"),
        pytest.param(None, [(0, 1), (1, 500)], [(0, 1), (1, 256)], id="no bound"),
        pytest.param(1.0, [(0, 1), (1, 500)], [(0, 1), (1, 256)], id="a wide bound"),
        pytest.param(0.1, [(0, 1), (1, 20), (2, 90)], [(0, 1), (1, 20), (2, 32)], id="two prompts"),
        pytest.param(0.085, [(0, 1), (1, 500)], [(0, 1), (1, 32)], id="not 48, which costs 64"),
        pytest.param(0.01, [(0, 1), (1, 500)], [(0, 1), (1, 16)], id="as long as decoding takes"),
        pytest.param(
            0.01, [(0, 1), (1, 1), (2, 500), (3, 5)], [(0, 1), (1, 1), (2, 32)],
            id="decoding two takes longer, and so may the prompts",
        ),
    ],
)  # fmt: skip
def test_prompts_get_what_the_stall_budget_leaves(
    max_stall_s: float | None, sequences: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    made = stalling(max_stall_s, *(running(slot_id, n) for slot_id, n in sequences))
    assert served(made.schedule()) == expected


def test_a_prompt_gets_on_even_if_nothing_fits() -> None:
    costs = CostModel(Measurements(decode_s={1: 0.001}, prefill_s={16: 9.0, 32: 9.0}))
    made = Scheduler(256, costs, 0.1)
    made.add(running(0, 1))
    made.add(running(1, 100))
    assert served(made.schedule()) == [(0, 1), (1, 16)]


def test_deep_prompts_get_smaller_chunks() -> None:
    costs = CostModel(Measurements(SLOW.decode_s, SLOW.prefill_s, row_and_cached_token_s=1e-6))
    made = Scheduler(256, costs, 0.1)
    made.add(running(0, 1))
    made.add(running(1, 2000, n_cached=1500))
    assert served(made.schedule()) == [(0, 1), (1, 16)]
