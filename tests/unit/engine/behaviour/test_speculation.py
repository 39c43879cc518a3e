"""Drafts from the text itself: the same answers, in fewer batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.base.sampling import SamplingParams
from serve_app.base.values.answers import FinishReason
from serve_app.engine.costs.cost_model import Profile
from tests.doubles.backend import FakeBackend, Script
from tests.unit.engine.harness import EOS, ask, options, request, running, start

# Drafted rows cost next to nothing. What batches really take here is less, but learned slowly.
DRAFTS_PAY = Profile(
    dict.fromkeys((1, 2, 3, 64), 1.0), {8: 1.0, 64: 1.0}, dict.fromkeys((2, 4, 8), 1e-6)
)
CHORUS = b"la la la, "


def chorus(tokens: Sequence[int]) -> int:
    """The same again and again, but for a letter that changes every seventh token."""
    n = len(tokens)
    return ord("a") + n // 7 % 26 if n % 7 == 0 else CHORUS[n % len(CHORUS)]


def backend(n_slots: int = 2, script: Script = chorus) -> FakeBackend:
    made = FakeBackend(script, n_slots=n_slots)
    made.profile = DRAFTS_PAY
    return made


def sung(prompt: bytes, n: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(chorus(tokens))
    return tokens[len(prompt) :]


@settings(max_examples=60)
@given(
    prompts=st.lists(st.text("la ,", min_size=1, max_size=20), min_size=1, max_size=5),
    max_tokens=st.integers(1, 40),
)
def test_answers_are_the_same(prompts: list[str], max_tokens: int) -> None:
    made = backend()
    with running(made, options(2, max_waiting=5)) as engine:
        inboxes = start(
            engine,
            *(request(str(i), text, max_tokens=max_tokens) for i, text in enumerate(prompts)),
        )
        for inbox, text in zip(inboxes, prompts, strict=True):
            inbox.wait()
            assert inbox.token_ids == sung(text.encode(), max_tokens)
        assert [slot.n_past for slot in engine.stats().slots] == [len(slot) for slot in made.slots]


def test_fewer_batches_than_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "serve_app.engine.core.batch_runner.AHEAD_S", 0.0
    )  # a draft before each pass
    with running(backend(1)) as engine:
        inbox = ask(engine, request("a", "la la la, la la la, ", max_tokens=40))
        stats = engine.stats()
    assert inbox.token_ids == sung(b"la la la, la la la, ", 40)
    assert stats.speculation.drafted_tokens > stats.speculation.accepted_tokens >= 8
    assert stats.speculation.drafted_tokens >= stats.speculation.drafts > 0
    assert stats.timing.steps <= 40 - stats.speculation.accepted_tokens + 1
    assert stats.tokens.generated_tokens == inbox.end.usage.completion_tokens == 40


@pytest.mark.parametrize("n_rewind", [0, 1, 4])
@pytest.mark.parametrize("n_cells", [None, 1000], ids=["split", "unified"])
def test_drafts_are_as_long_as_slots_can_be_rewound(n_rewind: int, n_cells: int | None) -> None:
    """Nothing is computed again for wrong ones, beside other streams and prompts, and slots between."""
    made = FakeBackend(chorus, n_slots=4, forgets=True, n_cells=n_cells)
    made.n_rewind, made.profile = n_rewind, DRAFTS_PAY
    prompts = ("la la la, la la la, ", "x", "la la, la la la, la", "la la la, la la")
    with running(made, options(4)) as engine:
        requests = [request(text, text, max_tokens=30) for text in prompts]
        requests[1] = request("x", "x", max_tokens=10)
        inboxes = start(engine, *requests)
        for inbox, text in zip(inboxes, prompts, strict=True):
            inbox.wait()
            assert inbox.token_ids == sung(text.encode(), 10 if text == "x" else 30)
        assert ask(engine, request("b", "la la la, " * 3, max_tokens=9)).token_ids
        stats = engine.stats()
    assert (stats.speculation.drafted_tokens > 0) == (n_rewind > 0)
    assert stats.speculation.drafted_tokens <= n_rewind * stats.speculation.drafts
    assert stats.tokens.prompt_tokens == sum(map(len, prompts)) + 30 - stats.tokens.cached_tokens


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_max_tokens_is_kept_in_mid_draft(max_tokens: int) -> None:
    with running(backend(1, lambda tokens: CHORUS[len(tokens) % len(CHORUS)])) as engine:
        inbox = ask(engine, request("a", CHORUS.decode() * 3, max_tokens=max_tokens))
        assert inbox.token_ids == list((CHORUS * 9)[30 % 10 :][:max_tokens])
        assert inbox.end.reason == FinishReason.LENGTH


def test_the_end_token_in_mid_draft() -> None:
    def script(tokens: Sequence[int]) -> int:
        return EOS if len(tokens) >= 37 else CHORUS[len(tokens) % len(CHORUS)]

    prompt = replace(
        request("a", max_tokens=50), prompt=(*CHORUS[:7], EOS, *CHORUS * 2, *CHORUS[:2])
    )
    with running(backend(1, script)) as engine:
        inbox = ask(engine, prompt)
        assert inbox.end.reason == FinishReason.STOP
        assert len(inbox.token_ids) == 37 - 30 + 1
        assert inbox.token_ids[-1] == EOS


def test_a_stop_string_in_mid_draft() -> None:
    with running(backend(1, lambda tokens: CHORUS[len(tokens) % len(CHORUS)])) as engine:
        one = replace(
            request("a", CHORUS.decode() * 3), sampling=SamplingParams(max_tokens=40, stop=("la,",))
        )
        inbox = ask(engine, one)
        assert inbox.end.reason == FinishReason.STOP
        assert inbox.text == "la la "
        assert len(inbox.token_ids) == 9
        slot = engine.stats().slots[0]
        assert slot.n_past <= 30 + 9


def test_a_full_context_ends_it_where_it_would_alone() -> None:
    ends = []
    for speculate in (False, True):
        with running(backend(1), options(1, speculate=speculate)) as engine:
            inbox = ask(engine, request("a", "la la la, la la la, ", max_tokens=None))
            ends.append((inbox.token_ids, inbox.end.reason))
    assert ends[0] == ends[1]
    assert len(ends[0][0]) == 64 - 20
