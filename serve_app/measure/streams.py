"""Parses the bytes of a streamed completion. Pure: no network, no clock."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

Read = tuple[float, bytes]
"""Bytes of a stream, and when they were there, in seconds from sending the request."""


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
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
    """Prompt tokens that the server found in its cache."""
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


class Reader:
    """Reads a stream as it comes: server-sent events of an OpenAI completion or chat."""

    def __init__(self) -> None:
        self.answer_id: str | None = None
        """The server's id of the answer."""
        self.error_code = ""
        """The code of the error that ended the stream, or else its type."""
        self._rest = b""
        self._over = False
        self._pieces: list[float] = []
        self._texts: list[str] = []
        self._usage: dict[str, Any] = {}
        self._error: str | None = "the stream ended without [DONE]"
        self._end_s = 0.0

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(self._texts)

    def feed(self, when: float, read: bytes) -> int:
        """The next bytes, and when they were there; gives the number of new pieces. Raises ValueError
        if an event is no JSON object."""
        self._end_s = when
        before = len(self._pieces)
        for data in self._events(read):
            if not self._over:
                self._take(when, data)
        return len(self._pieces) - before

    def answer(self) -> StreamedAnswer:
        """The answer so far."""
        usage = self._usage
        return StreamedAnswer(
            pieces_s=tuple(self._pieces),
            end_s=self._end_s,
            tokens=usage.get("completion_tokens", len(self._pieces)),
            counted="completion_tokens" in usage,
            prompt_tokens=usage.get("prompt_tokens"),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
            error=self._error,
        )

    def _events(self, read: bytes) -> Iterator[bytes]:
        """The data of each event whose line is complete. Servers write one line for an event."""
        *lines, self._rest = (self._rest + read).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line.removeprefix(b"data:").strip()

    def _take(self, when: float, data: bytes) -> None:
        if data == b"[DONE]":
            self._over, self._error = True, None
            return
        event = json.loads(data)
        if "error" in event:
            self._over, self._error = True, str(event["error"])
            self.error_code = _code(event["error"])
            return
        self.answer_id = event.get("id") or self.answer_id
        self._usage = event.get("usage") or self._usage
        if text := "".join(map(_text, event.get("choices", ()))):
            self._pieces.append(when)
            self._texts.append(text)


def parse(reads: Sequence[Read]) -> StreamedAnswer:
    """The answer in a stream that is over. Raises ValueError if an event is no JSON object."""
    reader = Reader()
    for when, read in reads:
        reader.feed(when, read)
    return reader.answer()


def _code(error: object) -> str:
    known = error if isinstance(error, dict) else {}
    return str(known.get("code") or known.get("type") or "error")


def _text(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""
