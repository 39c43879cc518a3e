"""Texts that become vectors: what shares a batch, who is next, and what ends without one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from serve_app.base.errors import (
    CorralError,
    DecodeError,
    EngineClosedError,
    EngineFailedError,
    QueueFullError,
    TextTooLongError,
)
from serve_app.base.formats import EmbeddingPooling, Row
from serve_app.base.values.media import MEDIUM, Picture
from serve_app.engine import Engine, InvalidRequestError
from serve_app.engine.backends.base import EmbeddingShape
from serve_app.engine.core.sequence import Sequence as EngineSequence
from serve_app.engine.core.step_budget import StepBudget
from serve_app.engine.costs.cost_model import CostModel, Profile
from serve_app.engine.guests.embedding import EmbeddingQueue, Texts, Vectors, pack
from serve_app.engine.guests.pictures import expand_media
from serve_app.engine.health import Progress
from serve_app.engine.metrics.stats import EmbeddingStats
from serve_app.engine.policy.policy import SlotPolicy
from tests.doubles.backend import FakeBackend
from tests.unit.engine.behaviour.test_pictures import BAD, GOOD, N_SEEN, OTHER, ScriptedProjector
from tests.unit.engine.harness import (
    PATIENCE_S,
    WatchedBackend,
    ask,
    endless,
    options,
    request,
    running,
    start,
    steps,
    until,
)

Tokens = tuple[int, ...]

RUNNING = (EngineSequence(request("runs"), lambda delta: None),)


def text(n_tokens: int, first: int = 1) -> Tokens:
    return tuple(range(first, first + n_tokens))


def mean(tokens: Tokens) -> list[float]:
    """What the fake backend's rows come to."""
    sums = np.cumsum(tokens)
    exact = [np.mean(tokens), (len(tokens) - 1) / 2, np.mean(sums)]
    return [float(np.float32(number)) for number in exact]


# -- the policy, without an engine ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("pending", "limit", "whole", "packed"),
    [
        ([3], 8, False, [3]),
        ([3, 4], 8, False, [3, 4]),
        ([3, 5, 1], 8, False, [3, 5]),
        ([3, 6, 1], 8, False, [3]),  # in order: nobody overtakes
        ([9, 1], 8, False, [8]),
        ([8, 1], 8, False, [8]),
        ([9, 1], 8, True, [9]),
        ([3, 6], 8, True, [3]),
        ([1, 1, 1], 1, False, [1]),
    ],
)
def test_packing(pending: list[int], limit: int, whole: bool, packed: list[int]) -> None:
    assert pack(pending, limit, whole=whole) == packed


def idle_queue(backend: FakeBackend, costs: CostModel, policy: SlotPolicy) -> EmbeddingQueue:
    """No text waits, and streams may wait for a quarter of a second."""
    budget = StepBudget(250, lambda: 0.0)
    return EmbeddingQueue(backend, costs, Progress(), policy, steps(budget, policy))


def step(made: EmbeddingQueue, *running: EngineSequence) -> None:
    """A batch beside those that run."""
    made._steps.running = running
    made.step()


def queue(
    *requests: Sequence[Tokens],
    seconds_a_row: float = 0.0,
    causal: bool = True,
    pooling: EmbeddingPooling = "mean",
    fail_on: Sequence[int] = (),
) -> tuple[EmbeddingQueue, FakeBackend, list[Texts]]:
    backend = FakeBackend(endless, n_slots=1, fail_on=fail_on)
    backend.embedding = EmbeddingShape(16, 8, n_text=32, pooling=pooling, causal=causal)
    prefill = {n: n * seconds_a_row for n in (1, 2, 4, 8, 16)} if seconds_a_row else {}
    costs = CostModel(Profile(dict(prefill), prefill))
    made = idle_queue(backend, costs, SlotPolicy(options()))
    texts = [Texts(tokens) for tokens in requests]
    made.add(texts)
    return made, backend, texts


def batches(made: EmbeddingQueue, backend: FakeBackend, *, beside: bool = False) -> list[list[int]]:
    """Every batch's tokens, until nothing waits."""
    while made.has_work:
        step(made, *(RUNNING if beside else ()))
    made.deliver()
    return [[row[0] for row in batch] for batch in backend.embed_batches]


