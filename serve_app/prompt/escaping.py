"""Escaping of the control tokens that users write, so that they stay text through a chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from serve_app.prompt.chat_template import Message

# Code points that are no characters, and which nobody sends but to do harm: those are dropped.
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_ESCAPES = re.compile(f"[{_OPEN}{_CLOSE}]")
_ESCAPED = re.compile(f"{_OPEN}(.*?){_CLOSE}", re.DOTALL)


class ControlTokenEscaper:
    """Escapes these texts wherever they occur. Immutable: any thread.

    A rendered chat does not show which of its words are the template's and which the users'. So
    users' control tokens are put between escapes before it is rendered, and found by them afterwards.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        longest_first = sorted(texts, key=len, reverse=True)
        self._found = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def needed(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether there is anything to escape."""
        return any(
            self._found.search(text) or _ESCAPES.search(text) for text in _texts([messages, tools])
        )

    def escape(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Message], list[Mapping[str, Any]]]:
        """The same with every control token escaped."""
        return [self._escape(one) for one in messages], [self._escape(one) for one in tools]

    def _escape(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._found.sub(rf"{_OPEN}\g<0>{_CLOSE}", _ESCAPES.sub("", value))
        if isinstance(value, Mapping):
            return {self._escape(key): self._escape(inner) for key, inner in value.items()}
        return [self._escape(inner) for inner in value] if isinstance(value, list) else value

    def split(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """A rendered chat's texts in order, none of them empty, without escapes, and whether each was
        escaped."""
        for i, text in enumerate(_ESCAPED.split(rendered)):
            if text:
                yield _ESCAPES.sub("", text), i % 2 == 1


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
