"""The record of a response: the input that it is made from, and its output so far.

All else, its events and the response itself, is computed from these two, by any ingress.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from serve_app.errors import CorralError
from serve_app.types import GenerationRequest, TokenDelta

_PART = 64
"""The most entries that are unpacked at once."""


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """The input that a response is made from."""

    model: str
    """The model's id."""
    created: int
    """Unix time."""
    asked: Mapping[str, Any]
    """The fields that the response repeats of its request."""
    request: GenerationRequest
    """The engine's request, whose id is the response's."""
    tools: Sequence[Mapping[str, Any]]
    """The tools as chat templates read them."""
    thinks: bool
    """Whether reasoning is split off."""
    return_progress: bool
    items: bytes
    """The conversation that it answers, as a JSON list of items."""

    @property
    def id(self) -> str:
        """The response's id."""
        return self.request.id

    @property
    def is_background(self) -> bool:
        """Whether it goes on when its client leaves."""
        return bool(self.asked["background"])

    def packed(self) -> bytes:
        """The bytes that `unpacked` reads."""
        return pickle.dumps(self, pickle.HIGHEST_PROTOCOL)

    @classmethod
    def unpacked(cls, packed: bytes) -> StoredRequest:
        """Unpacks the stored_request that another ingress packed."""
        stored_request: StoredRequest = pickle.loads(packed)
        return stored_request


@dataclass(frozen=True, slots=True)
class Event:
    """Something that came of a response. A log of entries has one last."""

    what: TokenDelta | CorralError | None
    """None: it was cancelled."""
    at: float
    """Unix time."""

    @property
    def is_last(self) -> bool:
        """Whether that is its end."""
        return not isinstance(self.what, TokenDelta) or self.what.end is not None


def packed(entries: Iterable[Event]) -> bytes:
    """Pack entries for `unpacked`."""
    rest, packs = iter(entries), []
    while part := list(islice(rest, _PART)):
        packs.append(pickle.dumps(part, pickle.HIGHEST_PROTOCOL))
    return b"".join(packs)


def unpacked(pack: bytes) -> Iterator[Sequence[Event]]:
    """Unpack the entries that an ingress packed, some at a time: a part takes about a millisecond."""
    file = io.BytesIO(pack)
    while file.tell() < len(pack):
        yield pickle.load(file)


def merged(entries: Sequence[Event]) -> list[Event]:
    """All deltas as one, and what else is the last of them: of these, a response is sooner computed, and is
    the same."""
    deltas = [entry.what for entry in entries if isinstance(entry.what, TokenDelta)]
    events: list[Event] = []
    if deltas:
        text = "".join(delta.text for delta in deltas)
        events.append(Event(TokenDelta(text, (), deltas[-1].end), entries[-1].at))
    return events + [entry for entry in entries[-1:] if not isinstance(entry.what, TokenDelta)]


def tokens(entries: Iterable[Event]) -> tuple[int, ...]:
    """All that was generated."""
    deltas = (entry.what for entry in entries if isinstance(entry.what, TokenDelta))
    return tuple(token for delta in deltas for token in delta.token_ids)