@pytest.mark.parametrize(
    ("n_asked", "client", "place"),
    [
        pytest.param(12, "batch", 0, id="a flood"),
        pytest.param(4, "batch", 4, id="another client's share"),
        pytest.param(12, "asks", 12, id="its own flood"),
    ],
)
def test_texts_in_the_background_are_behind_what_others_share_has(
    n_asked: int, client: str, place: int
) -> None:
    made, backend, _ = queue()
    made.add([Texts([(1,)] * n_asked, "asks"), Texts([(2,)] * 2, client, background=True)])
    tokens = [token for batch in batches(made, backend) for token in batch]
    assert tokens.index(2) // 2 * 2 == place


@pytest.mark.parametrize(
    ("n_asked", "client", "is_computed"),
    [
        pytest.param(5, "batch", True, id="a flood"),
        pytest.param(4, "batch", False, id="a share"),
        pytest.param(5, "runs", False, id="its own flood"),
    ],
)
def test_beside_sequences_texts_in_the_background_have_what_is_left_of_a_share(
    n_asked: int, client: str, is_computed: bool
) -> None:
    policy = SlotPolicy(options(8))
    made, backend = shared(policy, Texts([(2,)], client, background=True))
    policy._accounts.enter("runs")
    policy._accounts.charge("runs", 5.0)
    asked = [
        EngineSequence(replace(request(f"r{n}", "x"), client="runs"), lambda delta: None)
        for n in range(n_asked)
    ]
    made._steps.waiting = asked[1:]
    step(made, asked[0])
    assert bool(backend.embed_batches) == is_computed


def test_requests_take_turns() -> None:
    made, backend, _ = queue([(n,) * 8 for n in range(4)], [(9,), (10,)])
    first, *rest = batches(made, backend)
    assert first == [0] * 8 + [9]  # the short list's first text comes before the long one's second
    assert rest == [[1] * 8 + [10], [2] * 8 + [3] * 8]


def test_a_long_text_goes_on_in_the_next_batch() -> None:
    made, backend, (request,) = queue([text(30), text(3, 50)])
    assert batches(made, backend) == [list(text(16)), [*text(14, 17)], list(text(3, 50))]
    assert request.future.result().tolist() == [mean(text(30)), mean(text(3, 50))]


@pytest.mark.parametrize(("pooling", "row"), [("mean", None), ("cls", 0), ("last", 19)])
def test_pooling_over_parts(pooling: EmbeddingPooling, row: int | None) -> None:
    made, backend, (request,) = queue([text(20)], pooling=pooling)
    assert len(batches(made, backend)) == 2
    rows = [[token, token - 1, sum(text(token))] for token in text(20)]
    expected = mean(text(20)) if row is None else rows[row]
    assert request.future.result().tolist() == [expected]


def test_without_pooling_every_token_has_its_vector() -> None:
    made, backend, (request,) = queue([text(20), text(3)], pooling="none")
    assert len(batches(made, backend)) > 1
    rows = [[token, token - 1, sum(text(token))] for n in (20, 3) for token in text(n)]
    assert request.future.result().tolist() == rows


def test_a_text_that_must_be_whole_is() -> None:
    made, backend, _ = queue([text(30)], [text(3)], causal=False)
    assert [len(one) for one in batches(made, backend)] == [30, 3]


def test_batches_beside_running_sequences_keep_to_the_stall_budget() -> None:
    alone, backend, _ = queue([text(16)], seconds_a_row=0.015)
    assert [len(one) for one in batches(alone, backend)] == [16]
    beside, backend, _ = queue([text(16)], seconds_a_row=0.015)
    sizes = [len(one) for one in batches(beside, backend, beside=True)]
    assert sizes == [8, 8]  # half of 250 ms
    slow, backend, _ = queue([text(3)], seconds_a_row=9)
    assert len(batches(slow, backend, beside=True)) == 3  # it gets on all the same


def test_what_was_cancelled_is_not_computed() -> None:
    made, backend, (one, other) = queue([text(16)], [text(2, 40)])
    one.future.cancel()
    assert batches(made, backend) == [list(text(2, 40))]
    assert other.future.done()


