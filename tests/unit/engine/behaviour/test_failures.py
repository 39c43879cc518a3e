"""Backends that fail."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from serve_app.base.errors import CorralError
from serve_app.base.sampling import SamplingParams
from serve_app.engine import (
    ConfigError,
    DecodeError,
    Engine,
    EngineFailedError,
    FinishReason,
    TokenStream,
)
from serve_app.engine.core.loop import DecoderLoop
from serve_app.engine.core.sequence import Sequence as EngineSequence
from serve_app.engine.engine import make_guests
from tests.doubles.backend import FakeBackend
from tests.unit.engine.harness import (
    PATIENCE_S,
    SteppedBackend,
    WatchedBackend,
    ask,
    continuation,
    options,
    read,
    request,
    running,
    start,
    start_together,
)


def test_decode_error_ends_only_the_sequence_at_fault() -> None:
    backend = WatchedBackend(n_slots=3, fail_on=b"!")
    loop = DecoderLoop(lambda: backend, options(3), make_guests)
    good, bad, other = start_together(
        loop, request("a", "abc"), request("b", "xyz!"), request("c", "c")
    )
    loop.close(PATIENCE_S)
    assert bad.end.reason is FinishReason.ERROR
    assert isinstance(bad.end.error, DecodeError)
    assert good.token_ids == continuation(b"abc", 4)
    assert other.token_ids == continuation(b"c", 4)
    assert loop.failure is None
    assert loop.stats().requests.ended == {"error": 1, "length": 2}


def test_decode_error_in_the_middle_of_a_text() -> None:
    letter = continuation(b"abc", 2)[-1]
    innocent = next(bytes([c]) for c in b"XYZQRST" if letter not in continuation(bytes([c]), 4))
    backend = WatchedBackend(n_slots=2, fail_on=[letter])
    loop = DecoderLoop(lambda: backend, options(2), make_guests)
    bad, good = start_together(loop, request("a", "abc"), request("b", innocent.decode()))
    loop.close(PATIENCE_S)
    assert isinstance(bad.end.error, DecodeError)
    assert bad.token_ids == continuation(b"abc", 2)
    assert good.token_ids == continuation(innocent, 4)


async def test_a_request_that_cannot_be_begun_is_refused_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    resume = EngineSequence.resume

    def fail(sequence: EngineSequence, *arguments: Any) -> None:
        if sequence.id == "bad":
            raise ZeroDivisionError
        resume(sequence, *arguments)

    monkeypatch.setattr(EngineSequence, "resume", fail)
    with running(WatchedBackend(n_slots=2)) as engine:
        first, bad, last = engine.submit_many([request(name) for name in ("a", "bad", "b")])
        assert isinstance(bad, CorralError)
        assert (type(bad), bad.message) == (
            CorralError,
            "The request cannot be begun (ZeroDivisionError).",
        )
        assert "Request bad cannot be begun." in caplog.text
        for stream in (first, last):
            assert isinstance(stream, TokenStream)
            assert (await read(stream)).token_ids == continuation(b"hello\n", 4)
        assert ask(engine, request("bad2")).token_ids == continuation(b"hello\n", 4)


async def test_decode_error_is_raised_by_the_stream() -> None:
    with running(WatchedBackend(n_slots=1, fail_on=b"!")) as engine:
        stream = engine.submit(request("a", "!"))
        with pytest.raises(DecodeError, match="scripted failure"):
            await read(stream)
        assert ask(engine, request("b", "ok")).token_ids == continuation(b"ok", 4)


def test_backend_that_decodes_nothing_any_more_is_broken() -> None:
    with running(WatchedBackend(n_slots=1, fail_on=b"!")) as engine:
        for i in range(3):
            assert isinstance(ask(engine, request(f"bad{i}", "!")).end.error, DecodeError)
        engine.check_health()
        assert isinstance(ask(engine, request("bad3", "!")).end.error, EngineFailedError)
        with pytest.raises(EngineFailedError, match="Nothing could be decoded"):
            engine.check_health()


def test_one_good_step_clears_the_backend() -> None:
    with running(WatchedBackend(n_slots=1, fail_on=b"!")) as engine:
        for i in range(3):
            for bad in ("!", "!!", "a!"):
                assert isinstance(ask(engine, request(f"bad{i}{bad}", bad)).end.error, DecodeError)
            assert ask(engine, request(f"good{i}", "ok")).token_ids == continuation(b"ok", 4)
        engine.check_health()


def test_backend_lives_on_the_decoder_thread() -> None:
    threads: list[str] = []

    def open_backend() -> FakeBackend:
        threads.append(threading.current_thread().name)
        return FakeBackend(lambda _: ord("x"), n_slots=1)

    Engine(open_backend, options(1)).close()
    assert threads == ["corral-decoder"]


def test_backend_that_cannot_be_opened_says_why() -> None:
    def open_backend() -> FakeBackend:
        raise ConfigError("no such model")

    with pytest.raises(ConfigError, match="no such model"):
        Engine(open_backend, options(1))


def test_broken_backend_ends_everything() -> None:
    backend = WatchedBackend(n_slots=1, break_after=2)
    backend.hold()
    with running(backend) as engine:
        inboxes = start(engine, request("a"), request("b"))
        engine.check_health()
        backend.resume()
        for inbox in inboxes:
            assert isinstance(inbox.wait().error, EngineFailedError)
        assert inboxes[0].token_ids == continuation(b"hello\n", 2)
        with pytest.raises(EngineFailedError):
            start(engine, request("c"))
        with pytest.raises(EngineFailedError):
            engine.check_health()
        assert engine.stats().slots[0].state == "idle"


def test_request_that_arrives_in_the_last_batch_gets_its_end() -> None:
    backend = SteppedBackend(n_slots=1, break_after=0)
    with running(backend) as engine:
        start(engine, request("a"))
        backend.wait_for_batch()
        (late,) = start(engine, request("b"))
        backend.resume()
        assert isinstance(late.wait().error, EngineFailedError)


def test_backend_that_breaks_while_admitting_forgets_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("scripted break")

    backend = WatchedBackend(n_slots=1)
    monkeypatch.setattr(backend, "truncate", fail)
    loop = DecoderLoop(lambda: backend, options(1), make_guests)
    inboxes = start_together(loop, request("a"), request("b"))
    for inbox in inboxes:
        assert isinstance(inbox.wait().error, EngineFailedError)
    loop.close(0)


def test_a_sampler_that_cannot_be_made_ends_its_own_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = WatchedBackend(n_slots=1)
    make = backend.sampler

    def fail_for_x(params: SamplingParams, prompt: Sequence[int], constraint: Any) -> Any:
        if bytes(prompt) == b"x":
            raise TypeError("scripted break")
        return make(params, prompt, constraint)

    monkeypatch.setattr(backend, "sampler", fail_for_x)
    loop = DecoderLoop(lambda: backend, options(1), make_guests)
    good, bad, other = start_together(
        loop, request("a", "abc"), request("b", "x"), request("c", "c")
    )
    loop.close(PATIENCE_S)
    assert isinstance(bad.end.error, DecodeError)
    assert "scripted break" in bad.end.error.message
    assert good.token_ids == continuation(b"abc", 4)
    assert other.token_ids == continuation(b"c", 4)
    assert loop.stats().requests.ended == {"error": 1, "length": 2}


def test_a_sampler_that_breaks_ends_its_own_request() -> None:
    def script(tokens: Sequence[int]) -> int:
        if bytes(tokens).startswith(b"x"):
            raise ValueError("scripted")
        return ord("y")

    with running(FakeBackend(script, n_slots=2)) as engine:
        bad, good = start(engine, request("a", "x"), request("b", "abc"))
        assert isinstance(bad.wait().error, DecodeError)
        assert good.wait().error is None
        assert good.token_ids == list(b"yyyy")
