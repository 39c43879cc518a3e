"""The traffic of Serve's controller for one model's replicas at rest, by the real sizes of its messages.

    python -m loadtests.routing.traffic [--replicas 100,1000] [--ingresses 4] [--json FILE]

Nothing is started. The objects that Ray Serve 2.60 sends are made as it makes them, and serialised as it
does; how often they go follows from its settings. All replicas are busy, hold as many prefixes as they may
report, and neither come nor go. Two ways are compared: reports that go through the controller
(`record_routing_stats`, as Corral once had it, and a handle to themselves in all engines), and reports that
go over channels. The bytes that Ray's calls add to their arguments do not count.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ray import cloudpickle
from ray.serve._private import autoscaling_metrics_codec
from ray.serve._private.common import (
    RUNNING_REQUESTS_KEY,
    DeploymentHandleSource,
    DeploymentID,
    DeploymentTargetInfo,
    HandleMetricReport,
    ReplicaID,
    ReplicaMetricReport,
    RunningReplicaInfo,
    TimeStampedValue,
)
from ray.serve._private.constants import (
    CONTROL_LOOP_INTERVAL_S,
    DEFAULT_HEALTH_CHECK_PERIOD_S,
    RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S,
    RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S,
)
from ray.serve._private.long_poll import (
    LISTEN_FOR_CHANGE_REQUEST_TIMEOUT_S,
    LongPollNamespace,
    LongPollState,
    UpdatedObject,
)
from ray.serve._private.utils import compress_metric_report

from loadtests.common import benchmark
from loadtests.common.benchmark import bounded, listed
from serve_app.routing.blocks import MAX_BLOCKS, pack
from serve_app.routing.changes import change
from serve_app.routing.score import Report

_ENGINES = DeploymentID(name="engine-corral-demo", app_name="default")
_TAKEN = 256
"""Requests that a report knows of."""
_NEW_REQUESTS, _NEW_BLOCKS = 4, 4 * 36
"""Of a replica, in a second: four prompts of 1,152 tokens, which push as much out."""
_LOOK_BACK_S, _RECORD_S = 15, 3
"""Serve's autoscaling: what a report of metrics goes back, and how often it was measured."""


def _pickled(value: object) -> int:
    return len(cloudpickle.dumps(value))  # type: ignore[no-untyped-call]


def _hex(rng: random.Random, n: int) -> str:
    return f"{rng.getrandbits(4 * n):0{n}x}"


def _report(rng: random.Random) -> Report:
    """A busy replica's, as large as it may be."""
    blocks, requests = (
        frozenset(rng.getrandbits(32) for _ in range(n)) for n in (MAX_BLOCKS, _TAKEN)
    )
    work_s, prefill_s, prompt_token_s, token_s, answer_tokens = (rng.random() for _ in range(5))
    return Report(
        16,
        rng.randrange(32),
        work_s,
        prefill_s,
        prompt_token_s,
        token_s,
        answer_tokens,
        blocks,
        requests,
    )


def _later(rng: random.Random, report: Report) -> Report:
    """The same replica's, a second after."""
    fresh = _report(rng)
    return replace(
        fresh,
        blocks=_moved(report.blocks, fresh.blocks, _NEW_BLOCKS),
        requests=_moved(report.requests, fresh.requests, _NEW_REQUESTS),
    )


def _moved(held: frozenset[int], new: frozenset[int], n: int) -> frozenset[int]:
    """So many of them are others."""
    return frozenset((*tuple(held)[n:], *tuple(new)[:n]))


def _through_the_controller(report: Report) -> dict[str, Any]:
    """As plain values."""
    fields = {name: getattr(report, name) for name in Report.__slots__}
    return fields | {name: pack(tuple(fields[name])) for name in ("blocks", "requests")}


def _members(rng: random.Random, n: int, *, with_reports: bool) -> UpdatedObject:
    """The message to a subscriber when anything has changed."""
    infos = []
    for i in range(n):
        replica_id = ReplicaID(_hex(rng, 8), _ENGINES)
        info = RunningReplicaInfo(
            replica_id,
            _hex(rng, 56),
            f"10.0.{i // 250}.{i % 250}",
            None,
            replica_id.to_full_id_str(),
            96,
            routing_stats=_through_the_controller(_report(rng)) if with_reports else {},
            port=20_000 + i,
        )
        infos.append(info)
    return UpdatedObject(DeploymentTargetInfo(True, infos), rng.randrange(10**6), time.time())


