"""Who gets in."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.base.errors import DeadlineError
from serve_app.base.sampling import LogitBias
from serve_app.base.values.answers import Accepted
from serve_app.base.values.requests import Deadline
from serve_app.engine import (
    CorralError,
    Engine,
    FinishReason,
    GenerationRequest,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    SamplingParams,
    TokenStream,
)
from serve_app.engine.costs.cost_model import Profile
from tests.unit.engine.harness import (
    Inbox,
    SteppedBackend,
    WatchedBackend,
    ask,
    continuation,
    options,
    read,
    request,
    running,
    start,
)

ALL_OF_A = ("a0", "a1", "a2", "a3", "a4")


async def test_submit_many_refuses_each_for_itself() -> None:
    backend = WatchedBackend(n_slots=1)
    backend.hold()
    with running(backend, options(1, max_waiting=1)) as engine:
        good, empty, twin, waits, late = engine.submit_many(
            [request("a"), request("b", ""), request("a"), request("c"), request("d")]
        )
        assert isinstance(good, TokenStream)
        assert isinstance(empty, InvalidRequestError)
        assert isinstance(twin, InvalidRequestError)
        assert isinstance(waits, TokenStream)
        assert isinstance(late, QueueFullError)
        backend.resume()
        assert (await read(good)).end.reason is FinishReason.LENGTH
        assert (await read(waits)).end.reason is FinishReason.LENGTH


def test_queue_is_bounded() -> None:
    backend = WatchedBackend(n_slots=2)
    backend.hold()
    with running(backend, options(2, max_waiting=1)) as engine:
        inboxes = start(engine, *(request(name) for name in "abc"))
        with pytest.raises(QueueFullError) as refused:
            start(engine, request("d"))
        assert refused.value.retry_after_s >= 1
        backend.resume()
        inboxes[0].wait()
        assert ask(engine, request("d")).end.reason is FinishReason.LENGTH


def test_id_is_taken_while_it_lives() -> None:
    backend = WatchedBackend(n_slots=2)
    backend.hold()
    with running(backend) as engine:
        (first,) = start(engine, request("a"))
        with pytest.raises(InvalidRequestError) as refused:
            start(engine, request("a"))
        assert refused.value.param == "id"
        backend.resume()
        first.wait()
        assert ask(engine, request("a")).end.reason is FinishReason.LENGTH


def test_waiting_requests_are_served_first_come() -> None:
    backend = WatchedBackend(n_slots=1)
    backend.hold()
    with running(backend) as engine:
        inboxes = start(engine, *(request(name, name) for name in "abcd"))
        backend.resume()
        for inbox in inboxes:
            inbox.wait()
    assert [bytes(tenancy.prompt) for tenancy in backend.tenancies] == [b"a", b"b", b"c", b"d"]


@pytest.mark.parametrize(
    ("bad", "kind", "param"),
    [
        pytest.param(request("a", ""), InvalidRequestError, "prompt", id="empty prompt"),
        pytest.param(request("a", "x" * 64), PromptTooLongError, "prompt", id="prompt too long"),
        pytest.param(
            GenerationRequest("a", (257,)), InvalidRequestError, "prompt", id="token past the end"
        ),
        pytest.param(
            GenerationRequest("a", (-1,)), InvalidRequestError, "prompt", id="negative token"
        ),
        pytest.param(
            GenerationRequest("a", (1,), SamplingParams(logit_bias=LogitBias.of({257: 1.0}))),
            InvalidRequestError,
            "logit_bias",
            id="bias of no token",
        ),
        pytest.param(
            request("a", max_tokens=-1), InvalidRequestError, "max_tokens", id="less than none"
        ),
        pytest.param(request("a", stop=("x", "")), InvalidRequestError, "stop", id="empty stop"),
    ],
)
def test_refuses_what_cannot_work(
    bad: GenerationRequest, kind: type[CorralError], param: str
) -> None:
    backend = WatchedBackend(n_slots=1)
    with running(backend, options(1, max_waiting=0)) as engine:
        with pytest.raises(kind) as refused:
            start(engine, bad)
        assert refused.value.param == param
        assert ask(engine, request("a")).end.reason is FinishReason.LENGTH, "its place was lost"
    assert len(backend.tenancies) == 1


def test_longest_prompt_that_fits() -> None:
    with running(WatchedBackend(n_slots=1), options(1)) as engine:
        inbox = ask(engine, request("a", "x" * 63, max_tokens=None))
    assert (inbox.end.reason, len(inbox.token_ids)) == (FinishReason.LENGTH, 1)


def test_slots_are_shared_among_clients() -> None:
    """One slot; a has four requests there before b's one, and c's is urgent."""
    backend = SteppedBackend(n_slots=1)
    with running(backend, options(1, max_waiting=8)) as engine:
        requests = [replace(request(f"a{n}", f"a{n} asks"), client="a") for n in range(4)]
        requests.append(replace(request("b", "b asks"), client="b"))
        requests.append(replace(request("c", "c asks"), client="c", priority=-1))
        inboxes = start(engine, *requests[:1])
        backend.wait_for_batch()
        inboxes += start(engine, *requests[1:])
        backend.resume()
        for inbox in inboxes:
            inbox.wait()
    order = [bytes(tenancy.prompt).decode().split()[0] for tenancy in backend.tenancies]
    assert order == ["a0", "c", "b", "a1", "a2", "a3"]


def test_who_would_wait_too_long_is_refused_with_the_forecast() -> None:
    """Eight tokens of each take 0.8 s, by what was measured: with two slots, the fourth one's wait is that
    for two ends of three, 1.6 s, and its first token takes 0.2 s more."""
    backend = WatchedBackend(n_slots=2)
    backend.profile = Profile({1: 0.2, 2: 0.2}, {16: 0.16, 32: 0.32})
    backend.hold()
    with running(backend, options(2, max_waiting=50, max_first_token_s=1.0)) as engine:
        inboxes = start(engine, *(request(name, "h", max_tokens=8) for name in "abc"))
        with pytest.raises(
            QueueFullError, match=r"after up to 1\.80 seconds. It may come after 1\.00 at most"
        ) as refused:
            start(engine, request("d", "h", max_tokens=8))
        assert refused.value.retry_after_s == 1
        backend.resume()
        for inbox in inboxes:
            assert inbox.wait().reason is FinishReason.LENGTH
        assert ask(engine, request("d")).end.reason is FinishReason.LENGTH


def of(client: str, name: str, **changed: Any) -> GenerationRequest:
    """A request of a client."""
    return replace(request(name, f"{name} asks", **changed), client=client)


def test_a_full_queue_refuses_the_newest_of_who_holds_most() -> None:
    """One slot and four places to wait: a takes them all before b comes."""
    backend = SteppedBackend(n_slots=1)
    with running(backend, options(1, max_waiting=4)) as engine:
        greedy = start(engine, of("a", "a0"))
        backend.wait_for_batch()
        greedy += start(engine, *(of("a", f"a{n}") for n in range(1, 5)))
        with pytest.raises(QueueFullError):
            start(engine, of("a", "a5"))
        modest = start(engine, of("b", "b0"), of("b", "b1"))
        with pytest.raises(QueueFullError):
            start(engine, of("b", "b2"))  # it would have as many as a
        backend.resume()
        ends = {name: inbox.wait() for name, inbox in zip(ALL_OF_A, greedy, strict=True)}
        assert [inbox.wait().reason for inbox in modest] == [FinishReason.LENGTH] * 2
        displaced = {name: end.error for name, end in ends.items() if end.error is not None}
        assert set(displaced) == {"a3", "a4"}
        for error in displaced.values():
            assert isinstance(error, QueueFullError)
            assert error.retry_after_s >= 1
        assert ask(engine, of("a", "a6")).end.reason is FinishReason.LENGTH, "a place was lost"
        assert engine.explain("a4")[0].state == "ended"


def test_who_comes_first_while_all_places_run_gets_one_more() -> None:
    backend = SteppedBackend(n_slots=2)
    with running(backend, options(2, max_waiting=0)) as engine:
        (first,) = start(engine, of("a", "a0"))
        backend.wait_for_batch()
        (second,) = start(engine, of("a", "a1"))
        backend.step()
        with pytest.raises(QueueFullError):
            start(engine, of("a", "a2"))
        (newcomer,) = start(engine, of("b", "b0"))
        with pytest.raises(QueueFullError):
            start(engine, of("b", "b1"))
        backend.resume()
        for inbox in (first, second, newcomer):
            assert inbox.wait().reason is FinishReason.LENGTH


def test_each_client_waits_for_its_own_work() -> None:
    """Ten requests of a are more than a second's work, of which b waits for none."""
    backend = WatchedBackend(n_slots=2)
    backend.profile = Profile({1: 0.2, 2: 0.2}, {16: 0.16, 32: 0.32})
    backend.hold()
    with running(backend, options(2, max_waiting=50, max_first_token_s=1.5)) as engine:
        inboxes = start(engine, *(of("a", f"a{n}", max_tokens=8) for n in range(3)))
        with pytest.raises(QueueFullError, match="first token would come"):
            start(engine, of("a", "a3", max_tokens=8))
        inboxes += start(engine, of("b", "b0", max_tokens=8))
        backend.resume()
        for inbox in inboxes:
            assert inbox.wait().reason is FinishReason.LENGTH


