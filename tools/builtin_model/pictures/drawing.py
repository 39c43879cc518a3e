"""Draws scenes, with the flaws that pictures have."""

from __future__ import annotations

import io
import math
import random
from functools import cache
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tools.builtin_model.pictures.scenes import COLOURS, Scene, Thing

Colour = tuple[int, int, int]
Points = list[tuple[float, float]]

_FINE = 3
"""Things are drawn so many times larger than they end up, for smooth edges."""
_CONTRAST = 120
"""The least distance between a thing's colour and what is behind it."""
_DIGIT_HEIGHT = 0.72
"""Of a digit, as a part of its font's size."""


def draw(scene: Scene, dice: random.Random, side: int, *, held_out: bool = False) -> Image.Image:
    """The scene, `side` pixels on its shorter side, with small random differences in colour. Backgrounds
    that are `held_out` have lines or dots, which the others have not."""
    width, height = (round(side * max(1.0, part)) for part in (scene.ratio, 1 / scene.ratio))
    colours = [_near(COLOURS[thing.colour], dice) for thing in scene.things[:1] * 8]
    if scene.kind == "two":
        colours = [_near(COLOURS[thing.colour], dice) for thing in scene.things]
    picture = _background(dice, width, height, colours, held_out=held_out)
    for thing, colour in zip(scene.things, colours, strict=False):
        _add(picture, thing, colour, side)
    return picture


def flawed(picture: Image.Image, dice: random.Random) -> Image.Image:
    """The picture as cameras and networks hand it on: noise, and what JPEG leaves of it."""
    if dice.random() < 0.5:
        noise = np.random.default_rng(dice.getrandbits(32)).normal(
            0, dice.uniform(2, 9), (*picture.size[::-1], 3)
        )
        picture = Image.fromarray((np.asarray(picture) + noise).clip(0, 255).astype(np.uint8))
    if dice.random() < 0.5:
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=dice.randint(45, 90))
        picture = Image.open(file).convert("RGB")
    return picture


def fitted(picture: Image.Image, side: int) -> Image.Image:
    """As llama.cpp makes a picture fit a square: shrunk or enlarged, with black around it."""
    scale = side / max(picture.size)
    width, height = (min(side, math.ceil(one * scale)) for one in picture.size)
    square = Image.new("RGB", (side, side))
    smaller = picture.resize((width, height), Image.Resampling.BICUBIC)
    square.paste(smaller, ((side - width) // 2, (side - height) // 2))
    return square


def _background(
    dice: random.Random, width: int, height: int, colours: list[Colour], *, held_out: bool
) -> Image.Image:
    one, other = (_behind(dice, colours) for _ in range(2))
    picture = Image.new("RGB", (width, height), one)
    if held_out:
        _pattern(picture, dice, tuple((9 * a + b) // 10 for a, b in zip(one, other, strict=True)))
    elif dice.random() < 0.3:  # from one colour to another one that is near
        near = tuple((2 * a + b) // 3 for a, b in zip(one, other, strict=True))
        ramp = Image.linear_gradient("L").resize((width, height))
        if dice.random() < 0.5:
            ramp = ramp.transpose(Image.Transpose.ROTATE_90).resize((width, height))
        picture.paste(near, (0, 0), ramp)
    return picture


def _behind(dice: random.Random, colours: list[Colour]) -> Colour:
    """A colour that all of these can be seen on: mostly a light one."""
    while True:
        style = dice.random()
        if style < 0.3:
            one = (255, 255, 255)
        elif style < 0.7:
            one = _random(dice, 205, 255)
        elif style < 0.85:
            one = (dice.randint(90, 235),) * 3
        else:
            one = _random(dice, 10, 75)
        if all(math.dist(one, colour) > _CONTRAST for colour in colours):
            return one


def _random(dice: random.Random, low: int, high: int) -> Colour:
    return dice.randint(low, high), dice.randint(low, high), dice.randint(low, high)


def _pattern(picture: Image.Image, dice: random.Random, colour: Any) -> None:
    pen = ImageDraw.Draw(picture)
    step = max(6, round(min(picture.size) * dice.uniform(0.08, 0.16)))
    if dice.random() < 0.5:
        for x in range(0, picture.width, step):
            pen.line((x, 0, x, picture.height), colour)
        for y in range(0, picture.height, step):
            pen.line((0, y, picture.width, y), colour)
    else:
        for x in range(step // 2, picture.width, step):
            for y in range(step // 2, picture.height, step):
                pen.ellipse((x - 1, y - 1, x + 1, y + 1), colour)


def _near(colour: Colour, dice: random.Random) -> Colour:
    red, green, blue = (min(255, max(0, part + dice.randint(-14, 14))) for part in colour)
    return red, green, blue


def _add(picture: Image.Image, thing: Thing, colour: Colour, side: int) -> None:
    size = max(4, round(thing.size * side))
    mask = Image.new("L", (size * _FINE, size * _FINE))
    pen = ImageDraw.Draw(mask)
    if thing.name.isdigit():
        middle = size * _FINE / 2
        pen.text(
            (middle, middle), thing.name, 255, _font(round(size * _FINE / _DIGIT_HEIGHT)), "mm"
        )
        mask = mask.rotate(thing.turn, Image.Resampling.BILINEAR)
    elif thing.name == "circle":
        pen.ellipse((0, 0, mask.width - 1, mask.height - 1), 255)
    else:
        half = (mask.width - 1) / 2
        pen.polygon([(half + half * x, half + half * y) for x, y in _outline(thing)], 255)
    mask = mask.resize((size, size), Image.Resampling.BOX)
    at = (round(thing.x * picture.width - size / 2), round(thing.y * picture.height - size / 2))
    picture.paste(colour, at, mask)


def _outline(thing: Thing) -> Points:
    """The corners between -1 and 1, turned."""
    turn = math.radians(thing.turn)
    sine, cosine = math.sin(turn), math.cos(turn)
    return [(x * cosine - y * sine, x * sine + y * cosine) for x, y in _corners(thing.name)]


@cache
def _corners(name: str) -> Points:
    if name == "square":
        return [(-0.75, -0.75), (0.75, -0.75), (0.75, 0.75), (-0.75, 0.75)]
    if name == "triangle":
        return [(math.sin(n * math.tau / 3), 0.2 - math.cos(n * math.tau / 3)) for n in range(3)]
    if name == "star":
        return [
            (
                (0.4 if n % 2 else 1) * math.sin(n * math.tau / 10),
                -(0.4 if n % 2 else 1) * math.cos(n * math.tau / 10),
            )
            for n in range(10)
        ]
    if name == "moon":  # between the arcs of two circles
        near = [math.radians(degrees) for degrees in range(50, 311, 10)]
        far = [math.radians(degrees) for degrees in range(279, 80, -11)]
        return [(0.15 + 0.95 * math.cos(t), 0.95 * math.sin(t)) for t in near] + [
            (0.65 + 0.74 * math.cos(t), 0.74 * math.sin(t)) for t in far
        ]
    steps = [n * math.tau / 40 for n in range(40)]
    return [
        (
            0.055 * 16 * math.sin(t) ** 3,
            -0.055
            * (
                13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t) + 2.5
            ),
        )
        for t in steps
    ]


@cache
def _font(size: int) -> Any:
    return ImageFont.load_default(size)
