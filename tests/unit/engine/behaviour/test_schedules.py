"""Anything may happen, in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.base.formats import Row
from serve_app.base.values.answers import Accepted
from serve_app.engine import (
    DecodeError,
    EngineClosedError,
    EngineFailedError,
    FinishReason,
    GenerationRequest,
    InvalidRequestError,
    QueueFullError,
    TokenDelta,
)
from serve_app.engine.core.loop import DecoderLoop
from serve_app.engine.core.sequence import Sequence as EngineSequence
from serve_app.engine.engine import make_guests
from tests.unit.engine.harness import (
    PATIENCE_S,
    Inbox,
    WatchedBackend,
    assert_only_own_tokens_were_fed,
    continuation,
    options,
    request,
)


@dataclass(frozen=True)
class Submit:
    name: str
    prompt: str
    max_tokens: int


@dataclass(frozen=True)
class Abort:
    name: str


@dataclass(frozen=True)
class Steps:
    n: int


NAMES = st.sampled_from("abcdefgh")
EVENTS = st.lists(
    st.one_of(
        st.builds(Submit, NAMES, st.text("xyz!", min_size=1, max_size=12), st.integers(1, 6)),
        st.builds(Abort, NAMES),
        st.builds(Steps, st.integers(1, 4)),
    ),
    max_size=30,
)


class PacedBackend(WatchedBackend):
    """Decodes as many batches as it was given leave for, so that what happens is repeatable."""

    def __init__(self, *, n_slots: int, fail_on: Sequence[int], break_after: int | None) -> None:
        super().__init__(n_slots=n_slots, fail_on=fail_on, break_after=break_after)
        self._changed = threading.Condition()
        self._leave = 0
        self._blocked = False

    def allow(self, n: int) -> None:
        """Leave for n more batches."""
        with self._changed:
            self._leave += n
            self._changed.notify_all()

    def decode(self, rows: Sequence[Row]) -> None:
        with self._changed:
            self._blocked = True
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._leave > 0, PATIENCE_S)
            self._blocked = False
            self._leave -= 1
        super().decode(rows)

    def sink(self, inbox: Inbox) -> Callable[[TokenDelta], None]:
        """Delivers to the inbox, and lets `settle` look again."""

        def deliver(delta: TokenDelta) -> None:
            inbox(delta)
            with self._changed:
                self._changed.notify_all()

        return deliver

    def settle(self, inboxes: list[Inbox]) -> None:
        """Until a batch waits for leave, or all is done."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: (
                    (self._blocked and not self._leave) or all(inbox.ended for inbox in inboxes)
                ),
                PATIENCE_S,
            )


@settings(max_examples=60)
@given(
    events=EVENTS,
    fails=st.booleans(),
    break_after=st.none() | st.integers(0, 12),
    deadline_s=st.sampled_from([0.0, PATIENCE_S]),
    least_copy=st.sampled_from([1, 3]),
)
def test_every_accepted_request_ends_exactly_once(
    events: list[Submit | Abort | Steps],
    fails: bool,
    break_after: int | None,
    deadline_s: float,
    least_copy: int,
) -> None:
    backend = PacedBackend(n_slots=2, fail_on=b"!" if fails else b"", break_after=break_after)
    with mock.patch("serve_app.engine.cache.manager._LEAST_COPY", least_copy):
        loop = DecoderLoop(
            lambda: backend, options(2, n_batch=5, max_waiting=3, n_ctx_slot=14), make_guests
        )
    accepted: list[tuple[GenerationRequest, Inbox]] = []
    aborted: set[str] = set()
    for event in events:
        match event:
            case Submit(name, prompt, max_tokens):
                one, inbox = request(name, prompt, max_tokens=max_tokens), Inbox()
                (outcome,) = loop.enqueue([EngineSequence(one, backend.sink(inbox))])
                if isinstance(outcome, Accepted):
                    accepted.append((one, inbox))
                else:
                    assert isinstance(
                        outcome, QueueFullError | InvalidRequestError | EngineFailedError
                    )
            case Abort(name):
                aborted.add(name)
                loop.abort(name)
            case Steps(n):
                backend.allow(n)
        backend.settle([inbox for _, inbox in accepted])
    backend.allow(10_000)
    loop.close(deadline_s)
    assert loop.failure is None or break_after is not None or fails
    for one, inbox in accepted:
        end = inbox.end
        assert inbox.token_ids == continuation(one.prompt, len(inbox.token_ids))
        assert end.usage.completion_tokens == len(inbox.token_ids)
        assert (end.reason is FinishReason.ERROR) == (end.error is not None)
        if end.reason is FinishReason.LENGTH:
            n_most = 14 - len(one.prompt)
            assert len(inbox.token_ids) == min(one.sampling.max_tokens or n_most, n_most)
        elif end.reason is FinishReason.ABORT:
            assert one.id in aborted
        elif isinstance(end.error, DecodeError):
            assert fails
            assert ord("!") in one.prompt
        elif isinstance(end.error, EngineFailedError):
            assert loop.failure is not None
        else:
            assert isinstance(end.error, EngineClosedError)
            assert deadline_s == 0
    assert backend.open_samplers == 0
    assert backend.closed
    stats = loop.stats()
    assert (stats.queue.running, stats.queue.waiting) == (0, 0)
    assert {slot.state for slot in stats.slots} == {"idle"}
    assert sum(stats.requests.ended.values()) == len(accepted)
    assert_only_own_tokens_were_fed(backend)
