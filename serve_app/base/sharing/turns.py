"""Turns by which the engines of one machine share its cores: one computes at a time, on all of them.

Two teams of threads on the same cores wait for each other at every barrier. So an engine holds the turn
while it computes a step. The next engine is the one that had least of the machine, by measured seconds.
That is start-time fair queueing (Goyal, Vin and Cheng, 1996).

The engines share a table in a file. They lock it with flock(2) for some microseconds at a time. The kernel
drops that lock with its process. Each engine waits at a socket of its own for whoever gives it the turn. A
pidfd tells at once that the holder died. A holder that was stopped is passed over.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import math
import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path

from serve_app.base.sharing.locks import make_private

logger = logging.getLogger("corral.engine")

_VERSION, _MOST_ENGINES, _NOBODY = 1, 64, -1
# A turn goes on over short steps for so long: each change costs the time in which threads wake.
TURN_S = 0.05
# An engine competes for so long after its last turn. For the longer time its next request may come, and
# waits for no more than one step.
_COMPETES_S, _ACTIVE_S = 1.0, 10.0
# Whoever waits looks this often whether the holder goes on, and passes over one that was stopped, or that
# computes for so long at once.
_LOOK_EVERY_S, _MOST_HELD_S = 0.05, 2.0
# No critical section takes so long, unless its process was stopped in it.
_MOST_LOCKED_S, _RETRY_S = 0.2, 0.00005
# A flag of a process that the kernel ends: the memory of a large one takes it some tenths of a second.
_EXITING = 0x4


class _Entry(ctypes.Structure):
    """An engine, as the table has it."""

    _fields_ = (
        ("pid", ctypes.c_int32),
        ("waits", ctypes.c_int8),
        ("is_behind", ctypes.c_int8),
        ("began", ctypes.c_uint64),
        ("held_s", ctypes.c_double),
        ("had_s", ctypes.c_double),
        ("stall_s", ctypes.c_double),
        ("pass_s", ctypes.c_double),
        ("worked_at", ctypes.c_double),
    )
    pid: int
    """The process; 0: the entry is free."""
    waits: int
    is_behind: int
    """Whether its work goes behind that of all others."""
    began: int
    """The begin of the process, in the kernel's ticks: ids of processes are used again."""
    held_s: float
    """The seconds of all of its turns."""
    had_s: float
    """The seconds that are compared with those of others: who comes back is level with the active ones."""
    stall_s: float
    """The longest time that its streams should wait."""
    pass_s: float
    """The seconds of a pass over all of its streams; 0 if that is not known."""
    worked_at: float
    """The time, on `time.monotonic`, up to which its turns are charged."""


class _Table(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_int32),
        ("holder", ctypes.c_int32),
        ("n_waiting", ctypes.c_int32),
        ("n_entries", ctypes.c_int32),
        ("entries", _Entry * _MOST_ENGINES),
    )
    version: int
    holder: int
    n_waiting: int
    n_entries: int
    """The entries that have ever been used: those behind them are free."""
    entries: ctypes.Array[_Entry]


