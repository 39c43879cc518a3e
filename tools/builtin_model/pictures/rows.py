"""Chats about scenes as rows of token ids, as Corral sends them, several to a row."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from serve_app.prompt.conversation import Attachment, Turn
from serve_app.prompt.tokenizer import Tokenizer
from serve_app.store.builtin_model import BUILTIN_MODEL
from tools.builtin_model.corpus.conversation import PLAIN, Message
from tools.builtin_model.pictures.questions import Asked, questions
from tools.builtin_model.pictures.scenes import Scene

MARK = "<picture 0>"
"""Stands for the picture in a chat's text."""
LENGTH = 128
"""Tokens of a row."""
PICTURE, NOTHING = -1, -100

_SHARED = 0.8
"""The share of rows whose questions share one picture before them, as most clients send it."""


@dataclass(slots=True)
class Row:
    """One scene's chats. Those of a segment above 0 see themselves, and segment 0."""

    scene: Scene
    tokens: list[int] = field(default_factory=list)
    """PICTURE in the place of each of a picture's embeddings."""
    wanted: list[int] = field(default_factory=list)
    """The next token, where the assistant says it; NOTHING elsewhere."""
    positions: list[int] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    answers: list[tuple[Asked, int, int]] = field(default_factory=list)
    """The questions, and from where to where `wanted` has their answers."""

    def fits(self, tokens: Sequence[int]) -> bool:
        return len(self.tokens) + len(tokens) <= LENGTH

    def add(self, tokens: Sequence[int], segment: int, first: int = 0) -> None:
        """These tokens, at the positions from `first` on."""
        self.tokens += tokens
        self.wanted += [NOTHING] * len(tokens)
        self.positions += range(first, first + len(tokens))
        self.segments += [segment] * len(tokens)

    def want(self, asked: Asked, answer: Sequence[int], start: int) -> None:
        """This answer's tokens, the first of which follows `start`."""
        self.wanted[start : start + len(answer)] = answer
        self.answers.append((asked, start, start + len(answer)))


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows as tensors, `[rows, LENGTH]`."""

    tokens: Tensor
    wanted: Tensor
    positions: Tensor
    visible: Tensor
    """`[rows, LENGTH, LENGTH]`; see `language.Language.hidden`."""
    rows: Sequence[Row]


class Rows:
    """Makes rows of scenes. `n_picture` is the number of a picture's embeddings."""

    def __init__(self, n_picture: int) -> None:
        self._tokenizer = Tokenizer(BUILTIN_MODEL)
        self._n_picture = n_picture
        self._end = self._tokenizer.encode("<|im_end|>")
        self._prompts: dict[tuple[str, ...], tuple[int, ...]] = {}
        self._answers: dict[str, tuple[int, ...]] = {}

    def batch(self, scenes: Sequence[Scene], dice: random.Random) -> Batch:
        rows = [self._row(scene, dice) for scene in scenes]
        segments = torch.tensor([_padded(row.segments, 99) for row in rows])
        one, other = segments[:, :, None], segments[:, None, :]
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        return Batch(
            torch.tensor([_padded(row.tokens, 0) for row in rows]),
            torch.tensor([_padded(row.wanted, NOTHING) for row in rows]),
            torch.tensor([_padded(row.positions, 0) for row in rows]),
            causal & ((other == 0) | (one == other)),
            rows,
        )

    def tokens(self, text: str) -> list[int]:
        return list(self._tokenizer.tokenize(text, False, False))

    def text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens)

    def _row(self, scene: Scene, dice: random.Random) -> Row:
        row = Row(scene)
        asked = [one for _ in range(3) for one in _shuffled(questions(scene, dice), dice)]
        if dice.random() < _SHARED:
            self._add_shared(row, asked)
        else:
            self._add_whole(row, asked, dice)
        return row

    def _add_shared(self, row: Row, asked: Sequence[Asked]) -> None:
        """Each question as a segment behind the picture."""
        for segment, one in enumerate(asked, start=1):
            prompt = self._encoded([{"role": "user", "content": MARK + one.question}])
            n_before = len(prompt) - prompt[::-1].index(PICTURE)
            answer = self._answer(one)
            tokens = (*prompt[n_before:], *answer[:-1])
            if not row.tokens:
                row.add(prompt[:n_before], 0)
            if row.fits(tokens):
                row.add(tokens, segment, n_before)
                row.want(one, answer, len(row.tokens) - len(answer))

    def _add_whole(self, row: Row, asked: Sequence[Asked], dice: random.Random) -> None:
        """Chats, one after another, each a segment of its own."""
        for segment in range(1, len(asked)):
            first, second = asked[segment - 1 : segment + 1]
            last, messages = first, _chat(first, dice)
            if dice.random() < 0.25 and first.kind != second.kind:
                last = second
                messages.append({"role": "assistant", "content": first.answer})
                messages.append({"role": "user", "content": second.question})
            answer = self._answer(last)
            tokens = (*self._encoded(messages), *answer[:-1])
            if row.fits(tokens):
                row.add(tokens, segment)
                row.want(last, answer, len(row.tokens) - len(answer))

    def _answer(self, asked: Asked) -> tuple[int, ...]:
        found = self._answers.get(asked.answer)
        if found is None:
            found = (*self._tokenizer.tokenize(asked.answer, False, False), *self._end)
            self._answers[asked.answer] = found
        return found

    def _encoded(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """A chat's prompt, with the places of the picture's embeddings."""
        key = tuple(message["content"] for message in messages)
        found = self._prompts.get(key)
        if found is None:
            tokens = self._tokenizer.encode_chat([_turn(message) for message in messages])
            at = tokens.index(-1)
            found = (*tokens[:at], *[PICTURE] * self._n_picture, *tokens[at + 1 :])
            self._prompts[key] = found
        return found


def _turn(message: Message) -> Turn:
    before, mark, after = message["content"].partition(MARK)
    picture = (Attachment(""),) if mark else ()
    return Turn(message["role"], tuple(part for part in (before, *picture, after) if part))


def _chat(asked: Asked, dice: random.Random) -> list[Message]:
    """A first question, with the picture before or behind it, and now and then a system prompt."""
    question = asked.question.lower() if dice.random() < 0.15 else asked.question
    content = MARK + question if dice.random() < 0.5 else question + MARK
    messages: list[Message] = [{"role": "user", "content": content}]
    if dice.random() < 0.3:
        messages.insert(0, {"role": "system", "content": dice.choice(PLAIN.prompts)})
    return messages


def _shuffled(asked: list[Asked], dice: random.Random) -> list[Asked]:
    return dice.sample(asked, len(asked))


def _padded(values: list[int], filler: int) -> list[int]:
    return values + [filler] * (LENGTH - len(values))
