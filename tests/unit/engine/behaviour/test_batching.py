"""What slots are fed, and when."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from serve_app.base.values.answers import Accepted, FinishReason
from serve_app.engine import CorralError, TokenStream
from serve_app.engine.core.command_queue import CommandQueue
from serve_app.engine.core.loop import DecoderLoop
from serve_app.engine.core.sequence import Sequence as EngineSequence
from serve_app.engine.costs.cost_model import Profile
from serve_app.engine.engine import make_guests
from serve_app.engine.policy.forecast import Forecast
from tests.unit.engine.harness import (
    PATIENCE_S,
    Inbox,
    WatchedBackend,
    ask,
    assert_only_own_tokens_were_fed,
    continuation,
    endless,
    options,
    read,
    request,
    running,
    start,
    start_together,
    submit,
)


def test_slots_are_fed_their_own_tokens_and_nothing_else() -> None:
    """Interleaved, in chunks, with slots used again by strangers and by relatives."""
    backend = WatchedBackend(n_slots=3)
    lengths = (1, 9, 17, 3, 30, 2, 11, 11, 12, 1, 25, 7)
    prompts = ["a" * n + "b" * (n % 5) + chr(ord("A") + i) for i, n in enumerate(lengths)]
    requests = [request(str(i), prompt, max_tokens=1 + i % 6) for i, prompt in enumerate(prompts)]
    with running(backend, options(3, n_batch=5)) as engine:
        inboxes = start(engine, *requests)
        for inbox in inboxes:
            inbox.wait()
    assert_only_own_tokens_were_fed(backend)
    assert len(backend.tenancies) == len(prompts)
    for one, inbox in zip(requests, inboxes, strict=True):
        max_tokens = one.sampling.max_tokens or 0
        assert inbox.token_ids == continuation(one.prompt, max_tokens)
        (tenancy,) = (t for t in backend.tenancies if t.prompt == one.prompt)
        # All but the last token, which nothing follows.
        assert tenancy.n_cached + len(tenancy.fed) == len(one.prompt) + max_tokens - 1


def test_prompt_is_not_in_the_batch_with_a_stale_token_of_its_slot() -> None:
    """The slot's last sequence leaves a sampled token behind that was never fed."""
    backend = WatchedBackend(n_slots=1)
    with running(backend) as engine:
        ask(engine, request("first", "aaaa", max_tokens=3))
        ask(engine, request("second", "zzzz", max_tokens=3))
    second = [row for batch in backend.batches for row in batch][6:]
    said = continuation(b"zzzz", 2)
    assert [row[:2] for row in second] == list(zip([*b"zzzz", *said], range(6), strict=True))


@pytest.mark.parametrize(("max_tokens", "batches"), [(1, [4]), (3, [4, 1, 1])])
def test_first_token_comes_from_the_prompts_last_row(max_tokens: int, batches: list[int]) -> None:
    backend = WatchedBackend(n_slots=1)
    with running(backend) as engine:
        inbox = ask(engine, request("a", "abcd", max_tokens=max_tokens))
        assert engine.stats().timing.steps == len(batches)
    assert [len(batch) for batch in backend.batches] == batches
    assert [row[3] for row in backend.batches[0]] == [False, False, False, True]
    assert inbox.token_ids == continuation(b"abcd", max_tokens)


def test_long_prompt_leaves_every_decoder_a_row() -> None:
    backend = WatchedBackend(n_slots=2)
    loop = DecoderLoop(lambda: backend, options(2, n_batch=6), make_guests)
    inboxes = start_together(
        loop, request("decoder", "a", max_tokens=8), request("long", "b" * 30, max_tokens=2)
    )
    loop.close(PATIENCE_S)
    rows = [[row[2] for row in batch] for batch in backend.batches]
    assert rows[:11] == [[0]] + [[0], [1] * 6] * 5  # a first token waits for no prompt
    assert rows[11:] == [[0, 1], [0]]
    assert [len(inbox.token_ids) for inbox in inboxes] == [8, 2]


def test_prompts_that_do_not_fit_go_one_by_one() -> None:
    backend = WatchedBackend(n_slots=3)
    loop = DecoderLoop(lambda: backend, options(3, n_batch=4), make_guests)
    start_together(loop, *(request(name, name * 10, max_tokens=1) for name in "abc"))
    loop.close(PATIENCE_S)
    rows = [[row[2] for row in batch] for batch in backend.batches]
    assert rows == [[0] * 4, [0] * 4, [0, 0, 1, 1], [1] * 4, [1] * 4, [2] * 4, [2] * 4, [2] * 2]


