"""How long a process computes before one that wakes up may take its processor.

Linux lets a process that computes finish its slice, about 3 ms, before another one that has just woken up
runs, whatever their niceness. Each token of a stream wakes several processes in turn. With shorter slices,
a worker holds each of them up for less. Source: sched(7), and `sched_runtime` in sched_setattr(2), which
Linux heeds for ordinary processes since 6.12; earlier ones ignore it.
"""

from __future__ import annotations

import ctypes
import os
import platform
from ctypes import c_int32, c_uint32, c_uint64

SHORTEST_NS = 100_000
"""Linux takes no shorter ones."""
_SYSCALL = {"x86_64": 314, "aarch64": 274}


class _SchedAttr(ctypes.Structure):
    """The first version of `struct sched_attr`."""

    _fields_ = (
        ("size", c_uint32),
        ("sched_policy", c_uint32),
        ("sched_flags", c_uint64),
        ("sched_nice", c_int32),
        ("sched_priority", c_uint32),
        ("sched_runtime", c_uint64),
        ("sched_deadline", c_uint64),
        ("sched_period", c_uint64),
    )


def shorten() -> bool:
    """Give the calling thread, and what it forks, the shortest slices. Whether Linux took that."""
    number = _SYSCALL.get(platform.machine())
    if number is None:
        return False
    wanted = _SchedAttr(
        size=ctypes.sizeof(_SchedAttr),
        sched_policy=os.SCHED_OTHER,
        sched_nice=os.getpriority(os.PRIO_PROCESS, 0),
        sched_runtime=SHORTEST_NS,
    )
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    return int(syscall(number, 0, ctypes.byref(wanted), 0)) == 0
