"""Serve's request router: takes the replica for each request that `serve_app.routing.score` chooses."""

from __future__ import annotations

import math
import time
from typing import Any

from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from serve_app.routing.blocks import BLOCK_TOKENS, chain, request_key
from serve_app.routing.broadcast import note_running
from serve_app.routing.score import Fleet, Prompt, Report
from serve_app.types import GenerationRequest

_SYSTEM_TOKENS = 64 * BLOCK_TOKENS
"""Of a prompt, the first tokens that are looked for among system prompts: longer ones are rare."""


class PrefixRouter(FIFOMixin, RequestRouter):
    """Sends a prompt where it is answered soonest. Used in the loop in which Serve routes.

    Serve's own part stays what it is: replicas whose queues are full are passed over, queue lengths are
    looked up in its cache or asked for, and with all full it backs off and asks here again. Requests get
    replicas in their order (FIFOMixin): Serve's other way tells requests apart by an id that all prompts of
    one HTTP request share.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Serve calls this first."""
        self._fleet = Fleet[ReplicaID]()
        self._reports: dict[ReplicaID, tuple[dict[str, Any], Report | None]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve calls this whenever a replica comes, goes, or reports."""
        reports = {}
        for replica in replicas:
            said = replica.routing_stats
            known = self._reports.get(replica.replica_id)
            if known is None or known[0] != said:
                known = said, Report.of(said) if said else None
            reports[replica.replica_id] = known
        self._reports = reports
        self._fleet.update({one: report for one, (_, report) in reports.items()}, _now())
        note_running(self.app_name, self._deployment_id.name, (one.unique_id for one in reports))
        super().update_replicas(replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The best ones, each a rank of its own, as Serve would take the shortest queue of a rank."""
        now, prompt = _now(), prompt_of(pending_request)
        found = [entry for entry in self._fleet.rank(prompt, now) if entry[0] in self.curr_replicas]
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # or Serve asks again at once
            for replica, forecast in found[:1]:
                self._fleet.book(replica, prompt, forecast.missing, now)
        return [[self.curr_replicas[replica]] for replica, _ in found]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        """Serve has sent it, maybe not where it was meant to go."""
        self._fleet.went(replica_id, _key(pending_request), _now())

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """It was answered, refused or cancelled."""
        self._fleet.ended(replica_id, internal_request_id)


def prompt_of(pending: PendingRequest | None) -> Prompt:
    """What a call of `EngineReplica.generate` or `.embed` asks for; other calls ask for next to nothing."""
    if pending is None:
        return Prompt(0)
    group, asked = pending.metadata.internal_request_id, _argument(pending)
    if isinstance(asked, GenerationRequest):
        most = math.inf if asked.sampling.max_tokens is None else asked.sampling.max_tokens
        return Prompt(
            _key(pending),
            len(asked.given),
            chain(asked.given, asked.cache_group),
            most - len(asked.generated),
            group,
            chain(asked.given[:_SYSTEM_TOKENS]),
        )
    n_tokens = sum(len(text) for text in asked) if pending.metadata.call_method == "embed" else 0
    return Prompt(_key(pending), 1 + n_tokens, max_tokens=0, group=group)


def _key(pending: PendingRequest) -> int:
    asked = _argument(pending)
    own = asked.id if isinstance(asked, GenerationRequest) else None
    return request_key(own or pending.metadata.internal_request_id)


def _argument(pending: PendingRequest) -> Any:
    return pending.args[0] if pending.args else None


def _now() -> float:
    return time.monotonic()
