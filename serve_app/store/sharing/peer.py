"""A process on a node that reads the node's files for other nodes.

It is started by the first node that asks for something, and ends when nobody has for a while.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serve_app.store.sharing import NAMESPACE

IDLE_S = 60.0
_N_AT_ONCE = 64
"""Calls, most of which wait for the disk."""


class PeerActor:
    """Reads parts of files. Its methods run in the actor's event loop."""

    def __init__(self) -> None:
        self._asked = time.monotonic()
        self._watching: asyncio.Task[None] | None = None

    async def read(self, path: str, piece: int, start: int, end: int) -> bytes | None:
        """Bytes of the file that is, or will be, at that path; None if that piece is not there."""
        self._note_use()
        return await asyncio.to_thread(_read, Path(path), piece, start, end)

    async def age(self, path: str) -> float | None:
        """Seconds since the download of that file made progress, 0 if it is whole; None without a file."""
        self._note_use()
        return await asyncio.to_thread(_age, Path(path))

    def _note_use(self) -> None:
        self._asked = time.monotonic()
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            left_s = self._asked + IDLE_S - time.monotonic()
            if left_s <= 0:
                break
            await asyncio.sleep(left_s)
        ray.get_runtime_context().current_actor.leave.remote()

    async def leave(self) -> None:
        """End this process, unless somebody asked meanwhile."""
        if time.monotonic() - self._asked < IDLE_S:
            self._watching = asyncio.create_task(self._watch())
            return
        ray.actor.exit_actor()  # type: ignore[no-untyped-call]


def on(node: str) -> Any:
    """The actor of a node, started if it must be. Asks Ray's head. Raises RayError or ValueError."""
    options: dict[str, Any] = {
        "name": f"files-{node}",
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "num_cpus": 0,
        "max_concurrency": _N_AT_ONCE,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }
    made: Any = ray.remote(PeerActor)
    return made.options(**options).remote()


def _age(path: Path) -> float | None:
    for _ in range(2):  # the part may become the whole file between two looks
        if path.exists():
            return 0.0
        with suppress(OSError):
            return time.time() - path.with_name(f"{path.name}.part").stat().st_mtime
    return None


def _read(path: Path, piece: int, start: int, end: int) -> bytes | None:
    try:
        descriptor = _open(path, piece)
        if descriptor is None:
            return None
        try:
            data = os.pread(descriptor, end - start, start)
        finally:
            os.close(descriptor)
    except OSError:  # it was removed to make room
        return None
    return data if len(data) == end - start else None


def _open(path: Path, piece: int) -> int | None:
    """The whole file, or the part of it that is here if that piece is. Raises OSError."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        part = os.open(path.with_name(f"{path.name}.part"), os.O_RDONLY | os.O_CLOEXEC)
    try:
        done = path.with_name(f"{path.name}.pieces").read_bytes()[piece : piece + 1]
    except OSError:  # it has become whole just now: it is the same file
        return part
    if done == b"\1":
        return part
    os.close(part)
    return None
