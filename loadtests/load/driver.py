"""One load on one server: Locust in a process of its own, the server observed meanwhile."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from loadtests.common.processes import with_default_signals
from loadtests.load.observer import Sample, busy_s, cpu_s, ended, engines_of, sample
from loadtests.load.stream_metrics import Accounts, Slo, accounts, errors, figures, read_journal
from loadtests.load.target import Target
from serve_app.cli.measure.outcomes import Outcome

LOCUSTFILE = Path(__file__).parents[1] / "locustfile.py"
GRACE_S = 60.0
"""How long Locust may take to start and to end, and a server to become idle."""
MOST_SAMPLES = 600


class LoadError(Exception):
    """The load could not be put on the server."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load on the server, in the words of the locustfile."""

    users: int
    run_s: int
    mix: str
    think_s: float = 5.0
    seed: int = 20
    model: str = ""
    slo: Slo = field(default_factory=lambda: Slo(2.0, 0.15))
    shape: str = "constant"
    arrivals_per_s: float = 0.0

    def command(self, url: str, journal: Path) -> list[str]:
        """Locust without its web page."""
        options = {
            "host": url,
            "users": self.users,
            "spawn-rate": self.users,
            "run-time": f"{self.run_s}s",
            "mix": self.mix,
            "think": self.think_s,
            "seed": self.seed,
            "model": self.model,
            "slo-ttft": self.slo.ttft_s,
            "slo-itl": self.slo.itl_s,
            "shape": self.shape,
            "arrivals": self.arrivals_per_s,
            "journal": journal,
            "loglevel": "WARNING",
        }
        listed = [f"--{name}={value}" for name, value in options.items()]
        locust = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless"]
        return [*locust, "--only-summary", *listed]


Strikes = Sequence[tuple[float, Callable[[], object]]]
"""The faults for a server meanwhile, each after so many seconds."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a load."""

    load: Load
    sent: list[str]
    outcomes: list[Outcome]
    samples: list[Sample]
    server_ended: Counter[str]
    """Requests by the reason of their end, as the server counts them; a replica that died took its
    counts along."""
    wall_s: float
    client_share: float
    """Of one core, what the client used."""
    other_cores: float | None
    """The cores that other processes than the server and the client used meanwhile; None if the
    server was not started here, or something was done to it, which may take its counts along."""
    idle_after_s: float | None
    """When the server had nothing to do any more, from the end of the load; None: not in GRACE_S."""

    @property
    def accounts(self) -> Accounts:
        """The client's books."""
        return accounts(self.sent, self.outcomes)

    def figures(self) -> dict[str, float | None]:
        """The users' figures."""
        return figures(self.outcomes, self.wall_s, self.load.slo)

    def document(self) -> dict[str, Any]:
        """All but the single requests, for JSON."""
        return {
            "load": asdict(self.load),
            "figures": self.figures(),
            "accounts": asdict(self.accounts),
            "errors": errors(self.outcomes),
            "by_kind": dict(Counter(o.kind for o in self.outcomes)),
            "server_ended": dict(self.server_ended),
            "client_share": self.client_share,
            "other_cores": self.other_cores,
            "idle_after_s": self.idle_after_s,
            "samples": [asdict(one) for one in self.samples],
        }


def drive(target: Target, load: Load, strikes: Strikes = ()) -> Result:
    """Put the load on the server, and wait until it is idle again. Raises LoadError if Locust fails."""
    before = ended(engines_of(target.stats(), load.model))
    start, others = time.monotonic(), _others_s(target)
    with tempfile.TemporaryDirectory(prefix="corral-load-") as folder:
        journal, log = Path(folder, "journal"), Path(folder, "log")
        with log.open("wb") as output:
            locust = subprocess.Popen(
                with_default_signals(*load.command(target.url, journal)),
                cwd=LOCUSTFILE.parents[1],
                stdout=output,
                stderr=output,
            )
        try:
            samples = _observe(target, load, locust, strikes)
        finally:
            locust.kill()
            locust.wait()
        other_cores = (_others_s(target) - others) / (time.monotonic() - start)
        lines = journal.read_text().splitlines() if journal.exists() else []
        client = json.loads(lines[-1]).get("client") if lines else None
        if client is None:
            raise LoadError(f"Locust did not end well:\n{log.read_text(errors='replace')[-2000:]}")
    idle_after_s = _wait_idle(target, load.model)
    if (last := sample(target, load.model, client["wall_s"])) is not None:
        samples.append(last)
    sent, outcomes = read_journal(lines)
    counts = ended(engines_of(target.stats(), load.model))
    counts.subtract(before)
    wall_s = client["wall_s"]
    share = client["cpu_s"] / wall_s
    return Result(
        *(load, sent, outcomes, samples, +counts, wall_s, share),
        other_cores=max(0.0, other_cores) if target.directory and not strikes else None,
        idle_after_s=idle_after_s,
    )


def _observe(
    target: Target, load: Load, locust: subprocess.Popen[bytes], strikes: Strikes
) -> list[Sample]:
    """Look at the server until Locust ends. Raises LoadError if it does not."""
    samples: list[Sample] = []
    every_s = max(1.0, load.run_s / MOST_SAMPLES)
    due = sorted(strikes, key=lambda strike: strike[0])
    start = time.monotonic()
    while locust.poll() is None:
        at_s = time.monotonic() - start
        if at_s > load.run_s + GRACE_S:
            raise LoadError(f"Locust runs for {at_s:.0f} s.")
        if due and at_s > due[0][0]:
            due.pop(0)[1]()
        if (one := sample(target, load.model, at_s)) is not None:
            samples.append(one)
        with_time = max(0.05, every_s - (time.monotonic() - start - at_s))
        try:
            locust.wait(with_time)
        except subprocess.TimeoutExpired:
            continue
    return samples


def _others_s(target: Target) -> float:
    """CPU seconds of this machine so far, but for the server's, this process's and its ended children's."""
    return busy_s() - cpu_s(target.pids()) - sum(os.times()[:4])


def _wait_idle(target: Target, model: str) -> float | None:
    start = time.monotonic()
    while (passed := time.monotonic() - start) < GRACE_S:
        try:
            stats = target.stats()
            engines = engines_of(stats, model)
            busy = any(
                engine["queue"]["running"] or engine["queue"]["waiting"] for engine in engines
            )
            if not busy and (engines or not stats["models"]):
                return passed
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    return None
