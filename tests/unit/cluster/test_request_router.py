"""What the router sees of a call."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from ray.exceptions import ActorUnavailableError
from ray.serve._private.common import DeploymentID
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter

from serve_app.base.sampling import SamplingParams
from serve_app.base.values.adapters import AdapterUse
from serve_app.base.values.requests import GenerationRequest
from serve_app.channel import routing_reports as reports
from serve_app.channel.blocks import chain, request_key, turn_key
from serve_app.channel.protocol import Address
from serve_app.channel.routing_reports import Reports
from serve_app.channel.score import Fleet, Report, RoutedPrompt
from serve_app.cluster.replica import EngineReplica
from serve_app.cluster.request_router import PrefixRouter, attach, prompt_of

TOKENS = tuple(range(70))
KEY = request_key("http")
ADDRESS = Address("n", "l", "127.0.0.1", 1, "secret")
SERVED: Any = EngineReplica


@pytest.mark.parametrize(
    ("method", "args", "seen"),
    [
        pytest.param(
            "generate",
            (GenerationRequest("a.1", TOKENS, SamplingParams(max_tokens=9)),),
            RoutedPrompt(request_key("a.1"), 70, chain(TOKENS, ""), 9, "http", chain(TOKENS)),
            id="a prompt and the most that it may get",
        ),
        pytest.param(
            "generate",
            (GenerationRequest("a", TOKENS, cache_group="mine"),),
            RoutedPrompt(
                request_key("a"), 70, chain(TOKENS, "mine"), math.inf, "http", chain(TOKENS)
            ),
            id="a prompt",
        ),
        pytest.param(
            "generate",
            (GenerationRequest("a", TOKENS, adapters=(AdapterUse("legal", 0.5),)),),
            RoutedPrompt(
                request_key("a"),
                70,
                chain(TOKENS, "\0legal=0.5"),
                math.inf,
                "http",
                turn=turn_key("\0legal=0.5"),
            ),
            id="a prompt with an adapter",
        ),
        pytest.param(
            "embed", (((1, 2), (3,)),), RoutedPrompt(KEY, 4, (), 0, "http"), id="texts to embed"
        ),
        pytest.param("explain", ("a",), RoutedPrompt(KEY, 1, (), 0, "http"), id="a question"),
        pytest.param("stats", (), RoutedPrompt(KEY, 1, (), 0, "http"), id="no argument"),
    ],
)
def test_calls(method: str, args: tuple[object, ...], seen: RoutedPrompt) -> None:
    metadata = SimpleNamespace(call_method=method, internal_request_id="http")
    pending: Any = SimpleNamespace(args=args, metadata=metadata)
    assert prompt_of(pending) == seen


def test_nothing_is_known_of_no_call() -> None:
    assert prompt_of(None) == RoutedPrompt(0)


class Replica:
    """One that Serve's router knows."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.sent: list[tuple[PendingRequest, bool]] = []
        self._failure = failure

    def try_send_request(self, pending: PendingRequest, with_rejection: bool) -> Replica:
        self.sent.append((pending, with_rejection))
        return self

    async def get_async(self) -> None:
        if self._failure is not None:
            raise self._failure


async def test_one_replica_alone_is_asked_to_attach_itself() -> None:
    replica: Any = Replica()
    await attach(replica, ADDRESS)
    ((pending, with_rejection),) = replica.sent
    assert pending.args == [ADDRESS]
    assert pending.metadata.call_method == "attach"
    assert not pending.metadata.is_streaming
    assert not with_rejection
    assert callable(SERVED.func_or_class.attach)


async def test_whoever_asks_one_that_is_lost_is_told() -> None:
    replica: Any = Replica(ActorUnavailableError("gone", None))
    with pytest.raises(ActorUnavailableError):
        await attach(replica, ADDRESS)


def test_nothing_is_sent_to_a_gang_that_is_not_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    sent_to: list[list[Any]] = []
    monkeypatch.setattr(
        RequestRouter, "update_replicas", lambda _, replicas: sent_to.append(replicas)
    )
    router: Any = PrefixRouter.__new__(PrefixRouter)
    router._deployment_id = deployment = DeploymentID("engine", "app")
    router.initialize_state(gang_size=2)
    attached: list[int] = []
    router._attachment = SimpleNamespace(update=lambda known: attached.append(len(known)))
    first, second = (SimpleNamespace(replica_id=ReplicaID(name, deployment)) for name in "ab")
    for replicas in ([first], [first, second], [second]):
        router.update_replicas(replicas)
    assert sent_to == [[], [first, second], []]
    assert attached == [1, 2, 1]


def test_the_newest_reports_are_heard_before_a_replica_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    heard = Reports()
    monkeypatch.setattr(reports, "HERE", heard)
    router: Any = PrefixRouter.__new__(PrefixRouter)
    router._fleet = Fleet[ReplicaID]()
    ids = [ReplicaID(name, DeploymentID("engine", "app")) for name in ("a", "b")]
    router._replicas = dict.fromkeys(ids)
    router._fleet.update(ids)
    router._hear()
    first, second = Report(n_live=1), Report(n_live=2)
    connection = heard.connection("a")
    connection.take(msgspec.msgpack.encode(first))
    router._hear()
    assert [router._fleet[one].report for one in ids] == [first, Report()]
    assert connection.newest is not None
    assert router._fleet[ids[0]].at == connection.newest[1]
    connection.take(msgspec.msgpack.encode(second))
    router._hear()
    assert [router._fleet[one].is_silent for one in ids] == [False, True]
    connection.end()
    router._hear()
    assert [router._fleet[one].report for one in ids] == [Report(), Report()]
    assert router._fleet[ids[0]].is_silent, "its model may be unloaded"