def test_a_sequence_that_was_left_half_way_is_begun_anew() -> None:
    made, backend, (one, other) = queue([text(30)], [text(20, 40)])
    step(made)
    one.future.cancel()
    assert batches(made, backend) == [list(text(16)), [*text(16, 40)], [*text(4, 56)]]
    assert other.future.result().tolist() == [mean(text(20, 40))]


def test_only_the_text_at_fault_ends() -> None:
    requests = [(1,)], [(2,), (99,), (3,)], [text(4, 10)], [text(5, 20)]
    made, backend, (first, bad, *others) = queue(*requests, fail_on=[99])
    assert batches(made, backend) == [
        [1, 2, *text(4, 10), *text(5, 20), 99, 3],
        [1],
        [2],
        list(text(4, 10)),
        list(text(5, 20)),
        [99],
    ]
    assert isinstance(bad.future.exception(), DecodeError)
    assert first.future.result().tolist() == [mean((1,))]
    assert [one.future.result().tolist() for one in others] == [
        [mean(text(4, 10))],
        [mean(text(5, 20))],
    ]


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_a_long_text_beside_one_at_fault_is_begun_anew(pooling: EmbeddingPooling) -> None:
    undisturbed, backend, (expected,) = queue([text(30)], pooling=pooling)
    batches(undisturbed, backend)
    made, backend, (good, bad) = queue([text(30)], [(99,)], pooling=pooling, fail_on=[99])
    assert batches(made, backend) == [
        list(text(16)),
        [*text(14, 17), 99],
        list(text(16)),
        list(text(14, 17)),
        [99],
    ]
    assert good.future.result().tolist() == expected.future.result().tolist()
    assert isinstance(bad.future.exception(), DecodeError)


def test_those_who_come_later_share_batches_again() -> None:
    made, backend, _ = queue([(1,)], [(99,)], fail_on=[99])
    batches(made, backend)
    made.add([Texts([(5,)]), Texts([(6,)])])
    assert batches(made, backend)[-1] == [5, 6]


# -- clients ---------------------------------------------------------------------------------------


def shared(policy: SlotPolicy, *requests: Texts) -> tuple[EmbeddingQueue, FakeBackend]:
    """Texts of clients, a row of which takes a hundredth of a second."""
    backend = FakeBackend(endless, n_slots=1)
    backend.embedding = EmbeddingShape(4, 8, n_text=32, pooling="mean", causal=True)
    prefill = {n: n * 0.01 for n in (1, 2, 4)}
    costs = CostModel(Profile(dict(prefill), prefill))
    made = idle_queue(backend, costs, policy)
    made.add(requests)
    return made, backend


def of(client: str, *tokens: int) -> Texts:
    """Texts of two of the same tokens."""
    return Texts([(token,) * 2 for token in tokens], client)


def firsts(backend: FakeBackend) -> list[int]:
    """Each text's token, in the order in which texts were computed."""
    return [row[0] for batch in backend.embed_batches for row in batch if row[1] == 0]


def test_clients_take_turns() -> None:
    many, few = of("a", 1, 2, 3, 4, 5, 6), of("b", 7, 8)
    made, backend = shared(SlotPolicy(options()), many, few)
    while made.has_work:
        step(made)
    assert firsts(backend)[:4] in ([1, 7, 2, 8], [1, 7, 8, 2])


def test_who_was_served_less_goes_first() -> None:
    policy = SlotPolicy(options())
    accounts = policy._accounts
    for client in "ab":
        accounts.enter(client)
    accounts.charge("a", 100.0)
    made, backend = shared(policy, of("a", 1, 2, 3), of("b", 7, 8))
    while made.has_work:
        step(made)
    assert firsts(backend) == [7, 8, 1, 2, 3]
    assert 0 < accounts["b"] < 100 < accounts["a"]


def test_texts_are_no_clients_when_they_are_gone() -> None:
    policy = SlotPolicy(options())
    accounts = policy._accounts
    done, cancelled, failed = of("a", 1), of("b", 2), of("c", 3)
    made, _ = shared(policy, done, cancelled, failed)
    assert accounts.active == 3
    cancelled.future.cancel()
    step(made)
    made.fail(EngineClosedError("closed"))
    made.fail(EngineClosedError("closed"))
    made.deliver()
    assert accounts.active == 0
    assert done.future.done()
    assert failed.future.done()


