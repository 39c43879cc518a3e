"""All attacks, in the order in which they are made, after a control without any.

The table's row of the control is the machine's own noise."""

from __future__ import annotations

from loadtests.hostile.attack import KEYED, KEYLESS, Attack
from loadtests.hostile.attacks import (
    batch,
    block,
    connections,
    crash,
    grammar,
    hold,
    mixed,
    operate,
    replica,
    sampling,
    smuggle,
    spy,
    starve,
    web,
)
from loadtests.hostile.scene import Scene


def _nothing(scene: Scene) -> None:
    scene.sleep(scene.left_s())


_CONTROL = tuple(
    Attack(
        name=f"nothing ({server})",
        family="control",
        what="Nobody attacks.",
        expects="Honest users notice nothing: if they do, the machine is too busy to say anything.",
        act=_nothing,
        server=server,
        seconds=8.0,
        is_short=server == KEYED,
    )
    for server in (KEYLESS, KEYED)
)
_ALL: tuple[Attack, ...] = (
    *_CONTROL,
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
    *mixed.ATTACKS,
    *smuggle.ATTACKS,
    *connections.ATTACKS,
)
ATTACKS = tuple(sorted(_ALL, key=lambda attack: attack.server, reverse=True))
"""Those of one server follow each other: it takes a quarter of a minute to start."""
FAMILIES = tuple(dict.fromkeys(attack.family for attack in ATTACKS))
