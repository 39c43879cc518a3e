"""Questions about scenes, with the right answers."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tools.builtin_model.pictures.scenes import NUMBERS, SHAPES, Scene, Thing


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, and the right answer to it."""

    kind: str
    question: str
    answer: str


@dataclass(frozen=True, slots=True)
class Wordings:
    """The ways to ask one thing: those that are trained with, and those that only the evaluation uses."""

    trained: tuple[str, ...]
    held_out: tuple[str, ...]

    def choice(self, dice: random.Random, *, held_out: bool) -> str:
        return dice.choice(self.held_out if held_out else self.trained)


WORDINGS = {
    "description": Wordings(
        (
            "What is in this picture?",
            "What is in the picture?",
            "What's in this picture?",
            "What do you see?",
            "What do you see in this picture?",
            "What do you see in the image?",
            "What can you see?",
            "What can you see in this picture?",
            "What does this picture show?",
            "What does the picture show?",
            "What does this image show?",
            "What is shown in this picture?",
            "What is on this picture?",
            "What is in this image?",
            "What's in this image?",
            "What is this?",
            "What's this?",
            "Describe this picture.",
            "Describe the picture.",
            "Describe this image.",
            "Tell me what you see.",
            "Tell me what is in this picture.",
        ),
        (
            "What is in the image?",
            "What can you see in the picture?",
            "What does the image show?",
            "Tell me what is in the picture.",
        ),
    ),
    "colour": Wordings(
        (
            "What colour is the {}?",
            "What color is the {}?",
            "Which colour is the {}?",
            "Which colour has the {}?",
            "Tell me the colour of the {}.",
            "What is the colour of the {}?",
        ),
        ("What is the color of the {}?", "Which color is the {}?"),
    ),
    "colours": Wordings(
        ("What colour are the {}?", "What color are the {}?", "Which colour are the {}?"),
        ("Which color are the {}?", "Which colour have the {}?"),
    ),
    "shape": Wordings(
        (
            "What shape is this?",
            "Which shape is this?",
            "What shape is in this picture?",
            "Which shape is in the picture?",
            "What shape do you see?",
            "Which shape do you see?",
        ),
        ("What shape is in the picture?", "Which shape can you see?"),
    ),
    "count": Wordings(
        (
            "How many {} are there?",
            "How many {} are in this picture?",
            "How many {} do you see?",
            "How many {} can you see?",
            "How many {} does the picture show?",
            "Count the {}.",
        ),
        ("How many {} are in the picture?", "How many {} do you see in this picture?"),
    ),
    "place": Wordings(
        (
            "Where is the {}?",
            "Where is the {} in this picture?",
            "Where do you see the {}?",
            "In which part of the picture is the {}?",
        ),
        ("Where is the {} in the picture?", "Where can you see the {}?"),
    ),
    "digit": Wordings(
        (
            "Which number is this?",
            "What number is this?",
            "Which digit is this?",
            "What number do you see?",
            "Which number is in this picture?",
            "Which digit do you see?",
        ),
        ("What digit is this?", "What number is in the picture?"),
    ),
}


def questions(scene: Scene, dice: random.Random, *, held_out: bool = False) -> list[Asked]:
    """All kinds of questions that this scene answers, each in one of its wordings."""

    def asked(kind: str, about: str, answer: str) -> Asked:
        wording = WORDINGS[kind].choice(dice, held_out=held_out)
        return Asked(kind, wording.format(about), answer[0].upper() + answer[1:] + ".")

    return [asked(*one) for one in _topics(scene, dice)]


def _topics(scene: Scene, dice: random.Random) -> Iterator[tuple[str, str, str]]:
    """The kind of question, what it is about, and the answer."""
    first = scene.things[0]
    yield "description", "", described(scene)
    if scene.kind == "digit":
        yield "digit", "", first.name
        noun = dice.choice(("number", "digit"))
        yield "colour", noun, f"the {noun} is {first.colour}"
        return
    if scene.kind == "one":
        yield "shape", "", a(first.name)
        yield "colour", first.name, f"the {first.name} is {first.colour}"
        yield "count", dice.choice(("shapes", "things")), "one"
        if scene.place is not None:
            yield "place", first.name, scene.place
    elif scene.kind == "many":
        count = NUMBERS[len(scene.things)]
        yield "count", dice.choice((SHAPES[first.name], "shapes", "things")), count
        plural = SHAPES[first.name]
        yield "colours", plural, f"the {plural} are {first.colour}"
    else:
        yield "count", dice.choice(("shapes", "things")), "two"


def described(scene: Scene) -> str:
    """The right description."""
    first = scene.things[0]
    if scene.kind == "many":
        return f"{NUMBERS[len(scene.things)]} {first.colour} {SHAPES[first.name]}"
    return " and ".join(_with_colour(thing) for thing in scene.things)


def _with_colour(thing: Thing) -> str:
    if thing.name.isdigit():
        return f"the number {thing.name} in {thing.colour}"
    return a(f"{thing.colour} {thing.name}")


def a(noun: str) -> str:
    """With its article."""
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"
