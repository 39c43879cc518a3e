"""The replicas' present work, in the form that viewers get. Pure: no engine, no clock."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from serve_app.base.values.replicas import FetchingReplica, ReplicaStats
from serve_app.channel.score import slot_wait_s

Json = dict[str, Any]

# Seconds over which rates are told, and those over which prompts are looked at for what caches had.
_RATE_S = 3.0
_HITS_S = 60.0
# A replica that does not answer so many times in a row is gone, unless Serve says that it runs.
_MISSES = 3
_N_EVENTS = 200
# Counters of `EngineStats.requests` whose growth is an event, and the name of that event.
_NOTED = {"preemptions": "preempted", "failovers": "resumed"}
# Counters whose rates are shown, by their group in EngineStats.
_COUNTERS = {
    "tokens": ("generated_tokens", "prompt_tokens", "cached_tokens"),
    "embeddings": ("embedded_tokens",),
    "timing": ("batches", "busy_slots", "decode_s", "turn_s", "turn_wait_s"),
}
# Parts of a stage's time, by their counters in StageCounts.
_SPENT = {"computing": "computed_s", "sending": "sent_s"}
_QUANTILES = (0.5, 0.95, 0.99)

_NO_MORE: Mapping[str, Json] = {}
NOTHING: Json = {}


@dataclass
class _Replica:
    """A replica, as far as it has been seen."""

    model: str
    stats: ReplicaStats
    misses: int = 0
    samples: deque[tuple[float, dict[str, float]]] = field(default_factory=deque)

    def saw(self, stats: ReplicaStats, now: float) -> None:
        self.stats, self.misses = stats, 0
        self.samples.append((now, _counters(stats)))
        while now - self.samples[0][0] > _HITS_S:
            self.samples.popleft()

    def growth(self, within_s: float) -> tuple[float, dict[str, float]]:
        """The seconds between the last sample and one as long ago as that, and what was counted in them."""
        now, last = self.samples[-1]
        then, first = next(one for one in self.samples if now - one[0] <= within_s)
        return now - then, {name: last[name] - first[name] for name in last}


class Board:
    """All models' replicas, and what has happened. `look` takes in what they told; `view` is the board as
    flat as possible, so that `difference` of two of them is small."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._states: dict[str, dict[str, int]] = {}
        self._began = False
        self._events: deque[Json] = deque(maxlen=_N_EVENTS)
        self._n_events = 0
        self.view = NOTHING

    def look(
        self,
        replicas: Mapping[str, Iterable[ReplicaStats]],
        missing: Mapping[str, Sequence[str]],
        states: Mapping[str, Mapping[str, int]],
        now: float,
        wall_s: float,
        fetching: Mapping[str, Sequence[FetchingReplica]],
        more: Mapping[str, Json] = _NO_MORE,
    ) -> None:
        """Takes each model's statistics of replicas at this moment, the replicas that run and did not
        answer, and the number in each of Serve's states. `fetching` are replicas that download, and `more`
        is what else is shown of models."""
        seen = {stats.replica_id for of_model in replicas.values() for stats in of_model}
        for model, of_model in replicas.items():
            for stats in of_model:
                self._saw(model, stats, now, wall_s)
        for replica_id in [name for name in self._replicas if name not in seen]:
            is_late = replica_id in missing.get(self._replicas[replica_id].model, ())
            self._on_miss(replica_id, wall_s, is_late=is_late)
        self._follow_states(states, wall_s)
        self._began = True
        self.view = {
            "at": round(wall_s, 3),
            "models": {
                model: self._model(model, missing.get(model, ()))
                | {"fetching": _fetch_progress(fetching.get(model, ()))}
                | more.get(model, {})
                for model in replicas
            },
            "replicas": {
                key: _describe_replica(one) for key, one in sorted(self._replicas.items())
            },
            "events": {str(event["n"]): event for event in self._events},
        }

    def _saw(self, model: str, stats: ReplicaStats, now: float, wall_s: float) -> None:
        known = self._replicas.get(stats.replica_id)
        if known is None:
            known = self._replicas[stats.replica_id] = _Replica(model, stats)
            if self._began:
                self._note("came", model, wall_s, stats.replica_id)
        before = known.stats.engine
        for counter, kind in _NOTED.items():
            more = stats.engine["requests"][counter] - before["requests"][counter]
            if more > 0:
                self._note(kind, model, wall_s, stats.replica_id, more)
        if stats.engine["queue"]["draining"] and not before["queue"]["draining"]:
            self._note("draining", model, wall_s, stats.replica_id)
        known.saw(stats, now)

    def _on_miss(self, replica_id: str, wall_s: float, *, is_late: bool) -> None:
        replica = self._replicas[replica_id]
        replica.misses += 1
        if replica.misses >= _MISSES and not is_late:
            del self._replicas[replica_id]
            self._note("gone", replica.model, wall_s, replica_id)

    def _follow_states(self, states: Mapping[str, Mapping[str, int]], wall_s: float) -> None:
        for model, counts in states.items():
            before = self._states.get(model, {})
            for state, kind in (("STARTING", "starting"), ("STOPPING", "draining")):
                more = counts.get(state, 0) - before.get(state, 0)
                if more > 0:
                    self._note(kind, model, wall_s, None, more)
            self._states[model] = dict(counts)

    def _note(
        self, kind: str, model: str, wall_s: float, replica_id: str | None, count: int = 1
    ) -> None:
        self._n_events += 1
        self._events.append(
            {
                "n": self._n_events,
                "at": round(wall_s, 3),
                "kind": kind,
                "model": model,
                "replica": replica_id,
                "count": count,
            }
        )

    def _model(self, model: str, missing: Sequence[str]) -> Json:
        latencies = [one.stats.latencies for one in self._replicas.values() if one.model == model]
        states = self._states.get(model, {})
        return {"states": states, "missing": list(missing), **_quantiles(latencies)}