MEASURED = Profile({1: 0.2, 2: 0.2}, {16: 0.16, 32: 0.32})
"""The costs of tests of forecasts: 10 ms for a prompt token, 200 ms for a step."""


def within(
    name: str, first_token_s: float = math.inf, end_s: float = math.inf, **changed: Any
) -> GenerationRequest:
    """A request for eight tokens with a deadline."""
    deadline = Deadline(first_token_s, end_s)
    return replace(request(name, "h", max_tokens=8), deadline=deadline, **changed)


def outcome(engine: Engine, one: GenerationRequest, inbox: Inbox) -> CorralError | Accepted:
    return engine.submit_to([(one, inbox)])[0]


def test_a_request_that_would_miss_its_deadline_is_refused_with_when_it_would_not() -> None:
    """Two run for 1.6 s. The third one's slot is free after 0.8 s, and it ends 1.6 s later."""
    backend = WatchedBackend(n_slots=2)
    backend.profile = MEASURED
    backend.hold()
    with running(backend, options(2, max_waiting=50)) as engine:
        inboxes = start(engine, *(request(name, "h", max_tokens=8) for name in "ab"))
        for late in (within("c", 0.5), within("c", 9.0, 1.9)):
            with pytest.raises(DeadlineError) as refused:
                start(engine, late)
            assert refused.value.retry_after_s == 1
        with pytest.raises(InvalidRequestError, match="Even alone"):
            start(engine, within("c", 9.0, 1.0))
        inboxes.append(Inbox())
        accepted = outcome(engine, within("c", 1.1, 2.5), inboxes[-1])
        assert isinstance(accepted, Accepted)
        assert accepted[:2] == pytest.approx((1.0, 2.4))
        assert not accepted.background
        backend.resume()
        for inbox in inboxes:
            assert inbox.wait().reason is FinishReason.LENGTH


