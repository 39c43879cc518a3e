"""The state of replicas and of their requests, as they tell it. Plain, frozen, picklable."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from serve_app.base.values.answers import SequenceEnd


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """An engine's record of a request."""

    id: str
    http_id: str
    client: str
    state: str
    """"waiting", "prefill", "decode" or "ended"."""
    end: SequenceEnd | None = None
    """Set exactly when it has ended."""
    replica_id: str = ""
    node_id: str = ""

    def belongs_to(self, any_id: str) -> bool:
        """Whether the request has that id, is part of the answer with that id, or of that HTTP request."""
        base = self.id.partition("~")[0]  # without the number of a replica that went on with it
        return any_id != "" and any_id in (self.id, base, base.rpartition(".")[0], self.http_id)


@dataclass(frozen=True, slots=True)
class FetchingReplica:
    """An engine replica that does not answer yet, as it fetches, converts or loads its model."""

    replica_id: str
    node_id: str
    stage: str
    done: float
    limit_s: float | None = None
    """The most seconds that the stage takes; None: no limit."""


@dataclass(frozen=True, slots=True)
class Asleep:
    """An engine replica whose model is not loaded."""

    replica_id: str


@dataclass(frozen=True, slots=True)
class ReplicaRecords:
    """An engine replica's records of a request."""

    replica_id: str
    records: tuple[RequestRecord, ...]


@dataclass(frozen=True, slots=True)
class SlotAction:
    """The result of a requested action on one slot."""

    slot_id: int
    n_tokens: int
    n_bytes: int
    """The size of the file, if there was one."""
    seconds: float


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """An engine replica's state and statistics."""

    replica_id: str
    node_id: str
    engine: dict[str, Any]
    """The fields of `serve_app.engine.EngineStats`."""
    cores: tuple[int, ...] | None = None
    """The CPUs that are its own, by the kernel's numbers; None if it is not pinned to any."""
    numa_node: int | None = None
    """The NUMA node that has all of them, if one has."""
    latencies: dict[str, dict[float, int]] = field(default_factory=dict)
    """The latencies of the last five minutes. They are how many first tokens (`ttft_s`) and gaps (`itl_s`)
    took more than the bound before, and up to so many seconds. Bounds are 10% apart."""
    placement: str = ""
    """Why it is there, why there are so many replicas, and the memory that these divide."""
    stage: dict[str, Any] | None = None
    """The fields of `serve_app.plugins.stages.chain.StageCounts`, if the model is computed in stages."""
