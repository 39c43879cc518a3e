"""The request to a recognizer of speech that is no language model, and its answer."""

from __future__ import annotations

from typing import Protocol

import msgspec

from serve_app.base.values.media import Sound


class HearingOrder(msgspec.Struct, array_like=True, frozen=True):
    """How the samples that follow are heard."""

    n_bytes: int
    language: str | None
    translates: bool
    prompt: str | None
    temperature: float
    with_words: bool


class HeardWord(msgspec.Struct, frozen=True):
    """A word. Times are in seconds since the beginning of the samples."""

    word: str
    start: float
    end: float


class HeardSegment(msgspec.Struct, frozen=True):
    """Speech without a pause."""

    start: float
    end: float
    text: str
    tokens: list[int]
    avg_logprob: float
    no_speech_prob: float
    words: list[HeardWord]


class Heard(msgspec.Struct, frozen=True):
    """The speech of a window."""

    language: str
    """The code of the language that is spoken."""
    segments: list[HeardSegment]


class Recognizer(Protocol):
    """Hears windows of sound. Event loop only."""

    id: str
    """The name that requests put into `model`."""

    async def hear(self, client: str, order: HearingOrder, sound: Sound) -> Heard:
        """The speech of a client's window. Raises CorralError."""

    def close(self) -> None:
        """End what computes now. Idempotent."""
