"""Checks a server's books when it is treated badly: overload, lost replicas, hours of load.

    python -m loadtests.load.chaos SCENARIO (--url URL | --config FILE) [--capacity USERS] [--seconds N]

    overload    ten times as many users as --capacity, who do not think between requests
    kill        an engine replica is killed every eight seconds, until the last quarter; of a server of
                --config only
    slow        a third of the users read an event every quarter of a second
    vanish      two thirds of the users hang up at some moment
    soak        --capacity users for 30 minutes; memory, open files, slots and queue are flat at the end

Each ends with a verdict, from the counts of client and server; the exit status is 1 if it is bad.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from loadtests.common.servers import exit_on_sigterm
from loadtests.load.driver import Load, Result, drive
from loadtests.load.observer import Sample
from loadtests.load.target import Target, opened
from serve_app.cli.measure.benchmark import number_between
from serve_app.cli.measure.outcomes import ABORTED, COMPLETE, FAILED

WHOLE = ("stop", "length")
"""The reasons of the server for ends of answers that are complete."""
KILL_EVERY_S = 8
MEMORY_MARGIN, FILES_MARGIN, KV_MARGIN = 1.05, 1.1, 1.5
"""How much more the last quarter of a soak may hold than the second. Slots keep what they computed, so
the tokens in them go up and down."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One way to treat a server."""

    mix: str
    users: float
    """Times the capacity."""
    think_s: float
    seconds: int


SCENARIOS = {
    "overload": Scenario("chat=2,rag=1,batch=1", 10.0, 0.0, 60),
    "kill": Scenario("chat=2,batch=1", 1.0, 0.5, 60),
    "slow": Scenario("chat=2,slow=1", 1.0, 0.5, 60),
    "vanish": Scenario("vanish=2,chat=1", 1.0, 0.2, 60),
    "soak": Scenario("chat=6,rag=2,agent=1,code=2,batch=1,vanish=1", 1.0, 2.0, 1800),
}


def load_of(name: str, capacity: int, seconds: int | None, model: str) -> Load:
    """A scenario's load for a server that holds so many users."""
    scenario = SCENARIOS[name]
    users = max(3, round(scenario.users * capacity))
    return Load(users, seconds or scenario.seconds, scenario.mix, scenario.think_s, model=model)


def problems(name: str, result: Result) -> list[str]:
    """The problems, in words; nothing, if the verdict is good."""
    found = [*_books(result, counted=name != "kill")]
    books = result.accounts
    if not books.complete:
        found.append("no request was answered")
    if books.failed:
        failed = sorted({o.reason for o in result.outcomes if o.end == FAILED})
        found.append(f"{books.failed} requests failed: {', '.join(failed)}")
    if name == "overload" and not books.refused:
        found.append("nothing was refused: this was no overload")
    if name == "vanish" and not any(o.reason == "left" for o in result.outcomes):
        found.append("nobody left")
    if name == "kill" and not _answered_late(result):
        found.append("no request of the last quarter was answered: the replica was not replaced")
    if name == "soak":
        found += growth(result.samples)
    return found


def _books(result: Result, counted: bool) -> Iterator[str]:
    """The client's books balance, the server's agree with them, and it has nothing left to do."""
    books = result.accounts
    if not books.balanced:
        yield f"the books do not balance: {books}"
    if result.idle_after_s is None or (result.samples and result.samples[-1].busy_slots):
        yield "requests are still running or waiting, or slots are busy"
    if not counted:
        return
    server = result.server_ended
    whole = sum(server[reason] for reason in WHOLE)
    left = sum(o.end == ABORTED for o in result.outcomes)
    if not books.complete <= whole <= books.complete + left:
        yield f"the server completed {whole}, its clients got {books.complete} and left {left}"
    if server.total() > books.sent - books.refused:
        yield f"the server ended {server.total()} of {books.sent - books.refused} accepted"


def _answered_late(result: Result) -> bool:
    first = min(o.start_s for o in result.outcomes)
    late = first + 0.75 * result.load.run_s
    return any(o.end == COMPLETE and o.start_s + o.wall_s > late for o in result.outcomes)


def growth(samples: Sequence[Sample]) -> list[str]:
    """The resources that a soak's last quarter holds more of than its second; the first is warming
    up. The memory of kept prefixes, which has a bound of its own, does not count."""
    quarter = len(samples) // 4
    if not quarter:
        return ["too short to see whether anything grows"]
    early, late = samples[quarter : 2 * quarter], samples[-quarter:]
    measures: tuple[tuple[str, float, Callable[[Sample], float]], ...] = (
        ("memory grew from {:.0f} to {:.0f} MiB", MEMORY_MARGIN, _own_mib),
        ("open files grew from {:.0f} to {:.0f}", FILES_MARGIN, lambda one: one.files or 0),
        ("tokens in slots grew from {:.0f} to {:.0f}", KV_MARGIN, lambda one: one.kv_tokens),
    )
    found = []
    for text, margin, value in measures:
        before, after = (statistics.median(map(value, part)) for part in (early, late))
        if after > margin * before:
            found.append(text.format(before, after))
    return found


def _own_mib(one: Sample) -> float:
    return one.rss_mib - one.store_mib if one.rss_mib is not None else 0.0


def verdict(name: str, result: Result) -> str:
    """The verdict, in a few lines."""
    found = problems(name, result)
    figures = result.figures()
    lines = [
        f"{name}: {result.load.users} users, {result.wall_s:.0f} s: {result.accounts}",
        f"server: {dict(result.server_ended)}, idle after "
        + ("never" if result.idle_after_s is None else f"{result.idle_after_s:.1f} s"),
        ", ".join(f"{k} {v:.2f}" for k, v in figures.items() if v is not None),
        f"client: {result.client_share:.0%} of a core"
        + ("" if result.other_cores is None else f"; others: {result.other_cores:.1f} cores"),
    ]
    last = result.samples[-1] if result.samples else None
    if last is not None and last.rss_mib is not None:
        most = max(one.rss_mib or 0.0 for one in result.samples)
        lines.append(
            f"memory: {last.rss_mib:.0f} MiB, {most:.0f} at most, {last.store_mib:.0f} in prefixes; "
            f"{last.files} open files"
        )
    return "\n".join([*lines, *(f"BAD: {one}" for one in found), "" if found else "GOOD"]).rstrip()


def run(target: Target, name: str, load: Load) -> Result:
    """Treat the server so."""
    if name != "kill":
        return drive(target, load)

    def kill() -> None:
        with suppress(LookupError):  # the next one is not up yet
            target.kill_replica()

    late_s = math.floor(0.75 * load.run_s)
    return drive(target, load, [(at_s, kill) for at_s in range(KILL_EVERY_S, late_s, KILL_EVERY_S)])


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.load.chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("scenario", choices=tuple(SCENARIOS))
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url")
    where.add_argument("--config", type=Path)
    parser.add_argument(
        "--capacity", type=number_between(1, 1000), default=16, help="users it holds"
    )
    parser.add_argument(
        "--seconds", type=number_between(5, 86400), help="how long; each has its own"
    )
    parser.add_argument("--model", default="")
    args = parser.parse_args(argv)
    if args.scenario == "kill" and args.url:
        parser.error("kill wants --config: only a replica that was started here may be killed")
    with opened(args.url, args.config) as target:
        load = load_of(args.scenario, args.capacity, args.seconds, args.model)
        result = run(target, args.scenario, load)
    print(verdict(args.scenario, result))
    return int(bool(problems(args.scenario, result)))


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
