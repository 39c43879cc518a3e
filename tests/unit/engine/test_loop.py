"""The engine and its decoder thread, over the scripted backend."""

from __future__ import annotations

import asyncio
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engine import (
    ConfigError,
    CorralError,
    DecodeError,
    Engine,
    EngineClosedError,
    EngineFailedError,
    EngineOptions,
    FinishReason,
    GenerationRequest,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    SamplingParams,
    SequenceEnd,
    TokenDelta,
    TokenStream,
)
from serve_app.engine.backend import Row
from serve_app.engine.fake import FakeBackend, FakeSampler, FakeVocabulary
from serve_app.engine.loop import DecoderLoop
from serve_app.engine.mailbox import Mailbox
from serve_app.engine.sequence import Sequence as EngineSequence

EOS = FakeVocabulary.eos
PATIENCE_S = 30.0
"""How long a test waits for what must happen at once, before it fails."""


# -- scripts: what the fake model says ------------------------------------------------------------


def endless(tokens: Sequence[int]) -> int:
    """A letter that depends on every token before it, and on their order."""
    return ord("a") + zlib.crc32(repr(list(tokens)).encode()) % 26


def answers(replies: Mapping[str, bytes]) -> Callable[[Sequence[int]], int]:
    """After the prompt `key` and a newline: the reply, then the end."""

    def script(tokens: Sequence[int]) -> int:
        border = tokens.index(ord("\n"))
        reply = replies[bytes(tokens[:border]).decode()]
        said = len(tokens) - border - 1
        return reply[said] if said < len(reply) else EOS

    return script


def continuation(prompt: Sequence[int], n: int) -> list[int]:
    """What `endless` says after a prompt."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(endless(tokens))
    return tokens[len(prompt) :]


# -- backends: the fake one, watched --------------------------------------------------------------


@dataclass
class Tenancy:
    """One sequence's time in a lane: what was there, and what it was fed."""

    lane: int
    prompt: tuple[int, ...]
    n_cached: int
    fed: list[tuple[int, int]] = field(default_factory=list)
    """(token, position) of every row that was decoded."""


class WatchedBackend(FakeBackend):
    """Keeps who was in which lane, fed with what."""

    def __init__(
        self,
        script: Callable[[Sequence[int]], int] = endless,
        *,
        n_slots: int,
        fail_on: Sequence[int] = (),
        break_after: int | None = None,
    ) -> None:
        super().__init__(script, n_slots=n_slots, fail_on=fail_on, break_after=break_after)
        self.tenancies: list[Tenancy] = []
        self._tenant: dict[int, Tenancy] = {}
        self._last_cut = (-1, -1)

    def truncate(self, seq_id: int, n_past: int) -> None:
        super().truncate(seq_id, n_past)
        self._last_cut = (seq_id, n_past)

    def sampler(self, params: SamplingParams, prompt: Sequence[int]) -> FakeSampler:
        lane, n_cached = self._last_cut
        self._tenant[lane] = Tenancy(lane, tuple(prompt), n_cached)
        self.tenancies.append(self._tenant[lane])
        return super().sampler(params, prompt)

    def decode(self, rows: Sequence[Row]) -> None:
        super().decode(rows)
        for token, position, lane, _ in rows:
            self._tenant[lane].fed.append((token, position))


class SteppedBackend(WatchedBackend):
    """Waits before each batch until the test lets it go on."""

    def __init__(self, *, n_slots: int, break_after: int | None = None) -> None:
        super().__init__(n_slots=n_slots, break_after=break_after)
        self._entered = threading.Semaphore(0)
        self._permits = threading.Semaphore(0)
        self._free = False

    def decode(self, rows: Sequence[Row]) -> None:
        if not self._free:
            self._entered.release()
            assert self._permits.acquire(timeout=PATIENCE_S)
        super().decode(rows)

    def wait_for_batch(self) -> None:
        """Until the next batch is planned and about to be decoded."""
        assert self._entered.acquire(timeout=PATIENCE_S)

    def step(self) -> None:
        """Decode the batch that waits, and wait for the next one to be planned."""
        self._permits.release()
        self.wait_for_batch()

    def resume(self) -> None:
        self._free = True
        self._permits.release()
        super().resume()