@pytest.mark.parametrize(
    ("charged", "n_pending", "computed"),
    [
        pytest.param("texts", 9, False, id="a prompt of who has less goes first"),
        pytest.param("texts", 1, True, id="a stream does not stop them"),
        pytest.param("runs", 9, True, id="a prompt of who has more waits for them"),
        pytest.param("", 9, False, id="as much: a prompt goes first"),
    ],
)
def test_texts_and_prompts_take_turns(charged: str, n_pending: int, computed: bool) -> None:
    policy = SlotPolicy(options())
    accounts = policy._accounts
    made, backend = shared(policy, of("texts", 1))
    accounts.enter("runs")
    accounts.charge(charged, 5.0)
    one = EngineSequence(replace(request("r", "x" * 9), client="runs"), lambda delta: None)
    one.n_past = 9 - n_pending
    step(made, one)
    assert bool(backend.embed_batches) == computed


def test_streams_of_who_has_less_get_half_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of texts takes two seconds by this clock, a step without one takes none."""
    now = [0.0]
    monkeypatch.setattr("serve_app.engine.guests.embedding.time.monotonic", lambda: now[0])
    policy = SlotPolicy(options())
    accounts = policy._accounts
    made, backend = shared(policy, of("texts", *range(1, 9)))
    compute = backend.embed

    def embed(rows: Sequence[Row]) -> NDArray[np.float32]:
        now[0] += 2.0
        return compute(rows)

    monkeypatch.setattr(backend, "embed", embed)
    accounts.enter("runs")
    accounts.charge("texts", 5.0)
    one = EngineSequence(replace(request("r", "x"), client="runs"), lambda delta: None)
    n_batches = []
    for _ in range(8):
        step(made, one)
        n_batches.append(len(backend.embed_batches))
        now[0] += 0.5
    assert n_batches == [1, 1, 1, 1, 2, 2, 2, 2]
    step(made)  # nobody else is there
    assert len(backend.embed_batches) == 3


def test_batches_are_short_while_other_clients_are_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row takes two hundredths of a second, and a twentieth of the stall budget is less."""
    now = [0.0]
    monkeypatch.setattr("serve_app.engine.guests.embedding.time.monotonic", lambda: now[0])
    policy = SlotPolicy(options())
    accounts = policy._accounts
    made, backend = shared(policy, of("texts", *range(1, 9)))
    accounts.enter("runs")
    one = EngineSequence(replace(request("r", "x"), client="runs"), lambda delta: None)
    step(made)
    step(made, one)
    now[0] = 9.0
    step(made)
    now[0] = 11.0
    step(made)
    assert [len(batch) for batch in backend.embed_batches] == [4, 1, 1, 4]


@pytest.mark.parametrize(
    ("held", "client", "n_texts", "accepted"),
    [
        pytest.param({"a": 2047}, "a", 2048, True, id="few wait"),
        pytest.param({"a": 2048}, "a", 1, False, id="its own are too many"),
        pytest.param({"a": 2048}, "b", 2048, True, id="the first of another"),
        pytest.param({"b": 24, "a": 2048}, "b", 1000, True, id="within its share"),
        pytest.param({"b": 24, "a": 2048}, "b", 1001, False, id="beyond its share"),
        pytest.param({"a": 2048, "b": 2048, "c": 4096}, "d", 1, False, id="too many in all"),
    ],
)
@pytest.mark.parametrize("has_background", [False, True])
def test_who_may_bring_texts(
    held: dict[str, int], client: str, n_texts: int, has_background: bool, accepted: bool
) -> None:
    """Whatever is in the background, which has places of its own."""
    policy = SlotPolicy(options())
    if has_background:
        assert policy.accepts_texts(Texts([(1,)], client, background=True), 1024) is None
    requests = [Texts([(1,)], name) for name in held]
    for owner, n in zip(requests, held.values(), strict=True):
        assert policy.accepts_texts(owner, n) is None
    wanted = Texts([(1,)], client)
    assert (policy.accepts_texts(wanted, n_texts) is None) == accepted
    for owner in (*requests, wanted):
        policy.forget_texts(owner)
    assert policy.accepts_texts(Texts([(1,)], client), 1) is None