async def test_submit_many_enters_one_step_together(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = CommandQueue.submit
    sizes: list[int] = []

    def watched(
        command_queue: CommandQueue, sequences: list[EngineSequence], forecast: Forecast
    ) -> list[CorralError | Accepted]:
        sizes.append(len(sequences))
        return submit(command_queue, sequences, forecast)

    monkeypatch.setattr(CommandQueue, "submit", watched)
    backend = WatchedBackend(n_slots=3)
    backend.hold()
    with running(backend, options(3)) as engine:
        outcomes = engine.submit_many([request(name, name) for name in "abc"])
        backend.resume()
        streams = [outcome for outcome in outcomes if isinstance(outcome, TokenStream)]
        assert len(streams) == 3
        await asyncio.gather(*map(read, streams))
    assert sizes == [3], "the decoder thread could have come between"
    assert [row[:3] for row in backend.batches[0]] == [(97, 0, 0), (98, 0, 1), (99, 0, 2)]


def test_a_long_prompt_keeps_to_the_stall_budget() -> None:
    """A batch of 8 of a prompt's rows fits into the step beside the decoder, one of 16 by far not."""
    backend = WatchedBackend(n_slots=2)
    backend.profile = Profile({1: 0.01, 2: 0.01}, {8: 0.01, 16: 9.0})
    loop = DecoderLoop(lambda: backend, options(2, max_stall_ms=100), make_guests)
    inboxes = start_together(
        loop, request("decoder", "a", max_tokens=8), request("long", "b" * 30, max_tokens=2)
    )
    loop.close(PATIENCE_S)
    rows = [[row[2] for row in batch] for batch in backend.batches]
    assert rows[:7] == [[0]] + [[0], [1] * 8] * 3
    assert [len(inbox.token_ids) for inbox in inboxes] == [8, 2]
    # Batches take next to nothing here, and that is learned.
    assert loop.stats().costs.step_time["decode_ms"][1] < 10
    assert loop.stats().costs.step_time["prefill_ms"][8] < 10


QUICK = Profile(dict.fromkeys((1, 2, 4), 1e-5), {8: 1e-5, 16: 1e-5})
"""Passes that take less than what surrounds them."""


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes follow each other however slow this machine is."""
    monkeypatch.setattr("serve_app.engine.core.batch_runner.AHEAD_S", PATIENCE_S)


def quick(**kind: Any) -> WatchedBackend:
    backend = WatchedBackend(n_slots=3, **kind)
    backend.profile = QUICK
    return backend


@pytest.mark.usefixtures("ahead")
def test_quick_passes_follow_each_other_in_one_step() -> None:
    """As far as all go on: each has what it would have alone, and each end is told at once."""
    backend = quick()
    with running(backend, options(3, speculate=False)) as engine:
        backend.hold()
        inboxes = start(
            engine, *(request(name, name * 3, max_tokens=n) for name, n in (("a", 20), ("b", 30)))
        )
        backend.resume()
        for inbox, name, n in zip(inboxes, "ab", (20, 30), strict=True):
            inbox.wait()
            assert inbox.token_ids == continuation(name.encode() * 3, n)
            assert len(inbox.deltas) <= 6
        stats = engine.stats()
        assert [slot.n_past for slot in stats.slots] == list(map(len, backend.slots))
        assert stats.timing.steps < stats.timing.batches == len(backend.batches)
    assert_only_own_tokens_were_fed(backend)


@pytest.mark.usefixtures("ahead")
def test_a_pass_that_fails_is_computed_again_and_ends_one_sequence() -> None:
    said = continuation(b"aaa", 20)
    backend = quick(fail_on=(said[9],))
    other = next(name for name in "bcdefgh" if said[9] not in continuation(name.encode() * 3, 20))
    with running(backend, options(3, speculate=False)) as engine:
        backend.hold()
        bad, good = start(engine, *(request(n, n * 3, max_tokens=20) for n in ("a", other)))
        backend.resume()
        assert (bad.wait().reason, good.wait().reason) == (FinishReason.ERROR, FinishReason.LENGTH)
    assert bad.token_ids == said[: said.index(said[9]) + 1]
    assert good.token_ids == continuation(other.encode() * 3, 20)


@pytest.mark.usefixtures("ahead")
def test_tokens_behind_a_stop_string_are_dropped() -> None:
    said = bytes(continuation(b"abc", 40)).decode()
    backend = quick()
    with running(backend, options(3, speculate=False)) as engine:
        inbox = ask(engine, request("a", "abc", max_tokens=40, stop=(said[9:12],)))
        assert (inbox.text, inbox.end.reason) == (said[:9], FinishReason.STOP)
        assert inbox.token_ids == list(said[:12].encode())
        assert inbox.end.usage.completion_tokens == 12
        assert engine.stats().slots[0].n_past == len(backend.slots[0]) == 3 + 12


@pytest.mark.usefixtures("ahead")
def test_passes_do_not_follow_each_other_when_somebody_comes() -> None:
    second = Inbox()

    def script(tokens: Sequence[int]) -> int:
        if len(tokens) == 12 and bytes(tokens[:3]) == b"abc":
            submit(engine, request("second", "xyz", max_tokens=2), second)
        return endless(tokens)

    backend = quick(script=script)
    with running(backend, options(3, speculate=False)) as engine:
        ask(engine, request("first", "abc", max_tokens=30))
        second.wait()
    came = next(i for i, batch in enumerate(backend.batches) if batch[-1][2] == 1)
    assert [row[1] for row in backend.batches[came - 1]] == [12]  # of the step that begins both
    assert_only_own_tokens_were_fed(backend)
