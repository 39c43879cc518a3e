"""Pictures to train with, drawn once: as llama.cpp fits them to the encoder's square, and what is where."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tools.builtin_model.pictures.drawing import draw, fitted, flawed
from tools.builtin_model.pictures.scenes import COLOURS, Scene, mirrored, scene
from tools.builtin_model.pictures.shape import EyesShape
from tools.builtin_model.pictures.teacher import NAMES

_SIDES = (64, 96, 96, 128, 192, 256)
_COLOURS = tuple(COLOURS)
_HARD = {"digit": 1.7, "many": 1.4}


@dataclass(frozen=True)
class Album:
    """Scenes, and their pictures as bytes, `[scenes, side, side, 3]`."""

    scenes: list[Scene]
    pictures: NDArray[np.uint8]

    def some(self, dice: random.Random, n: int) -> tuple[list[Scene], Tensor]:
        """`n` of the scenes, and their pixels as the eyes take them, a little lighter or darker. Half of
        those without digits are mirrored, and those that are hard to learn come more often."""
        chosen = dice.choices(range(len(self.scenes)), cum_weights=self._weights, k=n)
        pixels = torch.from_numpy(self.pictures[chosen]).permute(0, 3, 1, 2).float() / 127.5 - 1
        scenes = [self.scenes[index] for index in chosen]
        for row, one in enumerate(scenes):
            if one.kind != "digit" and dice.random() < 0.5:
                scenes[row] = mirrored(one)
                pixels[row] = pixels[row].flip(2)
        light = torch.empty(n, 1, 1, 1).uniform_(0.9, 1.05)
        return scenes, ((pixels + 1) * light - 1).clamp(-1, 1)

    @cached_property
    def _weights(self) -> list[float]:
        return list(accumulate(_HARD.get(one.kind, 1.0) for one in self.scenes))


def album(folder: Path, shape: EyesShape, n: int, seed: int) -> Album:
    """The album of this seed. Its pictures are kept in the folder."""
    dice = random.Random(f"{seed}/scenes")
    scenes = [scene(dice) for _ in range(n)]
    path = folder / f"pictures-{seed}-{n}.npy"
    if not path.is_file():
        dice = random.Random(f"{seed}/pictures")
        drawn = np.empty((n, shape.image_size, shape.image_size, 3), np.uint8)
        for index, one in enumerate(scenes):
            picture = draw(one, dice, dice.choice(_SIDES))
            flaws = flawed(picture, dice) if dice.random() < 0.7 else picture
            drawn[index] = np.asarray(fitted(flaws, shape.image_size))
        np.save(path, drawn)
    return Album(scenes, np.load(path, mmap_mode="r"))


@dataclass(frozen=True, slots=True)
class Maps:
    """The things in pictures by patch, `[scenes, n_side ** 2]`."""

    names: Tensor
    """The number of the name of the thing that is there; the number after the last one: nothing."""
    colours: Tensor
    """The number of its colour, likewise."""
    middles: Tensor
    """How many things have their middles there."""


def maps(scenes: list[Scene], n_side: int) -> Maps:
    """The maps of scenes in pictures with so many patches on a side."""
    shape = (len(scenes), n_side, n_side)
    names, colours = np.full(shape, len(NAMES)), np.full(shape, len(COLOURS))
    middles = np.zeros(shape, np.float32)
    at = (np.arange(n_side) + 0.5) / n_side - 0.5
    for row, one in enumerate(scenes):
        # The picture's sides as parts of the square's.
        width, height = min(1.0, one.ratio), min(1.0, 1 / one.ratio)
        for thing in one.things:
            reach = max(thing.size * min(width, height), 1 / n_side) / 2
            x, y = (thing.x - 0.5) * width, (thing.y - 0.5) * height
            there = (np.abs(at - y) <= reach)[:, None] & (np.abs(at - x) <= reach)
            names[row][there] = NAMES.index(thing.name)
            colours[row][there] = _COLOURS.index(thing.colour)
            middles[row, int((y + 0.5) * n_side), int((x + 0.5) * n_side)] += 1
    names, colours, middles = (
        torch.from_numpy(one).flatten(1) for one in (names, colours, middles)
    )
    return Maps(names, colours, middles)
