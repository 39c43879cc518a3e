"""Measures what a server takes of the processor while nobody asks it anything.

    python -m loadtests.load.idle [--seconds 60] [--serve-run | --ray-defaults]

Starts what `corral serve --cluster` runs, with the built-in model on loopback, and waits until all is
quiet. Prints each process's share of one core in that time, its memory, and the sums. Memory is `Pss`, in
whose sum a page of several processes counts once. With --serve-run, `serve run` with
`serve_app/cluster/one-machine.env` instead (the dashboard of Ray); with --ray-defaults, without.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from loadtests.common.processes import command_line, rollup_kib, tagged
from loadtests.common.servers import NO_SETTINGS, exit_on_sigterm, serve_run
from loadtests.load.observer import cpu_s
from serve_app.cli.measure.benchmark import number_between, table
from serve_app.cluster.one_machine import environment_of

_SETTLE_S = 15.0
"""The work that the start has put off is done by then."""
_MODEL = {"id": "corral-demo", "source": {"builtin": True}}
_TITLE = re.compile(r"ray::[^ ]+|ray-dashboard-\w+")
_PYTHON = re.compile(r"[^ ]*python[\d.]*(?: -\w)*? (?:-m )?(?P<program>[^- ][^ ]*)")


def short_name(command: str) -> str:
    """A process's short name: the title that it gave itself, Python's module or script, or its
    program."""
    if title := _TITLE.match(command):
        return title[0]
    python = _PYTHON.match(command)
    program = python["program"] if python else command.partition(" ")[0]
    return Path(program).name.removesuffix(".py") or "?"


def percentages(
    before: Mapping[int, float], after: Mapping[int, float], wall_s: float
) -> dict[int, float]:
    """Percent of a core, by process, of CPU seconds at two times that many seconds apart; most first. Those
    that came or went between are left out."""
    both = [pid for pid in before if pid in after]
    shares = {pid: 100 * (after[pid] - before[pid]) / wall_s for pid in both}
    return dict(sorted(shares.items(), key=lambda share: -share[1]))


def measured(directory: Path, seconds: float) -> dict[int, float]:
    """`percentages` of the server that has this directory, over so many seconds from now."""
    pids = tagged(directory)
    before, start = _cpu_s(pids), time.monotonic()
    time.sleep(seconds)
    after, wall_s = _cpu_s(tagged(directory)), time.monotonic() - start
    return percentages(before, after, wall_s)


def _cpu_s(pids: Iterable[int]) -> dict[int, float]:
    return {pid: cpu_s([pid]) for pid in pids}


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(prog="python -m loadtests.load.idle", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seconds", type=number_between(1, 3600), default=60)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--serve-run", action="store_true")
    which.add_argument("--ray-defaults", action="store_true")
    args = parser.parse_args()
    one_machine = environment_of("one-machine.env") if args.serve_run else None
    with serve_run(_MODEL, NO_SETTINGS if args.ray_defaults else one_machine) as server:
        assert server.directory is not None  # it was started here
        time.sleep(_SETTLE_S)
        shares = measured(server.directory, args.seconds)
        memory = {pid: rollup_kib(pid, "Pss:") / 2**10 for pid in shares}
        names = {pid: short_name(command_line(pid)) for pid in shares}
    rows = [(names[pid], f"{share:.2f}", f"{memory[pid]:.0f}") for pid, share in shares.items()]
    sums = ("all", f"{sum(shares.values()):.2f}", f"{sum(memory.values()):.0f}")
    print(table(("process", "% of a core", "MiB"), [*rows, sums]))


if __name__ == "__main__":
    exit_on_sigterm()
    main()
