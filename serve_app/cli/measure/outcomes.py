"""Reads what users saw: parses streams, says how requests ended, and adds figures up. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from serve_app.cli.measure.benchmark import percentile


@dataclass(frozen=True, slots=True)
class StreamedAnswer:
    """A streamed completion as its user saw it. Times are in seconds from sending the request.

    A piece is an event with text. It may stand for several tokens: a server holds back text that may
    still change, half a character for instance.
    """

    pieces_s: tuple[float, ...]
    """The time when each piece was there; several that came in one read share its time."""
    end_s: float
    tokens: int
    """Generated ones: as the server counts them, or, if it does not, the number of pieces."""
    counted: bool
    prompt_tokens: int | None
    cached_tokens: int | None
    error: str | None

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
        return "".join(self._texts)

    def feed(self, when: float, read: bytes) -> int:
        """Take the next bytes, with their time; returns the number of new pieces. Raises ValueError."""
        self._end_s = when
        before = len(self._pieces)
        for data in self._events(read):
            if not self._over:
                self._take(when, data)
        return len(self._pieces) - before

    def answer(self) -> StreamedAnswer:
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
        if text := "".join(map(_choice_text, event.get("choices", ()))):
            self._pieces.append(when)
            self._texts.append(text)


def _code(error: object) -> str:
    known = error if isinstance(error, dict) else {}
    return str(known.get("code") or known.get("type") or "error")


def _choice_text(choice: dict[str, Any]) -> str:
    return choice.get("text") or (choice.get("delta") or {}).get("content") or ""


COMPLETE, REFUSED, ABORTED, FAILED = "complete", "refused", "aborted", "failed"
ENDS = (COMPLETE, REFUSED, ABORTED, FAILED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request ended. Times are in seconds."""

    id: str
    kind: str
    start_s: float
    """The time when it was sent, or, of an open loop, should have been: since the epoch."""
    wall_s: float
    end: str
    """The kind of end, one of ENDS: answered in full; refused with 429; left by its user; anything else."""
    reason: str
    """The type of an error, or who left; empty if complete."""
    ttft_s: float | None = None
    gaps_s: tuple[float, ...] = ()
    """The times between events with text; several that came in one read have gaps of 0."""
    tokens: int = 0
    """Generated: as the server counts them, or, of an answer that is not complete, its events."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_id: str | None = None


def heard(answer: StreamedAnswer) -> dict[str, Any]:
    """The fields of an Outcome that a stream gives."""
    return {
        "ttft_s": answer.ttft_s,
        "gaps_s": tuple(round(gap, 5) for gap in answer.gaps_s),
        "tokens": answer.tokens,
        "prompt_tokens": answer.prompt_tokens or 0,
        "cached_tokens": answer.cached_tokens or 0,
    }


def figures(outcomes: Sequence[Outcome], wall_s: float) -> dict[str, float | None]:
    """The users' figures in `wall_s` seconds; None where nothing was measured."""
    ttft_s = [o.ttft_s for o in outcomes if o.ttft_s is not None]
    gaps_s = [gap for o in outcomes for gap in o.gaps_s]
    done_s = [o.wall_s for o in outcomes if o.end == COMPLETE]
    return {
        "tokens_per_s": sum(o.tokens for o in outcomes) / wall_s,
        **_percentiles("ttft", "s", ttft_s, 1),
        **_percentiles("itl", "ms", gaps_s, 1000),
        **_percentiles("e2e", "s", done_s, 1),
    }


def _percentiles(
    name: str, unit: str, values: Sequence[float], factor: float
) -> dict[str, float | None]:
    return {
        f"{name}_p{percent}_{unit}": factor * percentile(values, percent) if values else None
        for percent in (50, 95, 99)
    }
