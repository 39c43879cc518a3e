"""Records a server under load: its own statistics, and memory and open files by the kernel."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtests.load.target import Target


@dataclass(frozen=True, slots=True)
class Sample:
    """A server at one moment, `at_s` seconds after the first. All replicas of a model together."""

    at_s: float
    replicas: int
    running: int
    waiting: int
    backlog_s: float
    """The longest of any replica."""
    busy_slots: int
    kv_tokens: int
    """In all slots, idle ones included; 0 for keys that are no operators'."""
    store_mib: float
    """Prefixes that lost their slot and are kept in memory, up to `engine.cache_ram_mib`."""
    rss_mib: float | None
    """Resident memory of all processes, shared pages in each: None of a server that is not local."""
    files: int | None
    """Open file descriptors."""


def sample(target: Target, model: str, at_s: float) -> Sample | None:
    """One look; None if the server does not answer."""
    try:
        engines = engines_of(target.stats(), model)
    except httpx.HTTPError:
        return None
    slots = [slot for engine in engines for slot in engine["slots"] if slot["state"] != "pinned"]
    pids = target.pids()
    return Sample(
        at_s=round(at_s, 2),
        replicas=len(engines),
        running=sum(engine["queue"]["running"] for engine in engines),
        waiting=sum(engine["queue"]["waiting"] for engine in engines),
        backlog_s=max((engine["queue"]["backlog_s"] for engine in engines), default=0.0),
        busy_slots=sum(slot["state"] != "idle" for slot in slots),
        kv_tokens=sum(slot.get("n_past", 0) for slot in slots),
        store_mib=round(sum(engine["cache"]["stored_bytes"] for engine in engines) / 2**20, 1),
        rss_mib=_rss_mib(pids) if pids else None,
        files=sum(map(_files, pids)) if pids else None,
    )


def engines_of(stats: Mapping[str, Any], model: str) -> list[dict[str, Any]]:
    """The state of each replica's engine; of the first model, if none is named. None of another server."""
    models = stats["models"]
    named = [entry for entry in models if entry["id"] == model] or models[:1]
    return [replica["engine"] for entry in named for replica in entry["replicas"]]


def ended(engines: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """Requests that ended since the engines started, by reason."""
    return sum((Counter(engine["requests"]["ended"]) for engine in engines), Counter[str]())


def _rss_mib(pids: Iterable[int]) -> float:
    found = (re.search(r"^VmRSS:\s+(\d+)", _status(pid), re.M) for pid in pids)
    return round(sum(int(match[1]) for match in found if match) / 1024, 1)


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""  # gone by now


def _files(pid: int) -> int:
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return 0


def busy_s() -> float:
    """CPU seconds that all cores of this machine have worked, or were kept from it by a hypervisor."""
    with Path("/proc/stat").open() as file:
        ticks = [int(value) for value in file.readline().split()[1:9]]
    user, nice, system, _idle, _iowait, *interrupts_and_stolen = ticks
    return (user + nice + system + sum(interrupts_and_stolen)) / os.sysconf("SC_CLK_TCK")


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds that these processes have used; nothing for those that have ended."""
    ticks = 0
    for pid in pids:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            continue
        user, system = stat.rpartition(")")[2].split()[11:13]
        ticks += int(user) + int(system)
    return ticks / os.sysconf("SC_CLK_TCK")
