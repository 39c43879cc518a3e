"""The place of a replica: what Serve, or a local server, gives to the process of a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.channel.handle import ReplicaHandle


@dataclass(frozen=True, slots=True)
class Gang:
    """The replicas that compute one model in stages. Serve starts and ends them together."""

    id: str
    rank: int
    """The stage of this replica, from 0 on."""
    size: int
    host: str
    """The address of this replica's node, for the others."""


@dataclass(frozen=True, slots=True)
class ReplicaPlace:
    """The names of one replica, and what it has of others."""

    app: str
    deployment: str
    replica_id: str
    node_id: str
    folder: Path
    """The folder that all processes of this application on this node share. It goes with the server."""
    reserved_cpus: float = 0.0
    """The CPUs that are reserved for the replica; 0: none."""
    peers: Callable[[], AbstractAsyncContextManager[ReplicaHandle]] | None = None
    """A handle to the replicas of the same deployment, for a while; None: there are no others."""
    measures_again: bool = True
    """Whether the replica may measure again what other programs disturbed: no request waits for it yet."""
    gang: Gang | None = None
    """The gang that the replica belongs to, if the model is computed in stages."""
    put: Callable[[Any], Any] = lambda value: value
    """Makes of a large value what another replica gets the value from by `await`. Blocks."""