def _series(rng: random.Random) -> list[TimeStampedValue]:
    now = time.time()
    return [
        TimeStampedValue(now - i * _RECORD_S, rng.randrange(32))
        for i in range(_LOOK_BACK_S // _RECORD_S)
    ]


def _in_flight(rng: random.Random, n: int) -> int:
    """Bytes in which a handle says how many requests it has at each replica."""
    running = {ReplicaID(_hex(rng, 8), _ENGINES).to_full_id_str(): _series(rng) for _ in range(n)}
    report = HandleMetricReport(
        _ENGINES,
        _hex(rng, 8),
        _hex(rng, 32),
        DeploymentHandleSource.REPLICA,
        _series(rng),
        {RUNNING_REQUESTS_KEY: running},
        time.time(),
    )
    return len(autoscaling_metrics_codec.encode(report))


@dataclass(frozen=True)
class Sizes:
    """Bytes of single messages, with so many replicas."""

    n: int
    said: int
    """One replica's report, to the controller."""
    all_said: int
    """All replicas and their reports, to one subscriber."""
    members: int
    """All replicas, to one subscriber."""
    poll: int
    """A subscriber's question."""
    nothing: int
    """The answer when nothing has changed for long."""
    pressure: int
    """One replica's, for autoscaling."""
    in_flight: int
    """One handle's requests at all replicas, for autoscaling."""
    healthy: int
    first: int
    """One replica's first report over a channel, and one that follows it."""
    change: int

    @classmethod
    def of(cls, n: int) -> Sizes:
        """Measured."""
        rng = random.Random(n)
        report = _report(rng)
        key = (LongPollNamespace.DEPLOYMENT_TARGETS, _ENGINES)
        config = (LongPollNamespace.DEPLOYMENT_CONFIG, _ENGINES)
        metrics = ReplicaMetricReport(
            ReplicaID(_hex(rng, 8), _ENGINES), {"pressure": _series(rng)}, time.time()
        )
        with_reports, members = (
            _members(rng, n, with_reports=with_reports) for with_reports in (True, False)
        )
        return cls(
            n=n,
            said=_pickled(_through_the_controller(report)),
            all_said=_pickled({key: with_reports}),
            members=_pickled({key: members}),
            poll=_pickled({key: 123_456, config: 654_321}),
            nothing=_pickled(LongPollState.TIME_OUT),
            pressure=len(compress_metric_report(metrics)),
            in_flight=_in_flight(rng, n),
            healthy=_pickled(None),
            first=len(change(None, report) or b""),
            change=len(change(report, _later(rng, report)) or b""),
        )


def before(sizes: Sizes, n_ingresses: int) -> dict[str, float]:
    """Bytes a second by what they are, where reports go through the controller. With ten replicas and more,
    one has changed in every turn of its loop."""
    n_subscribers = sizes.n + n_ingresses
    turns = min(1 / CONTROL_LOOP_INTERVAL_S, sizes.n)
    told = n_subscribers * turns * (sizes.poll + sizes.all_said)
    return {
        "reports": sizes.n * sizes.said,
        "all replicas, to all subscribers": told,
        **_metrics(sizes, n_subscribers),
    }


def after(sizes: Sizes, n_ingresses: int) -> dict[str, float]:
    """The same, where they go over channels: nothing changes that the controller knows."""
    polls_s = sum(LISTEN_FOR_CHANGE_REQUEST_TIMEOUT_S) / 2
    return {
        "reports": 0.0,
        "all replicas, to all subscribers": n_ingresses * (sizes.poll + sizes.nothing) / polls_s,
        **_metrics(sizes, n_ingresses),
    }


def _metrics(sizes: Sizes, n_handles: int) -> dict[str, float]:
    """The common part: health, and the figures for autoscaling."""
    pressure = sizes.pressure / RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S
    return {
        "health and pressure": sizes.n * (sizes.healthy / DEFAULT_HEALTH_CHECK_PERIOD_S + pressure),
        "requests in flight, by handles": n_handles
        * sizes.in_flight
        / RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S,
    }


def simulated(n: int, n_ingresses: int) -> dict[str, Any]:
    """All figures for so many replicas."""
    sizes = Sizes.of(n)
    return {
        "sizes": vars(sizes),
        "before": before(sizes, n_ingresses),
        "after": after(sizes, n_ingresses),
        "membership": {
            "before": (n + n_ingresses) * sizes.all_said,
            "after": n_ingresses * sizes.members,
        },
        "channels": {"of an engine": n_ingresses * sizes.change, "of an ingress": n * sizes.change},
    }


def size(n_bytes: float) -> str:
    """For people."""
    for unit in ("B", "kB", "MB"):
        if n_bytes < 1000:
            return f"{n_bytes:.3g} {unit}"
        n_bytes /= 1000
    return f"{n_bytes:,.3g} GB"


def table(results: Mapping[int, dict[str, Any]]) -> str:
    """A row for each thing that is sent, two columns for each number of replicas."""
    header = ["bytes a second", *(f"{way}, {n}" for n in results for way in ("before", "after"))]
    ways = [(result["before"], result["after"]) for result in results.values()]
    rows = [
        [kind, *(size(way[kind]) for both in ways for way in both)]
        for kind in next(iter(results.values()))["before"]
    ]
    rows.append(["all of it", *(size(sum(way.values())) for both in ways for way in both)])
    events = [
        size(one["membership"][way]) for one in results.values() for way in ("before", "after")
    ]
    rows.append(["bytes once, when a replica comes or goes", *events])
    return benchmark.table(header, rows)


def main(argv: Sequence[str] | None = None) -> None:
    """Weigh, print, write the JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtests.routing.traffic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--replicas", type=listed(bounded(1, 10_000)), default=(100, 1000))
    parser.add_argument("--ingresses", type=bounded(1, 1000), default=4)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args(argv)
    results = {n: simulated(n, args.ingresses) for n in args.replicas}
    print(f"Serve's controller, {args.ingresses} ingress replicas, so many engine replicas.\n")
    print(table(results))
    for n, result in results.items():
        sizes, channels = result["sizes"], result["channels"]
        print(
            f"\n{n} replicas: a first report has {size(sizes['first'])}, a change {size(sizes['change'])}; "
            f"over channels, an engine sends {size(channels['of an engine'])}, and an ingress gets "
            f"{size(channels['of an ingress'])} a second."
        )
    if args.json is not None:
        args.json.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
