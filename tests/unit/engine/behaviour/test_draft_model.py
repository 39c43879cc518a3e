"""A draft model: the same answers, in fewer batches; and none where it does not pay."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.base.formats import Row
from serve_app.base.values.answers import FinishReason
from serve_app.engine import EngineStats
from serve_app.engine.backends.base import GUESSED
from serve_app.engine.costs.cost_model import CostModel, Profile
from tests.doubles.backend import FakeBackend, Script
from tests.doubles.draft import CHEAP, FakeDraft
from tests.unit.engine.harness import (
    EOS,
    ask,
    continuation,
    endless,
    options,
    request,
    running,
    start,
)

STEP_S = 0.002
# Drafted rows cost nothing: what the backend below really takes.
DRAFTS_PAY = Profile(
    dict.fromkeys((1, 2, 3, 64), STEP_S),
    dict.fromkeys((8, 64), STEP_S),
    dict.fromkeys((2, 4, 8), STEP_S),
)
# A second row costs as much as a second batch.
DRAFTS_COST = Profile({1: 1.0, 64: 64.0}, {8: 1.0, 64: 8.0}, {2: 2.0, 4: 4.0, 8: 8.0})


SLOW = Profile({1: 0.002, 64: 0.065}, {8: 0.009, 64: 0.065}, {2: 0.003, 4: 0.005, 8: 0.009})


class SlowBackend(FakeBackend):
    """Takes what `SLOW` says: a millisecond, and one more for each row."""

    def decode(self, rows: Sequence[Row]) -> None:
        time.sleep(0.001 * (1 + len(rows)))
        super().decode(rows)


def alphabet(tokens: Sequence[int]) -> int:
    """The letter after the last one: no three tokens come twice in a short text."""
    return ord("a") + (tokens[-1] - ord("a") + 1) % 26


def half_right(tokens: Sequence[int]) -> int:
    return alphabet(tokens) if len(tokens) % 2 else ord("?")


def wrong(tokens: Sequence[int]) -> int:
    return ord("?")


def backend(
    guess: Script, *, n_slots: int = 1, script: Script = alphabet, profile: Profile = DRAFTS_PAY
) -> FakeBackend:
    made = FakeBackend(script, n_slots=n_slots, step_s=STEP_S)
    made.profile = profile
    made.draft = FakeDraft(guess, n_slots=n_slots)
    return made


def said(prompt: str, n: int) -> list[int]:
    tokens = list(prompt.encode())
    for _ in range(n):
        tokens.append(alphabet(tokens))
    return tokens[len(prompt) :]


def run(made: FakeBackend, n_tokens: int = 20, prompt: str = "x") -> EngineStats:
    with running(made, options(1, speculate=False)) as engine:
        assert ask(engine, request("a", prompt, max_tokens=n_tokens)).token_ids == said(
            prompt, n_tokens
        )
        return engine.stats()


def test_right_proposals_make_fewer_steps() -> None:
    stats = run(backend(alphabet), 40)
    assert stats.timing.steps <= 10
    assert stats.speculation.proposed_tokens == stats.speculation.drafted_tokens > 0
    assert stats.speculation.accepted_proposed_tokens == stats.speculation.accepted_tokens
    assert stats.speculation.draft_s > 0


def test_half_right_proposals() -> None:
    stats = run(backend(half_right), 40)
    assert 0 < stats.speculation.accepted_proposed_tokens < stats.speculation.proposed_tokens
    assert stats.timing.steps < 40


def test_wrong_proposals_are_hardly_tried() -> None:
    made = SlowBackend(alphabet, n_slots=1)
    made.profile = SLOW
    made.draft = FakeDraft(wrong, n_slots=1)
    with running(made, replace(options(1, speculate=False), n_ctx_slot=600)) as engine:
        ask(engine, request("a", "x", max_tokens=500))
        stats = engine.stats()
    assert stats.speculation.accepted_proposed_tokens == 0
    assert 0 < stats.speculation.drafts < 150, "of 500 tokens, on a busy machine, too"


# Drafts pay only if more than four of five are right, which nobody thinks at first.
DEAR = {1: 4e-3, 2: 5.8e-3, 4: 7.3e-3, 8: 12.5e-3, 16: 19.7e-3}
DEAR_DRAFT = 1.3e-3


@pytest.mark.parametrize("guess", [alphabet, wrong], ids=["right", "wrong"])
def test_one_finds_out_whether_it_is_better_than_one_thinks(
    guess: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CostModel, "observe_decode", lambda *batch: None)  # times stay as they are
    made = FakeBackend(alphabet, n_slots=1)
    made.profile = Profile({1: DEAR[1]}, {16: DEAR[16]}, {n: DEAR[n] for n in (2, 4, 8, 16)})
    passes = dict.fromkeys((1, 2, 16), DEAR_DRAFT)
    made.draft = FakeDraft(guess, n_slots=1, n_ctx=512, profile=Profile(passes, passes, passes))
    with running(made, replace(options(1, speculate=False), n_ctx_slot=400)) as engine:
        ask(engine, request("a", "x", max_tokens=300))
        stats = engine.stats()
    if guess is alphabet:
        assert stats.speculation.accepted_proposed_tokens == stats.speculation.proposed_tokens > 100
        assert stats.speculation.proposed_tokens / stats.speculation.drafts > 3
    else:
        assert 0 < stats.speculation.drafts <= 12


@pytest.mark.parametrize(
    ("of_target", "of_draft"),
    [(DRAFTS_COST, CHEAP), (DRAFTS_PAY, Profile()), (Profile(), CHEAP), (DRAFTS_PAY, DRAFTS_PAY)],
    ids=["verifying costs", "draft not measured", "nothing measured", "the draft costs as much"],
)
def test_nothing_is_proposed_where_it_does_not_pay(of_target: Profile, of_draft: Profile) -> None:
    made = backend(wrong, profile=of_target)
    made.draft = draft = FakeDraft(alphabet, n_slots=1, profile=of_draft)
    if of_draft is DRAFTS_PAY:
        draft.profile = Profile({1: 5.0}, {8: 5.0}, {2: 5.0})
    assert run(made).speculation.proposed_tokens == 0
    assert draft.batches == []


@settings(max_examples=60)
@given(
    prompts=st.lists(st.text("ab", min_size=1, max_size=40), min_size=1, max_size=6),
    max_tokens=st.integers(1, 20),
    guess=st.sampled_from([endless, wrong, lambda tokens: endless(tokens) - len(tokens) % 2]),
    speculate=st.booleans(),
)
def test_answers_are_the_same(
    prompts: list[str], max_tokens: int, guess: Script, speculate: bool
) -> None:
    made = backend(guess, n_slots=3, script=endless)
    with running(made, options(3, max_waiting=6, speculate=speculate)) as engine:
        inboxes = start(
            engine,
            *(request(str(i), text, max_tokens=max_tokens) for i, text in enumerate(prompts)),
        )
        for inbox, text in zip(inboxes, prompts, strict=True):
            inbox.wait()
            assert inbox.token_ids == continuation(text.encode(), max_tokens)
        assert [slot.n_past for slot in engine.stats().slots] == [len(slot) for slot in made.slots]


def test_all_of_a_step_verify_together() -> None:
    made = backend(alphabet, n_slots=3)
    with running(made, options(3, speculate=False)) as engine:
        inboxes = start(engine, *(request(str(i), "x", max_tokens=24) for i in range(3)))
        assert [inbox.wait().reason for inbox in inboxes] == [FinishReason.LENGTH] * 3
    together = [batch for batch in made.batches if len({row[2] for row in batch}) == 3]
    assert any(len(batch) >= 6 for batch in together)


def test_the_end_token_in_mid_draft() -> None:
    def script(tokens: Sequence[int]) -> int:
        return EOS if len(tokens) >= 9 else alphabet(tokens)

    with running(backend(alphabet, script=script), options(1, speculate=False)) as engine:
        inbox = ask(engine, request("a", "x", max_tokens=30))
    assert inbox.end.reason == FinishReason.STOP
    assert inbox.token_ids == [*said("x", 8), EOS]


@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_max_tokens_is_kept_in_mid_draft(max_tokens: int) -> None:
    assert run(backend(alphabet), max_tokens).tokens.generated_tokens == max_tokens


def test_text_longer_than_the_drafts_cells() -> None:
    made = backend(alphabet)
    draft = made.draft = FakeDraft(alphabet, n_slots=1, n_ctx=64)
    with running(made, replace(options(1, speculate=False), n_ctx_slot=400)) as engine:
        inbox = ask(engine, request("a", "x" * 100, max_tokens=200))
        stats = engine.stats()
    assert inbox.token_ids == said("x" * 100, 200)
    assert stats.speculation.accepted_proposed_tokens > 100
    assert max(row[1] for batch in draft.batches for row in batch) < 64


@pytest.mark.parametrize("n_unknown", [0, 3, 30])
def test_own_layers_are_fed_what_is_known(n_unknown: int) -> None:
    made = backend(alphabet)
    draft = made.draft = FakeDraft(alphabet, n_slots=1, reads_states=True)
    draft.unknown[0] = n_unknown
    stats = run(made, 40)
    assert stats.speculation.accepted_proposed_tokens == stats.speculation.proposed_tokens > 4
    fed = [place for places in draft.places for place in places if place != GUESSED]
    assert fed == list(range(n_unknown, fed[-1] + 1))


def test_nothing_is_proposed_where_nothing_is_known() -> None:
    made = backend(alphabet)
    draft = made.draft = FakeDraft(alphabet, n_slots=1, reads_states=True)
    draft.unknown[0] = 1000
    assert run(made).speculation.proposed_tokens == 0
    assert draft.batches == []


def test_a_draft_model_that_fails_is_left_alone() -> None:
    made = backend(alphabet)
    draft = made.draft = FakeDraft(alphabet, n_slots=1, fail_on=[ord("c")])
    with running(made, replace(options(1, speculate=False), n_ctx_slot=400)) as engine:
        inbox = ask(engine, request("a", "x", max_tokens=300))
    assert inbox.token_ids == said("x", 300)
    failed = [batch for batch in draft.batches if any(row[0] == ord("c") for row in batch)]
    assert len(failed) == 3


def test_a_model_that_cannot_rewind_has_no_proposals() -> None:
    made = backend(alphabet)
    made.n_rewind = 0
    assert run(made).speculation.proposed_tokens == 0
