"""Makes attacks, one after the other, each after a calm, while honest users stream."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from math import inf
from pathlib import Path

import httpx

from loadtests.common.servers import ROOT
from loadtests.hostile import elsewhere, figures, setups, watch
from loadtests.hostile.attack import Attack
from loadtests.hostile.figures import Journal
from loadtests.hostile.honest import API_KEYS, PATIENCE_S
from loadtests.hostile.scene import Scene
from loadtests.hostile.setups import HONEST, Setup
from loadtests.hostile.verdict import Result

WARM_S = 3.0
GRACE_S = 10.0
"""How much longer than it may an attack is waited for."""
RECOVERY_S, ENDED_S = 45.0, PATIENCE_S + 5.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How long each part takes, in seconds, and how many honest users there are."""

    calm_s: float
    least_s: float
    """An attack counts for so long at least, as some are over at once."""
    users: int
    most_s: float = inf
    """The longest that an attack may take, unless it may take less anyway, or needs more."""
    attempts: int = 3
    """How often an attack is made whose result is in doubt."""


def run(attacks: Sequence[Attack], plan: Plan, tell: Callable[[Result], None]) -> None:
    """All of them. A server lasts as long as it answers; `tell` gets each result when it is there. Raises
    RuntimeError if a server does not start."""
    for kind, group in groupby(attacks, key=lambda attack: attack.server):
        left = list(group)
        while left:
            with setups.started(kind) as setup, _honest(setup, plan.users) as journal:
                time.sleep(WARM_S)
                while left:
                    result = _surely(left.pop(0), setup, journal, plan)
                    tell(result)
                    if result.recovered_s is None:
                        break


def _surely(attack: Attack, setup: Setup, journal: Callable[[], Journal], plan: Plan) -> Result:
    """An attack that may have slowed honest users down is made again: others use this machine, too, and
    what they take looks the same, but not every time."""
    for attempt in range(1, plan.attempts + 1):
        result = replace(_one(attack, setup, journal, plan), attempt=attempt)
        if not result.is_doubtful:
            break
    return result


def _one(attack: Attack, setup: Setup, journal: Callable[[], Journal], plan: Plan) -> Result:
    """One attack and the calm before it."""
    serving = watch.serving(setup.directory)
    calm_from = time.time()
    if attack.beside is None:
        time.sleep(plan.calm_s)
    else:
        _bounded(attack.beside, Scene(setup.target, plan.calm_s, setup.keys), plan.calm_s)
    begin = time.time()
    seconds = min(attack.seconds, max(plan.most_s, attack.least_s))
    scene = Scene(setup.target, seconds, setup.keys)
    with watch.measured(setup.directory) as memory:
        _bounded(attack.act, scene, seconds)
        took_s = time.time() - begin
        time.sleep(max(0.0, plan.least_s - took_s))
    end = time.time()
    recovered_s = _recovery(setup)
    read = _settled(journal)
    return Result(
        attack=attack,
        seconds=took_s,
        calm=figures.seen(read, calm_from, begin),
        during=figures.seen(read, begin, end, and_later=True),
        answers=dict(scene.answers),
        problems=list(scene.problems),
        died=watch.died(serving, watch.serving(setup.directory)),
        memory_before_mib=memory.before,
        memory_most_mib=memory.most,
        recovered_s=recovered_s,
    )


def _bounded(act: Callable[[Scene], None], scene: Scene, seconds: float) -> None:
    """Do it, for so long at most, as from another machine; what it raises is a problem of the attack's."""
    told = elsewhere.call(partial(_acted, act, scene), seconds + GRACE_S)
    if told is None:
        scene.found(f"the attack did not end {GRACE_S:.0f} s after its time")
    else:
        scene.answers, scene.problems = told


def _acted(act: Callable[[Scene], None], scene: Scene) -> tuple[Counter[str], list[str]]:
    """The attacker's answers by status, and the problems that it found."""
    try:
        act(scene)
    except Exception as error:
        scene.found(f"the attack failed: {type(error).__name__}: {error}")
    return scene.answers, scene.problems


def _recovery(setup: Setup) -> float | None:
    """Seconds until an honest request is answered; None if none is in RECOVERY_S."""
    start = time.monotonic()
    while time.monotonic() - start < RECOVERY_S:
        with suppress(httpx.TransportError):
            if setups.answers(setup.target.url, setup.keys):
                return round(time.monotonic() - start, 2)
        time.sleep(0.2)
    return None


def _settled(journal: Callable[[], Journal]) -> Journal:
    """The journal when every request that has been sent by now has ended, or its user must have left."""
    now, first = time.time(), journal()
    if len(first.outcomes) == first.sent:
        return first
    while time.time() - now < ENDED_S:
        time.sleep(0.2)
        read = journal()
        if len(read.outcomes) >= first.sent:
            break
    return read


@contextmanager
def _honest(setup: Setup, users: int) -> Iterator[Callable[[], Journal]]:
    """Honest users of this server, in a process of their own; gives what reads their journal."""
    path = setup.directory / "honest.jsonl"
    command = [sys.executable, "-m", "loadtests.hostile.honest", "--url", setup.target.url]
    how = ["--users", str(users), "--journal", str(path)]
    process = subprocess.Popen(
        [*command, *how], cwd=ROOT, env=_environment(setup.keys), start_new_session=True
    )
    try:
        _wait(path)
        yield lambda: figures.read(path.open().readlines())
        if process.poll() is not None:
            raise RuntimeError("The honest users' process ended before its time.")
    finally:
        process.terminate()
        process.wait()


def _environment(keys: Mapping[str, str]) -> dict[str, str]:
    honest = {name: keys[name] for name in HONEST} if keys else {}
    return os.environ | {API_KEYS: json.dumps(honest)}


def _wait(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.is_file():
        if time.monotonic() > deadline:
            raise RuntimeError("The honest users did not start.")
        time.sleep(0.1)
