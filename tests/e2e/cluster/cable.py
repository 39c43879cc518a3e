"""A cable that takes time, for kernels without netem.

`python -m tests.e2e.cluster.cable FIRST SECOND SECONDS` makes two network interfaces, and carries frames
between them until it is ended. What comes from the first waits for that long; what comes from the second
does not.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

# Source: linux/if_tun.h.
_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x2, 0x1000
_MOST_BYTES = 1 << 16
CARRIES = "The cable carries frames."


def _interface(name: str) -> int:
    tap = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return tap


def _write(tap: int, frame: bytes) -> None:
    with suppress(OSError):  # the interface is down: the frame is lost
        os.write(tap, frame)


def main(first_name: str, second_name: str, delay_s: float) -> None:
    first, second = _interface(first_name), _interface(second_name)
    print(CARRIES, flush=True)
    late: deque[tuple[float, bytes]] = deque()
    while True:
        wait_s = max(0.0, late[0][0] - time.monotonic()) if late else None
        readable, _, _ = select.select((first, second), (), (), wait_s)
        if first in readable:
            late.append((time.monotonic() + delay_s, os.read(first, _MOST_BYTES)))
        if second in readable:
            _write(first, os.read(second, _MOST_BYTES))
        while late and late[0][0] <= time.monotonic():
            _write(second, late.popleft()[1])


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
