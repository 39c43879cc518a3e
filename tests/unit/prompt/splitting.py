"""Parsers fed in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from serve_app.prompt.output_parser import Reasoning


class Splitter(Protocol):
    def feed(self, text: str) -> Sequence[Any]: ...

    def finish(self) -> Sequence[Any]: ...


def parse(parser: Splitter, pieces: Sequence[str]) -> list[Any]:
    """What the pieces hold, neighbouring content and neighbouring reasoning joined."""
    joined: list[Any] = []
    for part in [*(part for piece in pieces for part in parser.feed(piece)), *parser.finish()]:
        assert part not in ("", Reasoning(""))
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif isinstance(part, Reasoning) and joined and isinstance(joined[-1], Reasoning):
            joined[-1] = Reasoning(joined[-1].text + part.text)
        else:
            joined.append(part)
    return joined


def cuts(text: str) -> list[list[str]]:
    """The text whole, in characters, and in every two pieces."""
    return [[text], list(text), *([text[:i], text[i:]] for i in range(len(text)))]
