"""Drawn pictures, and questions about them whose answers are right."""

from __future__ import annotations

import math
import random
from collections import Counter

import numpy as np
import pytest

from tools.builtin_model.pictures.drawing import draw, fitted, flawed
from tools.builtin_model.pictures.questions import WORDINGS, described, questions
from tools.builtin_model.pictures.scenes import COLOURS, MOST, SHAPES, Scene, Thing, mirrored, scene

Image = pytest.importorskip("PIL.Image")


def one(name: str, colour: str, x: float = 0.5, y: float = 0.5, size: float = 0.25) -> Thing:
    return Thing(name, colour, x, y, size, 0.0)


STAR = Scene("one", (one("star", "red", 1 / 6, 1 / 6),), "at the top left", True, 1.0)
HEARTS = Scene("many", (one("heart", "black", 0.2), one("heart", "black", 0.8)), None, True, 1.0)
PAIR = Scene(
    "two", (one("circle", "orange", 0.5, 0.25), one("square", "blue", 0.5, 0.75)), None, False, 1.0
)
SEVEN = Scene("digit", (one("7", "green", size=0.6),), None, True, 1.0)


def answers(about: Scene) -> dict[str, set[str]]:
    """All answers to each kind of question, by many seeds."""
    found: dict[str, set[str]] = {}
    for seed in range(50):
        for asked in questions(about, random.Random(seed)):
            found.setdefault(asked.kind, set()).add(asked.answer)
    return found


def test_each_kind_of_scene_has_its_right_answers() -> None:
    assert answers(STAR) == {
        "description": {"A red star."},
        "shape": {"A star."},
        "colour": {"The star is red."},
        "count": {"One."},
        "place": {"At the top left."},
    }
    assert answers(HEARTS) == {
        "description": {"Two black hearts."},
        "count": {"Two."},
        "colours": {"The hearts are black."},
    }
    assert answers(PAIR) == {
        "description": {"An orange circle and a blue square."},
        "count": {"Two."},
    }
    assert answers(SEVEN) == {
        "description": {"The number 7 in green."},
        "digit": {"7."},
        "colour": {"The number is green.", "The digit is green."},
    }


def test_held_out_wordings_are_no_others() -> None:
    for wordings in WORDINGS.values():
        assert not set(wordings.trained) & set(wordings.held_out)
        assert len(wordings.held_out) >= 2
    for asked in questions(STAR, random.Random(0), held_out=True):
        texts = (one.format("star") for one in WORDINGS[asked.kind].trained)
        assert asked.question not in texts


def test_scenes_are_of_all_kinds_and_their_things_apart_and_inside() -> None:
    dice = random.Random(0)
    made = [scene(dice) for _ in range(500)]
    assert Counter(one.kind for one in made).keys() == {"one", "many", "two", "digit"}
    assert {len(one.things) for one in made if one.kind == "many"} == set(range(2, MOST + 1))
    assert len({described(one) for one in made}) > 200
    for about in made:
        across, down = max(about.ratio, 1.0), max(1 / about.ratio, 1.0)
        for number, thing in enumerate(about.things):
            assert 0 < thing.x < 1
            assert 0 < thing.y < 1
            for other in about.things[:number]:
                gap = math.hypot((thing.x - other.x) * across, (thing.y - other.y) * down)
                assert gap > 0.9 * (thing.size + other.size) / 2


@pytest.mark.parametrize("name", [*SHAPES, *"0123456789"])
def test_things_are_drawn_in_their_colour_where_they_are(name: str) -> None:
    for colour, (red, green, blue) in COLOURS.items():
        about = Scene("one", (one(name, colour, 0.7, 0.3, 0.3),), None, True, 1.0)
        for held_out in (False, True):
            pixels = np.asarray(draw(about, random.Random(0), 200, held_out=held_out)).astype(int)
            there = np.abs(pixels - (red, green, blue)).max(-1) < 25
            rows, columns = np.nonzero(there)
            assert 110 < columns.mean() < 170
            assert 30 < rows.mean() < 90
            assert 150 < there.sum() < 60 * 60


def test_pictures_differ_by_shape_and_are_the_same_by_seed() -> None:
    drawn = {
        draw(Scene("one", (one(name, "red"),), None, True, 1.0), random.Random(0), 64).tobytes()
        for name in SHAPES
    }
    assert len(drawn) == len(SHAPES)
    assert draw(STAR, random.Random(3), 64) == draw(STAR, random.Random(3), 64)
    assert flawed(draw(STAR, random.Random(3), 64), random.Random(5)).size == (64, 64)


def test_a_picture_is_fitted_as_llama_cpp_does() -> None:
    wide = fitted(Image.new("RGB", (300, 150), "white"), 96)
    assert wide.size == (96, 96)
    pixels = np.asarray(wide)
    assert (pixels[24:72] == 255).all()
    assert (pixels[:24] == 0).all()
    assert (pixels[72:] == 0).all()


def test_a_mirrored_scene_is_described_as_a_mirror_shows_it() -> None:
    assert mirrored(STAR).place == "at the top right"
    across = Scene("two", (one("star", "red", 0.2), one("moon", "blue", 0.8)), None, True, 1.0)
    assert described(mirrored(across)) == "a blue moon and a red star"
    assert described(mirrored(PAIR)) == described(PAIR)  # above each other
    dice = random.Random(0)
    for about in (scene(dice) for _ in range(50)):
        assert mirrored(mirrored(about)).place == about.place
        assert described(mirrored(mirrored(about))) == described(about)


def test_a_mirrored_scene_is_drawn_as_a_mirror_shows_it() -> None:
    for name in ("square", "triangle", "star", "heart", "circle"):  # alike in a mirror
        about = Scene("one", (Thing(name, "red", 0.3, 0.4, 0.4, 10.0),), None, True, 1.0)
        shown, other = (
            np.asarray(draw(one, random.Random(0), 200)).astype(int)
            for one in (about, mirrored(about))
        )
        there, mirror = (np.abs(one - COLOURS["red"]).max(-1) < 30 for one in (shown, other))
        assert (there[:, ::-1] != mirror).mean() < 0.01
