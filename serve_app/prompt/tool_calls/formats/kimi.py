"""Kimi K2's format of tool calls.

All calls of an answer are in one section. Each has an id, which is `functions.`, the name, a colon and a
number, and then a JSON object of arguments.

Source: the chat template of Kimi K2 and its "tool call guidance", by Moonshot AI.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, ToolCall
from serve_app.prompt.tool_calls.format import Example, ToolFormat
from serve_app.prompt.tool_calls.parser import CallParser
from serve_app.prompt.tool_calls.reader import BLANKS, NoCallError, Reading, TextReader

DELIMITERS = OPEN, CALL, ARGUMENTS, CALL_END, CLOSE = (
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
)

_ID = re.compile(r"[^<>\s]*")
_NAME = re.compile(r"(?:functions\.)?(.+?)(?::[0-9]+)?")


class KimiParser(CallParser):
    """An id may lack what is before the name, or its number."""

    opening = OPEN

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        calls: list[ToolCall] = []
        yield from text.run(BLANKS)
        while (yield from text.one_of(CALL, CLOSE)) == CALL:
            yield from text.run(BLANKS)
            name = _NAME.fullmatch((yield from text.run(_ID)))
            yield from text.run(BLANKS)
            yield from text.one_of(ARGUMENTS)
            called = yield from self._named_call(name and name[1], text)
            if not called:
                raise NoCallError
            calls += called
            yield from text.run(BLANKS)
            yield from text.one_of(CALL_END)
            yield from text.run(BLANKS)
        return calls


def _rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    bodies = [
        f"{lark.text('functions.' + function['name'] + ':')} /[0-9]{{1,3}}/ "
        f"{delimiter(ARGUMENTS)} {lark.arguments(function)}"
        for function in functions
    ]
    more = "call*" if parallel else ""
    return f"""calls: call {more} {delimiter(CLOSE)}
call: {delimiter(CALL)} body {delimiter(CALL_END)}
{lark.one_of("body", bodies)}"""


def _section(*calls: str) -> str:
    return f"{OPEN}{''.join(f'{CALL}{call}{CALL_END}' for call in calls)}{CLOSE}"


_FIRST = f'functions.get_weather:0{ARGUMENTS}{{"city": "Tromsø", "days": 2}}'

FORMAT = ToolFormat(
    name="kimi",
    template_patterns=(r"<\|tool_calls_section_begin\|>", r"<\|tool_call_argument_begin\|>"),
    delimiters=DELIMITERS,
    make_parser=lambda _: KimiParser(),
    rules=_rules,
    example=Example(
        first=_section(_FIRST),
        second=_section(f"functions.now:0{ARGUMENTS}{{}}"),
        both=_section(_FIRST, f"functions.now:1{ARGUMENTS}{{}}"),
    ),
    opening=OPEN,
)