def assert_only_own_tokens_were_fed(backend: WatchedBackend) -> None:
    """Every lane got its sequence's prompt and then what `endless` sampled; each token once."""
    for tenancy in backend.tenancies:
        n = len(tenancy.fed)
        tokens = [*tenancy.prompt, *continuation(tenancy.prompt, tenancy.n_cached + n)]
        positions = range(tenancy.n_cached, tenancy.n_cached + n)
        assert tenancy.fed == [(tokens[position], position) for position in positions]


# -- requests and what comes back -----------------------------------------------------------------


class Inbox:
    """Takes one request's deltas, from any thread."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []
        self._ended = threading.Event()

    def __call__(self, delta: TokenDelta) -> None:
        self.deltas.append(delta)
        if delta.end is not None:
            self._ended.set()

    def wait(self) -> SequenceEnd:
        """Until the end has come."""
        assert self._ended.wait(PATIENCE_S)
        return self.end

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    @property
    def end(self) -> SequenceEnd:
        """The end; the request must have exactly one, and nothing after it."""
        ends = [delta.end for delta in self.deltas if delta.end is not None]
        assert len(ends) == 1
        assert self.deltas[-1].end is ends[0]
        return ends[0]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token for delta in self.deltas for token in delta.token_ids]


def request(
    name: str, prompt: str = "hello\n", *, max_tokens: int | None = 4, stop: tuple[str, ...] = ()
) -> GenerationRequest:
    return GenerationRequest(
        name, tuple(prompt.encode()), SamplingParams(max_tokens=max_tokens, stop=stop)
    )


def options(n_slots: int = 2, **changed: Any) -> EngineOptions:
    return replace(EngineOptions(n_slots=n_slots, n_ctx_slot=64, threads=1, n_batch=16), **changed)


@pytest.fixture
def after(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], threading.Event]:
    """`after("abort")` is an event that is set once that command is in the mailbox."""

    def watch(command: str) -> threading.Event:
        given_in = threading.Event()
        original = getattr(Mailbox, command)

        def watched(mailbox: Mailbox, argument: object) -> None:
            original(mailbox, argument)
            given_in.set()

        monkeypatch.setattr(Mailbox, command, watched)
        return given_in

    return watch


@contextmanager
def running(backend: FakeBackend, opts: EngineOptions | None = None) -> Iterator[Engine]:
    """An engine that is closed, and whose backend is not left waiting, whatever happens."""
    engine = Engine(lambda: backend, opts or options(len(backend.lanes)))
    try:
        yield engine
    finally:
        backend.resume()
        engine.close(0)
        assert backend.closed
        assert backend.open_samplers == 0


def start(engine: Engine, *requests: GenerationRequest) -> list[Inbox]:
    inboxes = [Inbox() for _ in requests]
    for one, inbox in zip(requests, inboxes, strict=True):
        engine.submit_callback(one, inbox)
    return inboxes


def ask(engine: Engine, one: GenerationRequest) -> Inbox:
    """Run one request to its end."""
    (inbox,) = start(engine, one)
    inbox.wait()
    return inbox


def start_together(loop: DecoderLoop, *requests: GenerationRequest) -> list[Inbox]:
    inboxes = [Inbox() for _ in requests]
    pairs = zip(requests, inboxes, strict=True)
    assert not any(loop.submit([EngineSequence(*pair) for pair in pairs]))
    return inboxes


async def read(stream: TokenStream) -> Inbox:
    inbox = Inbox()
    async for delta in stream:
        inbox(delta)
    return inbox


# -- what is fed ----------------------------------------------------------------------------------


def test_lanes_are_fed_their_own_tokens_and_nothing_else() -> None:
    """Interleaved, in chunks, with lanes used again by strangers and by relatives."""
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
        assert engine.stats().steps == len(batches)
    assert [len(batch) for batch in backend.batches] == batches
    assert [row[3] for row in backend.batches[0]] == [False, False, False, True]
    assert inbox.token_ids == continuation(b"abcd", max_tokens)


def test_long_prompt_leaves_every_decoder_a_row() -> None:
    backend = WatchedBackend(n_slots=2)
    loop = DecoderLoop(lambda: backend, options(2, n_batch=6))
    inboxes = start_together(
        loop, request("decoder", "a", max_tokens=8), request("long", "b" * 30, max_tokens=2)
    )
    loop.drain(PATIENCE_S)
    rows = [[row[2] for row in batch] for batch in backend.batches]
    assert rows[:6] == [[0, 1, 1, 1, 1, 1]] * 6
    assert all(0 in batch for batch in rows[:8])
    assert max(map(len, rows)) == 6
    assert [len(inbox.token_ids) for inbox in inboxes] == [8, 2]


def test_prompts_that_do_not_fit_take_turns() -> None:
    backend = WatchedBackend(n_slots=3)
    loop = DecoderLoop(lambda: backend, options(3, n_batch=4))
    start_together(loop, *(request(name, name * 10, max_tokens=1) for name in "abc"))
    loop.drain(PATIENCE_S)
    rows = [[row[2] for row in batch] for batch in backend.batches]
    assert rows[:6] == [[0] * 4, [1] * 4, [2] * 4, [0] * 4, [1] * 4, [2] * 4]
    assert rows[6:] == [[0, 0, 1, 1], [2, 2]]


async def test_submit_many_enters_one_step_together(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Mailbox.submit
    sizes: list[int] = []

    def watched(
        mailbox: Mailbox, sequences: list[EngineSequence], retry_after_s: int
    ) -> list[CorralError | None]:
        sizes.append(len(sequences))
        return submit(mailbox, sequences, retry_after_s)

    monkeypatch.setattr(Mailbox, "submit", watched)
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


# -- admission ------------------------------------------------------------------------------------


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
            GenerationRequest("a", (1,), SamplingParams(logit_bias=((257, 1.0),))),
            InvalidRequestError,
            "logit_bias",
            id="bias of no token",
        ),
        pytest.param(
            request("a", max_tokens=0), InvalidRequestError, "max_tokens", id="no tokens wanted"
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


# -- the end of a text ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "stop", "max_tokens", "text", "reason", "found"),
    [
        pytest.param(b"abc", (), None, "abc", "stop", None, id="end of turn"),
        pytest.param(b"", (), None, "", "stop", None, id="end of turn at once"),
        pytest.param(b"abc", (), 2, "ab", "length", None, id="max_tokens"),
        pytest.param(b"abc", (), 3, "abc", "length", None, id="max_tokens before the end token"),
        pytest.param(b"one END two", ("END",), None, "one ", "stop", "END", id="over tokens"),
        pytest.param(b"abcdef", ("x", "cd"), None, "ab", "stop", "cd", id="several stops"),
        pytest.param(b"abcdef", ("cde", "cd"), None, "ab", "stop", "cd", id="one begins another"),
        pytest.param(b"abEN", ("END",), None, "abEN", "stop", None, id="held text at end of turn"),
        pytest.param(b"abEND", ("END",), 4, "abEN", "length", None, id="held text at max_tokens"),
        pytest.param(b"abEND", ("END",), 5, "ab", "stop", "END", id="stop on the last token"),
        pytest.param("a€b😀".encode(), (), None, "a€b😀", "stop", None, id="characters of bytes"),
        pytest.param("a€".encode(), (), 3, "a�", "length", None, id="cut character"),
        pytest.param(b"a\xffb", (), None, "a�b", "stop", None, id="no UTF-8"),
    ],
)
def test_end_of_text(
    reply: bytes,
    stop: tuple[str, ...],
    max_tokens: int | None,
    text: str,
    reason: str,
    found: str | None,
) -> None:
    backend = FakeBackend(answers({"q": reply}), n_slots=1)
    with running(backend) as engine:
        inbox = ask(engine, request("a", "q\n", max_tokens=max_tokens, stop=stop))
    assert (inbox.text, inbox.end.reason, inbox.end.stop) == (text, reason, found)
    assert inbox.end.error is None


def test_nothing_of_a_stop_string_is_ever_shown() -> None:
    backend = FakeBackend(answers({"q": b"xENENDy"}), n_slots=1)
    with running(backend) as engine:
        inbox = ask(engine, request("a", "q\n", stop=("END",), max_tokens=None))
    assert [delta.text for delta in inbox.deltas] == ["x", "", "", "EN", "", ""]


def test_context_is_used_to_its_last_token() -> None:
    backend = WatchedBackend(n_slots=1)
    with running(backend, options(1, n_ctx_slot=10)) as engine:
        inbox = ask(engine, request("a", "abcd", max_tokens=None))
    assert inbox.end.reason is FinishReason.LENGTH
    assert len(inbox.token_ids) == 6
    assert inbox.end.usage.prompt_tokens + inbox.end.usage.completion_tokens == 10


def test_usage_and_timings() -> None:
    backend = WatchedBackend(n_slots=1)
    with running(backend) as engine:
        end = ask(engine, request("a", "abcd", max_tokens=3)).end
        assert (end.usage.prompt_tokens, end.usage.completion_tokens) == (4, 3)
        assert end.usage.cached_tokens == 0
        assert min(end.timings.queue_s, end.timings.prefill_s, end.timings.decode_s) >= 0
        stats = engine.stats()
        assert (stats.prompt_tokens, stats.generated_tokens, stats.cached_tokens) == (4, 3, 0)
        assert stats.ended == {"length": 1}
        assert (stats.running, stats.waiting) == (0, 0)


def test_stats_while_running() -> None:
    backend = SteppedBackend(n_slots=2)
    with running(backend, options(2, n_batch=4)) as engine:
        start(engine, request("a", "abcdef"))
        backend.wait_for_batch()
        start(engine, request("b"), request("c"))
        backend.step()
        stats = engine.stats()
        assert (stats.running, stats.waiting, stats.steps) == (1, 2, 1)
        (slot, idle) = stats.slots
        assert (slot.state, slot.request_id, slot.n_past) == ("prefill", "a", 4)
        assert (idle.state, idle.request_id) == ("idle", None)
        backend.step()
        stats = engine.stats()
        assert (stats.running, stats.waiting) == (2, 1)
        assert (stats.slots[0].state, stats.slots[0].n_generated) == ("decode", 1)


# -- cached prefixes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "n_cached"),
    [
        pytest.param("abcd", "abcdefg", 4, id="longer"),
        pytest.param("abcd", "abcd", 3, id="same: the last token again"),
        pytest.param("abcd", "abc", 2, id="shorter: its last token again"),
        pytest.param("abcd", "abxy", 2, id="branch"),
        pytest.param("abcd", "xyz", 0, id="stranger"),
        pytest.param("a", "a", 0, id="one token is always decoded"),
    ],
)
def test_slot_keeps_a_prefix(first: str, second: str, n_cached: int) -> None:
    backend = WatchedBackend(n_slots=1)
    with running(backend) as engine:
        ask(engine, request("a", first, max_tokens=1))
        inbox = ask(engine, request("b", second, max_tokens=3))
        assert engine.stats().cached_tokens == n_cached
    assert inbox.end.usage.cached_tokens == n_cached
    assert inbox.token_ids == continuation(second.encode(), 3)
    fed = backend.tenancies[1].fed
    assert [token for token, _ in fed][: len(second) - n_cached] == [*second[n_cached:].encode()]


def test_answer_is_part_of_the_next_prompts_prefix() -> None:
    backend = WatchedBackend(n_slots=1)
    with running(backend) as engine:
        answer = ask(engine, request("a", "abcd", max_tokens=5)).text
        # The answer's last token was sampled but never fed.
        usage = ask(engine, request("b", f"abcd{answer}!")).end.usage
    assert usage.cached_tokens == 4 + 4


COMMON = "one and the same beginning, of no less than sixty letters: "


def fed_prompt_tokens(backend: WatchedBackend) -> int:
    """Prompt tokens that were computed."""
    return sum(
        sum(position < len(tenancy.prompt) for _, position in tenancy.fed)
        for tenancy in backend.tenancies
    )


def test_prefix_of_a_running_sequence_is_copied() -> None:
    backend = SteppedBackend(n_slots=2)
    with running(backend, options(2, n_batch=64, n_ctx_slot=99)) as engine:
        (first,) = start(engine, request("a", COMMON + "a"))
        backend.wait_for_batch()
        backend.step()
        (second,) = start(engine, request("b", COMMON + "b"))
        backend.resume()
        assert second.wait().usage.cached_tokens == len(COMMON)
        first.wait()
    assert first.token_ids == continuation((COMMON + "a").encode(), 4)
    assert second.token_ids == continuation((COMMON + "b").encode(), 4)
    assert_only_own_tokens_were_fed(backend)


def test_prefix_that_many_bring_at_once_is_computed_once() -> None:
    backend = WatchedBackend(n_slots=4)
    loop = DecoderLoop(lambda: backend, options(4, n_batch=20, n_ctx_slot=99))
    requests = [request(name, COMMON + name) for name in "abcd"]
    inboxes = start_together(loop, *requests)
    loop.drain(PATIENCE_S)
    for one, inbox in zip(requests, inboxes, strict=True):
        assert inbox.token_ids == continuation(one.prompt, 4)
    assert fed_prompt_tokens(backend) == len(COMMON) + 4
    assert sorted(inbox.end.usage.cached_tokens for inbox in inboxes) == [0, *[len(COMMON)] * 3]
    assert_only_own_tokens_were_fed(backend)


def test_who_waits_for_a_prefix_lets_others_pass_and_survives_its_abort() -> None:
    backend = SteppedBackend(n_slots=3)
    with running(backend, options(3, n_batch=8, n_ctx_slot=99)) as engine:
        (first,) = start(engine, request("a", COMMON + "a"))
        backend.wait_for_batch()
        second, other = start(engine, request("b", COMMON + "b"), request("c", "xyz"))
        backend.step()
        backend.step()
        assert (engine.stats().running, engine.stats().waiting) == (2, 1)
        engine.abort("a")
        backend.resume()
        first.wait()
        n_fed_of_first = len(backend.tenancies[0].fed)
        assert 0 < second.wait().usage.cached_tokens == n_fed_of_first < len(COMMON)
        other.wait()
    assert second.token_ids == continuation((COMMON + "b").encode(), 4)
    assert other.token_ids == continuation(b"xyz", 4)
    assert_only_own_tokens_were_fed(backend)


def test_conversation_in_an_idle_slot_is_copied_not_overwritten() -> None:
    backend = WatchedBackend(n_slots=2)
    with running(backend, options(2, n_ctx_slot=200)) as engine:
        long_one = COMMON + "a conversation that has gone on for quite a while by now, and goes on"
        ask(engine, request("a", long_one))
        assert ask(engine, request("b", COMMON + "b")).end.usage.cached_tokens == len(COMMON)
        assert ask(engine, request("c", long_one + "!")).end.usage.cached_tokens == len(long_one)
    assert_only_own_tokens_were_fed(backend)


def test_aborted_prompt_leaves_what_was_fed() -> None:
    backend = SteppedBackend(n_slots=1)
    with running(backend, options(1, n_batch=4)) as engine:
        (first,) = start(engine, request("a", "abcdefghij"))
        backend.wait_for_batch()
        engine.abort("a")
        backend.resume()
        first.wait()
        assert ask(engine, request("b", "abcdefghij")).end.usage.cached_tokens == 4
    assert_only_own_tokens_were_fed(backend)


def test_memory_that_cannot_be_cut_is_computed_again() -> None:
    class Uncuttable(WatchedBackend):
        """As a model with recurrent layers: all or nothing."""

        def truncate(self, seq_id: int, n_past: int) -> None:
            if 0 < n_past < len(self.lanes[seq_id]):
                raise DecodeError("cannot cut")
            super().truncate(seq_id, n_past)

    backend = Uncuttable(n_slots=1, fail_on=b"!")
    with running(backend) as engine:
        ask(engine, request("a", "abcd"))
        branch = ask(engine, request("b", "abxy"))
        assert branch.end.usage.cached_tokens == 0
        assert branch.token_ids == continuation(b"abxy", 4)
        assert isinstance(ask(engine, request("c", "!")).end.error, DecodeError)
        assert ask(engine, request("d", "abxy")).token_ids == branch.token_ids
        engine.check_health()


# -- abort ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_steps", "n_generated"),
    [
        pytest.param(0, 0, id="first prompt chunk"),
        pytest.param(1, 0, id="second prompt chunk"),
        pytest.param(2, 1, id="last prompt chunk"),
        pytest.param(3, 2, id="first decode"),
        pytest.param(5, 4, id="later"),
    ],
)
def test_abort_while_running(n_steps: int, n_generated: int) -> None:
    """The prompt takes three steps; the batch that waits when the abort comes is still decoded."""
    backend = SteppedBackend(n_slots=1)
    with running(backend, options(1, n_batch=4)) as engine:
        (inbox,) = start(engine, request("a", "abcdefghijkl", max_tokens=None))
        backend.wait_for_batch()
        for _ in range(n_steps):
            backend.step()
        engine.abort("a")
        engine.abort("a")
        backend.resume()
        end = inbox.wait()
        assert end.reason is FinishReason.ABORT
        assert end.error is None
        assert end.usage.completion_tokens == n_generated
        assert len(backend.batches) == n_steps + 1, "it ran on"
        assert engine.stats().slots[0].state == "idle"
    assert inbox.token_ids == continuation(b"abcdefghijkl", n_generated)


def test_abort_while_waiting() -> None:
    backend = WatchedBackend(n_slots=1)
    backend.hold()
    with running(backend, options(1, max_waiting=1)) as engine:
        first, second = start(engine, request("a"), request("b"))
        engine.abort("b")
        backend.resume()
        assert second.wait().reason is FinishReason.ABORT
        assert second.end.usage.completion_tokens == 0
        assert first.wait().reason is FinishReason.LENGTH
    assert len(backend.tenancies) == 1, "compute was spent on it"


def test_abort_shows_the_text_that_was_held() -> None:
    letters = continuation(b"q", 1)
    backend = SteppedBackend(n_slots=1)
    with running(backend) as engine:
        held = bytes(letters).decode()
        (inbox,) = start(engine, request("a", "q", max_tokens=None, stop=(held + "\0",)))
        backend.wait_for_batch()
        engine.abort("a")
        backend.resume()
        inbox.wait()
    assert [delta.text for delta in inbox.deltas] == ["", held]


def test_abort_after_the_end_and_of_nobody() -> None:
    with running(WatchedBackend(n_slots=1)) as engine:
        ended = ask(engine, request("a"))
        engine.abort("a")
        engine.abort("nobody")
        assert ask(engine, request("a")).end.reason is FinishReason.LENGTH
        assert ended.end.reason is FinishReason.LENGTH


def test_late_abort_does_not_hit_the_next_request_of_that_id() -> None:
    mailbox = Mailbox(1)
    first, second = (EngineSequence(request("a"), Inbox()) for _ in range(2))
    assert mailbox.submit([first], 1) == [None]
    mailbox.take(wait=False)
    mailbox.abort("a")
    mailbox.forget("a")
    assert mailbox.submit([second], 1) == [None]
    commands = mailbox.take(wait=False)
    assert commands.submitted == [second]
    assert not commands.aborted


async def test_leaving_a_stream_aborts_it() -> None:
    backend = SteppedBackend(n_slots=1)
    with running(backend) as engine:
        async with engine.submit(request("a", max_tokens=None)) as stream:
            backend.wait_for_batch()
            backend.step()
            async for _ in stream:
                break
        backend.resume()
        ask(engine, request("b"))
        assert engine.stats().ended == {"abort": 1, "length": 1}


# -- failures -------------------------------------------------------------------------------------


def test_decode_error_ends_only_the_sequence_at_fault() -> None:
    backend = WatchedBackend(n_slots=3, fail_on=b"!")
    loop = DecoderLoop(lambda: backend, options(3))
    good, bad, other = start_together(
        loop, request("a", "abc"), request("b", "xyz!"), request("c", "c")
    )
    loop.drain(PATIENCE_S)
    assert bad.end.reason is FinishReason.ERROR
    assert isinstance(bad.end.error, DecodeError)
    assert good.token_ids == continuation(b"abc", 4)
    assert other.token_ids == continuation(b"c", 4)
    assert loop.failure is None
    assert loop.stats.ended == {"error": 1, "length": 2}


def test_decode_error_in_the_middle_of_a_text() -> None:
    letter = continuation(b"abc", 2)[-1]
    innocent = next(bytes([c]) for c in b"XYZQRST" if letter not in continuation(bytes([c]), 4))
    backend = WatchedBackend(n_slots=2, fail_on=[letter])
    loop = DecoderLoop(lambda: backend, options(2))
    bad, good = start_together(loop, request("a", "abc"), request("b", innocent.decode()))
    loop.drain(PATIENCE_S)
    assert isinstance(bad.end.error, DecodeError)
    assert bad.token_ids == continuation(b"abc", 2)
    assert good.token_ids == continuation(innocent, 4)


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


@pytest.mark.parametrize("method", ["sampler", "truncate"])
def test_backend_that_breaks_while_admitting_forgets_nobody(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("scripted break")

    backend = WatchedBackend(n_slots=1)
    monkeypatch.setattr(backend, method, fail)
    loop = DecoderLoop(lambda: backend, options(1))
    inboxes = start_together(loop, request("a"), request("b"))
    for inbox in inboxes:
        assert isinstance(inbox.wait().error, EngineFailedError)
    loop.drain(0)


def test_script_that_raises_breaks_the_engine_cleanly() -> None:
    def script(tokens: Sequence[int]) -> int:
        raise ValueError("scripted")

    with running(FakeBackend(script, n_slots=2)) as engine:
        inboxes = start(engine, request("a"))
        assert isinstance(inboxes[0].wait().error, EngineFailedError)


# -- close ----------------------------------------------------------------------------------------


def test_close_finishes_what_was_accepted_and_refuses_the_rest(
    after: Callable[[str], threading.Event],
) -> None:
    drained = after("drain")
    backend = SteppedBackend(n_slots=1)
    with running(backend) as engine:
        inboxes = start(engine, request("a"), request("b"))
        backend.wait_for_batch()
        closing = threading.Thread(target=engine.close, args=(PATIENCE_S,))
        closing.start()
        assert drained.wait(PATIENCE_S)
        with pytest.raises(EngineClosedError):
            start(engine, request("c"))
        backend.resume()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
        assert [inbox.end.reason for inbox in inboxes] == [FinishReason.LENGTH] * 2
        assert backend.closed
        with pytest.raises(EngineClosedError):
            start(engine, request("d"))


def test_close_past_its_deadline_ends_the_rest_with_an_error(
    after: Callable[[str], threading.Event],
) -> None:
    drained = after("drain")
    backend = SteppedBackend(n_slots=1)
    with running(backend) as engine:
        inboxes = start(engine, request("a"), request("b"))
        backend.wait_for_batch()
        closing = threading.Thread(target=engine.close, args=(0.0,))
        closing.start()
        assert drained.wait(PATIENCE_S)
        backend.resume()
        closing.join(PATIENCE_S)
        assert not closing.is_alive()
    assert all(isinstance(inbox.end.error, EngineClosedError) for inbox in inboxes)
    assert [len(inbox.token_ids) for inbox in inboxes] == [1, 0], "the batch in flight counts"


async def test_piled_up_text_is_read_after_close() -> None:
    engine = Engine(lambda: WatchedBackend(n_slots=1), options(1))
    stream = engine.submit(request("a", "abc", max_tokens=5))
    engine.close()
    (delta,) = [delta async for delta in stream]
    assert delta.token_ids == tuple(continuation(b"abc", 5))
    assert delta.text == bytes(continuation(b"abc", 5)).decode()
    assert delta.end is not None
    assert delta.end.reason is FinishReason.LENGTH


def test_close_of_an_idle_engine_twice() -> None:
    backend = WatchedBackend(n_slots=1)
    engine = Engine(lambda: backend, options(1))
    engine.close()
    engine.close()
    assert backend.closed
    assert backend.batches == []
    with pytest.raises(EngineClosedError):
        start(engine, request("a"))


def test_close_of_a_failed_engine() -> None:
    with running(WatchedBackend(n_slots=1, break_after=0)) as engine:
        ask(engine, request("a"))
        engine.close()
        with pytest.raises(EngineFailedError):
            start(engine, request("b"))


def test_closed_engine_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    engine = Engine(lambda: WatchedBackend(n_slots=1), options(1))
    ask(engine, request("a"))
    engine.close()
    with pytest.raises(EngineClosedError):
        start(engine, request("b"))
    assert set(threading.enumerate()) <= before


# -- readers --------------------------------------------------------------------------------------


def test_callback_that_raises_aborts_its_request_only(
    after: Callable[[str], threading.Event],
) -> None:
    aborted = after("abort")
    backend = SteppedBackend(n_slots=2)
    calls: list[TokenDelta] = []

    def fail(delta: TokenDelta) -> None:
        calls.append(delta)
        raise ValueError("scripted")

    with running(backend) as engine:
        engine.submit_callback(request("bad", max_tokens=None), fail)
        backend.wait_for_batch()
        backend.step()
        assert aborted.wait(PATIENCE_S)
        (neighbour,) = start(engine, request("good", "abc"))
        backend.resume()
        assert neighbour.wait().reason is FinishReason.LENGTH
        assert engine.stats().ended == {"abort": 1, "length": 1}
    assert len(calls) == 1


async def test_slow_callback_holds_up_no_stream() -> None:
    go_on = threading.Event()
    called = threading.Event()
    slow = Inbox()

    def wait(delta: TokenDelta) -> None:
        called.set()
        assert go_on.wait(PATIENCE_S)
        slow(delta)

    with running(WatchedBackend(n_slots=2)) as engine:
        engine.submit_callback(request("slow"), wait)
        assert called.wait(PATIENCE_S)
        fast = await read(engine.submit(request("fast")))
        assert fast.end.reason is FinishReason.LENGTH
        assert slow.deltas == []
        go_on.set()
        slow.wait()
    assert slow.token_ids == fast.token_ids


def test_stream_of_a_closed_event_loop_is_aborted_and_harms_nobody() -> None:
    backend = SteppedBackend(n_slots=2)
    with running(backend) as engine:

        async def leave() -> None:
            engine.submit(request("left", max_tokens=None))

        asyncio.run(leave())
        backend.wait_for_batch()
        backend.resume()
        assert ask(engine, request("stays", "abc")).token_ids == continuation(b"abc", 4)
        engine.check_health()
        assert engine.stats().ended == {"abort": 1, "length": 1}


async def test_many_streams_at_once_say_what_they_would_say_alone() -> None:
    backend = WatchedBackend(n_slots=4)
    prompts = [f"{'common ' * (i % 3)}{i}" for i in range(20)]
    with running(backend, options(4, n_batch=7)) as engine:
        outcomes = engine.submit_many(
            [request(str(i), prompt, max_tokens=3 + i % 5) for i, prompt in enumerate(prompts)]
        )
        streams = [outcome for outcome in outcomes if isinstance(outcome, TokenStream)]
        inboxes = await asyncio.gather(*map(read, streams))
    assert len(inboxes) == len(prompts)
    for i, (prompt, inbox) in enumerate(zip(prompts, inboxes, strict=True)):
        assert inbox.token_ids == continuation(prompt.encode(), 3 + i % 5)
    assert_only_own_tokens_were_fed(backend)


# -- anything may happen, in any order ------------------------------------------------------------


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


@settings(max_examples=150, deadline=None)
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
    with mock.patch("serve_app.engine.loop._LEAST_COPY", least_copy):
        loop = DecoderLoop(lambda: backend, options(2, n_batch=5, max_waiting=3, n_ctx_slot=14))
    accepted: list[tuple[GenerationRequest, Inbox]] = []
    aborted: set[str] = set()
    for event in events:
        match event:
            case Submit(name, prompt, max_tokens):
                one, inbox = request(name, prompt, max_tokens=max_tokens), Inbox()
                (refusal,) = loop.submit([EngineSequence(one, backend.sink(inbox))])
                if refusal is None:
                    accepted.append((one, inbox))
                else:
                    assert isinstance(
                        refusal, QueueFullError | InvalidRequestError | EngineFailedError
                    )
            case Abort(name):
                aborted.add(name)
                loop.abort(name)
            case Steps(n):
                backend.allow(n)
        backend.settle([inbox for _, inbox in accepted])
    backend.allow(10_000)
    loop.drain(deadline_s)
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
    stats = loop.stats
    assert (stats.running, stats.waiting) == (0, 0)
    assert {slot.state for slot in stats.slots} == {"idle"}
    assert sum(stats.ended.values()) == len(accepted)
    assert_only_own_tokens_were_fed(backend)
