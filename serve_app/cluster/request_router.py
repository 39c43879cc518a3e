"""Serve's request router: takes the replica for each request that `serve_app.channel.score` chooses."""

from __future__ import annotations

import math
import time
import uuid
from typing import Any

from ray.serve._private.common import RequestMetadata  # what is public routes where it likes
from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from serve_app.base.values.adapters import adapters_of
from serve_app.base.values.requests import GenerationRequest
from serve_app.channel import routing_reports as reports
from serve_app.channel.blocks import BLOCK_TOKENS, chain, request_key, turn_key
from serve_app.channel.protocol import Address
from serve_app.channel.routing_reports import ReplicaAttachment
from serve_app.channel.score import Fleet, RoutedPrompt
from serve_app.cluster.serve_handle import note_running

_SYSTEM_TOKENS = 64 * BLOCK_TOKENS
"""First tokens of a prompt that are looked for among system prompts: longer ones are rare."""


class PrefixRouter(FIFOMixin, RequestRouter):
    """Sends a prompt where it is answered soonest. Used in the loop in which Serve routes.

    Serve's own part stays what it is. It passes replicas over whose queues are full, by lengths in its
    cache or by asking. With all full, it backs off and asks here again. Requests get replicas in their
    order (FIFOMixin): Serve's other way tells requests apart by an id that all prompts of one HTTP request
    share.
    """

    def initialize_state(self, gang_size: int = 1, **kwargs: Any) -> None:
        """Serve calls this first."""
        self._gang_size = gang_size
        self._fleet = Fleet[ReplicaID]()
        self._attachment = ReplicaAttachment(reports.HERE, attach)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve calls this whenever a replica comes or goes. Before a gang is whole, nothing is sent to it:
        the first replica would get all requests that wait, and the others none."""
        known = {replica.replica_id.unique_id: replica for replica in replicas}
        note_running(self.app_name, self._deployment_id.name, known)
        ready = replicas if len(replicas) >= self._gang_size else []
        self._fleet.update(replica.replica_id for replica in ready)
        super().update_replicas(ready)
        self._attachment.update(known)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The best ones, each a rank of its own, as Serve would take the shortest queue of a rank."""
        self._hear()
        now, prompt = time.monotonic(), prompt_of(pending_request)
        ranked = [
            entry for entry in self._fleet.rank(prompt, now) if entry[0] in self.curr_replicas
        ]
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # or Serve asks again at once
            for replica, forecast in ranked[:1]:
                self._fleet.book(replica, prompt, forecast.missing, now)
        return [[self.curr_replicas[replica]] for replica, _ in ranked]

    def _hear(self) -> None:
        for replica in self.curr_replicas:
            newest = reports.HERE.newest(replica.unique_id)
            if newest is None:
                self._fleet.silence(replica, time.monotonic())
            else:
                self._fleet.hear(replica, *newest)

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Serve has sent it, maybe not where it was meant to go."""
        self._fleet.on_send(replica_id, _key(pending_request), time.monotonic())

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count a request as ended that was answered, refused or cancelled."""
        self._fleet.on_end(replica_id, internal_request_id)


async def attach(replica: RunningReplica, address: Address) -> None:
    """Have this very replica open a channel to that address. Raises whatever Ray raises if it is lost."""
    request_id = str(uuid.uuid4())
    call = RequestMetadata(request_id, request_id, call_method="attach")
    asked = PendingRequest(args=[address], kwargs={}, metadata=call)
    sent: Any = replica.try_send_request(asked, with_rejection=False)
    await sent.get_async()


def prompt_of(pending: PendingRequest | None) -> RoutedPrompt:
    """The prompt of a call of `EngineReplica.generate` or `.embed`; other calls cost next to nothing."""
    if pending is None:
        return RoutedPrompt(0)
    group, argument = pending.metadata.internal_request_id, _argument(pending)
    if isinstance(argument, GenerationRequest):
        most = math.inf if argument.sampling.max_tokens is None else argument.sampling.max_tokens
        return RoutedPrompt(
            _key(pending),
            len(argument.all_tokens),
            chain(argument.all_tokens, argument.content_group),
            most - len(argument.generated),
            group,
            () if argument.adapters else chain(argument.all_tokens[:_SYSTEM_TOKENS]),
            argument.background,
            turn_key(adapters_of(argument.content_group)),
        )
    embeds = pending.metadata.call_method == "embed"
    n_tokens = sum(len(text) for text in argument) if embeds else 0
    background = embeds and any(pending.args[3:4])
    return RoutedPrompt(
        _key(pending), 1 + n_tokens, max_tokens=0, group=group, background=background
    )


def _key(pending: PendingRequest) -> int:
    asked = _argument(pending)
    own = asked.id if isinstance(asked, GenerationRequest) else None
    return request_key(own or pending.metadata.internal_request_id)


def _argument(pending: PendingRequest) -> Any:
    return pending.args[0] if pending.args else None
