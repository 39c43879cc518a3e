"""Pictures to train with, drawn once: as llama.cpp fits them to the encoder's square, and what is where."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from serve_app.demo_model.pictures.drawing import draw, fitted, flawed
from serve_app.demo_model.pictures.scenes import COLOURS, Scene, scene
from serve_app.demo_model.pictures.shape import EyesShape
from serve_app.demo_model.pictures.teacher import NAMES

_SIDES = (64, 96, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True)
class Album:
    """Scenes, and their pictures as bytes, `[scenes, side, side, 3]`."""

    scenes: list[Scene]
    pictures: NDArray[np.uint8]

    def some(self, dice: random.Random, n: int) -> tuple[list[Scene], Tensor]:
        """`n` of the scenes, and their pixels as the eyes take them, a little lighter or darker."""
        chosen = [dice.randrange(len(self.scenes)) for _ in range(n)]
        pixels = torch.from_numpy(self.pictures[chosen]).permute(0, 3, 1, 2).float() / 127.5 - 1
        light = torch.empty(n, 1, 1, 1).uniform_(0.9, 1.05)
        return [self.scenes[index] for index in chosen], (pixels * light).clamp(-1, 1)


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


def maps(scenes: list[Scene], n_side: int) -> tuple[Tensor, Tensor]:
    """For each patch, the name and the colour of the thing that is there, by number; the number after
    the last one: none. Each is `[scenes, n_side ** 2]`."""
    names = torch.full((len(scenes), n_side, n_side), len(NAMES))
    colours = torch.full((len(scenes), n_side, n_side), len(COLOURS))
    middles = (torch.arange(n_side) + 0.5) / n_side - 0.5
    for row, one in enumerate(scenes):
        # The picture's sides as parts of the square's.
        width, height = min(1.0, one.ratio), min(1.0, 1 / one.ratio)
        for thing in one.things:
            reach = max(thing.size * min(width, height), 1 / n_side) / 2
            x, y = (thing.x - 0.5) * width, (thing.y - 0.5) * height
            there = ((middles - y).abs() <= reach)[:, None] & ((middles - x).abs() <= reach)
            names[row][there] = NAMES.index(thing.name)
            colours[row][there] = list(COLOURS).index(thing.colour)
    return names.flatten(1), colours.flatten(1)
