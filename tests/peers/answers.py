"""Two servers' answers to one request, and how they differ in shape."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Answer:
    """What one server answered: a JSON value, or a stream's events."""

    status: int
    body: Any
    events: list[Json]
    is_done: bool
    """Whether a stream ended with [DONE]."""


@dataclass(frozen=True, slots=True)
class Pair:
    """llama-server, and Corral."""

    theirs: httpx.Client
    ours: httpx.Client

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> tuple[Answer, Answer]:
        """Both answers to one request, theirs first."""
        one, other = (
            _read(client.request(method, path, json=body)) for client in (self.theirs, self.ours)
        )
        return one, other


def _read(response: httpx.Response) -> Answer:
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        return Answer(response.status_code, response.json(), [], False)
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    return Answer(response.status_code, None, events, lines[-1:] == ["[DONE]"])


def missing(theirs: Any, ours: Any, path: str = "") -> Iterator[str]:
    """Where ours lacks a field of theirs, or has another type there; of lists, the first item counts."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for name, value in theirs.items():
            if name not in ours:
                yield f"{path}{name} is missing"
            else:
                yield from missing(value, ours[name], f"{path}{name}.")
    elif isinstance(theirs, list) and isinstance(ours, list):
        if theirs and ours:
            yield from missing(theirs[0], ours[0], f"{path}0.")
        elif theirs:
            yield f"{path[:-1]} is empty"
    elif kind(theirs) != kind(ours):
        yield f"{path[:-1]} is {kind(ours)}, and not {kind(theirs)}"


def kind(value: object) -> str:
    """The JSON type of a value."""
    if isinstance(value, bool):
        return "boolean"
    return "number" if isinstance(value, int | float) else type(value).__name__
