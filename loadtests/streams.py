"""What the bytes of a streamed completion say. Pure: no network, no clock."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Read = tuple[float, bytes]
"""Bytes of a stream, and when they were there, in seconds from sending the request."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed completion as its user saw it. Times are in seconds from sending the request.

    A piece is an event with text. It may stand for several tokens: a server holds back text that may
    still change, half a character for instance.
    """

    pieces_s: tuple[float, ...]
    """When each piece was there; several that came in one read share its time."""
    end_s: float
    """When the last byte was there."""
    tokens: int
    """Generated ones: as the server counts them, or, if it does not, the number of pieces."""
    counted: bool
    """Whether the server said how many."""
    prompt_tokens: int | None
    """As the server counts them."""
    cached_tokens: int | None
    """Of these, the ones that it found in its cache."""
    error: str | None
    """Why the answer is not complete."""

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first text; None if there was none."""
        return self.pieces_s[0] if self.pieces_s else None

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between pieces that follow each other; 0 for two of one read."""
        return [b - a for a, b in pairwise(self.pieces_s)]


def parse(reads: Sequence[Read]) -> Answer:
    """The answer in the server-sent events of an OpenAI completion or chat. Raises ValueError if an
    event is no JSON object."""
    pieces: list[float] = []
    usage: dict[str, Any] = {}
    error: str | None = "the stream ended without [DONE]"
    for when, data in _events(reads):
        if data == b"[DONE]":
            error = None
            break
        event = json.loads(data)
        if "error" in event:
            error = str(event["error"])
            break
        usage = event.get("usage") or usage
        if any(_text(choice) for choice in event.get("choices", ())):
            pieces.append(when)
    return Answer(
        pieces_s=tuple(pieces),
        end_s=reads[-1][0] if reads else 0.0,
        tokens=usage.get("completion_tokens", len(pieces)),
        counted="completion_tokens" in usage,
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        error=error,
    )


def _events(reads: Sequence[Read]) -> Iterator[Read]:
    """Each event's data, and when its line was complete. Both servers write one line for an event."""
    rest = b""
    for when, read in reads:
        *lines, rest = (rest + read).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield when, line.removeprefix(b"data:").strip()


def _text(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""
