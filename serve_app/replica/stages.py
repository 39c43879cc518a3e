"""The engine of a replica that computes one stage of a model: its replicas form a gang of Serve's."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import msgspec

from serve_app.channel.protocol import Address
from serve_app.engine import Engine
from serve_app.engine.options import EngineOptions
from serve_app.errors import EngineFailedError
from serve_app.openvino.parts import ModelPart
from serve_app.progress import Report
from serve_app.replica.place import Gang, ReplicaPlace
from serve_app.stages.chain import StageChain
from serve_app.store.shared_entries import shared_values

_MEET_EVERY_S, _MEET_S = 0.2, 3600.0
"""How often a stage looks for the others, and how long. They may have to download and convert the model.
Serve ends all of them if one fails."""


def chain_of(place: ReplicaPlace, gang: Gang) -> StageChain:
    """The chain that the replicas of a gang form."""
    part = ModelPart(gang.rank, gang.size)
    return StageChain(part, place.node_id, gang.host, partial(_met, gang))


def load_stage(path: Path, options: EngineOptions, chain: StageChain, report: Report) -> Engine:
    """An engine whose passes go through the chain, of which this process computes a stage. Raises
    ConfigError, and EngineFailedError if other stages do not come."""
    from serve_app.engine.backends.openvino import OpenVinoBackend

    return Engine(lambda: OpenVinoBackend(path, options, report, chain), options)


def forget_address(gang: Gang) -> None:
    """Delete the address of this replica's stage, which all others have read."""
    shared_values().delete(_key(gang, gang.rank))


def _met(gang: Gang, address: Address) -> list[Address]:
    """The addresses of all stages, with this one's. Blocks until all are there. Raises
    EngineFailedError."""
    shared, until = shared_values(), time.monotonic() + _MEET_S
    shared.put(_key(gang, gang.rank), msgspec.msgpack.encode(address), overwrite=True)
    addresses: list[Address] = []
    while len(addresses) < gang.size:
        value = shared.get(_key(gang, len(addresses)))
        if value is not None:
            addresses.append(msgspec.msgpack.decode(value, type=Address))
        elif time.monotonic() > until:
            raise EngineFailedError(
                f"Stage {len(addresses) + 1} of {gang.size} was not there within {_MEET_S:.0f} s."
            )
        else:
            time.sleep(_MEET_EVERY_S)
    return addresses


def _key(gang: Gang, rank: int) -> str:
    return f"stages/{gang.id}/{rank}"
