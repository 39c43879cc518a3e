"""Requests whose replicas are lost."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from serve_app.base.errors import (
    CorralError,
    DecodeError,
    EngineClosedError,
    EngineFailedError,
    EngineUnavailableError,
    ModelReplacedError,
    QueueFullError,
)
from serve_app.base.sampling import SamplingParams
from serve_app.base.values.answers import (
    Accepted,
    FinishReason,
    SequenceEnd,
    Timings,
    TokenDelta,
    Usage,
)
from serve_app.base.values.requests import GenerationRequest
from serve_app.server.answering.failover import retry, unbroken

TEXT = "hello world"
END = SequenceEnd(FinishReason.STOP, Usage(1, len(TEXT), 0), Timings(0, 0, 0))
DIED = EngineFailedError("The engine replica failed (ActorDiedError).")
CLOSED = EngineClosedError("The engine shut down.")
NO_PAUSES = (0.0, 0.0, 0.0)


class Replicas:
    """Each says the rest of TEXT, a token for a character, up to where it fails. One that fails before any
    token, and not by dying, refuses the request; all others accept it."""

    def __init__(self, *fates: tuple[int, CorralError | None]) -> None:
        self.fates = list(fates)
        """For each attempt: tokens that it gives, and how it fails then; None for a stream that is cut."""
        self.asked: list[GenerationRequest] = []
        self.n_open = 0

    async def attempt(self, request: GenerationRequest) -> AsyncGenerator[Accepted | TokenDelta]:
        self.asked.append(request)
        self.n_open += 1
        try:
            rest = TEXT[len(request.generated) :]
            n_tokens, failure = self.fates.pop(0) if self.fates else (len(rest), None)
            if n_tokens or isinstance(failure, EngineFailedError | None):
                yield Accepted()
            for character in rest[:n_tokens]:
                yield TokenDelta(character, (ord(character),))
            if failure is not None:
                raise failure
            if n_tokens == len(rest):
                yield TokenDelta("", (), END)
        finally:
            self.n_open -= 1


def asking(**sampling: int) -> GenerationRequest:
    return GenerationRequest("r", (1,), SamplingParams(**sampling))  # type: ignore[arg-type]


async def read(replicas: Replicas, request: GenerationRequest) -> str:
    """The text, of a request that is accepted once, and ends once."""
    accepted, *deltas = [item async for item in unbroken(request, replicas.attempt, NO_PAUSES)]
    assert isinstance(accepted, Accepted)
    text, ends = "", 0
    for delta in deltas:
        assert isinstance(delta, TokenDelta)
        text += delta.text
        ends += delta.end is not None
    assert ends == 1
    return text


@pytest.mark.parametrize("failure", [DIED, CLOSED, None])
@pytest.mark.parametrize("n_tokens", [0, 1, 5])
async def test_nothing_is_missing_and_nothing_comes_twice(
    failure: CorralError | None, n_tokens: int
) -> None:
    replicas = Replicas((n_tokens, failure), (3, failure), (2, failure))
    assert await read(replicas, asking()) == TEXT
    assert [bytes(one.generated).decode() for one in replicas.asked] == [
        TEXT[:n] for n in (0, n_tokens, n_tokens + 3, n_tokens + 5)
    ]
    assert [one.id for one in replicas.asked] == ["r", "r~1", "r~2", "r~3"]
    assert [one.n_failovers for one in replicas.asked] == [0, 1, 2, 3]
    assert replicas.n_open == 0


@pytest.mark.parametrize(
    ("fates", "n_tokens", "n_asked"),
    [
        ([(1, DIED)] * 9, 4, 4),
        ([(2, DIED), (0, CLOSED), (1, DIED), (0, CLOSED), (1, DIED), (1, DIED), (9, DIED)], 5, 6),
        ([(2, CLOSED), (0, CLOSED), (1, CLOSED), *[(0, CLOSED)] * 9], 3, 6),
    ],
)
async def test_a_request_that_breaks_its_replicas_is_given_up(
    fates: list[tuple[int, CorralError]], n_tokens: int, n_asked: int
) -> None:
    """Replicas that failed count whatever they brought, and others until the next token."""
    replicas = Replicas(*fates)
    items = unbroken(asking(), replicas.attempt, NO_PAUSES)
    tokens = [TokenDelta(character, (ord(character),)) for character in TEXT[:n_tokens]]
    assert [await anext(items) for _ in range(1 + n_tokens)] == [Accepted(), *tokens]
    with pytest.raises(type(fates[-1][1])):
        await anext(items)
    assert len(replicas.asked) == n_asked
    assert replicas.n_open == 0


async def test_a_request_moves_as_often_as_replicas_are_shut_down() -> None:
    replicas = Replicas(*[(1, CLOSED)] * 10)
    assert await read(replicas, asking()) == TEXT
    assert len(replicas.asked) == len(TEXT)


@pytest.mark.parametrize(
    "failure",
    [DecodeError("Bad rows."), EngineUnavailableError("None is up."), QueueFullError("Full.", 1)],
)
async def test_other_errors_are_the_end(failure: CorralError) -> None:
    replicas = Replicas((0, failure))
    with pytest.raises(type(failure)):
        await read(replicas, asking())
    assert len(replicas.asked) == 1


@pytest.mark.parametrize("n_tokens", [0, 4])
async def test_an_engine_with_another_vocabulary_is_passed_over(n_tokens: int) -> None:
    replaced = ModelReplacedError("Another vocabulary.")
    replicas = Replicas((n_tokens, DIED), (0, replaced), (0, replaced))
    assert await read(replicas, asking()) == TEXT
    with pytest.raises(EngineUnavailableError, match="Another vocabulary") as failed:
        await read(Replicas((n_tokens, DIED), *[(0, replaced)] * 9), asking())
    assert (failed.value.status, failed.value.code) == (503, "engine_unavailable")


async def test_a_request_that_was_accepted_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    slept = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("asyncio.sleep", sleep)
    full = QueueFullError("Full.", 30)
    replicas = Replicas((4, DIED), *[(0, full)] * 20)
    assert await read(replicas, asking()) == TEXT
    assert slept == [0.0, *[1.0] * 20]


async def test_a_request_that_was_lost_before_it_was_accepted_is_refused() -> None:
    replicas = Replicas((0, CLOSED), (0, QueueFullError("Full.", 30)))
    items = unbroken(asking(), replicas.attempt, NO_PAUSES)
    with pytest.raises(QueueFullError):
        await anext(items)
    assert len(replicas.asked) == 2


async def test_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.server.answering.failover._REFUSED_S", 0.0)
    with pytest.raises(QueueFullError):
        await read(Replicas((4, DIED), (0, QueueFullError("Full.", 1))), asking())


async def test_whoever_leaves_ends_the_attempt() -> None:
    replicas = Replicas((3, DIED))
    items = unbroken(asking(), replicas.attempt, NO_PAUSES)
    for _ in range(6):
        await anext(items)
    assert replicas.n_open == 1
    await items.aclose()
    assert replicas.n_open == 0


async def test_what_was_asked_for_stays_but_seeds_move_on() -> None:
    replicas = Replicas((4, DIED))
    await read(replicas, asking(seed=7, max_tokens=50))
    first, second = replicas.asked
    assert (first.sampling.seed, second.sampling.seed) == (7, 11)
    assert second.sampling.max_tokens == 50
    assert (second.prompt, len(second.failovers_s), second.failovers_s[0] > 0) == ((1,), 1, True)


@pytest.mark.parametrize(("n_lost", "n_asked"), [(0, 1), (3, 4), (9, 4)])
async def test_what_has_no_stream_is_asked_for_again(n_lost: int, n_asked: int) -> None:
    asked = []

    async def attempt() -> int:
        asked.append(1)
        if len(asked) <= n_lost:
            raise DIED
        return 5

    if n_lost < n_asked:
        assert await retry(attempt, NO_PAUSES) == 5
    else:
        with pytest.raises(EngineFailedError):
            await retry(attempt, NO_PAUSES)
    assert len(asked) == n_asked


@pytest.mark.parametrize("n_tokens", [0, 4])
async def test_log_probabilities_of_the_prompt_come_once(n_tokens: int) -> None:
    replicas = Replicas((n_tokens, DIED))
    await read(replicas, asking(prompt_logprobs=True))
    assert [one.sampling.prompt_logprobs for one in replicas.asked] == [True, n_tokens == 0]
