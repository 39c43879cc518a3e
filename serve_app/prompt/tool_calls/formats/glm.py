"""GLM's format of tool calls (GLM 4.5, 4.6 and 4.7).

Between `<tool_call>` and `</tool_call>` a name, and then for each parameter its name and its value in tags,
with line ends between them until GLM 4.6. Values are JSON or, for strings, plain text.

Source: the chat templates of GLM 4.6 and GLM 4.7 Flash, by Z.ai.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from serve_app.prompt.tool_calls import lark
from serve_app.prompt.tool_calls.calls import Function, ToolCall
from serve_app.prompt.tool_calls.format import Example, ToolFormat
from serve_app.prompt.tool_calls.parser import CallParser, TaggedCall
from serve_app.prompt.tool_calls.reader import BLANKS, Reading, TextReader
from serve_app.prompt.tool_calls.schemas import properties_of, read_value

DELIMITERS = OPEN, CLOSE, KEY, KEY_END, VALUE, VALUE_END = (
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
)

_NAME = re.compile(r"[^<>\s]*")


class GlmParser(CallParser):
    """Values are read by the schemas of the functions, as OpenAI describes these."""

    opening = OPEN

    def __init__(self, functions: Sequence[Function]) -> None:
        super().__init__()
        self._schemas = {one["name"]: one.get("parameters") or {} for one in functions}

    def _read(self, text: TextReader) -> Reading[Sequence[ToolCall]]:
        yield from text.run(BLANKS)
        name = yield from text.run(_NAME)
        schema = self._schemas.get(name, {})
        properties = properties_of(schema)
        call = TaggedCall(name)
        yield from text.run(BLANKS)
        while (yield from text.one_of(KEY, CLOSE)) == KEY:
            key = (yield from text.until(KEY_END)).strip()
            yield from text.run(BLANKS)
            yield from text.one_of(VALUE)
            value = yield from text.until(VALUE_END)
            self._argument(call, key, read_value(value, properties.get(key), schema))
            yield from text.run(BLANKS)
        return self._tagged_call(call)


def _rules(functions: Sequence[Function], delimiter: lark.Delimiter, parallel: bool) -> str:
    """Parameters are in the order of their schema."""

    def opening(parameter: str) -> str:
        key = f"{delimiter(KEY)} {lark.text(parameter)} {delimiter(KEY_END)}"
        return f'"\\n"? {key} "\\n"? {delimiter(VALUE)}'

    closing = delimiter(VALUE_END)
    bodies = [
        " ".join([lark.text(function["name"]), *lark.parameters(function, opening, closing)])
        for function in functions
    ]
    more = f'("\\n"? {delimiter(OPEN)} call)*' if parallel else ""
    return f"""calls: call {more}
call: body "\\n"? {delimiter(CLOSE)}
{lark.one_of("body", bodies)}
{lark.free_text(closing)}"""


_FIRST = (
    "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Tromsø</arg_value>"
    "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
)
_SECOND = "<tool_call>now</tool_call>"

FORMAT = ToolFormat(
    name="glm",
    template_patterns=("<tool_call>", "<arg_key>", "<arg_value>"),
    delimiters=DELIMITERS,
    make_parser=GlmParser,
    rules=_rules,
    example=Example(_FIRST, _SECOND, both=_FIRST + _SECOND),
    opening=OPEN,
    unwritable=r"[<>\n]",
)
