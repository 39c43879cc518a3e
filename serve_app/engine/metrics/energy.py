"""The energy that requests take: the processor's own counters, by measured shares of its time.

Source: Linux, "Power Capping Framework" (RAPL, of Intel's and AMD's processors).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

_SYSTEM = Path("/")
_LEAST_S = 0.1
"""The shortest time that power is measured over: the counters move every millisecond."""
_TICKS_S = 0.01  # proc_stat(5)


class _Reading(NamedTuple):
    at: float
    joules: tuple[float, ...]
    """The energy of each processor package since some moment."""
    busy_s: float
    """The CPU seconds of all programs on this machine, and those of this process."""
    own_s: float


class EnergyMeter:
    """Measures the power of this process's part of the machine. Used in one thread.

    The packages' energy is divided among programs by their CPU time. So who uses the machine alone has all
    of its energy while it computes, and an idle machine's energy is nobody's.
    """

    def __init__(
        self,
        root: Path = _SYSTEM,
        clock: Callable[[], float] = time.monotonic,
        own_s: Callable[[], float] = time.process_time,
    ) -> None:
        """`root` is the folder that has `sys` and `proc`."""
        self._stat, self._clock, self._own_s = root / "proc/stat", clock, own_s
        zones = sorted((root / "sys/class/powercap").glob("intel-rapl:*"))
        self._zones = [
            zone for zone in zones if _read_counter(zone / "name").startswith("package-")
        ]
        self._ranges = [
            float(_read_counter(zone / "max_energy_range_uj") or 0) / 1e6 for zone in self._zones
        ]
        self._last = self._reading()
        self._watts: float | None = None

    def look(self) -> None:
        """Measure the power since the last look, if that is long enough ago."""
        last = self._last
        if last is None or self._clock() - last.at < _LEAST_S:
            return
        now = self._last = self._reading()
        if now is None:
            self._watts = None
            return
        grown = (
            (after - before) % most if most else max(0.0, after - before)
            for before, after, most in zip(last.joules, now.joules, self._ranges, strict=True)
        )
        busy_s, own_s = now.busy_s - last.busy_s, now.own_s - last.own_s
        share = min(1.0, own_s / busy_s) if busy_s > 0 else 1.0
        self._watts = share * sum(grown) / (now.at - last.at)

    def joules(self, compute_s: float) -> float | None:
        """The energy of so many seconds of the decoder that have just passed; None if nothing tells it."""
        self.look()
        return None if self._watts is None else self._watts * compute_s

    def _reading(self) -> _Reading | None:
        """The counters now; None where the machine shows none, or not to this user."""
        if not self._zones:
            return None
        with suppress(OSError, ValueError):
            joules = tuple(int((zone / "energy_uj").read_text()) / 1e6 for zone in self._zones)
            ticks = [int(n) for n in self._stat.read_text().split("\n", 1)[0].split()[1:9]]
            busy_s = (
                sum(ticks) - ticks[3] - ticks[4]
            ) * _TICKS_S  # not idle, nor waiting for disks
            return _Reading(self._clock(), joules, busy_s, self._own_s())
        return None


def _read_counter(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


@cache
def meter() -> EnergyMeter:
    """The meter of this process."""
    return EnergyMeter()
