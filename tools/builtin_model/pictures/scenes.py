"""Scenes: the small world that the built-in model sees."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 30, 35),
    "orange": (250, 140, 20),
    "yellow": (245, 220, 30),
    "green": (40, 160, 60),
    "blue": (35, 80, 215),
    "purple": (130, 50, 170),
    "pink": (250, 130, 190),
    "black": (20, 20, 22),
}
SHAPES = {
    "circle": "circles",
    "square": "squares",
    "triangle": "triangles",
    "star": "stars",
    "heart": "hearts",
    "moon": "moons",
}
"""Each with its plural."""
PLACES = (
    ("at the top left", "at the top", "at the top right"),
    ("on the left", "in the middle", "on the right"),
    ("at the bottom left", "at the bottom", "at the bottom right"),
)
"""By row and column."""
NUMBERS = ("zero", "one", "two", "three", "four", "five")
MOST = 5
"""Things in a picture, at most."""

Kind = Literal["one", "many", "two", "digit"]
"""One shape; several alike; two that differ in shape and colour; a digit."""


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape or a digit. Its places and sizes are parts of the picture's sides."""

    name: str
    """A key of SHAPES, or a digit."""
    colour: str
    x: float
    """Of its middle."""
    y: float
    size: float
    """Its width and height, as a part of the shorter side."""
    turn: float
    """Degrees."""


@dataclass(frozen=True, slots=True)
class Scene:
    """All that is in a picture. Two things stand in the order of reading."""

    kind: Kind
    things: tuple[Thing, ...]
    place: str | None
    """Of PLACES, if the one thing is in one of them."""
    row: bool
    """Whether the two things are beside each other, and not above each other."""
    ratio: float
    """Width by height."""


def scene(dice: random.Random) -> Scene:
    """A scene of any kind."""
    kinds: tuple[tuple[Kind, Callable[[random.Random, float], Scene], float], ...] = (
        ("one", _one, 0.3),
        ("many", _many, 0.25),
        ("two", _two, 0.3),
        ("digit", _digit, 0.15),
    )
    make = dice.choices([make for _, make, _ in kinds], [share for *_, share in kinds])[0]
    ratio = 1.0 if dice.random() < 0.7 else dice.uniform(0.75, 1.33)
    return make(dice, ratio)


def mirrored(one: Scene) -> Scene:
    """The scene as a mirror shows it."""
    things = tuple(replace(thing, x=1 - thing.x, turn=-thing.turn) for thing in one.things)
    if one.kind == "two" and one.row:
        things = things[::-1]
    place = one.place
    if place is not None:
        row = next(row for row in PLACES if place in row)
        place = row[2 - row.index(place)]
    return replace(one, things=things, place=place)


def _one(dice: random.Random, ratio: float) -> Scene:
    name, colour = dice.choice([*SHAPES]), dice.choice([*COLOURS])
    if dice.random() < 0.25:  # large, and so in no place
        size = dice.uniform(0.45, 0.85)
        x, y = (0.5 + dice.uniform(-0.06, 0.06) for _ in range(2))
        return Scene("one", (Thing(name, colour, x, y, size, _turn(dice)),), None, True, ratio)
    row, column = dice.randrange(3), dice.randrange(3)
    x, y = ((1 + 2 * n) / 6 + dice.uniform(-0.05, 0.05) for n in (column, row))
    thing = Thing(name, colour, x, y, dice.uniform(0.18, 0.3), _turn(dice))
    return Scene("one", (thing,), PLACES[row][column], True, ratio)


def _many(dice: random.Random, ratio: float) -> Scene:
    name, colour, count = dice.choice([*SHAPES]), dice.choice([*COLOURS]), dice.randint(2, MOST)
    size = dice.uniform(0.18, 0.3 if count < 5 else 0.25)
    things: list[Thing] = []
    while len(things) < count:
        x, y = dice.uniform(0.13, 0.87), dice.uniform(0.13, 0.87)
        across, down = max(ratio, 1.0), max(1 / ratio, 1.0)
        far = (
            ((x - o.x) * across) ** 2 + ((y - o.y) * down) ** 2 > (1.3 * size) ** 2 for o in things
        )
        if all(far):
            things.append(Thing(name, colour, x, y, size * dice.uniform(0.85, 1.0), _turn(dice)))
        elif dice.random() < 0.05:
            things, size = [], size * 0.95
    return Scene("many", tuple(things), None, True, ratio)


def _two(dice: random.Random, ratio: float) -> Scene:
    names, colours = dice.sample([*SHAPES], 2), dice.sample([*COLOURS], 2)
    row = dice.random() < 0.5
    things = []
    for n in range(2):
        along, across = 0.27 + 0.46 * n + dice.uniform(-0.06, 0.06), 0.5 + dice.uniform(-0.12, 0.12)
        x, y = (along, across) if row else (across, along)
        things.append(Thing(names[n], colours[n], x, y, dice.uniform(0.22, 0.38), _turn(dice)))
    return Scene("two", tuple(things), None, row, ratio)


def _digit(dice: random.Random, ratio: float) -> Scene:
    x, y = (0.5 + dice.uniform(-0.12, 0.12) for _ in range(2))
    thing = Thing(
        str(dice.randrange(10)), dice.choice([*COLOURS]), x, y, dice.uniform(0.4, 0.8), _turn(dice)
    )
    return Scene("digit", (thing,), None, True, ratio)


def _turn(dice: random.Random) -> float:
    return dice.uniform(-12, 12)
