"""Tool calls in what a model says.

The Hermes format, which Qwen2.5's, Qwen3's and Corral's own chat templates ask for: each call is a
JSON object with `name` and `arguments` between `<tool_call>` and `</tool_call>`. Source: the Hermes
Function Calling repository of Nous Research.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

HERMES_TAGS = _OPEN, _CLOSE = "<tool_call>", "</tool_call>"
"""What is before and after a call."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A function that the model wants called."""

    name: str
    arguments: str
    """A JSON object, as text."""


class HermesParser:
    """Splits a text that arrives in pieces into prose and calls. Nothing is lost but line ends
    around calls: what looks like a call and is none comes back as the prose that it is. Not
    thread-safe."""

    def __init__(self) -> None:
        self._held = ""
        """What cannot be told apart yet: the start of a tag, or a call that is not closed."""
        self._after_call = False

    def feed(self, text: str) -> list[str | ToolCall]:
        """What is certain now, in order; no piece of prose is empty."""
        self._held += text
        parts: list[str | ToolCall] = []
        while True:
            if self._after_call:
                self._held = self._held.lstrip("\n")
            start = self._held.find(_OPEN)
            prose = self._held[: start if start >= 0 else len(self._held) - _overlap(self._held)]
            self._held = self._held[len(prose) :]
            if start >= 0:
                prose = prose.rstrip("\n")
            if prose:
                parts.append(prose)
                self._after_call = False
            end = self._held.find(_CLOSE) + len(_CLOSE)
            if start < 0 or end < len(_CLOSE):
                return parts
            call = _parse(self._held[:end])
            parts.append(call)
            self._held = self._held[end:]
            self._after_call = isinstance(call, ToolCall)

    def finish(self) -> list[str | ToolCall]:
        """The rest, when there is no more text."""
        rest, self._held = self._held, ""
        return [rest] if rest and not (self._after_call and not rest.strip("\n")) else []


def _overlap(text: str) -> int:
    """How many characters at the end of `text` may belong to a call: line ends, and what may begin
    its tag."""
    tag = next(n for n in range(len(_OPEN) - 1, -1, -1) if text.endswith(_OPEN[:n]))
    before = text[: len(text) - tag]
    return len(text) - len(before.rstrip("\n"))


def _parse(text: str) -> str | ToolCall:
    """The call between the tags; the text itself if it holds none."""
    try:
        body = json.loads(text.removeprefix(_OPEN).removesuffix(_CLOSE))
    except json.JSONDecodeError:
        return text
    if not isinstance(body, dict) or not isinstance(body.get("name"), str):
        return text
    arguments = body.get("arguments", {})
    if not isinstance(arguments, dict):
        return text
    return ToolCall(body["name"], json.dumps(arguments, ensure_ascii=False))
