"""What viewers get of the replicas."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from serve_app.apis.page.snapshot import Board, Json, difference
from serve_app.base.values.replicas import FetchingReplica, ReplicaStats
from serve_app.engine.metrics.stats import EngineStats, SlotStats
from tests.unit.engine_stats import changed_stats

BASE = EngineStats(n_slots=2, n_ctx_slot=100, n_ctx=200)


def replica(name: str = "r1", **fields: Any) -> ReplicaStats:
    latencies = fields.pop("latencies", {})
    engine = dataclasses.asdict(changed_stats(BASE, **fields))
    return ReplicaStats(name, "node", engine, (0, 1), 0, latencies)


class Seen:
    """A board, and a clock that goes on by a second with each look."""

    def __init__(self) -> None:
        self.board = Board()
        self.now = 0.0
        self.missing: list[str] = []
        self.fetching: list[FetchingReplica] = []

    def look_at_models(self, **more: Json) -> Any:
        self.board.look(dict.fromkeys(more, ()), {}, {}, self.now, 1000 + self.now, {}, more)
        return self.board.view["models"]

    def look(self, *replicas: ReplicaStats, **states: int) -> Json:
        self.now += 1
        missing = {"m": self.missing}
        fetching = {"m": self.fetching}
        self.board.look(
            {"m": replicas}, missing, {"m": states}, self.now, 1000 + self.now, fetching
        )
        return self.board.view

    @property
    def events(self) -> list[tuple[str, str | None, int]]:
        events = self.board.view["events"].values()
        return [(event["kind"], event["replica"], event["count"]) for event in events]


def test_rates_are_of_the_last_seconds() -> None:
    seen = Seen()
    for i in range(10):
        view = seen.look(replica(generated_tokens=50 * i, prompt_tokens=200 * (i > 7)))
    told = view["replicas"]["r1"]
    assert (told["generated_per_s"], told["prompt_per_s"]) == (50.0, round(200 / 3, 1))


def test_texts_that_are_embedded_or_ranked_are_read_like_prompts() -> None:
    seen = Seen()
    for i in range(10):
        view = seen.look(replica(embedded_tokens=400 * i, prompt_tokens=200 * i))
    told = view["replicas"]["r1"]
    assert (told["generated_per_s"], told["prompt_per_s"], told["hits"]) == (0.0, 600.0, 0.0)


def test_a_stage_has_its_layers_and_its_shares_of_the_time() -> None:
    seen = Seen()
    place = {"n_stages": 2, "stage": 1, "first_layer": 20, "n_layers": 8}
    for i in range(10):
        stage = place | {"computed_s": 0.75 * i, "sent_s": 0.125 * i}
        view = seen.look(dataclasses.replace(replica(), stage=stage), replica("whole"))
    assert view["replicas"]["r1"]["stage"] == stage | {"computing": 0.75, "sending": 0.12}
    assert view["replicas"]["whole"]["stage"] is None


def test_the_first_look_knows_no_rates() -> None:
    told = Seen().look(replica(generated_tokens=5000, batches=10))["replicas"]["r1"]
    assert (told["generated_per_s"], told["point"], told["hits"]) == (0.0, None, None)


def test_the_operating_point_and_the_hits() -> None:
    seen = Seen()
    seen.look(replica())
    grown: dict[str, Any] = {"batches": 10, "busy_slots": 35, "decode_s": 0.5}
    view = seen.look(replica(**grown, prompt_tokens=25, cached_tokens=75))
    told = view["replicas"]["r1"]
    assert (told["point"], told["hits"]) == ([3.5, 50.0], 0.75)


def test_the_wait_is_the_forecast_of_a_slot() -> None:
    told = Seen().look(replica(running=2, waiting=2, backlog_s=8.0))["replicas"]["r1"]
    assert told["wait_s"] == 6.0  # three of four have to end


@pytest.mark.parametrize(
    ("slot", "widths"),
    [
        (SlotStats(0, "idle", None, 30, 0, 0), ["idle", 30, 0, 0, 0]),
        (SlotStats(0, "pinned", None, 9, 0, 0), ["pinned", 9, 0, 0, 0]),
        (SlotStats(0, "prefill", "a", 20, 50, 0, 16), ["prefill", 16, 4, 0, 30]),
        (SlotStats(0, "decode", "a", 57, 50, 8, 16), ["decode", 16, 34, 7, 0]),
        (SlotStats(0, "decode", "a", 10, 50, 60, 16), ["decode", 10, 0, 0, 0]),  # shifted
    ],
)
def test_slots(slot: SlotStats, widths: list[Any]) -> None:
    told = Seen().look(replica(slots=(slot,)))["replicas"]["r1"]
    assert told["slots"] == {"0": widths}
    assert told["requests"] == {"0": slot.request_id}


def test_percentiles_are_of_all_replicas_together() -> None:
    fast = {"ttft_s": {0.1: 98}, "itl_s": {}}
    slow = {"ttft_s": {0.1: 1, 2.0: 1}, "itl_s": {0.5: 1}}
    view = Seen().look(replica("a", latencies=fast), replica("b", latencies=slow))
    assert view["replicas"]["a"]["ttft"] == [100.0, 100.0, 100.0, 98]
    assert view["replicas"]["b"]["ttft"] == [100.0, 2000.0, 2000.0, 2]
    assert view["models"]["m"]["ttft"] == [100.0, 100.0, 100.0, 100]
    assert view["models"]["m"]["itl"] == [500.0, 500.0, 500.0, 1]
    assert view["replicas"]["a"]["itl"] == [None, None, None, 0]


def test_replicas_come_and_go() -> None:
    seen = Seen()
    seen.look(replica("a"))
    assert seen.events == []  # it was there already
    seen.look(replica("a"), replica("b"))
    assert seen.events == [("came", "b", 1)]
    for _ in range(2):
        assert seen.look(replica("b"))["replicas"]["a"]["state"] == "silent"
    assert "a" not in seen.look(replica("b"))["replicas"]
    assert seen.events == [("came", "b", 1), ("gone", "a", 1)]


def test_who_runs_and_does_not_answer_is_not_gone() -> None:
    seen = Seen()
    seen.look(replica("a"))
    seen.missing = ["a"]
    for _ in range(9):
        view = seen.look()
    assert view["replicas"]["a"]["state"] == "silent"
    assert view["models"]["m"]["missing"] == ["a"]
    seen.missing = []
    assert seen.look()["replicas"] == {}
    assert seen.events == [("gone", "a", 1)]


def test_who_misses_one_look_is_not_gone() -> None:
    seen = Seen()
    seen.look(replica("a"))
    seen.look()
    assert seen.look(replica("a"))["replicas"]["a"]["state"] == "up"
    assert seen.events == []


def test_what_serve_starts_and_stops_is_an_event() -> None:
    seen = Seen()
    seen.look(replica(), RUNNING=1)
    seen.look(replica(), RUNNING=1, STARTING=2)
    seen.look(replica(), RUNNING=2, STARTING=1)
    seen.look(replica(), RUNNING=1, STOPPING=1)
    assert seen.events == [("starting", None, 2), ("draining", None, 1)]
    assert seen.board.view["models"]["m"]["states"] == {"RUNNING": 1, "STOPPING": 1}


def test_drains_and_preemptions_are_events() -> None:
    seen = Seen()
    seen.look(replica(preemptions=3))
    seen.look(replica(preemptions=5))
    seen.look(replica(preemptions=5, draining=True))
    assert seen.events == [("preempted", "r1", 2), ("draining", "r1", 1)]
    assert seen.board.view["replicas"]["r1"]["state"] == "draining"


def test_failovers_are_events() -> None:
    seen = Seen()
    for n in (0, 2):
        seen.look(replica(failovers=n))
    assert seen.events == [("resumed", "r1", 2)]


def test_events_are_bounded() -> None:
    seen = Seen()
    for i in range(300):
        seen.look(replica(preemptions=i))
    assert len(seen.events) == 200
    assert max(map(int, seen.board.view["events"])) == 299


def merged(target: Any, patch: Any) -> Any:
    """RFC 7396, as it is written there."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(result.get(key), value)
    return result