class Turns:
    """An engine's place among those that share its cores. One thread."""

    def __init__(self, path: Path, stall_s: float = math.inf) -> None:
        """Join the engines of that file, whose folder is this user's alone. `stall_s` is the longest time
        that a stream of this engine should wait for its next token. Raises OSError."""
        make_private(path.parent)
        self._path = path
        # Others that have another table, or cannot see whether this process lives, have another file.
        self._name = f"{path.name}.{_VERSION}.{Path('/proc/self/ns/pid').stat().st_ino}"
        self.waited_s = 0.0
        """The seconds of all waits for a turn."""
        self._holds, self._began_at = False, 0.0
        self._passed_over = 0
        """The process that was passed over last."""
        with ExitStack() as stack:
            self._folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, self._folder)
            self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            stack.callback(self._bell.close)
            how = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._file = os.open(self._name, how, 0o600, dir_fd=self._folder)
            stack.callback(os.close, self._file)
            with self._lock():
                self._table = self._open_table()
                self._index = self._join(stall_s)
            self._closing = stack.pop_all()

    def take(self, *, behind: bool = False) -> float | None:
        """Wait until it is this engine's turn; if it has the turn, others go first that had less. Returns
        the seconds that this turn may take: infinite if no other engine was active lately. Work `behind`
        all others' waits while any other does: None if it has no turn yet, so that the caller can look
        whether it has more urgent work."""
        began, table = time.monotonic(), self._table
        if self._holds and table.holder == self._index and not table.n_waiting:
            return self._most_s(began)
        with self._lock():
            entry, has_turn = table.entries[self._index], table.holder == self._index
            if self._holds and has_turn:
                self._charge(self._index, began)
                if began - self._began_at < TURN_S:
                    return self._most_s(began)
            # It comes back, was passed over, or has more urgent work than it had before.
            if not (entry.waits or has_turn) or (entry.is_behind and not behind):
                self._enter(entry, began)
            entry.is_behind = behind
            if self._holds or not has_turn:
                entry.waits = True
                if table.holder in (self._index, _NOBODY):
                    self._choose()
            self._holds, table.n_waiting = False, self._n_waiting
        self._holds = self._wait(began, until=began + _LOOK_EVERY_S if behind else math.inf)
        self._began_at = time.monotonic()
        self.waited_s += self._began_at - began
        return self._most_s(self._began_at) if self._holds else None

    def give(self) -> None:
        """Give the turn to the next one, as this engine rests, or wait no more. Idempotent."""
        table, entry = self._table, self._table.entries[self._index]
        if entry.waits or table.holder == self._index:  # which it may have become in the meantime
            with self._lock():
                entry.waits = False
                if table.holder == self._index:
                    self._charge(self._index, time.monotonic())
                    self._choose()
                table.n_waiting = self._n_waiting
        self._holds = False

    def expect(self, pass_s: float) -> float:
        """Tell the others what a pass over all streams of this engine takes. Returns what a pass of each
        engine that has streams takes, one after the other."""
        with self._lock():
            self._table.entries[self._index].pass_s = pass_s
            return pass_s + sum(one.pass_s for _, one in self._others)

    @property
    def others_worked_at(self) -> float:
        """The time when another engine had the turn last, on `time.monotonic`."""
        if self._table.holder not in (self._index, _NOBODY):
            return time.monotonic()
        return max((one.worked_at for _, one in self._others), default=-math.inf)

    @property
    def shared_file(self) -> Path | None:
        """The file, if there are other engines."""
        return self._path if any(True for _ in self._others) else None

    @property
    def held_s(self) -> float:
        """The seconds of all turns."""
        entry, has_turn = self._table.entries[self._index], self._table.holder == self._index
        return entry.held_s + (time.monotonic() - entry.worked_at if has_turn else 0.0)

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Hold the turn within this. It is given back then, unless this engine had it before."""
        had = self._holds
        self.take()
        try:
            yield
        finally:
            if not had:
                self.give()

    def close(self) -> None:
        """Leave. Not twice."""
        self.give()
        with self._closing, self._lock():
            self._clear(self._index)

    # -- under the lock ---------------------------------------------------------------------------

    @contextmanager
    def _lock(self) -> Iterator[None]:
        until = time.monotonic() + _MOST_LOCKED_S
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    break  # a stopped process has it: two compute at once, at worst
                time.sleep(_RETRY_S)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def _open_table(self) -> _Table:
        size = ctypes.sizeof(_Table)
        os.posix_fallocate(
            self._file, 0, size
        )  # or a write would end the process where there is no room
        table = _Table.from_buffer(mmap.mmap(self._file, size))
        if not table.version:
            table.version, table.holder = _VERSION, _NOBODY
        return table

    def _join(self, stall_s: float) -> int:
        """Take a free entry, and listen there. Raises OSError."""
        table = self._table
        for index in range(table.n_entries):
            if not _is_alive(table.entries[index]):
                self._clear(index)
                if table.holder == index:
                    self._choose()
        index = next((i for i, entry in enumerate(table.entries) if not entry.pid), _NOBODY)
        if index == _NOBODY:
            raise OSError(f"{_MOST_ENGINES} engines share {self._name} already")
        self._clear(index)  # who was killed a moment ago may have left a bell
        self._bell.bind(self._bell_of(index))
        entry, pid = table.entries[index], os.getpid()
        entry.pid, entry.began, entry.stall_s = pid, int(_stat(pid)[19]), stall_s
        entry.worked_at = -math.inf
        table.n_entries = max(table.n_entries, index + 1)
        return index

    def _enter(self, entry: _Entry, now: float) -> None:
        """Become active again, with nothing saved while this engine rested, or waited behind the others."""
        table, active = self._table, list[tuple[bool, float]]()
        for i, other in self._others:
            if other.waits or i == table.holder:
                begun_s = now - other.worked_at if i == table.holder else 0.0
                active.append((bool(other.is_behind), other.had_s + begun_s))
        entry.worked_at = now
        if active:
            entry.had_s = max(entry.had_s, min(active)[1])
            return
        for _, other in self._others:  # with the last active one, all debts are gone
            other.had_s = 0.0
        entry.had_s = 0.0

    def _charge(self, index: int, now: float) -> None:
        entry = self._table.entries[index]
        seconds, entry.worked_at = max(0.0, now - entry.worked_at), now
        entry.had_s += seconds
        entry.held_s += seconds

    def _choose(self) -> None:
        """Give the turn to who waits and had least; those behind the others come last."""
        table, entries = self._table, self._table.entries
        waiting = [i for i in range(table.n_entries) if entries[i].waits]

        def order(i: int) -> tuple[int, float, float]:
            return entries[i].is_behind, entries[i].had_s, entries[i].worked_at

        for i in sorted(waiting, key=order):
            entries[i].waits, entries[i].worked_at = False, time.monotonic()
            table.holder = i  # before it looks
            if i == self._index or self._ring(i) or _is_alive(entries[i]):
                break
            self._clear(i)
        else:
            table.holder = _NOBODY
        table.n_waiting = self._n_waiting

    def _clear(self, index: int) -> None:
        """Free the entry of an engine that is gone."""
        entry = self._table.entries[index]
        ctypes.memset(ctypes.byref(entry), 0, ctypes.sizeof(entry))
        with suppress(FileNotFoundError):
            Path(self._bell_of(index)).unlink()

    # -- others -----------------------------------------------------------------------------------

    @property
    def _others(self) -> Iterator[tuple[int, _Entry]]:
        for i in range(self._table.n_entries):
            if i != self._index and self._table.entries[i].pid:
                yield i, self._table.entries[i]

    @property
    def _n_waiting(self) -> int:
        return sum(entry.waits for entry in self._table.entries[: self._table.n_entries])

    def _most_s(self, now: float) -> float:
        """The seconds of a step: all that compete have one each before a stream has waited for too long."""
        holder = self._table.holder
        rested_s = [
            (0.0 if i == holder else now - one.worked_at, one.stall_s) for i, one in self._others
        ]
        active = [stall_s for seconds, stall_s in rested_s if seconds < _ACTIVE_S]
        if not active:
            return math.inf
        n_others = sum(seconds < _COMPETES_S for seconds, _ in rested_s)
        return min(self._table.entries[self._index].stall_s, *active) / (1 + n_others)

    def _bell_of(self, index: int) -> str:
        # However long the folder's name is: that of a socket has 107 characters.
        return f"/proc/self/fd/{self._folder}/{self._name}.{index}"

    def _ring(self, index: int) -> bool:
        """Wake an engine; whether it is there."""
        try:
            self._bell.sendto(b"", self._bell_of(index))
        except BlockingIOError:  # it was woken, and has not looked yet
            return True
        except OSError:
            return False
        return True

    def _wait(self, since: float, until: float) -> bool:
        """Wait for the turn; whether it has come until then."""
        table, entry = self._table, self._table.entries[self._index]
        while table.holder != self._index:
            if time.monotonic() > until:
                return False
            if self._wait_for_bell(holder := table.holder):
                continue
            with self._lock():
                if table.holder == self._index:
                    return True
                if not entry.waits:  # it was passed over itself
                    entry.waits = True
                    self._enter(entry, time.monotonic())
                if table.holder == _NOBODY:
                    self._choose()
                elif table.holder == holder:
                    self._look_at_holder(since)
        return True

    def _look_at_holder(self, since: float) -> None:
        """Pass over a holder that does not go on. This engine has waited `since` then."""
        index, entry, now = (
            self._table.holder,
            self._table.entries[self._table.holder],
            time.monotonic(),
        )
        if not _is_alive(entry):
            self._clear(index)
            self._choose()
        elif now - max(since, entry.worked_at) > _MOST_HELD_S or _is_stopped(entry):
            if (
                entry.pid != self._passed_over
            ):  # once: on a crowded machine, it is so with each pass
                logger.warning("The engine of process %d holds its turn: others go on.", entry.pid)
            self._passed_over = entry.pid
            self._charge(index, now)
            self._choose()

    def _wait_for_bell(self, holder: int) -> bool:
        """Whether this engine was woken: False once the holder has ended, or after a while."""
        ended = None
        if holder != _NOBODY:
            try:
                ended = os.pidfd_open(self._table.entries[holder].pid)
            except ProcessLookupError:
                return False
            except OSError:  # as where there are too many open files
                pass
        try:
            poll = select.poll()
            for descriptor in (self._bell.fileno(), ended):
                if descriptor is not None:
                    poll.register(descriptor, select.POLLIN)
            ready = poll.poll(1000 * _LOOK_EVERY_S)
        finally:
            if ended is not None:
                os.close(ended)
        if (self._bell.fileno(), select.POLLIN) not in ready:
            return False
        with suppress(BlockingIOError):
            self._bell.recv(1)
        return True


class Alone:
    """The turns of an engine that has its cores for itself."""

    held_s = waited_s = 0.0
    others_worked_at = -math.inf
    shared_file = None

    def expect(self, pass_s: float) -> float:
        return pass_s

    def take(self, *, behind: bool = False) -> float | None:
        return math.inf

    def give(self) -> None: ...

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()

    def close(self) -> None: ...


class _OfThread(threading.local):
    turns: Turns | Alone = Alone()


_of_thread = _OfThread()


def current() -> Turns | Alone:
    """The turns of this thread: all that it computes takes part in them."""
    return _of_thread.turns


@contextmanager
def join(path: Path | None, stall_s: float = math.inf) -> Iterator[None]:
    """Have the thread compute in turns with the engines of that file: see `Turns`. If there is no file, or
    it cannot be used, it has the cores for itself."""
    try:
        turns = Alone() if path is None else Turns(path, stall_s)
    except OSError as error:
        logger.warning("This engine takes no turns with others on its cores: %s.", error)
        turns = Alone()
    before, _of_thread.turns = _of_thread.turns, turns
    try:
        yield
    finally:
        _of_thread.turns = before
        turns.close()


def _stat(pid: int) -> list[str]:
    """The fields of /proc of a process, from its state on; none if it is gone. See proc_pid_stat(5)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _is_alive(entry: _Entry) -> bool:
    stat = _stat(entry.pid)
    if not stat or stat[0] in "ZX" or int(stat[6]) & _EXITING:
        return False
    return int(stat[19]) == entry.began


def _is_stopped(entry: _Entry) -> bool:
    return _stat(entry.pid)[:1] in (["T"], ["t"])
