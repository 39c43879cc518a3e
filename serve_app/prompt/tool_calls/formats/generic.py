"""A format of tool calls for models whose chat templates ask for none that is known.

A system message describes the functions. The answer is one JSON object, which a grammar holds it to. It
has calls as `tool_calls`, or a text as `response`, which is told as content while it comes.

Source: llama.cpp's generic format, `common/chat.cpp`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from serve_app.prompt.conversation import Turn
from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, ToolCall
from serve_app.prompt.tool_calls.format import ToolFormat
from serve_app.prompt.tool_calls.parser import CallParser, Previous
from serve_app.prompt.tool_calls.reader import BLANKS, NoCallError, Reading, TextReader

CALLS, RESPONSE = "tool_calls", "response"

_BEGINNING = re.compile(r"\s*(\{)?")
_PARAGRAPH = "\n\n"
_DESCRIPTION = """\
You can call these functions. Each line describes one as JSON:
{functions}

Answer with one JSON object and nothing else. To call functions, answer:
{{"tool_calls": [{{"name": "<function's name>", "arguments": {{<its arguments>}}}}]}}
The results come in the next message. To say something to the user, answer:
{{"response": "<text>"}}"""


class GenericParser(CallParser):
    """The whole answer is the object, or else it is content."""

    opening = "{"

    def _find(self, text: str, at: int) -> tuple[int, int | None]:
        if self._after is not Previous.NOTHING:
            return len(text), None
        found = _BEGINNING.match(text, at)
        end = found.end() if found else at
        if found and found[1]:
            return at, end
        return (at if end == len(text) else len(text)), None

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall] | None]:
        key = yield from text.json('"')
        yield from text.delimiter(":")
        yield from text.run(BLANKS)
        calls: Sequence[ToolCall] | None = None
        if key == RESPONSE:
            yield from text.one_of('"')
            yield from self._response(text)
        elif key == CALLS:
            calls = yield from self._json_calls(text, ("arguments",))
        else:
            raise NoCallError
        yield from text.delimiter("}")
        return calls

    def _response(self, text: TextReader) -> Reading[None]:
        while True:
            piece = yield from text.string_piece()
            if piece is None:
                return
            if piece:
                self._tell(piece)


def describe_chat(turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """A chat for templates without tools: the system describes functions; calls and results are texts."""
    texts = [_as_text(turn) for turn in turns]
    if tools:
        functions = "\n".join(_json(tool["function"]) for tool in tools)
        description = _DESCRIPTION.format(functions=functions)
        has_system = bool(texts) and texts[0].role == "system"
        system = texts.pop(0).text if has_system else ""
        texts.insert(0, Turn("system", (_join_paragraphs(system, description),)))
    return texts


def _as_text(turn: Turn) -> Turn:
    if turn.role == "tool":
        result = {"name": turn.name or None, "content": turn.text}
        return Turn("user", (_json({"tool_response": result}),))
    if not turn.calls:
        return turn
    calls = [{"name": call.name, "arguments": call.value} for call in turn.calls]
    return replace(turn, parts=(_join_paragraphs(turn.text, _json({CALLS: calls})),), calls=())


def _join_paragraphs(*texts: str) -> str:
    return _PARAGRAPH.join(text for text in texts if text)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _generic_rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    bodies = [f'{lark.json_call(function, "arguments")} "}}"' for function in functions]
    more = '(", " call)*' if parallel else ""
    # The bracket is a lexeme of its own, as in JSON that may stand in the place of calls.
    start = lark.text(f'"{CALLS}": [')
    return f'calls: "{{" {start} call {more} "]}}"\n{lark.one_of("call", bodies)}'


def _free_start(_: lark.Delimiter) -> str:
    start = lark.text(f'"{RESPONSE}": ')
    return f'start: calls | said\nsaid: "{{" {start} {lark.value({"type": "string"})} "}}"'


GENERIC = ToolFormat(
    name="generic",
    template_patterns=(),
    delimiters=(),
    make_parser=GenericParser,
    rules=_generic_rules,
    free_start=_free_start,
    holds_answers=True,
    is_shown=True,
    describe=describe_chat,
)
