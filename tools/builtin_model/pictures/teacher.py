"""Scenes in numbers, and the embeddings that would tell the language model about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.builtin_model.pictures.scenes import COLOURS, MOST, NUMBERS, PLACES, SHAPES, Scene

NAMES = (*SHAPES, *(str(digit) for digit in range(10)))
_KINDS = ("one", "many", "two", "digit")
_ALL_PLACES = tuple(place for row in PLACES for place in row)
_N_HIDDEN = 256


def attributes(scenes: Sequence[Scene]) -> Tensor:
    """The attributes of each scene: `[scenes, N_ATTRIBUTES]`, zeros and ones."""
    made = torch.zeros(len(scenes), N_ATTRIBUTES)
    for row, scene in enumerate(scenes):
        made[row, [_NUMBERS[one] for one in _true_of(scene)]] = 1.0
    return made


def _true_of(scene: Scene) -> Iterator[tuple[str, object]]:
    yield "kind", scene.kind
    yield "count", len(scene.things)
    if scene.place is not None:
        yield "place", scene.place
    for number, thing in enumerate(scene.things[: 2 if scene.kind == "two" else 1]):
        yield f"name {number}", thing.name
        yield f"colour {number}", thing.colour


_VALUES: tuple[tuple[str, Sequence[object]], ...] = (
    ("kind", _KINDS),
    ("count", range(1, MOST + 1)),
    ("place", _ALL_PLACES),
    ("name 0", NAMES),
    ("name 1", NAMES),
    ("colour 0", tuple(COLOURS)),
    ("colour 1", tuple(COLOURS)),
)
_NUMBERS = {
    one: number
    for number, one in enumerate((name, value) for name, values in _VALUES for value in values)
}
N_ATTRIBUTES = len(_NUMBERS)


_SLOTS = {
    "count": (0,),
    "colour 0": (1,),
    "name 0": (2, 3),
    "colour 1": (4,),
    "name 1": (5, 6),
    "place": (7, 8, 9),
}
"""The embeddings that begin as an attribute's words."""

Words = Callable[[str], Sequence[int]]
"""The tokens of a text."""


class Teacher(nn.Module):
    """From a scene's attributes to `n_tokens` embeddings, which the eyes are to find in its picture.

    It begins with the embeddings of words that name the attributes' values, so that the language model
    finds them as it finds what a text says."""

    def __init__(self, n_tokens: int, embedding: Tensor, words: Words) -> None:
        super().__init__()
        self._shape = (n_tokens, embedding.shape[1])
        self.words = nn.Linear(N_ATTRIBUTES, n_tokens * embedding.shape[1])
        self.words.weight.data = _named(n_tokens, embedding, words).flatten(1).T.contiguous()
        self.words.bias.data = _rest(n_tokens, embedding).flatten()
        self.hidden = nn.Linear(N_ATTRIBUTES, _N_HIDDEN)
        self.output = nn.Linear(_N_HIDDEN, n_tokens * embedding.shape[1])
        nn.init.normal_(self.output.weight, std=0.003)
        nn.init.zeros_(self.output.bias)

    def forward(self, scenes: Tensor) -> Tensor:
        more = self.output(functional.gelu(self.hidden(scenes)))
        return (self.words(scenes) + more).unflatten(-1, self._shape)


def _named(n_tokens: int, embedding: Tensor, words: Words) -> Tensor:
    """For each attribute, its words in its slots: `[N_ATTRIBUTES, n_tokens, n_embd]`."""
    made = torch.zeros(N_ATTRIBUTES, n_tokens, embedding.shape[1])
    for (name, value), number in _NUMBERS.items():
        for slot, token in zip(_SLOTS.get(name, ()), words(" " + _word(name, value)), strict=False):
            made[number, slot] = embedding[token]
    return made


def _rest(n_tokens: int, embedding: Tensor) -> Tensor:
    """Any words in the slots that no attribute has."""
    made = torch.zeros(n_tokens, embedding.shape[1])
    n_taken = sum(map(len, _SLOTS.values()))
    made[n_taken:] = embedding[torch.randint(len(embedding), (n_tokens - n_taken,))]
    return made


def _word(name: str, value: object) -> str:
    if name == "count" and isinstance(value, int):
        return NUMBERS[value]
    return str(value).replace(" the", "")
