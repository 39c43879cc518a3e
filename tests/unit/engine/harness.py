"""A watched engine over the scripted backend, and how tests talk to it."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from serve_app.base.formats import Row
from serve_app.base.values.answers import Accepted
from serve_app.engine import (
    CorralError,
    Engine,
    EngineOptions,
    GenerationRequest,
    SamplingParams,
    SequenceEnd,
    TokenDelta,
    TokenStream,
)
from serve_app.engine.core.guest import Steps
from serve_app.engine.core.loop import DecoderLoop
from serve_app.engine.core.sequence import Sequence as EngineSequence
from serve_app.engine.core.step_budget import StepBudget
from serve_app.engine.metrics.stats import Counts
from serve_app.engine.policy.policy import SlotPolicy
from serve_app.kernels.llama.grammars.constraint import Constraint
from tests.doubles.backend import FakeBackend, FakeSampler, FakeVocabulary

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
    """One sequence's time in a slot: what was there, and what it was fed."""

    slot: int
    prompt: tuple[int, ...]
    n_cached: int
    fed: list[tuple[int, int]] = field(default_factory=list)
    """(token, position) of every row that was decoded."""


class WatchedBackend(FakeBackend):
    """Keeps who was in which slot, fed with what."""

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

    def sampler(
        self, params: SamplingParams, prompt: Sequence[int], constraint: Constraint | None
    ) -> FakeSampler:
        slot, n_cached = self._last_cut
        self._tenant[slot] = Tenancy(slot, tuple(prompt), n_cached)
        self.tenancies.append(self._tenant[slot])
        return super().sampler(params, prompt, constraint)

    def decode(self, rows: Sequence[Row]) -> None:
        super().decode(rows)
        for token, position, slot, _ in rows:
            self._tenant[slot].fed.append((token, position))


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

    def release(self) -> None:
        """Decode the batch that waits."""
        self._permits.release()

    def step(self) -> None:
        """Decode the batch that waits, and wait for the next one to be planned."""
        self.release()
        self.wait_for_batch()

    def step_if_any(self) -> None:
        """Let the batch be decoded that waits, if one does within a hundredth of a second."""
        if self._entered.acquire(timeout=0.01):
            self._permits.release()

    def resume(self) -> None:
        self._free = True
        self._permits.release()
        super().resume()


def assert_only_own_tokens_were_fed(backend: WatchedBackend) -> None:
    """Every slot got its sequence's prompt and then what `endless` sampled; each token once."""
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
    name: str,
    prompt: str = "hello\n",
    *,
    max_tokens: int | None = 4,
    stop: tuple[str, ...] = (),
    group: str = "",
) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=max_tokens, stop=stop)
    return GenerationRequest(name, tuple(prompt.encode()), sampling, cache_group=group)


def options(n_slots: int = 2, **changed: Any) -> EngineOptions:
    return replace(EngineOptions(n_slots=n_slots, n_ctx_slot=64, threads=1, n_batch=16), **changed)


@contextmanager
def running(backend: FakeBackend, opts: EngineOptions | None = None) -> Iterator[Engine]:
    """An engine that is closed, and whose backend is not left waiting, whatever happens."""
    engine = Engine(lambda: backend, opts or options(len(backend.slots)))
    try:
        yield engine
    finally:
        backend.resume()
        engine.close(0)
        assert backend.closed
        assert backend.open_samplers == 0


def steps(budget: StepBudget, policy: SlotPolicy | None = None) -> Steps:
    """The steps of an engine in which nothing happens."""
    return Steps(
        running=(),
        waiting=(),
        budget=budget,
        counts=Counts(),
        charge=(policy or SlotPolicy(options())).charge,
        admit=lambda: None,
        take_commands=lambda: True,
        interlude=lambda: None,
        end=lambda sequences, error: None,
        interrupt=lambda: None,
        resting=nullcontext,
    )


def are_accepted(outcomes: Iterable[CorralError | Accepted]) -> bool:
    return all(isinstance(outcome, Accepted) for outcome in outcomes)


def submit(engine: Engine, one: GenerationRequest, inbox: Inbox) -> None:
    """Start a request. Raises the refusal."""
    (outcome,) = engine.submit_to([(one, inbox)])
    if isinstance(outcome, CorralError):
        raise outcome


def start(engine: Engine, *requests: GenerationRequest) -> list[Inbox]:
    inboxes = [Inbox() for _ in requests]
    for one, inbox in zip(requests, inboxes, strict=True):
        submit(engine, one, inbox)
    return inboxes


def ask(engine: Engine, one: GenerationRequest) -> Inbox:
    """Run one request to its end."""
    (inbox,) = start(engine, one)
    inbox.wait()
    return inbox


def start_together(loop: DecoderLoop, *requests: GenerationRequest) -> list[Inbox]:
    inboxes = [Inbox() for _ in requests]
    pairs = zip(requests, inboxes, strict=True)
    assert are_accepted(loop.enqueue([EngineSequence(*pair) for pair in pairs]))
    return inboxes


async def read(stream: TokenStream) -> Inbox:
    inbox = Inbox()
    async for delta in stream:
        inbox(delta)
    return inbox


def until(condition: Callable[[], bool]) -> None:
    """Wait until another thread has made it true."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