def test_a_flexible_request_steps_forward_only_if_it_meets_its_deadline_so() -> None:
    backend = WatchedBackend(n_slots=1)
    backend.profile = MEASURED
    backend.hold()
    with running(backend, options(1, max_waiting=50)) as engine:
        inboxes = start(
            engine, *(replace(request(n, "h", max_tokens=8), client=n) for n in ("a", "b"))
        )
        outcomes = []
        for name, first_token_s in (("patient", 9.0), ("hasty", 3.5), ("late", 1.0)):
            inboxes.append(Inbox())
            one = within(name, first_token_s, background=True, client="c")
            outcomes.append(outcome(engine, one, inboxes[-1]))
        patient, hasty, late = outcomes
        assert isinstance(patient, Accepted)
        assert patient.background
        assert isinstance(hasty, Accepted)
        assert not hasty.background
        assert isinstance(late, DeadlineError)
        backend.resume()
        for inbox in inboxes[:-1]:
            assert inbox.wait().reason is FinishReason.LENGTH


def test_nobody_is_admitted_whose_first_token_would_come_too_late() -> None:
    """A prompt that takes 0.6 s by itself may take twice as long."""
    backend = WatchedBackend(n_slots=2)
    backend.profile = MEASURED
    backend.hold()
    with running(backend, options(2, max_waiting=50, max_first_token_s=0.5)) as engine:
        inboxes = start(engine, request("a", "h", max_tokens=2))
        inboxes += start(engine, request("long", "x" * 61, max_tokens=2))
        for late in (request("short", "h", max_tokens=2), request("long-too", "y" * 61)):
            with pytest.raises(QueueFullError, match="first token"):
                start(engine, late)
        backend.resume()
        for inbox in inboxes:
            assert inbox.wait().reason is FinishReason.LENGTH
        stats = engine.stats().forecasts
        assert stats.first_tokens == stats.ends == 2


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(0, 6), st.integers(0, 3)),
        min_size=1,
        max_size=25,
    ),
    st.integers(1, 3),
    st.integers(0, 4),
)
def test_every_accepted_request_has_exactly_one_end(
    arrivals: list[tuple[str, int, int]], n_slots: int, max_waiting: int
) -> None:
    """`arrivals` are (client, tokens, batches before the next one comes)."""
    backend = SteppedBackend(n_slots=n_slots)
    accepted: list[tuple[GenerationRequest, Inbox]] = []
    with running(backend, options(n_slots, max_waiting=max_waiting)) as engine:
        for n, (client, max_tokens, n_steps) in enumerate(arrivals):
            wanted = of(client, f"{client}{n}", max_tokens=max_tokens)
            try:
                (inbox,) = start(engine, wanted)
            except QueueFullError:
                continue
            accepted.append((wanted, inbox))
            for _ in range(n_steps):
                backend.step_if_any()
        backend.resume()
        for wanted, inbox in accepted:
            end = inbox.wait()
            if end.error is None:
                assert end.reason is FinishReason.LENGTH
                n_tokens = wanted.sampling.max_tokens
                assert inbox.token_ids == continuation(wanted.prompt, n_tokens or 0)
            else:
                assert isinstance(end.error, QueueFullError)
                assert not inbox.token_ids, "it was displaced after it had begun"
        assert ask(engine, of("d", "last")).end.reason is FinishReason.LENGTH
    assert len(backend.batches) > 0


def test_requests_can_be_asked_about() -> None:
    backend = SteppedBackend(n_slots=1)
    with running(backend, options(1, max_waiting=1)) as engine:
        named = replace(request("cmpl-a.0"), http_id="web-1", client="ana")
        first, second = start(engine, named, replace(request("cmpl-a.1"), http_id="web-1"))
        backend.wait_for_batch()
        backend.step()
        states = {record.id: record.state for record in engine.explain("cmpl-a")}
        assert states == {"cmpl-a.0": "decode", "cmpl-a.1": "waiting"}
        assert engine.explain("cmpl") == engine.explain("") == []
        backend.resume()
        first.wait()
        second.wait()
        (record,) = engine.explain("cmpl-a.0")
        assert (record.state, record.client, record.end) == ("ended", "ana", first.end)
        assert [found.id for found in engine.explain("web-1")] == ["cmpl-a.0", "cmpl-a.1"]
        waited = second.end.timings
        assert waited.queue_s > 0
        assert waited.mean_batch == 1
        assert 0 <= waited.stalled_s <= waited.decode_s