def test_texts_in_the_background_have_half_as_many_places() -> None:
    policy = SlotPolicy(options())
    assert policy.accepts_texts(Texts([(1,)], "a", background=True), 1024) is None
    assert isinstance(policy.accepts_texts(Texts([(1,)], "b", background=True), 1), QueueFullError)
    assert policy.accepts_texts(Texts([(1,)], "b"), 1) is None


# -- the engine -----------------------------------------------------------------------------------


def gather(engine: Engine, *requests: Sequence[Tokens]) -> list[list[list[float]]]:
    outcomes = engine.embed_many([Texts(tokens) for tokens in requests])
    found = []
    for outcome in outcomes:
        assert not isinstance(outcome, Exception)
        found.append(outcome.result(PATIENCE_S).tolist())
    return found


def test_requests_that_come_together_share_a_batch() -> None:
    backend = WatchedBackend(n_slots=2)
    with running(backend) as engine:
        assert gather(engine, [(1, 2)], [(3,), (4, 5)]) == [
            [mean((1, 2))],
            [mean((3,)), mean((4, 5))],
        ]
        stats = engine.stats()
    assert len(backend.embed_batches) == 1
    assert stats.embeddings == EmbeddingStats(3, 5, 1)


def test_requests_that_come_during_a_batch_share_the_next() -> None:
    backend = WatchedBackend(n_slots=2)
    with running(backend) as engine:
        backend.hold()
        first = engine.embed([(1,)])
        until(lambda: not engine._command_queue._pending.commands)  # it was taken
        others = [engine.embed([(n,)]) for n in range(2, 9)]
        backend.resume()
        for one in (first, *others):
            one.result(PATIENCE_S)
        assert engine.stats().embeddings.embedding_batches <= 3
        assert engine.stats().embeddings.embedded_texts == 8


def test_generation_goes_on_beside_it() -> None:
    alone, beside = WatchedBackend(n_slots=2), WatchedBackend(n_slots=2)
    with running(alone) as engine:
        expected = ask(engine, request("a", max_tokens=40)).text
    with running(beside) as engine:
        (inbox,) = start(engine, request("a", max_tokens=40))
        found = gather(engine, *([text(20), (n,)] for n in range(10)))
        inbox.wait()
    assert inbox.text == expected
    assert found == [[mean(text(20)), mean((n,))] for n in range(10)]


@pytest.mark.parametrize("texts", [[], [()], [(1,), ()]], ids=repr)
def test_nothing_is_no_text(texts: list[Tokens]) -> None:
    with running(WatchedBackend(n_slots=1)) as engine, pytest.raises(InvalidRequestError):
        engine.embed(texts)


def test_refusals_come_before_anything_is_computed() -> None:
    backend = WatchedBackend(n_slots=1)
    with running(backend) as engine:
        too_long, unknown, good = engine.embed_many(
            [Texts([text(33)]), Texts([(1, 257)]), Texts([(1,)])]
        )
        assert isinstance(too_long, TextTooLongError)
        assert isinstance(unknown, InvalidRequestError)
        assert not isinstance(good, Exception)
        good.result(PATIENCE_S)
    assert backend.embed_batches == [[(1, 0, 0, True)]]


def test_2048_texts_wait_at_most() -> None:
    backend = WatchedBackend(n_slots=1)
    backend.hold()
    with running(backend) as engine:
        many = engine.embed([(1,)] * 2048)
        with pytest.raises(QueueFullError):
            engine.embed([(1,)])
        many.cancel()
        again = engine.embed([(1,)])  # their places are free at once
        backend.resume()
        again.result(PATIENCE_S)


def test_many_texts_of_one_client_do_not_refuse_another() -> None:
    backend = WatchedBackend(n_slots=1)
    backend.hold()
    with running(backend) as engine:
        engine.embed([(1,)] * 2048, "a")
        with pytest.raises(QueueFullError):
            engine.embed([(1,)], "a")
        other = engine.embed([(2,)], "b")
        backend.resume()
        other.result(PATIENCE_S)
        assert engine.stats().embeddings.embedded_texts < 2049


