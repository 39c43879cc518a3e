"""No attack at all: what the table says of it is the machine's own noise."""

from __future__ import annotations

from loadtests.hostile.attack import KEYED, KEYLESS, Attack
from loadtests.hostile.scene import Scene


def _nothing(scene: Scene) -> None:
    scene.sleep(scene.left_s())


ATTACKS = tuple(
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
