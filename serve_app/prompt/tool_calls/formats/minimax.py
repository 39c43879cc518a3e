"""MiniMax M2's format of tool calls.

All calls of an answer are between `<minimax:tool_call>` and `</minimax:tool_call>`: for each, a name and
its parameters in tags. Values are JSON or, for strings, plain text.

Source: the chat template of MiniMax M2 and its "tool calling guide", by MiniMax.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, ToolCall
from serve_app.prompt.tool_calls.format import Example, ToolFormat
from serve_app.prompt.tool_calls.parser import CallParser, TaggedCall
from serve_app.prompt.tool_calls.reader import BLANKS, NoCallError, Reading, TextReader
from serve_app.prompt.tool_calls.schemas import properties_of, read_value

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
CALL, CALL_END = '<invoke name="', "</invoke>"
PARAMETER, PARAMETER_END = '<parameter name="', "</parameter>"
NAME_END = '">'

_CALL_END_LINE = f"{CALL_END}\n"
_NAME = re.compile(r'[^<>"\s]*')
_PARAMETER_NAME = re.compile(r'[^<>"\n]*')


class MiniMaxParser(CallParser):
    """Values are read by the schemas of the functions, as OpenAI describes these."""

    opening = OPEN

    def __init__(self, functions: Sequence[Function]) -> None:
        super().__init__()
        self._schemas = {one["name"]: one.get("parameters") or {} for one in functions}

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        calls: list[ToolCall] = []
        yield from text.run(BLANKS)
        while (yield from text.one_of(CALL, CLOSE)) == CALL:
            called = yield from self._call(text)
            if not called:
                raise NoCallError
            calls += called
            yield from text.run(BLANKS)
        return calls

    def _call(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        """Reads a call after the tag that begins it."""
        name = yield from text.run(_NAME)
        yield from text.one_of(NAME_END)
        schema = self._schemas.get(name, {})
        properties = properties_of(schema)
        call = TaggedCall(name)
        yield from text.run(BLANKS)
        while (yield from text.one_of(PARAMETER, CALL_END)) == PARAMETER:
            key = yield from text.run(_PARAMETER_NAME)
            yield from text.one_of(NAME_END)
            value = yield from text.until(PARAMETER_END)
            self._argument(call, key, read_value(value, properties.get(key), schema))
            yield from text.run(BLANKS)
        return self._tagged_call(call)


def _rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    """Parameters are in the order of their schema."""
    closing = lark.text(f"{PARAMETER_END}\n")
    bodies = [
        " ".join(
            [
                lark.text(f"{CALL}{function['name']}{NAME_END}\n"),
                *lark.parameters(function, _opening, closing),
            ]
        )
        for function in functions
    ]
    more = "call*" if parallel else ""
    return f"""calls: "\\n" call {more} {delimiter(CLOSE)}
call: body {lark.text(_CALL_END_LINE)}
{lark.one_of("body", bodies)}
{lark.free_text(closing)}"""


def _opening(parameter: str) -> str:
    return lark.text(f"{PARAMETER}{parameter}{NAME_END}")


_FIRST = """<invoke name="get_weather">
<parameter name="city">Tromsø</parameter>
<parameter name="days">2</parameter>
</invoke>
"""
_SECOND = '<invoke name="now">\n</invoke>\n'

FORMAT = ToolFormat(
    name="minimax",
    template_patterns=("<minimax:tool_call>", "<invoke name=", "<parameter name="),
    delimiters=(OPEN, CLOSE),
    make_parser=MiniMaxParser,
    rules=_rules,
    example=Example(
        first=f"{OPEN}\n{_FIRST}{CLOSE}",
        second=f"{OPEN}\n{_SECOND}{CLOSE}",
        both=f"{OPEN}\n{_FIRST}{_SECOND}{CLOSE}",
    ),
    opening=OPEN,
    unwritable=r'[<>"\n]',
)
