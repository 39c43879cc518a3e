"""Mixes: the kinds of users of a load, by weight. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from serve_app.measure.users.workloads import KINDS


def parse_mix(text: str) -> dict[str, int]:
    """`chat=3,rag=1`: whole weights by kind. Raises ValueError."""
    mix: dict[str, int] = {}
    for part in text.split(","):
        kind, _, weight = part.partition("=")
        if kind not in KINDS or kind in mix or not weight.isdecimal() or not int(weight):
            raise ValueError(
                f"{part!r}: expected KIND=WEIGHT, kinds {', '.join(KINDS)}, each once."
            )
        mix[kind] = int(weight)
    return mix


def checked_mix(text: str) -> str:
    """An argument's type: a mix. Raises ValueError."""
    parse_mix(text)
    return text


def kind_of(number: int, mix: Mapping[str, int]) -> str:
    """The kind of the user of this number: every so many users hold the mix exactly, and the kinds are
    spread evenly among them."""
    turn = number % sum(mix.values())
    places = [((i + 0.5) / weight, kind) for kind, weight in mix.items() for i in range(weight)]
    return sorted(places)[turn][1]
