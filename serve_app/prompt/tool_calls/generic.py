"""A format of tool calls for models whose chat templates ask for none that is known.

A system message describes the functions. The answer is one JSON object, which a grammar holds it to: calls
as `tool_calls`, or a text as `response`, which is told as content while it comes.

Source: llama.cpp's generic format, `common/chat.cpp`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, ToolCall
from serve_app.prompt.tool_calls.format import Example, ToolFormat
from serve_app.prompt.tool_calls.parser import After, CallParser
from serve_app.prompt.tool_calls.reader import BLANKS, NoCallError, Reading, TextReader

CALLS, RESPONSE = "tool_calls", "response"
Messages = Sequence[Mapping[str, Any]]

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
        if self._after is not After.NOTHING:
            return len(text), None
        found = _BEGINNING.match(text, at)
        end = found.end() if found else at
        if found and found[1]:
            return at, end
        return (at if end == len(text) else len(text)), None

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall] | None]:
        key = yield from text.json('"')
        yield from text.run(BLANKS)
        yield from text.one_of(":")
        yield from text.run(BLANKS)
        calls: Sequence[ToolCall] | None = None
        if key == RESPONSE:
            yield from text.one_of('"')
            yield from self._response(text)
        elif key == CALLS:
            calls = yield from self._json_calls(text, ("arguments",))
        else:
            raise NoCallError
        yield from text.run(BLANKS)
        yield from text.one_of("}")
        return calls

    def _response(self, text: TextReader) -> Reading[None]:
        while True:
            piece = yield from text.string_piece()
            if piece is None:
                return
            if piece:
                self._tell(piece)


def describe(messages: Messages, tools: Messages, *, takes_system: bool) -> list[dict[str, Any]]:
    """A chat as templates without tools take it: functions are described by the system, or where a template
    has no place for that, by the user; calls and results are texts."""
    told = _as_texts(messages)
    if tools:
        functions = "\n".join(_json(tool["function"]) for tool in tools)
        description = _DESCRIPTION.format(functions=functions)
        if not (told and told[0]["role"] == "system"):
            told.insert(0, {"role": "system", "content": ""})
        told[0]["content"] = _joined(told[0]["content"], description)
    if not takes_system and len(told) > 1 and told[0]["role"] == "system":
        system = told.pop(0)
        told[0]["content"] = _joined(system["content"], told[0]["content"])
    return told


def _as_texts(messages: Messages) -> list[dict[str, Any]]:
    names: dict[str, str] = {}
    told: list[dict[str, Any]] = []
    for message in messages:
        text = dict(message)
        calls = [call["function"] for call in text.pop("tool_calls", None) or ()]
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()}
        if calls:
            made = [{"name": call["name"], "arguments": call["arguments"]} for call in calls]
            text["content"] = _joined(text["content"], _json({CALLS: made}))
        if message["role"] == "tool":
            name = names.get(text.pop("tool_call_id", ""))
            result = {"name": name, "content": text["content"]}
            text |= {"role": "user", "content": _json({"tool_response": result})}
        # Many templates want the roles to take turns.
        if told and told[-1]["role"] == text["role"] == "user":
            told[-1]["content"] = _joined(told[-1]["content"], text["content"])
        else:
            told.append(text)
    return told


def _joined(*texts: str) -> str:
    return _PARAGRAPH.join(text for text in texts if text)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    bodies = [f'{lark.json_call(function, "arguments")} "}}"' for function in functions]
    more = '(", " call)*' if parallel else ""
    start = lark.text(f'{{"{CALLS}": [')
    return f'calls: {start} call {more} "]}}"\n{lark.one_of("call", bodies)}'


def _said(_: lark.Delimiter) -> str:
    start = lark.text(f'{{"{RESPONSE}": ')
    return f'start: calls | said\nsaid: {start} {lark.value({"type": "string"})} "}}"'


_FIRST = '{"name": "get_weather", "arguments": {"city": "Tromsø", "days": 2}}'
_SECOND = '{"name": "now", "arguments": {}}'

FORMAT = ToolFormat(
    name="generic",
    template_patterns=(),
    delimiters=(),
    make_parser=lambda _: GenericParser(),
    rules=_rules,
    example=Example(
        first=f'{{"{CALLS}": [{_FIRST}]}}',
        second=f'{{"{CALLS}": [{_SECOND}]}}',
        both=f'{{"{CALLS}": [{_FIRST}, {_SECOND}]}}',
    ),
    said=_said,
    holds_answers=True,
    describe=describe,
)
