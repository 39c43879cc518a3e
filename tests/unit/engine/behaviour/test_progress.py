"""What requests are told of their prompts, and texts that lines end."""

from __future__ import annotations

from dataclasses import replace

from serve_app.base.values.answers import FinishReason, PromptProgress
from serve_app.engine import GenerationRequest
from tests.unit.engine.harness import Inbox, WatchedBackend, answers, ask, request, running

LONG = "a text of which only some rows are computed in each of the steps\n"[-50:]


def told(inbox: Inbox) -> list[PromptProgress]:
    return [one for delta in inbox.deltas for one in delta.progress]


def watching(name: str, prompt: str) -> GenerationRequest:
    return replace(request(name, prompt), return_progress=True)


def test_progress_from_nothing_to_all_of_the_prompt() -> None:
    with running(WatchedBackend(n_slots=1)) as engine:
        inbox = ask(engine, watching("a", LONG))
        again = ask(engine, watching("b", LONG))
    found = told(inbox)
    assert [(one.n_total, one.n_cached) for one in found] == [(50, 0)] * 5
    assert [one.n_processed for one in found] == [0, 16, 32, 48, 50]
    assert found[0].seconds == 0
    assert all(one.seconds > 0 for one in found[1:])
    assert [(one.n_cached, one.n_processed) for one in told(again)] == [(49, 49), (49, 50)]


def test_progress_comes_before_the_first_token() -> None:
    with running(WatchedBackend(n_slots=1)) as engine:
        inbox = ask(engine, watching("a", LONG))
    first = next(i for i, delta in enumerate(inbox.deltas) if delta.token_ids)
    assert not any(delta.progress for delta in inbox.deltas[first:])


def test_nobody_is_told_who_did_not_ask() -> None:
    with running(WatchedBackend(n_slots=1)) as engine:
        assert told(ask(engine, request("a", LONG))) == []


def test_a_line_ends_the_text() -> None:
    backend = WatchedBackend(answers({"f": b"x\n  y\nz and more"}), n_slots=1)
    one = request("a", "f\n", max_tokens=None)
    with running(backend) as engine:
        inbox = ask(engine, replace(one, sampling=replace(one.sampling, n_indent=2)))
    assert inbox.text == "x\n  y\n"
    assert inbox.end.reason is FinishReason.LENGTH
    assert inbox.end.usage.completion_tokens == len("x\n  y\nz")


def test_the_slot_that_is_asked_for() -> None:
    backend = WatchedBackend(n_slots=3)
    with running(backend) as engine:
        ends = [ask(engine, replace(request(str(i)), slot_id=i)).end for i in (2, 1, 2, 7)]
    assert [end.slot_id for end in ends[:3]] == [2, 1, 2]
    assert ends[3].slot_id in range(3)