def test_a_failed_batch_ends_the_one_at_fault_only() -> None:
    backend = WatchedBackend(n_slots=1, fail_on=[7])
    with running(backend) as engine:
        backend.hold()
        bad, good = (engine.embed([one]) for one in ((7,) * 8, (5,) * 8))
        backend.resume()
        with pytest.raises(DecodeError):
            bad.result(PATIENCE_S)
        assert good.result(PATIENCE_S).tolist() == [mean((5,) * 8)]


def test_a_drain_finishes_what_was_accepted() -> None:
    backend = WatchedBackend(n_slots=1)
    backend.hold()
    engine = Engine(lambda: backend, options(1))
    future = engine.embed([text(20), text(20)])
    backend.resume()
    engine.close(PATIENCE_S)
    assert future.result(0).shape == (2, 3)
    with pytest.raises(EngineClosedError):
        engine.embed([(1,)])


def test_what_is_not_done_in_time_ends_with_an_error() -> None:
    backend = WatchedBackend(n_slots=1)
    backend.hold()
    engine = Engine(lambda: backend, options(1))
    future = engine.embed([text(20)] * 50)
    until(lambda: not engine._command_queue._pending.commands)
    engine._command_queue.drain(0)
    backend.resume()
    engine.close(0)
    with pytest.raises(EngineClosedError):
        future.result(0)


def test_an_engine_that_breaks_ends_them() -> None:
    backend = WatchedBackend(n_slots=1, break_after=0)
    with running(backend) as engine:
        backend.hold()
        futures = [engine.embed([text(20)] * 50) for _ in range(3)]
        start(engine, request("breaks it"))
        backend.resume()
        for future in futures:
            with pytest.raises(EngineFailedError):
                future.result(PATIENCE_S)
        with pytest.raises(EngineFailedError):
            engine.embed([(1,)])


def test_models_that_see_the_whole_text_generate_nothing() -> None:
    backend = WatchedBackend(n_slots=1)
    backend.embedding = EmbeddingShape(16, 8, n_text=32, pooling="cls", causal=False)
    with running(backend) as engine:
        with pytest.raises(InvalidRequestError, match="cannot generate"):
            start(engine, request("a"))
        assert gather(engine, [(5, 6)]) == [[[5, 0, 5]]]


def test_a_cancelled_future_stays_so() -> None:
    backend = WatchedBackend(n_slots=1)
    with running(backend) as engine:
        backend.hold()
        futures = [engine.embed([(n,)]) for n in range(3)]
        assert futures[2].cancel()
        backend.resume()
        futures[1].result(PATIENCE_S)
        with pytest.raises(CancelledError):
            futures[2].result(PATIENCE_S)


# -- texts with pictures --------------------------------------------------------------------------


@contextmanager
def seeing(*, causal: bool = True) -> Iterator[tuple[Engine, WatchedBackend, ScriptedProjector]]:
    backend, projector = WatchedBackend(n_slots=2), ScriptedProjector(causal=causal)
    backend.projector = projector
    with running(backend) as engine:
        yield engine, backend, projector


def embedded(engine: Engine, request: Texts) -> Future[Vectors]:
    (outcome,) = engine.embed_many([request])
    assert not isinstance(outcome, CorralError)
    return outcome


def pictured(*texts: Tokens, media: Sequence[Picture] = (GOOD,)) -> Texts:
    return Texts(texts, media=media)


def tokens_of(backend: WatchedBackend) -> list[list[int | str]]:
    """The tokens of each batch; a picture's are one word."""
    return [
        ["picture"] if batch[0][0] < 0 else [row[0] for row in batch]
        for batch in backend.embed_batches
    ]


@pytest.mark.parametrize("causal", [True, False])
def test_a_picture_is_a_pass_between_those_of_its_text(causal: bool) -> None:
    with seeing(causal=causal) as (engine, backend, projector):
        projector.may_end.set()
        request = pictured((1, MEDIUM, 2, MEDIUM, 3), media=(GOOD, OTHER))
        (vector,) = embedded(engine, request).result(PATIENCE_S)
        assert engine.stats().embeddings == EmbeddingStats(1, 3 + 2 * (N_SEEN + 2), 5)
    begin, end = ord("<"), ord(">")
    assert tokens_of(backend) == [[1, begin], ["picture"], [end, 2, begin], ["picture"], [end, 3]]
    positions = [row[1] for batch in backend.embed_batches for row in batch]
    assert positions == list(range(3 + 2 * (N_SEEN + 2)))
    assert vector[1] == np.mean(positions)
    assert projector.encoded == [GOOD.pixels, OTHER.pixels]


