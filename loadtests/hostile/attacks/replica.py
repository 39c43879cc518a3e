"""Processes that are made silent: one replica, which must not harm the others, and all workers."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from loadtests.hostile.attack import KEYLESS, Attack, Bars
from loadtests.hostile.scene import Scene
from loadtests.hostile.setups import PRE_TOKENIZERS

STOPPED_S = 6.0
PATHS = (
    "/v1/stats",
    "/metrics?model=corral-demo",
    "/slots?model=corral-demo",
    "/v1/models",
    "/health",
)
LATE_S = 5.0


def _stopped(scene: Scene) -> None:
    """One model's only replica is stopped for some seconds, and meanwhile others are asked for."""
    pids = scene.pids(f"engine-{PRE_TOKENIZERS[0]}")
    if not pids:
        scene.found("no process of that replica is found: this shows nothing")
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        until = time.monotonic() + STOPPED_S
        while time.monotonic() < until:
            for path in PATHS:
                answer = scene.get(path)
                if answer.status >= 500 or answer.seconds > LATE_S:
                    told = answer.status if answer.status >= 500 else f"more than {LATE_S:.0f} s"
                    scene.found(f"{path.partition('?')[0]}: {told}, as one replica says nothing")
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _hanging_workers(scene: Scene) -> None:
    """All processes that read requests are stopped, and requests come."""
    pids = scene.pids("serve_app.server.workers.worker")
    if not pids:
        scene.found("no worker is found: this shows nothing")
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    body = {"model": "corral-demo", "prompt": "Hello", "max_tokens": 1}
    try:
        while scene.left_s():
            answer = scene.post("/v1/completions", body)
            if answer.status >= 500:
                scene.found(f"{answer.status}, as the workers say nothing")
            if answer.status == 200 and not any(map(_exists, pids)):
                return
        scene.found("workers that are stopped are not replaced")
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


ATTACKS = (
    Attack(
        name="a replica that says nothing",
        family="replica",
        what="One replica of another model is stopped for six seconds.",
        expects="What is known is answered, and what is missing is named.",
        act=_stopped,
        server=KEYLESS,
        seconds=12.0,
        bars=Bars(),
        is_short=True,
    ),
    Attack(
        name="workers that hang",
        family="replica",
        what="All processes that read requests are stopped, their parent among them.",
        expects="They are replaced, and every request is answered: users wait for that.",
        act=_hanging_workers,
        server=KEYLESS,
        seconds=60.0,
        least_s=40.0,
        bars=Bars(ttft_factor=None, memory_mib=256),  # workers without their parent count whole
    ),
)