def _fetch_progress(replicas: Iterable[FetchingReplica]) -> Json:
    """The part of the files that each has."""
    return {replica.replica_id: round(replica.done, 2) for replica in replicas}


def _describe_replica(replica: _Replica) -> Json:
    stats, engine = replica.stats, replica.stats.engine
    seconds, grown = replica.growth(_RATE_S)
    _, lately = replica.growth(_HITS_S)
    n_prompt = lately["prompt_tokens"] + lately["cached_tokens"]
    queue, compute = engine["queue"], engine["compute"]
    n_live = queue["running"] + queue["waiting"]
    return {
        "model": replica.model,
        "state": "silent" if replica.misses else "draining" if queue["draining"] else "up",
        "node": stats.node_id,
        "cores": stats.cores,
        "numa_node": stats.numa_node,
        "stage": stats.stage
        and stats.stage
        | {part: round(grown[spent] / (seconds or 1), 2) for part, spent in _SPENT.items()},
        **{name: engine[name] for name in ("n_slots", "n_ctx_slot")},
        **{name: compute[name] for name in ("threads", "kv_unified")},
        **{name: queue[name] for name in ("running", "waiting")},
        **{name: engine["requests"][name] for name in ("preemptions", "ended")},
        "wait_s": round(slot_wait_s(queue["backlog_s"], n_live, engine["n_slots"]), 2),
        "backlog_s": round(queue["backlog_s"], 2),
        "generated_per_s": _rate(grown["generated_tokens"], seconds),
        "prompt_per_s": _rate(grown["prompt_tokens"] + grown["embedded_tokens"], seconds),
        "turns": _parts_of_turns(grown, seconds),
        "hits": round(lately["cached_tokens"] / n_prompt, 3) if n_prompt else None,
        "stored_mib": engine["cache"]["stored_bytes"] >> 20,
        "curve": engine["costs"]["step_time"].get("decode_ms", {}),
        "point": _point(grown),
        **_quantiles([stats.latencies]),
        "slots": {str(slot["id"]): _slot(slot) for slot in engine["slots"]},
        "requests": {str(slot["id"]): slot["request_id"] for slot in engine["slots"]},
    }