def test_differences_are_small_and_add_up() -> None:
    seen = Seen()
    looks = [
        (replica("a"), replica("b", slots=(SlotStats(0, "idle", None, 1, 0, 0),))),
        (replica("a"), replica("b", slots=(SlotStats(0, "decode", "x", 2, 1, 1),), running=1)),
        (replica("a", preemptions=1),),
        (replica("a", preemptions=1, batches=3, busy_slots=3, decode_s=0.1),),
    ]
    before: Json = {}
    built: Json = {}
    for look in looks:
        after = seen.look(*look)
        built = merged(built, difference(before, after))
        assert built == merged({}, after)
        before = after
    assert difference(before, before) == {}
    seen.look(replica("a", preemptions=1, batches=3, busy_slots=3, decode_s=0.1))
    assert set(difference(before, seen.board.view)) <= {"at", "events", "replicas"}


def test_sixty_four_idle_replicas_cost_nothing_to_tell() -> None:
    seen = Seen()
    slots = tuple(SlotStats(i, "idle", None, 100, 0, 0) for i in range(16))
    replicas = [replica(f"r{i}", slots=slots) for i in range(64)]
    before = seen.look(*replicas)
    assert set(difference(before, seen.look(*replicas))) == {"at"}


def test_what_else_is_known_of_models_is_shown() -> None:
    told = Seen().look_at_models(old={"share": 0.9}, new={"loaded": True})
    assert (told["old"]["share"], told["new"]["loaded"]) == (0.9, True)
    assert "loaded" not in told["old"]


def test_downloads_are_told_until_they_end() -> None:
    seen = Seen()
    seen.fetching = [FetchingReplica("r1", "n1", "downloading", 0.4219)]
    assert seen.look(STARTING=1)["models"]["m"]["fetching"] == {"r1": 0.42}
    seen.fetching = []
    assert seen.look(STARTING=1)["models"]["m"]["fetching"] == {}
