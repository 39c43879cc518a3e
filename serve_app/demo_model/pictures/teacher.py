"""Scenes in numbers, and the embeddings that would tell the language model about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from serve_app.demo_model.pictures.scenes import COLOURS, MOST, PLACES, SHAPES, Scene

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


class Teacher(nn.Module):
    """From a scene's attributes to `n_tokens` embeddings, which the eyes are to find in its picture."""

    def __init__(self, n_tokens: int, embedding: Tensor) -> None:
        super().__init__()
        self._shape = (n_tokens, embedding.shape[1])
        self.hidden = nn.Linear(N_ATTRIBUTES, _N_HIDDEN)
        self.output = nn.Linear(_N_HIDDEN, n_tokens * embedding.shape[1])
        nn.init.normal_(self.output.weight, std=0.005)
        words = embedding[torch.randint(len(embedding), (n_tokens,))]  # to begin with
        self.output.bias.data = words.flatten().clone()

    def forward(self, scenes: Tensor) -> Tensor:
        return self.output(functional.gelu(self.hidden(scenes))).unflatten(-1, self._shape)