def without_requests(view: Json) -> Json:
    """A board's view for those who may not see what single requests do."""
    if "replicas" not in view:
        return view
    replicas = {
        key: fields
        | {"slots": {slot_id: [slot[0], 0, 0, 0, 0] for slot_id, slot in fields["slots"].items()}}
        | {"requests": dict.fromkeys(fields["requests"])}
        for key, fields in view["replicas"].items()
    }
    return view | {"replicas": replicas}


def only_models(view: Json, may_use: Callable[[str], bool]) -> Json:
    """A board's view of some models: their own entries, replicas and events."""
    if "models" not in view:
        return view
    models = {model: fields for model, fields in view["models"].items() if may_use(model)}
    parts = {
        part: {key: fields for key, fields in view[part].items() if may_use(fields["model"])}
        for part in ("replicas", "events")
    }
    return view | {"models": models} | parts


def _counters(stats: ReplicaStats) -> dict[str, float]:
    engine, stage = stats.engine, stats.stage or {}
    counters = {name: engine[group][name] for group, names in _COUNTERS.items() for name in names}
    return counters | {name: stage[name] for name in _SPENT.values() if name in stage}


def _rate(n: float, seconds: float) -> float:
    return round(n / seconds, 1) if seconds else 0.0


def _parts_of_turns(grown: Mapping[str, float], seconds: float) -> list[float]:
    """The parts of the time in which the engine had the cores that it shares, and waited for them."""
    return [round(grown[name] / (seconds or 1), 2) for name in ("turn_s", "turn_wait_s")]


def _point(grown: Mapping[str, float]) -> list[float] | None:
    """The sequences of an average batch, and its milliseconds; None if there was none."""
    n_batches = grown["batches"]
    if not n_batches:
        return None
    slots, seconds = grown["busy_slots"] / n_batches, grown["decode_s"] / n_batches
    return [round(slots, 2), round(1000 * seconds, 2)]


def _slot(slot: Mapping[str, Any]) -> list[Any]:
    """A slot's state; its tokens in the cache that were found there, prefilled and generated; those of its
    prompt that are missing. Tokens that an idle slot keeps count as cached."""
    n_past, n_prompt = slot["n_past"], slot["n_prompt"]
    if slot["request_id"] is None:
        return [slot["state"], n_past, 0, 0, 0]
    n_cached = min(slot["n_cached"], n_past)
    n_prefilled = min(n_past, n_prompt) - n_cached
    n_missing = max(0, n_prompt - n_past) if slot["state"] == "prefill" else 0
    n_generated = n_past - n_cached - n_prefilled
    return [slot["state"], n_cached, n_prefilled, n_generated, n_missing]


def _quantiles(latencies: Iterable[Mapping[str, Mapping[float, int]]]) -> Json:
    """Milliseconds of `ttft` and `itl` at 50, 95 and 99 in 100, and how many there were."""
    summed = {"ttft_s": Counter[float](), "itl_s": Counter[float]()}
    for one in latencies:
        for kind, counts in one.items():
            summed[kind].update(counts)
    return {
        kind.removesuffix("_s"): [*(_quantile(counts, q) for q in _QUANTILES), counts.total()]
        for kind, counts in summed.items()
    }


def _quantile(counts: Mapping[float, int], q: float) -> float | None:
    """The bound below which so much of the histogram is, in milliseconds; None if it is empty."""
    left = q * sum(counts.values())
    for bound in sorted(counts):
        left -= counts[bound]
        if left <= 0:
            return round(1000 * bound, 1)
    return None


def difference(before: Json, after: Json) -> Json:
    """The changes that turn `before` into `after`: objects key by key, removed keys as null, all
    else whole.

    As JSON merge patch (RFC 7396): a null in `after` means that it is not there."""
    changed: Json = {}
    for key in before.keys() | after.keys():
        old, value = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            if inner := difference(old, value):
                changed[key] = inner
        elif value != old:
            changed[key] = value
    return changed
