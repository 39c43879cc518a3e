"""Harmony, the format of gpt-oss: reasoning, calls and content are messages on channels.

`<|channel|>analysis<|message|>` begins reasoning, `<|channel|>final<|message|>` what the user reads, and a
message to `functions.` and a name, on the channel `commentary`, is a call. Messages end with `<|end|>`, or
with the answer; `<|start|>assistant` begins the next one.

Source: OpenAI's guide to the harmony response format, and the chat template of gpt-oss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, Reasoning, ToolCall
from serve_app.prompt.tool_calls.format import Example, ToolFormat
from serve_app.prompt.tool_calls.parser import CallParser, Previous
from serve_app.prompt.tool_calls.reader import Reading, TextReader, overlap

DELIMITERS = START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
)

_OPENINGS = re.compile("|".join(map(re.escape, (START, CHANNEL, END, CALL, RETURN))))
_ENDS = (END, CALL, RETURN)
_TO = " to="
_RECIPIENT = re.compile(r"\bto=functions\.([^\s<]+)")
_CHANNEL = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
# Of a header, between an opening and `<|message|>`.
_MOST_CHARS = 256


class HarmonyParser(CallParser):
    """Headers are no content, but those of calls that are none."""

    opening = CHANNEL

    def __init__(self, functions: Sequence[Function]) -> None:
        super().__init__()
        self._has_functions = bool(functions)
        self._opened = ""

    def _find(self, text: str, at: int) -> tuple[int, int | None]:
        if self._after is Previous.NOTHING and at == 0:
            # The prompt has begun the message already.
            if text.startswith(_TO):
                self._opened = ""
                return at, at
            if _TO.startswith(text):
                return at, None
        match = _OPENINGS.search(text, at)
        self._opened = match[0] if match else ""
        start = (
            match.start() if match else len(text) - max(overlap(text, d, at) for d in DELIMITERS)
        )
        while self._opened not in _ENDS and start > at and text[start - 1] == "\n":
            start -= 1
        return start, match.end() if match else None

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall] | None]:
        if self._opened in _ENDS:
            return None
        rest = yield from text.until(MESSAGE, _MOST_CHARS)
        header = f"{self._opened}{rest}"
        self._n_opening += len(rest) + len(MESSAGE)
        to, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        if to is not None:
            return (yield from self._named_call(to[1], text)) if self._has_functions else ()
        if channel is not None and channel[1] == "analysis" and self.splits_reasoning:
            yield from self._reasoning(text)
        return None

    def _reasoning(self, text: TextReader) -> Reading[None]:
        while True:
            piece = yield from text.some_until(END)
            if piece is None:
                return
            self._tell(Reasoning(piece))


def _rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    """One call, as a call ends the answer. Its recipient is before the channel or behind it."""
    start, channel, message = delimiter(START), delimiter(CHANNEL), delimiter(MESSAGE)
    bodies = []
    for function in functions:
        name = function["name"]
        before = f'{lark.text(f"assistant to=functions.{name}")} {channel} "commentary json"'
        behind = f'{lark.text(f"commentary to=functions.{name} ")} {delimiter(CONSTRAIN)} "json"'
        header = f'({start} {before} | ({start} "assistant")? {channel} {behind})'
        bodies.append(f"{header} {message} {lark.arguments(function)}")
    return lark.one_of("calls", bodies)


def _said(delimiter: lark.Delimiter) -> str:
    """Reasoning and what a model says before a call may come first."""
    return f"""start: before* (calls | {_final(delimiter)} TEXT | PLAIN?)
PLAIN: /[^<](.|\\n)*/
{_before(delimiter)}"""


def _held(delimiter: lark.Delimiter, has_calls: bool) -> str:
    calls = "calls |" if has_calls else ""
    return f"start: before* ({calls} {_final(delimiter)} answer)\n{_before(delimiter)}"


def _final(delimiter: lark.Delimiter) -> str:
    """The header of what the user reads."""
    return f'{delimiter(CHANNEL)} "final" {delimiter(MESSAGE)}'


def _before(delimiter: lark.Delimiter) -> str:
    """The rules `before`, which is a message that comes before others, and TEXT, which is any text."""
    start, channel, message = delimiter(START), delimiter(CHANNEL), delimiter(MESSAGE)
    lazy = "[lazy]" if delimiter(END).startswith('"') else ""
    return f"""before: {channel} ("analysis" | "commentary") {message} ended {start} "assistant"
ended{lazy}: TEXT {delimiter(END)}
TEXT: /(.|\\n)*/"""


def _message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with reasoning where the template looks for it: before calls."""
    changed = dict(message)
    reasoning = changed.pop("reasoning_content", None)
    if reasoning and changed.get("tool_calls") and not changed.get("content"):
        changed["thinking"] = reasoning
    return changed


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The tool with a description, which the template does not do without."""
    return {**tool, "function": {"description": "", **tool["function"]}}


def _called(name: str, arguments: str) -> str:
    return f"{START}assistant to=functions.{name}{CHANNEL}commentary json{MESSAGE}{arguments}"


FORMAT = ToolFormat(
    name="harmony",
    template_patterns=(r"<\|channel\|>analysis", r"<\|message\|>", r"to=functions|functions\."),
    delimiters=DELIMITERS,
    make_parser=HarmonyParser,
    rules=_rules,
    example=Example(
        first=_called("get_weather", '{"city": "Tromsø", "days": 2}'),
        second=_called("now", "{}"),
        both=None,
    ),
    said=_said,
    held=_held,
    has_channels=True,
    message=_message,
    tool=_tool,
)
