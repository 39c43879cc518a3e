"""Replicas that fetch their model, for those who ask the server: no replica answers before it has one.

It is kept where Ray's nodes keep what they share, under the deployment's name, and told anew every second;
what was not for some seconds is of a replica that is gone.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict

from ray.experimental import internal_kv
from ray.serve.context import ReplicaContext

from serve_app.progress import Report, Stage
from serve_app.types import FetchingReplica

_EVERY_S = 1.0
_STALE_S = 10.0
"""Clocks of nodes may differ by less."""
_NAMESPACE = b"corral"


@asynccontextmanager
async def told(context: ReplicaContext, node_id: str, report: Report) -> AsyncIterator[Report]:
    """Meanwhile, everybody may know how far this replica is; `report` is told, too."""
    replica_id = context.replica_id.unique_id
    key = _prefix(context.app_name, context.deployment) + replica_id.encode()
    latest: list[Stage] = []
    enough = asyncio.Event()

    def take(stage: Stage) -> None:
        latest[:] = [stage]
        report(stage)

    async def keep_telling() -> None:
        while not enough.is_set():
            if latest:
                found = _told(latest[0], replica_id, node_id)
                value = json.dumps({"at": time.time(), "told": asdict(found)}).encode()
                with suppress(Exception):  # Ray's head is away for a moment
                    await asyncio.to_thread(
                        internal_kv._internal_kv_put, key, value, True, namespace=_NAMESPACE
                    )
            with suppress(TimeoutError):
                async with asyncio.timeout(_EVERY_S):
                    await enough.wait()

    telling = asyncio.create_task(keep_telling())
    try:
        yield take
    finally:
        enough.set()
        await telling
        with suppress(Exception):
            await asyncio.to_thread(internal_kv._internal_kv_del, key, namespace=_NAMESPACE)


def _told(stage: Stage, replica_id: str, node_id: str) -> FetchingReplica:
    n_bytes = stage.from_origin_bytes, stage.from_nodes_bytes
    return FetchingReplica(replica_id, node_id, stage.name, stage.done, *n_bytes)


def read(app: str, deployment: str) -> tuple[FetchingReplica, ...]:
    """The replicas of a deployment that fetch their model now. Asks Ray's head, blocks, and raises its
    errors."""
    found = []
    now = time.time()
    for key in internal_kv._internal_kv_list(_prefix(app, deployment), namespace=_NAMESPACE):
        value: bytes | None = internal_kv._internal_kv_get(key, namespace=_NAMESPACE)
        if value is None:
            continue
        kept = json.loads(value)
        if now - kept["at"] < _STALE_S:
            found.append(FetchingReplica(**kept["told"]))
    return tuple(found)


def _prefix(app: str, deployment: str) -> bytes:
    return f"fetching/{app}/{deployment}/".encode()
