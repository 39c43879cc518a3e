"""The engine of a replica that computes one stage of a model: its replicas form a gang of Serve's."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import msgspec

from serve_app.base.engine_options import EngineOptions
from serve_app.base.errors import EngineFailedError
from serve_app.base.progress import Report
from serve_app.engine import Engine
from serve_app.engine.choice.plan import OPENVINO, Plan
from serve_app.engine.costs import profile_cache
from serve_app.kernels.openvino.parts import ModelPart, ModelShape, StageNode, divide
from serve_app.plugins.stages.chain import StageChain
from serve_app.run.replica.place import Gang, ReplicaPlace
from serve_app.run.sizing import PROCESS_BYTES
from serve_app.store.shared_entries import shared_values

logger = logging.getLogger("corral.stages")

_MEET_EVERY_S, _MEET_S = 0.2, 3600.0
"""How often a stage looks for the others, and how long. They may have to download and convert the model.
Serve ends all of them if one fails."""
_MEASURED_S = 2.0
"""The time that passes take until they tell a node's speed."""
_WORTH_DIVIDING_ANEW = 1.03
"""A new division must be so much faster than the one before, because parts are converted anew for it."""

_Value = TypeVar("_Value")


class StageSpeed(msgspec.Struct, frozen=True):
    """The speed at which a node computed the passes of its stage."""

    layers: tuple[int, int]
    """The first layer of the stage, and the first behind it."""
    bytes_per_s: float
    n_rows: float
    """The rows of a pass, on average."""
    sampled: float
    """The part of the time for rows whose logits were wanted."""


class StageReport(msgspec.Struct, frozen=True):
    """The figures that a stage tells the others before any of them loads its part."""

    node_id: str
    memory_bytes: int | None
    """The memory that is free on the node, if it is known."""
    speed: StageSpeed | None
    """The node's speed, if this model's stages were computed there before."""


class ReplicaStage:
    """The stage of a replica, and how it finds the others. Methods that load or close block."""

    def __init__(self, place: ReplicaPlace, gang: Gang) -> None:
        self._gang, self._node_id = gang, place.node_id
        part = ModelPart(gang.rank, gang.size)
        self.chain = StageChain(part, place.node_id, gang.host, partial(self._exchange, "address"))
        self._shape: ModelShape | None = None
        self._folder: Path | None = None
        self._kept_as, self._kept_s = "", 0.0

    def load(self, path: Path, options: EngineOptions, report: Report) -> Engine:
        """An engine whose passes go through all stages, of which this process computes one: all of them
        agree first on each one's layers. To be called once. Raises ConfigError, and EngineFailedError if
        other stages do not come."""
        from serve_app.engine.backends.openvino import OpenVinoBackend
        from serve_app.kernels.llama.model import Model
        from serve_app.kernels.openvino.convert import shape_of, versions
        from serve_app.prompt.chat_template import delimiters

        gang, model = self._gang, Model(path, vocab_only=True, delimiters=delimiters)
        self._shape = shape_of(model.files, options.quantization)
        self._folder = options.profile_folder
        conditions = {"model": model.fingerprint().hex(), "openvino": versions()}
        self._kept_as = profile_cache.key(options, **conditions, stages=gang.size)
        # However layers are divided: an engine measures the time of all stages.
        name = profile_cache.key(options, **conditions, chain=gang.size)
        plan = profile_cache.load(self._folder, name, Plan) or Plan(OPENVINO, name=name)
        speed = profile_cache.load(self._folder, self._kept_as, StageSpeed)
        own = StageReport(self._node_id, options.memory_bytes, speed)
        n_tokens = gang.size * options.n_ctx_together
        parts = plan_layers(self._shape, self._exchange("report", own), options.n_slots, n_tokens)
        layers = parts[gang.rank]
        logger.info(
            "Stage %d of %d has layers %d to %d of %d.",
            *(gang.rank + 1, gang.size, layers.start + 1, layers.stop, parts[-1].stop),
        )
        self.chain.part = ModelPart(gang.rank, gang.size, layers)
        self.chain.turns, options = options.turns, replace(options, turns=None)
        engine = Engine(lambda: OpenVinoBackend(model, options, report, plan, self.chain), options)
        for what in ("address", "report"):  # all others have read them
            shared_values().delete(self._key(what, gang.rank))
        return engine

    def check_health(self) -> None:
        """Raises EngineFailedError if the chain is broken. Keeps the speed of this node for later starts,
        each time that twice as much is known about it."""
        self.chain.check_health()
        counts, layers = self.chain.counts, self.chain.part.layers
        if counts.passes_s < max(_MEASURED_S, 2 * self._kept_s) or not (layers and self._shape):
            return
        self._kept_s = counts.passes_s
        n_rows, sampled = counts.rows / counts.passes, counts.sampled_s / counts.passes_s
        n_bytes = sum(self._shape.read_bytes(n_rows, sampled)[layers.start : layers.stop])
        bytes_per_s = n_bytes * counts.passes / counts.passes_s
        speed = StageSpeed((layers.start, layers.stop), bytes_per_s, n_rows, sampled)
        profile_cache.save(self._folder, self._kept_as, speed)

    def _exchange(self, what: str, own: _Value) -> list[_Value]:
        """The values that all stages tell under this name, with this one's. Blocks until all are there.
        Raises EngineFailedError."""
        gang, shared, until = self._gang, shared_values(), time.monotonic() + _MEET_S
        shared.put(self._key(what, gang.rank), msgspec.msgpack.encode(own), overwrite=True)
        values: list[_Value] = []
        while len(values) < gang.size:
            value = shared.get(self._key(what, len(values)))
            if value is not None:
                values.append(msgspec.msgpack.decode(value, type=type(own)))
            elif time.monotonic() > until:
                raise EngineFailedError(
                    f"Stage {len(values) + 1} of {gang.size} was not there within {_MEET_S:.0f} s."
                )
            else:
                time.sleep(_MEET_EVERY_S)
        return values

    def _key(self, what: str, rank: int) -> str:
        return f"stages/{self._gang.id}/{what}/{rank}"


def plan_layers(
    shape: ModelShape, reports: Sequence[StageReport], n_rows: int, n_tokens: int
) -> list[range]:
    """The layers of each stage, by what all of them report: the same in all processes. Passes have `n_rows`
    where nothing was measured, and caches have room for `n_tokens`. A node whose speed is not known counts
    as the others' average. A division that was measured stays if no other is much faster. Raises
    ConfigError if none fits."""
    n_on_node = Counter(report.node_id for report in reports)
    speeds = [report.speed for report in reports if report.speed is not None]
    average = fmean(speed.bytes_per_s for speed in speeds) if speeds else 1.0
    nodes = [
        StageNode(
            average if report.speed is None else report.speed.bytes_per_s,
            math.inf
            if report.memory_bytes is None
            else report.memory_bytes / n_on_node[report.node_id] - PROCESS_BYTES,
        )
        for report in reports
    ]
    read = shape.read_bytes(n_rows)
    if speeds:
        read = shape.read_bytes(fmean(s.n_rows for s in speeds), fmean(s.sampled for s in speeds))
    best = divide(shape, nodes, read=read, n_tokens=n_tokens)
    measured = [range(*speed.layers) for speed in speeds]
    if [i for part in measured for i in part] != list(range(best[-1].stop)):
        return best

    def slowest_s(parts: Sequence[range]) -> float:
        return max(
            sum(read[part.start : part.stop]) / node.bytes_per_s
            for part, node in zip(parts, nodes, strict=True)
        )

    return measured if slowest_s(measured) <= _WORTH_DIVIDING_ANEW * slowest_s(best) else best
