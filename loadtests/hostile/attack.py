"""Attacks, and the limits of their effect on other users."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from loadtests.hostile.scene import Scene

KEYLESS, KEYED, ALONE, SHARED = "keyless", "keyed", "alone", "shared"
"""The servers: as `corral serve --cluster` has it, with models whose vocabularies need regular expressions;
one with API keys; as `corral serve` has it, with API keys and 1,024 files; and the same with two models
that have the cores in turns."""

MIB = 2**20
MOST_BODY_BYTES = 8 * MIB
"""The most bytes of a request, as docs/security.md says."""


@dataclass(frozen=True, slots=True)
class Bars:
    """How much worse than calm honest users may fare. None: it is not looked at."""

    ttft_factor: float | None = 1.5
    """The 95th percentile of times to the first token, to calm's."""
    itl_factor: float | None = 1.1
    """The 99th percentile of gaps between tokens, to calm's."""
    pause_s: float | None = 0.05
    """How much longer than calm's longest the longest answer of /health may take."""
    memory_mib: float | None = 10 * MOST_BODY_BYTES / MIB
    """How much all processes together may grow, while it lasts."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One way to hurt a server.

    `act` is called in a thread of its own. It returns when `scene.left_s()` is 0 or soon after, closes what
    it has opened, and tells the scene what it found; what honest users noticed is measured besides.
    """

    name: str
    family: str
    what: str
    """The description of the attack."""
    expects: str
    """The behaviour of a server that holds."""
    act: Callable[[Scene], None]
    server: str = KEYED
    seconds: float = 12.0
    """The longest that it may take."""
    least_s: float = 0.0
    """The time that it needs to show anything."""
    bars: Bars = field(default_factory=Bars)
    beside: Callable[[Scene], None] | None = None
    """The load in the calm before it; nothing, if None."""
    is_short: bool = False
    """Whether it is in the short form."""