def test_other_texts_are_computed_while_a_picture_is_encoded() -> None:
    with seeing() as (engine, backend, projector):
        first = embedded(engine, pictured((1, MEDIUM, 2), (3,)))
        assert projector.is_encoding.wait(PATIENCE_S)
        assert engine.embed([(4,)], "another").result(PATIENCE_S).tolist() == [mean((4,))]
        assert not first.done()
        projector.may_end.set()
        assert first.result(PATIENCE_S)[1].tolist() == mean((3,))
        assert ["picture"] in tokens_of(backend)


def test_texts_that_share_a_picture_have_it_encoded_once() -> None:
    with seeing() as (engine, _, projector):
        projector.may_end.set()
        outcomes = [embedded(engine, pictured((n, MEDIUM, 2))) for n in range(4)]
        assert all(outcome.result(PATIENCE_S).shape == (1, 3) for outcome in outcomes)
    assert projector.encoded == [GOOD.pixels]


def test_a_picture_that_cannot_be_encoded_ends_the_requests_that_have_it() -> None:
    with seeing() as (engine, _, projector):
        projector.may_end.set()
        bad = embedded(engine, pictured((1, MEDIUM, 2), media=(BAD,)))
        good = embedded(engine, pictured((3, MEDIUM, 2)))
        with pytest.raises(DecodeError):
            bad.result(PATIENCE_S)
        assert good.result(PATIENCE_S).shape == (1, 3)


def test_a_text_that_has_begun_goes_on_before_others_have_their_pictures() -> None:
    made, backend, _ = queue()
    backend.projector = projector = ScriptedProjector()
    requests = [
        Texts([(1, MEDIUM, 2)], "batch", background=True, media=(GOOD,)),
        Texts([(3, MEDIUM, 4)], "asks", media=(OTHER,)),
    ]
    for pending in requests:
        prompt, tiles = expand_media(pending.tokens[0], iter(pending.media), projector, 16)
        pending.tokens, pending.tiles = [prompt], [tiles]
        for tile in tiles:
            tile.embeddings = np.zeros((N_SEEN, 4), np.float32)
        made.add([pending])
        step(made)
    tokens = [batch[0] for batch in batches(made, backend)]
    assert [token for token in tokens if token >= 0] == [1, ord(">"), 3, ord(">")]
    assert all(pending.future.result(0).shape == (1, 3) for pending in requests)


def test_encoding_ends_with_the_request_that_it_was_for() -> None:
    with seeing() as (engine, _, projector):
        gone = embedded(engine, pictured((1, MEDIUM, 2)))
        assert projector.is_encoding.wait(PATIENCE_S)
        gone.cancel()
        until(lambda: projector.n_left == 1)
        projector.may_end.set()
        again = embedded(engine, pictured((1, MEDIUM, 2)))
        assert again.result(PATIENCE_S).shape == (1, 3)


def test_pictures_that_have_no_place_are_refused() -> None:
    with seeing() as (engine, backend, _):
        few, many, long, unseen = engine.embed_many(
            [
                pictured((1, 2)),
                pictured((1, MEDIUM, MEDIUM, 2)),
                pictured((1, MEDIUM, MEDIUM, MEDIUM, MEDIUM, 2), media=(GOOD,) * 4),
                pictured((1, MEDIUM, 2), media=()),
            ]
        )
    assert "another number of places" in str(few)
    assert "another number of places" in str(many)
    assert isinstance(long, TextTooLongError)
    assert "outside 0 to" in str(unseen)
    with seeing() as (engine, backend, _):
        encoder = replace(backend.embedding, causal=False)
        backend.embedding = encoder
        (whole,) = engine.embed_many([pictured((1, MEDIUM, 2))])
    assert "takes texts only" in str(whole)
    with running(WatchedBackend(n_slots=1)) as engine:
        (blind,) = engine.embed_many([pictured((1, MEDIUM, 2))])
    assert "no projector" in str(blind)
    assert not backend.embed_batches
