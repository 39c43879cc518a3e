"""All attacks, in the order in which they are made."""

from __future__ import annotations

from loadtests.hostile.attack import Attack
from loadtests.hostile.attacks import (
    batch,
    block,
    control,
    crash,
    grammar,
    hold,
    operate,
    replica,
    sampling,
    smuggle,
    spy,
    starve,
    web,
)

_ALL: tuple[Attack, ...] = (
    *control.ATTACKS,
    *crash.ATTACKS,
    *web.ATTACKS,
    *replica.ATTACKS,
    *block.ATTACKS,
    *grammar.ATTACKS,
    *sampling.ATTACKS,
    *starve.ATTACKS,
    *hold.ATTACKS,
    *spy.ATTACKS,
    *operate.ATTACKS,
    *batch.ATTACKS,
    *smuggle.ATTACKS,
)
ATTACKS = tuple(sorted(_ALL, key=lambda attack: attack.server, reverse=True))
"""Those of one server follow each other: it takes a quarter of a minute to start."""
FAMILIES = tuple(dict.fromkeys(attack.family for attack in ATTACKS))
