"""Escaping of the control tokens that users write, so that they stay text through a chat template."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any


class ControlTokenEscaper:
    """Finds these texts wherever they occur. Immutable: any thread.

    A rendered chat does not show which of its words are the template's and which the users'. So
    users' control tokens are put between escapes before it is rendered, and found by them afterwards.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        longest_first = sorted(texts, key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def needed(self, *values: Any) -> bool:
        """Whether there is anything to escape in what users sent: JSON of any kind."""
        return any(self._found.search(text) for text in _texts(values))

    def begin(self) -> Escapes:
        """The escapes for one chat."""
        return Escapes(self._found)


class Escapes:
    """One chat's escapes: digits, which no user foresees, and which templates leave as they are.
    A noncharacter becomes `\\ufdd0` in JSON, or where a list is written out."""

    def __init__(self, found: re.Pattern[str]) -> None:
        number = f"{secrets.randbelow(10**12):012}"
        self._found = found
        self._open, self._close = f"{number}(", f"{number})"
        self._escapes = re.compile(rf"{number}[()]")
        self._escaped = re.compile(rf"{number}\((.*?){number}\)", re.DOTALL)

    def escape(self, value: Any) -> Any:
        """The same JSON with every control token escaped."""
        if isinstance(value, str):
            return self._found.sub(rf"{self._open}\g<0>{self._close}", value)
        if isinstance(value, Mapping):
            return {self.escape(key): self.escape(inner) for key, inner in value.items()}
        return [self.escape(inner) for inner in value] if isinstance(value, list) else value

    def split(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """A rendered chat's texts in order, none of them empty, without escapes, and whether each was
        escaped."""
        for i, text in enumerate(self._escaped.split(rendered)):
            if bare := self._escapes.sub("", text):  # a template may have cut a text in two
                yield bare, i % 2 == 1


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _texts(key)
            yield from _texts(inner)
    elif isinstance(value, Sequence):
        for inner in value:
            yield from _texts(inner)
