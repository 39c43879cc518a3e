"""A rendered chat that knows which of its characters the template wrote.

A rendered chat does not show which of its words are the template's and which the users'. A template may
cut, join and replace pieces of a user's text. So it may make a control token that the user did not
write in one piece. Every string constant of a template is therefore a `TemplateText`, and every other
text counts as a user's. Each operation on strings keeps the origin of each character, and an operation
that is not known here makes a user's text.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self, SupportsIndex

_OWN, _USERS = "1", "0"
_RUN = re.compile(f"{_OWN}+")


class TemplateText(str):
    """A text and the origin of its characters. Immutable."""

    origin: str
    """The origins of the text's characters, a digit for each: `1` if the template wrote it, or else `0`."""

    def __new__(cls, text: object = "", origin: str | None = None) -> Self:
        """The text is a user's if no origin is given."""
        self = super().__new__(cls, text)
        self.origin = _USERS * len(self) if origin is None else origin
        return self

    @staticmethod
    @functools.lru_cache(maxsize=8192)
    def own(text: str) -> TemplateText:
        """The text as the template's. Cached: for constants, and no more."""
        return TemplateText(text, _OWN * len(text))

    @staticmethod
    def concat(pieces: Iterable[object], between: str = "") -> TemplateText:
        """The pieces as one text, each with its origin."""
        texts = [piece if isinstance(piece, str) else str(piece) for piece in pieces]
        origin = _origin(between).join(map(_origin, texts))
        return TemplateText(str.join(str.__str__(between), texts), origin)

    @property
    def is_own(self) -> bool:
        return _USERS not in self.origin

    def own_runs(self) -> Iterator[tuple[int, int]]:
        """The places, from and to, of the longest pieces that the template wrote."""
        return (match.span() for match in _RUN.finditer(self.origin))

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> TemplateText:
        return TemplateText.concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> TemplateText:
        return TemplateText.concat((other, self))

    def __mul__(self, times: SupportsIndex) -> TemplateText:
        return TemplateText(super().__mul__(times), self.origin * times)

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        written = super().__mod__(values)
        return all_own(written, self, *(values if isinstance(values, tuple) else (values,)))

    def __getitem__(self, key: SupportsIndex | slice) -> TemplateText:
        return TemplateText(super().__getitem__(key), self.origin[key])

    def join(self, pieces: Iterable[str]) -> TemplateText:
        return TemplateText.concat(pieces, self)

    def lstrip(self, chars: str | None = None) -> TemplateText:
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None) -> TemplateText:
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None) -> TemplateText:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> TemplateText:
        return self[len(self) - len(super().removeprefix(prefix)) :]

    def removesuffix(self, suffix: str) -> TemplateText:
        return self[: len(super().removesuffix(suffix))]

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._pieces(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[Any]:
        return self._pieces(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[Any]:
        return self._pieces(super().splitlines(keepends), None)

    def _pieces(self, texts: Sequence[str], sep: str | None) -> list[TemplateText]:
        """The pieces with their origins: they stand in their order, with the separator between."""
        pieces, at = [], 0
        for text in texts:
            at = self.index(text, at)
            pieces.append(self[at : at + len(text)])
            at += len(text) + len(sep or "")
        return pieces

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> TemplateText:
        if not old:
            return TemplateText(super().replace(old, new, count))
        return TemplateText.concat(self.split(old, count), new)

    def _same_places(self, text: str) -> TemplateText:
        return TemplateText(text, self.origin if len(text) == len(self) else None)

    def upper(self) -> TemplateText:
        return self._same_places(super().upper())

    def lower(self) -> TemplateText:
        return self._same_places(super().lower())

    def title(self) -> TemplateText:
        return self._same_places(super().title())

    def capitalize(self) -> TemplateText:
        return self._same_places(super().capitalize())


def _origin(text: str) -> str:
    return text.origin if isinstance(text, TemplateText) else _USERS * len(text)


def all_own(text: str, *sources: object) -> str:
    """The text as the template's if all strings among its sources are."""
    texts = [source for source in sources if isinstance(source, str)]
    is_own = all(isinstance(source, TemplateText) and source.is_own for source in texts)
    return TemplateText(text, _OWN * len(text)) if is_own else text


def formatting(write: Callable[..., str], source: str) -> Callable[..., str]:
    """A `str.format` of this text that keeps the origin."""

    def write_text(*args: Any, **kwargs: Any) -> str:
        return all_own(write(*args, **kwargs), source, *args, *kwargs.values())

    return write_text


def control_tokens(rendered: TemplateText, pattern: re.Pattern[str]) -> list[tuple[int, int]]:
    """The places of the control tokens that the template wrote, which the pattern finds."""
    return [
        match.span()
        for start, end in rendered.own_runs()
        for match in pattern.finditer(rendered, start, end)
    ]
